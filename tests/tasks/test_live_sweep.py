"""A sweep's page and artifacts while its trials end, on a real server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from prefect import flow, get_client

from launcher.config import SweepConfig, validated
from launcher.runs.outcomes import Outcome
from launcher.runs.sweeps import trials
from launcher.runs.trials import Trial, sweep_name
from tasks.sweep import LiveSweep

pytestmark = pytest.mark.prefect


def outcome(trial: Trial, loss: float) -> Outcome:
    return Outcome(trial=trial, run=f"gpt-{trial.number}", validation_loss=loss, tokens_per_second=None)


def artifacts(name: str) -> dict[str, tuple[str, object]]:
    with get_client(sync_client=True) as client:
        return {str(one.key): (str(one.id), one.data) for one in client.read_artifacts() if name in str(one.key)}


@pytest.mark.usefixtures("prefect_api")
def test_page_and_table_are_there_after_the_first_trial_and_change_in_place(tmp_path: Path) -> None:
    document = {"root": str(tmp_path), "sweep": {"grid": {"train.seed": [1, 2]}}}
    config = validated(SweepConfig, document, where="test")
    first, second = trials(config)
    name = sweep_name(config)
    page = tmp_path / "sweeps" / name / "sweep.html"
    seen: list[dict[str, tuple[str, object]]] = []

    @flow(name="scene")
    async def scene() -> None:
        async with LiveSweep(config, every=0.05) as live:
            live.have([outcome(first, 3.0)])
            while f"sweep-{name}" not in artifacts(name):
                await asyncio.sleep(0.1)
            seen.append(artifacts(name))
            assert "3.0000" in page.read_text()
            live.have([outcome(first, 3.0), outcome(second, 2.0)])
        seen.append(artifacts(name))

    asyncio.run(scene())
    before, after = (one[f"sweep-{name}"] for one in seen)
    assert before[0] == after[0], "one artifact, updated"
    assert ("2.0000" in str(before[1]), "2.0000" in str(after[1])) == (False, True)
    assert "2 trials: 2 came to their end" in str(seen[1][f"trials-{name}"][1])
    assert "2.0000" in page.read_text()
