"""What every platform promises (launcher.platforms.base), tried on each of them by the same tests.

A new platform joins with one function that yields a `Place`, as the toy of tests/fakes/toy_platform does.
"""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import real_cluster
import runai
import toy_platform.platform as toy
from batch import running_batch
from waiting import until

from launcher.job import ATTEMPT_LABEL, RUN_LABEL, Job, JobId, JobState, JobStatus
from launcher.platforms.base import Platform
from launcher.platforms.batch.platform import BatchPlatform
from launcher.platforms.batch.settings import BatchPlatformConfig
from launcher.platforms.local.platform import LocalPlatform
from launcher.platforms.local.supervisor import JOB_TAG
from launcher.platforms.runai.platform import RunaiPlatform
from launcher.platforms.runai.rest import Rest
from launcher.platforms.runai.settings import RunaiPlatformConfig


@dataclass(frozen=True, kw_only=True)
class Place:
    """A platform to try, and how to see from outside what runs on it."""

    platform: Platform
    directory: str
    """Where its jobs may keep their files."""
    live_jobs: Callable[[], int]
    """How many jobs run or wait there, found without the platform's help."""
    image: str | None = None
    """What its nodes run, where they need one."""
    patience: float = 60.0
    """Seconds in which a job of a few seconds is over."""


@contextlib.contextmanager
def local_place(folder: Path) -> Iterator[Place]:
    def supervisors() -> Iterator[str]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                job = process.environ().get(JOB_TAG, "")
                if job.startswith(str(folder)) and "launcher.platforms.local.supervisor" in process.cmdline():
                    yield job

    platform = LocalPlatform(grace=2)
    yield Place(platform=platform, directory=str(folder / "runs"), live_jobs=lambda: len(list(supervisors())))
    for job in set(supervisors()):
        platform.cancel(JobId(job))


@contextlib.contextmanager
def toy_place(folder: Path) -> Iterator[Place]:
    """The one that shows what it takes to add a platform."""

    def jobs() -> set[str]:
        there = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                there.add(process.environ().get(toy.MARK, ""))
        return {job for job in there if job.startswith(str(folder))}

    platform = toy.ToyPlatform()
    yield Place(platform=platform, directory=str(folder / "runs"), live_jobs=lambda: len(jobs()))
    for job in jobs():
        platform.cancel(JobId(job))


@contextlib.contextmanager
def batch_place(folder: Path) -> Iterator[Place]:
    settings = BatchPlatformConfig(
        kind="batch", project="my-project", location="us-central1", machine="n2-standard-8", gpus=0, nodes=2,
        nfs="10.0.0.2:/data", nfs_path=str(folder), gate=0, grace=2,
    )  # fmt: skip
    with running_batch(folder / "cloud", shared=[folder]) as cloud, pytest.MonkeyPatch.context() as patch:
        for name, value in cloud.environment.items():
            patch.setenv(name, value)
        cloud.export("10.0.0.2", "/data", folder)
        yield Place(
            platform=BatchPlatform(settings, grace=4, settle=0),
            directory=str(folder / "runs"),
            live_jobs=lambda: len(cloud.live()),
            image=f"registry.example/litgpt@sha256:{'0' * 64}",
        )


def runai_settings(folder: Path, **settings: object) -> RunaiPlatformConfig:
    claims = [{"name": "scratch", "path": str(folder)}]
    return RunaiPlatformConfig.model_validate(
        {"kind": "runai", "project": "team-a", "nodes": 2, "claims": claims, "grace": 2, **settings}
    )


def runai_place(platform: RunaiPlatform, cluster: runai.Cluster, folder: Path) -> Place:
    return Place(
        platform=platform,
        directory=str(folder / "runs"),
        live_jobs=lambda: len(cluster.live()),
        image=f"registry.example/litgpt@sha256:{'0' * 64}",
    )


@contextlib.contextmanager
def runai_program_place(folder: Path, *, variant: str, version: str) -> Iterator[Place]:
    """By the command line; each generation with the environment that pods had in its time."""
    with (
        runai.running(folder / "runai", claims={"scratch": str(folder)}, version=version, told_gpus=2) as cluster,
        runai.on_path(folder, cluster, variant) as program,
    ):
        settings = runai_settings(folder, api="cli", cli=program)
        yield runai_place(RunaiPlatform(settings), cluster, folder)


@contextlib.contextmanager
def runai_rest_place(folder: Path) -> Iterator[Place]:
    with (
        runai.running(folder / "runai", claims={"scratch": str(folder)}, version="2.18", told_gpus=2) as cluster,
        runai.serving(cluster) as api,
    ):
        settings = runai_settings(folder, api="rest", url=api.url)
        environ = {"RUNAI_CLIENT_ID": api.application[0], "RUNAI_CLIENT_SECRET": api.application[1]}
        yield runai_place(RunaiPlatform(settings, Rest(settings, environ)), cluster, folder)


@contextlib.contextmanager
def cluster_place(folder: Path, workload: str) -> Iterator[Place]:
    """A cluster of two nodes, whose pods run as processes of this machine."""
    from kubernetes_cluster import running_cluster

    from launcher.platforms.kubernetes.platform import GkePlatform
    from launcher.platforms.kubernetes.settings import GkePlatformConfig

    with running_cluster(shared=[folder], nodes=2, jobset="0.12.0" if workload == "jobset" else None) as cluster:
        settings = {
            "kind": "gke", "kubeconfig": str(cluster.kubeconfig), "workload": workload, "nodes": 2, "grace": 2,
            "gate": 0,
        }  # fmt: skip
        platform = GkePlatform(GkePlatformConfig.model_validate(settings))
        plural = "jobsets" if workload == "jobset" else "jobs"
        yield Place(
            platform=platform,
            directory=str(folder / "runs"),
            live_jobs=lambda: len(cluster.objects(plural)),
            image="registry.example/train@sha256:" + 64 * "1",
        )
        platform.close()


def gke_place(folder: Path) -> contextlib.AbstractContextManager[Place]:
    return cluster_place(folder, "jobset")


def gke_job_place(folder: Path) -> contextlib.AbstractContextManager[Place]:
    return cluster_place(folder, "job")


@contextlib.contextmanager
def real_place(_: Path) -> Iterator[Place]:
    """The cluster of $KUBECONFIG. CLUSTER_TEST_IMAGE has this project in it; the PersistentVolumeClaim
    CLUSTER_TEST_CLAIM is the folder CLUSTER_TEST_SHARED, here and in the pods (docs/gke.md has it for kind).
    """
    from kubernetes import client, config

    from launcher.platforms.kubernetes.platform import GkePlatform
    from launcher.platforms.kubernetes.settings import GkePlatformConfig

    kubeconfig, image, claim, shared = real_cluster.needed(
        "KUBECONFIG", "CLUSTER_TEST_IMAGE", "CLUSTER_TEST_CLAIM", "CLUSTER_TEST_SHARED"
    )
    folder = Path(shared) / f"contract-{time.time_ns()}"
    folder.mkdir()
    platform = GkePlatform(GkePlatformConfig(
        kind="gke", kubeconfig=kubeconfig, nodes=2, grace=2, gate=0, claim=claim, claim_path=shared,
    ))  # fmt: skip
    config.load_kube_config(kubeconfig)

    def jobs() -> set[JobId]:
        """This suite's, all of which are called contract-…: also of a run that was interrupted."""
        listed = client.BatchV1Api().list_namespaced_job("default", label_selector=RUN_LABEL).items
        marks = [(one.metadata.labels[RUN_LABEL], one.metadata.labels[ATTEMPT_LABEL]) for one in listed]
        return {JobId(f"default/{run}-{attempt}") for run, attempt in marks if run.startswith("contract-")}

    def clear() -> None:
        for job_id in jobs():
            platform.cancel(job_id)

    clear()
    try:
        yield Place(
            platform=platform, directory=f"{folder}/runs", live_jobs=lambda: len(jobs()), image=image, patience=300.0
        )
    finally:
        clear()
        platform.close()
        shutil.rmtree(folder, ignore_errors=True)


PLACES = {
    "local": local_place,
    "gke": gke_place,
    "gke-job": gke_job_place,
    "runai-v1": partial(runai_program_place, variant="v1", version="2.13"),
    "runai-v2": partial(runai_program_place, variant="v2", version="2.18"),
    "runai-rest": runai_rest_place,
    "batch": batch_place,
    "toy": toy_place,
    "cluster": real_place,
}
QUICK = {"local", "gke"}
"""Those that every change is tried on: the others have tests of their own for what they say and do."""
LONG = {name: pytest.mark.long for name in PLACES if name not in QUICK}
MARKS = {**LONG, "cluster": pytest.mark.cluster}


@pytest.fixture(scope="module", params=[pytest.param(name, marks=MARKS.get(name, ())) for name in PLACES])
def place(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """One for all tests: each has jobs of its own names, and leaves none."""
    with PLACES[request.param](tmp_path_factory.mktemp(request.param)) as made:
        yield made


def program(place: Place, name: str, text: str) -> tuple[str, ...]:
    script = Path(place.directory).parent / f"{name}.py"
    script.write_text(text)
    return (str(script),)


def job(place: Place, name: str, text: str, **changes: object) -> Job:
    made = Job(
        name=f"contract-{name}",
        attempt=1,
        nodes=2,
        processes=1,
        program=program(place, name, text),
        directory=f"{place.directory}/{name}",
        image=place.image,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def end_of(place: Place, job_id: JobId) -> JobStatus:
    until(lambda: not place.platform.status(job_id).state.live, seconds=place.patience)
    return place.platform.status(job_id)


SLEEP = "import time; time.sleep(600)"


def test_rendering_says_the_same_twice_and_sends_nothing(place: Place) -> None:
    asked = job(place, "render", SLEEP)
    first = place.platform.render(asked)
    assert first == place.platform.render(asked)
    assert place.platform.status(first.job_id).state is JobState.ABSENT
    assert place.live_jobs() == 0


def test_that_it_lets_us_in_is_told_in_one_line_and_starts_nothing(place: Place) -> None:
    told = place.platform.check_access()
    assert told
    assert "\n" not in told
    assert place.live_jobs() == 0


def test_attempts_of_one_run_are_jobs_of_their_own(place: Place) -> None:
    first = job(place, "attempts", SLEEP)
    second = replace(first, attempt=2, directory=f"{place.directory}/attempts-2")
    assert place.platform.render(first).job_id != place.platform.render(second).job_id


@contextlib.contextmanager
def submitted(place: Place, name: str, text: str) -> Iterator[JobId]:
    job_id = place.platform.submit(place.platform.render(job(place, name, text)))
    try:
        yield job_id
    finally:
        place.platform.cancel(job_id)


WORLD = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(dist.get_rank() + 1.0)
dist.all_reduce(total)
node = os.environ["GROUP_RANK"]
sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()} on node {node}: {total.item():.0f}\\n")
dist.destroy_process_group()
for number in range(40):
    sys.stdout.write(f"line {number} of node {node}\\n")
    time.sleep(0.05)
"""


@pytest.mark.training
def test_the_program_runs_in_every_rank_of_one_world_and_its_logs_can_be_followed_from_where_one_stopped(
    place: Place,
) -> None:
    with submitted(place, "world", WORLD) as job_id:
        states, lines, position = [], [], ""
        give_up = time.monotonic() + place.patience
        while time.monotonic() < give_up:
            states.append(place.platform.status(job_id).state)
            page = place.platform.logs(job_id, position)
            lines += page.lines
            position = page.position
            if states[-1].final:
                break
            time.sleep(0.2)
        assert states[0].live
        assert states[-1] is JobState.SUCCEEDED
        assert place.platform.status(job_id).exit_codes == {0: 0, 1: 0}
        assert place.platform.logs(job_id, position).lines == ()
    for node in (0, 1):
        told = [line.text for line in lines if line.node == node and re.search(r"\]:(rank|line)", line.text)]
        counted = [f"[rank{node}]:line {number} of node {node}" for number in range(40)]
        assert told == [f"[rank{node}]:rank {node} of 2 on node {node}: 3", *counted]


@pytest.mark.training
def test_a_failing_program_ends_the_job_with_the_exit_code_of_its_fault(place: Place) -> None:
    text = "import os, time\nif os.environ['RANK'] == '1':\n    raise SystemExit(41)\ntime.sleep(600)"
    with submitted(place, "fails", text) as job_id:
        seen = end_of(place, job_id)
        assert seen.state is JobState.FAILED
        assert seen.exit_codes[1] == 41
        assert seen.native


def test_submitting_twice_is_one_job_and_cancelling_twice_leaves_nothing(place: Place) -> None:
    begun = Path(place.directory).parent / "begun"
    text = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(600)"
    submission = place.platform.render(job(place, "twice", text))
    first = place.platform.submit(submission)
    assert place.platform.status(first).state.live
    assert place.platform.submit(submission) == first
    assert place.live_jobs() == 1
    until(begun.exists, seconds=place.patience)  # as pids 1, nodes that just begin do not hear that they shall go
    assert place.platform.left(first), "what costs money is listed"
    place.platform.cancel(first)
    assert place.platform.left(first) == ()
    assert not place.platform.status(first).state.live
    assert place.live_jobs() == 0
    place.platform.cancel(first)


def test_cancelling_a_job_that_never_was_is_success(place: Place) -> None:
    unknown = place.platform.render(job(place, "unknown", SLEEP)).job_id
    place.platform.cancel(unknown)
    assert place.platform.left(unknown) == ()
    assert place.platform.status(unknown).state is JobState.ABSENT
    assert place.platform.logs(unknown).lines == ()


def test_a_submission_is_plain_data_that_can_be_shown(place: Place) -> None:
    submission = place.platform.render(job(place, "plain", SLEEP, env={"MARKER": "shown"}))
    # As a mapping has it, and as a list of names and values has it.
    assert re.search(r"MARKER(: |\s+value: )shown", str(submission))
    assert json.loads(json.dumps(submission.body)) == submission.body
    assert submission.platform == place.platform.name
