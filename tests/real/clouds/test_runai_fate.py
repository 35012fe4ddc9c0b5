"""What becomes of a Run:ai training whose pods are preempted, or not what was submitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import runai
from runai_jobs import job_of, settings_of
from waiting import until

from launcher.job import Job, JobId, JobState, JobStatus
from launcher.platforms.runai.platform import RunaiPlatform
from launcher.platforms.runai.rest import Rest
from launcher.runs.diagnosis import Action, diagnose
from launcher.runs.evidence import node_reports
from litgpt_demo.storage import open_storage


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[runai.Cluster]:
    with runai.running(tmp_path / "runai", claims={"scratch": str(tmp_path)}, told_gpus=2) as made:
        yield made


@pytest.fixture
def platform(cluster: runai.Cluster, tmp_path: Path) -> Iterator[RunaiPlatform]:
    with runai.serving(cluster) as api:
        claims = [{"name": "scratch", "path": str(tmp_path)}]
        config = settings_of(api="rest", url=api.url, grace=2, claims=claims)
        yield RunaiPlatform(config, Rest(config, api.credentials()), settle=4)


@pytest.fixture
def job(tmp_path: Path) -> Callable[[str], Job]:
    """A job of two pods that runs this text in each rank."""

    def make(text: str) -> Job:
        (script := tmp_path / "program.py").write_text(text)
        directory = str(tmp_path / "attempts/1")
        return job_of(name="fate", processes=1, program=(str(script),), directory=directory, stage=())

    return make


def end_of(platform: RunaiPlatform, job_id: JobId) -> JobStatus:
    until(lambda: not platform.status(job_id).state.live)
    return platform.status(job_id)


def test_a_preempted_training_comes_back_as_the_same_workload_and_its_logs_go_on(
    cluster: runai.Cluster, platform: RunaiPlatform, job: Callable[[str], Job], tmp_path: Path
) -> None:
    text = """
import pathlib, sys, time
second_life = pathlib.Path(sys.argv[0]).with_name("second-life").exists()
print("again" if second_life else "first", flush=True)
time.sleep(1 if second_life else 600)
"""
    job_id = platform.submit(platform.render(job(text)))
    log = cluster.folder / "team-a/fate-1/0.log"
    until(lambda: log.exists() and "]:first" in log.read_text())
    (tmp_path / "second-life").touch()
    cluster.trainings["team-a", "fate-1"].wanted = "preempt"
    seen = end_of(platform, job_id)
    assert (seen.state, seen.exit_codes) == (JobState.SUCCEEDED, {0: 0, 1: 0})
    assert "[node 0] [rank0]:again" in [str(line) for line in platform.logs(job_id).lines]


@pytest.mark.parametrize("version", ["2.13", "2.18"])
def test_pods_that_are_more_than_was_submitted_say_so_in_the_runs_directory(
    version: str, cluster: runai.Cluster, platform: RunaiPlatform, job: Callable[[str], Job], tmp_path: Path
) -> None:
    """Somebody copied the workload and added a worker."""
    cluster.version = version
    submission = platform.render(job("raise SystemExit('never started')"))
    spec = submission.body["sent"]["json"]["spec"]
    command = (spec["command"], *spec["args"].split(" "))
    cluster.create(runai.Training(name="fate-1", project="team-a", workers=2, command=command))
    seen = end_of(platform, submission.job_id)
    assert seen.state is JobState.FAILED
    verdict = diagnose(seen, node_reports(open_storage(str(tmp_path / "attempts/1"))), [], logs="")
    assert verdict.action is Action.STOP
    assert "node.contradiction" in verdict.evidence
