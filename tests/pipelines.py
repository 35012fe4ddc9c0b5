"""Trainings that several files look at, run once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from launcher.config import RunConfig
from launcher.events import Event, Listener
from litgpt_demo.export import FinalManifest


@dataclass(frozen=True)
class Done:
    """A pipeline that came to its end, and what it told on the way."""

    config: RunConfig
    final: FinalManifest
    events: list[Event]


def run_here(config: RunConfig) -> Done:
    """The flow train-litgpt in this process."""
    from flows.train_litgpt import train_litgpt

    events: list[Event] = []
    groups: dict[str, Any] = {name: getattr(config, name) for name in RunConfig.model_fields}
    with Listener(events.append):
        final = asyncio.run(train_litgpt(**groups))
    return Done(config, final, events)


@pytest.fixture(scope="session")
def trained(prefect_api: None, tmp_path_factory: pytest.TempPathFactory, tiny_under: Callable[..., RunConfig]) -> Done:
    """A tiny training, from text to model, in a folder that held nothing."""
    return run_here(tiny_under(tmp_path_factory.mktemp("trained")))


@pytest.fixture
def run_again() -> Callable[[RunConfig], Done]:
    return run_here
