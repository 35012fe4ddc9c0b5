"""`plan`'s choice among the ways to divide a training, by memory and by the speed of the links."""

from __future__ import annotations

import re
from typing import Any

import pytest

from launcher.checks.layouts import layouts
from launcher.checks.preflight import check_strategy
from launcher.config import RunConfig, validated
from litgpt_demo.findings import Finding

GKE = {"kind": "gke", "project": "p-1", "location": "us-central1", "cluster": "c"}
H100S = GKE | {"nodes": 8, "machine": "a3-megagpu-8g", "network": "tcpxo"}
H200S = GKE | {"nodes": 16, "machine": "a3-ultragpu-8g", "network": "gib"}


def config(platform: dict[str, Any], name: str = "transformer-175b", **train: Any) -> RunConfig:
    settings = {
        "model": {"name": name, "sequence_length": 2048} | ({"from": "/weights"} if "lora" in train else {}),
        "train": {"micro_batch": 1, "global_batch": 1024} | train,
        "platform": platform,
    }
    return validated(RunConfig, settings, where="test")


def measured(nodes: int, busbw: float) -> dict[str, Any]:
    """The gate's row of a run's metrics."""
    return {"kind": "network", "step": 0, "nodes": nodes, "ranks": 8 * nodes, "busbw": busbw}


def said(asked: RunConfig, *rows: dict[str, Any]) -> tuple[list[dict[str, str]], dict[str, Finding]]:
    table, findings = layouts(asked, vocab_size=None, rows=rows)
    return table, {finding.code: finding for finding in findings}


@pytest.mark.parametrize(
    ("platform", "layout", "weights"),
    [
        (H100S, "strategy={kind: fsdp, tensor: 2} activation_checkpointing=full", "weights 10.9 GB + AdamW 21.9 GB"),
        (H200S, "strategy=fsdp activation_checkpointing=selective", "weights 5.47 GB + AdamW 10.9 GB"),
    ],
)
def test_the_largest_model_fits_64_h100_and_16_nodes_of_h200(
    platform: dict[str, Any], layout: str, weights: str
) -> None:
    table, findings = said(config(platform))
    best = table[0]
    assert best["layout"] == f"{layout} micro_batch=1"
    assert best["memory"].startswith(f"{weights} + gathered ")
    assert {"products", "exchange beside", "waiting", "a step"} < best.keys()
    assert "does not fit" not in best["memory per process"]
    copies = next(row for row in table if row["layout"].startswith("strategy=auto"))
    assert copies["memory per process"].endswith("TB: does not fit")
    strategy = re.split(r" (?=activation|micro)", best["layout"])[0]
    assert strategy in findings["train.layout"].fix


def test_what_the_gate_has_measured_decides_and_is_told() -> None:
    """EPFL's two nodes: 122 Gbit/s between them, and 1,662 within each."""
    asked = config(GKE | {"nodes": 2, "machine": "a3-megagpu-8g"}, "Llama-3.2-1B", strategy="fsdp")
    (slow, told), (fast, _) = said(asked, measured(2, 15.3)), said(asked, measured(2, 338.0))
    assert slow[0]["layout"] != fast[0]["layout"]
    assert slow[0]["layout"].startswith(("strategy=auto", "strategy={kind: hybrid"))
    advice = told["train.layout"]
    assert "122 Gbit/s between nodes (measured by this run's gate)" in advice.what
    assert "a run may change the strategy and go on" in advice.fix


def test_a_layout_that_the_links_are_too_slow_for_is_named() -> None:
    asked = config(H200S, strategy="fsdp")
    _, told = said(asked, measured(16, 15.3))
    assert told["train.fabric"].what.startswith("the links are too slow for fsdp (")
    assert told["train.fabric"].what.endswith("122 Gbit/s between nodes (measured by this run's gate)")


def test_adapters_divide_no_products_and_send_gradients_of_themselves_alone() -> None:
    whole, adapted = (
        said(config(H200S, "Llama-3-70B", strategy="fsdp", **lora), measured(16, 15.3))[0]
        for lora in ({}, {"lora": {"rank": 8}})
    )
    assert any("tensor" in row["layout"] for row in whole)
    assert not any("tensor" in row["layout"] for row in adapted)
    beside = [
        float(next(row for row in table if row["layout"].startswith("strategy=fsdp"))["exchange beside"].split()[0])
        for table in (whole, adapted)
    ]
    # Weights come twice in two bytes either way, and gradients in four.
    assert beside[1] == pytest.approx(beside[0] / 2, rel=0.05)


def test_processes_without_gpus_have_no_choice() -> None:
    assert said(config({"kind": "local", "processes": 4}, "pythia-1b")) == ([], {})


def test_experts_are_not_divided_and_plan_says_so() -> None:
    (told,) = check_strategy(config(H100S, "Mixtral-8x7B-v0.1", strategy="fsdp"), vocab_size=None)
    assert told.severity == "info"
    assert "there is no expert parallelism yet" in told.what
    refused, _ = check_strategy(
        config(H100S, "Mixtral-8x7B-v0.1", strategy={"kind": "fsdp", "tensor": 2}), vocab_size=None
    )
    assert (refused.severity, refused.code) == ("error", "train.strategy")
