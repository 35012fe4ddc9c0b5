"""The lines of a job's log as people read them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.job import LogLine
from launcher.runs.log_text import in_words, readable
from litgpt_demo.metrics import marked

STEP = {
    "kind": "step", "step": 42, "loss": 5.66721, "learning_rate": 0.00033333, "grad_norm": 1.9238, "tokens": 5376,
    "tokens_per_second": 5869.4, "step_seconds": 1.4, "data_seconds": 0.7, "memory": 606_000_000, "mfu": 0.4123,
}  # fmt: skip
START = {
    "kind": "start", "step": 20, "steps": 60, "parameters": 124e6, "world_size": 8, "device_name": "H100",
    "precision": "bf16-mixed",
}  # fmt: skip
KINDS = ["start", "step", "evaluation", "checkpoint", "skip", "leave", "network", "straggler", "end", "mine"]
JSON = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.integers())


@pytest.mark.parametrize(
    ("row", "words"),
    [
        (START, "goes on after step 20 of 60: 124 M parameters, 8 ranks on H100, bf16-mixed"),
        (
            STEP,
            "step 42  loss 5.6672  gradient 1.92  learning rate 0.000333  5,869 tok/s  606 MB  MFU 41 %  "
            "waited 0.7 s for data",
        ),
        ({"kind": "mine", "step": 3, "accuracy": 0.5}, "kind mine, step 3, accuracy 0.5"),
    ],
)  # fmt: skip
def test_metrics_are_lines_of_words(row: dict[str, Any], words: str) -> None:
    assert readable(LogLine(1, f"[rank0]:{marked(row)}")) == f"[node 1] [rank0]: {words}"
    assert readable(LogLine(0, "[rank0]: loss is nan")) == "[node 0] [rank0]: loss is nan"


@given(st.sampled_from(KINDS), st.dictionaries(st.sampled_from(sorted({*STEP, *START} - {"kind"})), JSON))
def test_whatever_a_node_writes_is_one_line(kind: str, changes: dict[str, Any]) -> None:
    row = {**STEP, "kind": kind, **changes}
    assert in_words(row)
    assert len(readable(LogLine(0, marked(row))).splitlines()) == 1
