from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.job import LogLine
from launcher.runs.log_text import in_words, readable
from litgpt_demo.metrics import marked

STEP = {
    "kind": "step", "step": 42, "loss": 5.66721, "learning_rate": 0.00033333, "grad_norm": 1.9238, "tokens": 5376,
    "tokens_per_second": 5869.4, "step_seconds": 1.4, "data_seconds": 0.01, "memory": 606_000_000,
}  # fmt: skip
ROWS: list[tuple[dict[str, Any], str]] = [
    (
        {"kind": "start", "step": 0, "steps": 60, "parameters": 3_352_704, "world_size": 2, "device_name": "AMD EPYC",
         "precision": "32-true"},
        "starts, 60 steps: 3.35 M parameters, 2 ranks on AMD EPYC, 32-true",
    ),
    (
        {"kind": "start", "step": 20, "steps": 60, "parameters": 124e6, "world_size": 8, "device_name": "H100",
         "precision": "bf16-mixed"},
        "goes on after step 20 of 60: 124 M parameters, 8 ranks on H100, bf16-mixed",
    ),
    (STEP, "step 42  loss 5.6672  gradient 1.92  learning rate 0.000333  5,869 tok/s  606 MB"),
    (
        {**STEP, "mfu": 0.4123, "data_seconds": 0.7},
        "step 42  loss 5.6672  gradient 1.92  learning rate 0.000333  5,869 tok/s  606 MB  MFU 41 %  "
        "waited 0.7 s for data",
    ),
    (
        {**STEP, "loss": math.nan, "grad_norm": math.inf},
        "step 42  loss not a number  gradient inf  learning rate 0.000333  5,869 tok/s  606 MB",
    ),
    (
        {"kind": "evaluation", "step": 12, "validation_loss": 6.12057, "perplexity": 455.1, "seconds": 1.62},
        "step 12  validation loss 6.1206 (1.6 s)",
    ),
    (
        {"kind": "checkpoint", "step": 12, "seconds": 0.05, "save_seconds": 0.48, "bytes": 40_665_032,
         "path": "checkpoints/step-00000012"},
        "step 12  saved checkpoints/step-00000012, 40.7 MB (training stood still for 0.1 s, committed after 0.5 s)",
    ),
    ({"kind": "skip", "step": 7, "why": "loss is nan", "windows": [1]}, "step 7  its batch is left out: loss is nan"),
    ({"kind": "leave", "step": 7, "why": "SIGTERM"}, "step 7  leaves: SIGTERM"),
    (
        {"kind": "network", "step": 0, "ranks": 16, "nodes": 2, "bytes": 8e9, "busbw": 87.123, "floor": 80.0},
        "network: all-reduce of 8.00 GB among 16 ranks on 2 nodes, 87.1 GB/s (busbw), at least 80 are asked for",
    ),
    (
        {"kind": "straggler", "step": 80, "rank": 9, "node": 1, "since": 61, "factor": 2.27, "seconds": 0.25},
        "step 80  node 1 (rank 9) takes 2.3 times as long as the others since step 61",
    ),
    ({"kind": "end", "step": 60, "seconds": 200.0}, "step 60  ends after 3 min 20 s"),
]  # fmt: skip


@pytest.mark.parametrize(("row", "words"), ROWS, ids=lambda value: value["kind"] if isinstance(value, dict) else "")
def test_every_kind_of_metrics_is_one_line_of_words(row: dict[str, Any], words: str) -> None:
    line = LogLine(1, f"[rank0]:{marked(row)}")
    assert readable(line) == f"[node 1] [rank0]: {words}"
    assert readable(LogLine(0, marked(row))) == f"[node 0] {words}"


@pytest.mark.parametrize("text", ["", "[rank0]: loss is nan", "@litgpt-metrics {cut sho", "@litgpt-metrics 3"])
def test_every_other_line_stays_as_it_is(text: str) -> None:
    assert readable(LogLine(0, text)) == f"[node 0] {text}"


JSON = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers(), max_size=2)
)


@given(st.sampled_from([row for row, _ in ROWS]), st.dictionaries(st.sampled_from(sorted(STEP)), JSON))
def test_whatever_a_node_writes_is_one_line(row: dict[str, Any], changes: dict[str, Any]) -> None:
    assert in_words({**row, **changes})


def test_a_row_that_we_do_not_know_is_listed() -> None:
    assert in_words({"kind": "mine", "step": 3, "accuracy": 0.5}) == "kind mine, step 3, accuracy 0.5"
