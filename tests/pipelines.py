"""Trainings that several files look at, run once, and a script that goes on until it is told."""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from job_handles import handle_of

from launcher.config import RunConfig, ScriptConfig, validated
from launcher.events import Event, Listener
from litgpt_demo.export import FinalManifest
from litgpt_demo.metrics import METRICS_MARK


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


def artifact(key: str) -> Any:
    """The data of the newest artifact with this key. A list has 200 artifacts at most, in the order of random ids."""
    from prefect import get_client

    with get_client(sync_client=True) as client:
        return client.request("GET", "/artifacts/{key}/latest", path_params={"key": key}).json()["data"]


@pytest.fixture(scope="session")
def trained(prefect_api: None, tmp_path_factory: pytest.TempPathFactory, tiny_under: Callable[..., RunConfig]) -> Done:
    """A tiny training, from text to model, in a folder that held nothing."""
    return run_here(tiny_under(tmp_path_factory.mktemp("trained")))


@pytest.fixture
def run_again() -> Callable[[RunConfig], Done]:
    return run_here


TICK = f"""
import os, time
number = 0
while not os.path.exists("FOLDER/enough"):
    print(f'line {{number}}\\n{METRICS_MARK}{{{{"kind":"step","step":{{number}}}}}}', flush=True)
    number += 1
    time.sleep(0.1)
print(f"of {{number}} lines", flush=True)
"""


@pytest.fixture
def ticking(tmp_path: Path) -> Iterator[ScriptConfig]:
    """The config, in `run.yaml`, of a script that counts until there is a file `enough`; its job ends with the test."""
    (tmp_path / "tick.py").write_text(TICK.replace("FOLDER", str(tmp_path)))
    settings = {"name": "ticking", "root": str(tmp_path / "out"), "script": str(tmp_path / "tick.py")}
    config = validated(ScriptConfig, settings, where="ticking")
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json")))
    yield config
    handle_of(config).attempts.cancel()
