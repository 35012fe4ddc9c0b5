"""A step's numbers are heard of in the order of the steps, and after the next one unless they are waited for."""

from __future__ import annotations

import math

import torch
from lightning.fabric import Fabric

from litgpt_demo.training.exchange import Exchange


def put(exchange: Exchange, done: int, loss: float, *, leave: bool = False, time_up: bool = False) -> None:
    device = exchange.device
    values = torch.tensor(loss, device=device), torch.tensor(loss * 10, dtype=torch.bfloat16, device=device)
    exchange.put(done, *values, leave=leave, time_up=time_up, waited=done / 100)


def test_a_step_is_heard_of_after_the_next_one_and_one_without_a_number_spoils_no_flag() -> None:
    exchange = Exchange(Fabric(accelerator="cpu", devices=1))
    assert exchange.take(keep=0) is None
    put(exchange, 1, math.nan, time_up=True)
    assert exchange.take(keep=1) is None
    put(exchange, 2, 0.25, leave=True)
    first, none, second = exchange.take(keep=1), exchange.take(keep=1), exchange.take(keep=0)
    assert none is None
    assert first is not None
    assert second is not None
    assert math.isnan(first.loss)
    assert (first.done, first.leave, first.time_up, first.waited) == (1, False, True, 0.01)
    assert (second.done, second.loss, second.grad_norm, second.leave, second.time_up) == (2, 0.25, 2.5, True, False)
