"""What becomes of a Run:ai training whose pods are lost, preempted, removed, or not what was submitted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import runai
from waiting import until

from launcher.job import Job, JobId, JobState, JobStatus
from launcher.platforms.runai.platform import RunaiPlatform
from launcher.platforms.runai.rest import Rest
from launcher.platforms.runai.settings import RunaiPlatformConfig
from launcher.runs.diagnosis import Action, diagnose
from launcher.runs.evidence import node_reports
from litgpt_demo.storage import open_storage

pytestmark = pytest.mark.training


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[runai.Cluster]:
    with runai.running(tmp_path / "runai", claims={"scratch": str(tmp_path)}, told_gpus=2) as made:
        yield made


@pytest.fixture
def platform(cluster: runai.Cluster, tmp_path: Path) -> Iterator[RunaiPlatform]:
    with runai.serving(cluster) as api:
        config = RunaiPlatformConfig.model_validate(
            {
                "kind": "runai",
                "project": "team-a",
                "nodes": 2,
                "api": "rest",
                "url": api.url,
                "grace": 2,
                "claims": [{"name": "scratch", "path": str(tmp_path)}],
            }
        )
        environ = {"RUNAI_CLIENT_ID": api.application[0], "RUNAI_CLIENT_SECRET": api.application[1]}
        yield RunaiPlatform(config, Rest(config, environ, pause=0.01), settle=4)


@pytest.fixture
def job(tmp_path: Path) -> Callable[[str], Job]:
    """A job of two pods that runs this text in each rank."""

    def make(text: str) -> Job:
        script = tmp_path / "program.py"
        script.write_text(text)
        return Job(
            name="fate",
            attempt=1,
            nodes=2,
            processes=1,
            program=(str(script),),
            directory=str(tmp_path / "attempts/1"),
            image="registry.example/litgpt@sha256:" + 64 * "0",
        )

    return make


def end_of(platform: RunaiPlatform, job_id: JobId) -> JobStatus:
    until(lambda: not platform.status(job_id).state.live)
    return platform.status(job_id)


def texts(platform: RunaiPlatform, job_id: JobId) -> str:
    return "\n".join(str(line) for line in platform.logs(job_id).lines)


def test_logs_and_the_outcome_outlive_the_workload(
    cluster: runai.Cluster, platform: RunaiPlatform, job: Callable[[str], Job]
) -> None:
    job_id = platform.submit(platform.render(job("print('said by', __import__('os').environ['RANK'])")))
    assert end_of(platform, job_id).exit_codes == {0: 0, 1: 0}
    cluster.delete("team-a", "fate-1")  # as Run:ai does by itself some time after the end
    until(lambda: not cluster.phases("team-a"))
    seen = platform.status(job_id)
    assert (seen.state, seen.native, seen.exit_codes) == (JobState.SUCCEEDED, "deleted after its end", {0: 0, 1: 0})
    said = texts(platform, job_id)
    assert "[node 0] [rank0]:said by 0" in said
    assert "[node 1] [rank1]:said by 1" in said


@pytest.mark.long
def test_a_pod_whose_machine_is_lost_ends_the_attempt_and_is_worth_another(
    cluster: runai.Cluster, platform: RunaiPlatform, job: Callable[[str], Job]
) -> None:
    asked = job("import time; print('up', flush=True); time.sleep(600)")
    job_id = platform.submit(platform.render(asked))
    log = Path(cluster.folder) / "workloads/team-a/fate-1/fate-1-worker-0.log"
    until(lambda: log.exists() and "]:up" in log.read_text())
    cluster.kill_pod("team-a", "fate-1", 1)
    seen = end_of(platform, job_id)
    assert (seen.state, seen.native) == (JobState.FAILED, "Failed")
    assert 1 not in seen.exit_codes
    verdict = diagnose(seen, node_reports(open_storage(asked.directory)), [], logs=asked.directory)
    assert verdict.action is Action.RESTART
    again = replace(asked, attempt=2, directory=asked.directory.replace("/1", "/2"))
    second = platform.submit(platform.render(again))
    assert second != job_id
    platform.cancel(second)
    platform.cancel(job_id)
    assert cluster.phases("team-a") == {}


@pytest.mark.long
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
    log = Path(cluster.folder) / "workloads/team-a/fate-1/fate-1-master-0.log"
    until(lambda: log.exists() and "]:first" in log.read_text())
    (tmp_path / "second-life").touch()
    cluster.preempt("team-a", "fate-1")
    seen = end_of(platform, job_id)
    assert (seen.state, seen.exit_codes) == (JobState.SUCCEEDED, {0: 0, 1: 0})
    assert "[node 0] [rank0]:again" in texts(platform, job_id)


@pytest.mark.parametrize("version", [pytest.param("2.13", marks=pytest.mark.long), "2.18"])
def test_pods_that_are_more_than_was_submitted_say_so_in_the_runs_directory(
    version: str, cluster: runai.Cluster, platform: RunaiPlatform, job: Callable[[str], Job], tmp_path: Path
) -> None:
    """Somebody copied the workload and added a worker."""
    cluster.change(version=version)
    submission = platform.render(job("raise SystemExit('never started')"))
    spec = submission.body["sent"]["json"]["spec"]
    cluster.create(
        runai.Training(
            name="fate-1",
            project="team-a",
            workers=2,
            command=(spec["command"], *spec["args"].split(" ")),
            claims=(("scratch", str(tmp_path)),),
        )
    )
    seen = end_of(platform, submission.job_id)
    assert seen.state is JobState.FAILED
    verdict = diagnose(seen, node_reports(open_storage(str(tmp_path / "attempts/1"))), [], logs="")
    assert verdict.action is Action.STOP
    assert "3" in verdict.evidence
    assert "node.contradiction" in verdict.evidence
