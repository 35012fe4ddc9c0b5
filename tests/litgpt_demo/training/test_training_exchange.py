"""A step's numbers are heard of in the order of the steps, and after the next one unless they are waited for."""

from __future__ import annotations

import math
from time import monotonic, sleep

import pytest
import torch
from lightning.fabric import Fabric

from litgpt_demo.training.exchange import Exchange, Stopwatch


def put(exchange: Exchange, done: int, loss: float, *, leave: bool = False, time_up: bool = False) -> None:
    device = exchange.device
    values = torch.tensor(loss, device=device), torch.tensor(loss * 10, dtype=torch.bfloat16, device=device)
    exchange.put(done, *values, leave=leave, time_up=time_up, waited=done / 100)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def exchange(request: pytest.FixtureRequest) -> Exchange:
    return Exchange(Fabric(accelerator=request.param, devices=1))


def test_a_step_is_heard_of_after_the_next_one(exchange: Exchange) -> None:
    assert exchange.take(keep=0) is None
    put(exchange, 1, 0.5)
    assert exchange.take(keep=1) is None
    put(exchange, 2, 0.25, leave=True)
    first = exchange.take(keep=1)
    assert first is not None
    assert (first.done, first.loss, first.grad_norm, first.waited) == (1, 0.5, 5.0, 0.01)
    assert (first.leave, first.time_up) == (False, False)
    assert first.ended <= monotonic()
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


def test_what_a_rank_took_alone_is_heard_of_without_waiting_for_its_device(exchange: Exchange) -> None:
    values = torch.tensor(1.0, device=exchange.device), torch.tensor(1.0, device=exchange.device)
    seen = []
    for done in range(1, 6):
        alone = Stopwatch(exchange.device)
        if exchange.device.type == "cuda":
            torch.cuda._sleep(20_000_000)
        else:
            sleep(0.01)
        alone.stop()
        exchange.put(done, *values, leave=False, time_up=False, waited=0.0, alone=alone)
        if (result := exchange.take(keep=1)) is not None:
            seen.append(result.alone)
    known = seen[2:]  # a GPU's are those of the step before the last
    assert len(known) == 2
    assert all(len(ranks) == 1 and 0.005 < ranks[0] < 1.0 for ranks in known)


def test_going_back_forgets_what_was_on_its_way(exchange: Exchange) -> None:
    put(exchange, 7, 1.0)
    put(exchange, 8, 1.0)
    exchange.forget()
    assert exchange.take(keep=0) is None
