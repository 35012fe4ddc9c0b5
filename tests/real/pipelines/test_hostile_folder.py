"""Nothing of ours imports what lies in the folder that it is started in, which may be /tmp."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from waiting import until

from launcher.config import RunConfig
from launcher.job import JobState
from launcher.platforms.local.platform import LocalPlatform
from launcher.runs.attempts import claim_of

# Modules of Python, of what we depend on, and of ours.
NAMES = ("token", "random", "tempfile", "launcher/__init__", "litgpt_demo/__init__", "torch/__init__", "numpy/__init__")


def test_supervisor_node_torchrun_and_rank_run_no_program_of_the_current_folder(
    tmp_path: Path, tiny: Callable[..., RunConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "hostile"
    for name in NAMES:
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"from pathlib import Path\nPath({str(tmp_path / 'executed')!r}).write_text(__file__)\n")
    job = replace(claim_of(tiny()).make_job(1), stage=(), program=("-m", "litgpt_demo", "verify", "nowhere"))
    monkeypatch.chdir(folder)
    platform = LocalPlatform(grace=2)
    job_id = platform.submit(platform.render(job))
    until(lambda: not platform.status(job_id).state.live)
    log = (Path(job_id) / "node-0.log").read_text()
    assert platform.status(job_id).state is JobState.FAILED
    assert "[rank0]" in log, log  # so far did it come
    assert "no manifest" in log, log
    assert not (tmp_path / "executed").exists(), (tmp_path / "executed").read_text()
