"""What becomes of a Run:ai training whose pods are preempted."""

from __future__ import annotations

from pathlib import Path

import runai
from runai_jobs import job_of, settings_of
from waiting import until

from launcher.job import JobState
from launcher.platforms.runai.platform import RunaiPlatform
from launcher.platforms.runai.rest import Rest

LIVES = """
import pathlib, sys, time
second_life = pathlib.Path(sys.argv[0]).with_name("second-life").exists()
print("again" if second_life else "first", flush=True)
time.sleep(1 if second_life else 600)
"""


def test_a_preempted_training_comes_back_as_the_same_workload_and_its_logs_go_on(tmp_path: Path) -> None:
    (script := tmp_path / "program.py").write_text(LIVES)
    with (
        runai.running(tmp_path / "runai", claims={"scratch": str(tmp_path)}, told_gpus=2) as cluster,
        runai.serving(cluster) as api,
    ):
        claims = [{"name": "scratch", "path": str(tmp_path)}]
        config = settings_of(api="rest", url=api.url, grace=2, claims=claims)
        platform = RunaiPlatform(config, Rest(config, api.credentials()), settle=4)
        asked = {"name": "fate", "processes": 1, "program": (str(script),), "stage": ()}
        job_id = platform.submit(platform.render(job_of(**asked, directory=str(tmp_path / "attempts/1"))))
        log = cluster.folder / "team-a/fate-1/0.log"
        until(lambda: log.exists() and "]:first" in log.read_text())
        (tmp_path / "second-life").touch()
        cluster.trainings["team-a", "fate-1"].wanted = "preempt"
        until(lambda: not platform.status(job_id).state.live)
        seen = platform.status(job_id)
        assert (seen.state, seen.exit_codes) == (JobState.SUCCEEDED, {0: 0, 1: 0})
        assert "[node 0] [rank0]:again" in [str(line) for line in platform.logs(job_id).lines]
