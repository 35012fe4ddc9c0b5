"""What a run has cost, as its own files tell it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from litgpt_demo.config import ModelConfig, TrainConfig, TrainingSpec
from litgpt_demo.export.cost import cost_of
from litgpt_demo.runs import RecordedPrice, RunDocument, write_document
from litgpt_demo.storage import open_storage

PRICE = RecordedPrice(machine="a2-highgpu-1g", usd=3.6, region="us-central1", date="2025-03-06")
SPEC = TrainingSpec(
    run="gpt-0123456789",
    dataset="datasets/mine",
    dataset_key="0123456789",
    model=ModelConfig(),
    train=TrainConfig(),
    steps=8,
    world_size=1,
)


def write_config(run: Path, price: RecordedPrice | None) -> None:
    write_document(open_storage(str(run)), RunDocument(training=SPEC, price=price))


def left(run: Path, report: str, *, hours: float) -> None:
    """A node's report of its end."""
    path = run / "attempts" / report
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"node": 0, "started": 1e9, "ended": 1e9 + 3600 * hours}))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    write_config(tmp_path, PRICE)
    left(tmp_path, "1/node-0.json", hours=2)
    left(tmp_path, "1/restart-0/node-0.json", hours=1)
    left(tmp_path, "1/node-0/other.json", hours=50)
    left(tmp_path, "2/node-0.json", hours=0.5)
    left(tmp_path, "2/node-1.json", hours=0.5)
    return tmp_path


def test_a_run_costs_the_hours_of_all_nodes_in_all_attempts(run: Path) -> None:
    cost = cost_of(open_storage(str(run)))
    assert cost is not None
    assert (cost.hours, cost.usd) == pytest.approx((4.0, 14.4))
    assert str(cost) == (
        "$14.40 or more: 4.00 hours of a2-highgpu-1g at $3.60, list price on demand in us-central1 of 2025-03-06"
    )


def test_reports_that_cannot_be_read_are_counted_with_the_cost(run: Path) -> None:
    (run / "attempts/2/node-1.json").write_text('{"node": 1, "started"')
    cost = cost_of(open_storage(str(run)))
    assert cost is not None
    assert cost.hours == pytest.approx(3.5)
    assert str(cost).endswith(" of 2025-03-06; reports of nodes that could not be read, and are left out: 1")


def test_where_machines_have_no_list_price_no_cost_is_told(run: Path) -> None:
    write_config(run, None)
    assert cost_of(open_storage(str(run))) is None


def test_a_run_whose_nodes_told_nothing_has_no_cost(tmp_path: Path) -> None:
    write_config(tmp_path, PRICE)
    (tmp_path / "attempts/1").mkdir(parents=True)
    (tmp_path / "attempts/1/node-0.json").write_text('{"node": 0, "ended": 5.0}')  # of a version before
    assert cost_of(open_storage(str(tmp_path))) is None
