"""No program imports files of the folder that it starts in, which may be /tmp."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from job_handles import handle_of
from waiting import until

from flows.train_litgpt import prepare_dataset
from launcher.config import ProcessWorkers, RunConfig
from launcher.job import JobState
from launcher.platforms.local.platform import LocalPlatform
from launcher.platforms.local.settings import LocalPlatformConfig

# Modules of Python, of what we depend on, and of ours.
NAMES = (
    "token",
    "random",
    "tempfile",
    "socket",
    "launcher/__init__",
    "litgpt_demo/__init__",
    "torch/__init__",
    "numpy/__init__",
)


@pytest.fixture
def executed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a module of the current folder would leave its name."""
    folder = tmp_path / "hostile"
    for name in NAMES:
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"from pathlib import Path\nPath({str(tmp_path / 'executed')!r}).write_text(__file__)\n")
    monkeypatch.chdir(folder)
    return tmp_path / "executed"


def test_job_runs_no_program_of_the_current_folder(executed: Path, tiny: Callable[..., RunConfig]) -> None:
    """That is its supervisor, node, torchrun and ranks."""
    job = replace(handle_of(tiny()).make_job(1), stage=(), program=("-m", "litgpt_demo", "train", "--run", "nowhere"))
    platform = LocalPlatform(LocalPlatformConfig(kind="local", grace_period=2))
    job_id = platform.submit(platform.render(job))
    until(lambda: not platform.status(job_id).state.is_live)
    log = (Path(job_id) / "node-0.log").read_text()
    assert platform.status(job_id).state is JobState.FAILED
    assert "[rank0]" in log, log  # so far did it come
    assert "config.json does not exist" in log, log
    assert not executed.exists(), executed.read_text()


@pytest.mark.prefect
def test_preparation_runs_no_program_of_the_current_folder(executed: Path, tiny: Callable[..., RunConfig]) -> None:
    config = tiny()
    workers = ProcessWorkers(kind="processes", count=2)
    assert asyncio.run(prepare_dataset(root=config.root, data=config.data, dataset_workers=workers)).documents
    assert not executed.exists(), executed.read_text()
