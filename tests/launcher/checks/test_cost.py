"""What a training takes and costs: arithmetic, told with what it rests on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from launcher.checks.cost import UTILISATION, expected, listed_price
from launcher.checks.plan import steps_of
from launcher.config import RunConfig, validated
from launcher.machines import MACHINES, ListPrice
from launcher.platforms.batch.settings import BatchPlatformConfig
from launcher.platforms.local.settings import LocalPlatformConfig

PRICE = ListPrice(usd=36.0, region="us-central1", date="2026-10-13", source="here")
A2 = replace(MACHINES["a2-highgpu-8g"], price=PRICE)
HOUR = A2.peak_flops * UTILISATION * 3600


def test_an_hour_of_two_machines_costs_twice_their_hourly_price() -> None:
    one = expected(A2, nodes=2, flops=2 * HOUR)
    assert one.seconds == pytest.approx(3600)
    assert one.dollars == pytest.approx(72)
    assert str(one) == "about 60 min at 35% of peak, $72.00 at list price (on demand, us-central1, 2026-10-13)"


def test_more_machines_take_less_time_for_the_same_money() -> None:
    one, eight = (expected(A2, nodes=nodes, flops=100 * HOUR) for nodes in (1, 8))
    assert eight.seconds == pytest.approx(one.seconds / 8)
    assert eight.dollars == pytest.approx(one.dollars)
    assert str(one).startswith("about 4.2 days at 35% of peak, $3,600 ")


def test_without_a_list_price_no_cost_is_told() -> None:
    one = expected(replace(A2, price=None), nodes=1, flops=HOUR)
    assert one.dollars is None
    assert "not known" in str(one)


@pytest.mark.parametrize(("machine", "told"), [("g2-standard-4", True), ("n2-standard-8", False)])
def test_the_plan_tells_time_and_price_where_the_machine_is_known(
    machine: str, told: bool, tiny: Callable[..., RunConfig]
) -> None:
    gpus = {} if machine.startswith("g2") else {"gpus": 0}
    platform = {"kind": "batch", "project": "my-project", "location": "us-central1", "machine": machine, **gpus}
    config = validated(RunConfig, tiny().model_dump(mode="json") | {"platform": platform}, where="batch")
    (training,) = [row["would"] for row in steps_of(config) if row["step"] == "training"]
    assert training.startswith("train 8 steps")
    assert ("of peak" in training) == told


@pytest.mark.parametrize(("machine", "gpus"), [("g2-standard-4", None), ("a3-megagpu-8g", None), ("n2-standard-8", 0)])
def test_a_run_records_the_list_price_of_its_machines_where_there_is_one(machine: str, gpus: int | None) -> None:
    platform = {"kind": "batch", "project": "my-project", "location": "us-central1", "machine": machine, "gpus": gpus}
    price = listed_price(BatchPlatformConfig.model_validate(platform))
    listed = MACHINES[machine].price if machine in MACHINES else None
    assert (price and price.usd) == (listed and listed.usd)
    assert price is None or price.machine == machine


def test_this_machine_has_no_price() -> None:
    assert listed_price(LocalPlatformConfig(kind="local")) is None
