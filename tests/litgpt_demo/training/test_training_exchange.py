"""A step's numbers are heard of in the order of the steps, and after the next one unless they are waited for."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.fabric import Fabric

from litgpt_demo.training.exchange import Exchange


def put(exchange: Exchange, done: int, loss: float, *, leave: bool = False, time_up: bool = False) -> None:
    device = exchange.device
    values = torch.tensor(loss, device=device), torch.tensor(loss * 10, dtype=torch.bfloat16, device=device)
    exchange.put(done, *values, leave=leave, time_up=time_up, waited=done / 100)


@pytest.fixture
def exchange() -> Exchange:
    return Exchange(Fabric(accelerator="cpu", devices=1))


def test_a_step_is_heard_of_after_the_next_one(exchange: Exchange) -> None:
    assert exchange.take(keep=0) is None
    put(exchange, 1, 0.5)
    assert exchange.take(keep=1) is None
    put(exchange, 2, 0.25, leave=True)
    first = exchange.take(keep=1)
    assert first is not None
    assert (first.done, first.loss, first.grad_norm, first.waited) == (1, 0.5, 5.0, 0.01)
    assert (first.leave, first.time_up) == (False, False)
    assert exchange.take(keep=1) is None
    second = exchange.take(keep=0)
    assert second is not None
    assert (second.done, second.leave, second.time_up) == (2, True, False)
    assert second.ended >= first.ended


def test_what_is_no_number_spoils_neither_the_flags_nor_the_steps_after_it(exchange: Exchange) -> None:
    put(exchange, 1, math.nan, time_up=True)
    put(exchange, 2, 1.0)
    first, second = exchange.take(keep=0), exchange.take(keep=0)
    assert first is not None
    assert second is not None
    assert math.isnan(first.loss)
    assert (first.time_up, first.leave) == (True, False)
    assert second.loss == 1.0
