"""What a training costs: arithmetic, told with what it rests on."""

from __future__ import annotations

from dataclasses import replace

import pytest

from launcher.checks.cost import UTILISATION, expected
from launcher.machines import MACHINES, ListPrice

PRICE = ListPrice(usd=36.0, region="us-central1", date="2026-10-13", source="here")
A2 = replace(MACHINES["a2-highgpu-8g"], price=PRICE)
HOUR = A2.peak_flops * UTILISATION * 3600


def test_more_machines_take_less_time_for_the_same_money() -> None:
    one, eight = (expected(A2, nodes=nodes, flops=8 * HOUR) for nodes in (1, 8))
    assert (one.seconds, eight.seconds) == (pytest.approx(8 * 3600), pytest.approx(3600))
    assert one.dollars == eight.dollars == pytest.approx(8 * 36)
    assert str(eight) == "about 60 min at 35% of peak, $288 at list price (on demand, us-central1, 2026-10-13)"
    assert "not known" in str(expected(replace(A2, price=None), nodes=1, flops=HOUR))
