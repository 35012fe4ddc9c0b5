from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.checks.arithmetic import seconds_for
from launcher.checks.cost import expected
from launcher.config import RunConfig, validated
from launcher.machines import MACHINES, ListPrice

PRICE = ListPrice(usd=36.0, region="us-central1", date="2026-10-13", source="here")
A2 = replace(MACHINES["a2-highgpu-8g"], price=PRICE)


def test_more_machines_take_less_time_for_the_same_money() -> None:
    def on(nodes: int) -> RunConfig:
        platform = {"kind": "gke", "machine": A2.name, "nodes": nodes}
        return validated(RunConfig, {"train": {"global_batch": 1024}, "platform": platform}, where="test")

    one, eight = (expected(A2, nodes=nodes, seconds=seconds_for(on(nodes), 1e21) or 0) for nodes in (1, 8))
    assert one.seconds == pytest.approx(8 * eight.seconds)
    assert one.dollars == pytest.approx(eight.dollars)
    assert "$288 at list price" in str(expected(A2, nodes=8, seconds=3600))
    assert "not known" in str(expected(replace(A2, price=None), nodes=1, seconds=3600))
