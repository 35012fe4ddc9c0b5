"""What every platform promises (launcher.platforms.base), tried on several of them by the same tests.

A new platform joins with one function that yields a `Place`. Clouds whose pods are processes of this machine are in
tests/real/clouds, where these tests run on them.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
import pytest
from job_handles import handle_on
from strict_platform import StrictPlatform
from waiting import until

from launcher.config import RunConfig, validated
from launcher.errors import ConfigProblem, PlatformRefused
from launcher.job import Job, JobId, JobState
from launcher.platforms import PLATFORMS, settings_classes
from launcher.platforms.base import Platform
from launcher.platforms.local.platform import LocalPlatform
from launcher.platforms.local.settings import LocalPlatformConfig
from launcher.platforms.local.supervisor import JOB_TAG
from launcher.runs.index import AttemptRecord

IMAGE = f"registry.example/litgpt@sha256:{'0' * 64}"


@dataclass(frozen=True, kw_only=True)
class Place:
    """A platform to try, and how to see from outside what runs on it."""

    platform: Platform
    folder: Path
    """Where its jobs may keep their files."""
    live_jobs: Callable[[], int]
    """How many jobs run or wait there, found without the platform's help."""
    written: Callable[[], object]
    """What has been asked of it that changes something, or what it is like."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Of who asks it."""
    runs: bool = True
    """Nodes are processes, and not only said to run."""
    points_apart: int = 1
    """Lines between two points at which an orchestrator is killed; 12 where nodes are processes, which take seconds."""
    lose: Callable[[], object] | None = None
    """Takes the machine of node 1 away, where that can be done."""


@contextlib.contextmanager
def local_place(folder: Path) -> Iterator[Place]:
    """Its jobs are folders, which all processes of a job have in a variable."""

    def jobs() -> set[str]:
        tags = set()
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                tags.add(process.environ().get(JOB_TAG, ""))
        return {job for job in tags if job.startswith(str(folder))}

    platform = LocalPlatform(LocalPlatformConfig(kind="local", grace_period=2))
    yield Place(platform=platform, folder=folder, live_jobs=lambda: len(jobs()), written=jobs)


@contextlib.contextmanager
def strict_place(folder: Path) -> Iterator[Place]:
    """The one that other tests have in place of a real one."""
    strict = StrictPlatform()
    jobs = strict.live
    yield Place(platform=strict, folder=folder, live_jobs=lambda: len(jobs()), written=jobs, runs=False)


@contextlib.contextmanager
def kubernetes_place(folder: Path, *, simulate: bool = True, workload: str = "jobset") -> Iterator[Place]:
    from kubernetes_cluster import running_cluster

    from launcher.platforms.kubernetes.platform import KubernetesPlatform
    from launcher.platforms.kubernetes.settings import KubernetesPlatformConfig

    jobset = "0.12.0" if workload == "jobset" else None
    with running_cluster(simulate=simulate, nodes=2, jobset=jobset) as cluster:
        section = {
            "kubeconfig": str(cluster.kubeconfig),
            "workload": workload,
            "nodes": 2,
            "grace_period": 2,
            "network_test": 0,
        }
        platform = KubernetesPlatform(KubernetesPlatformConfig.model_validate({"kind": "kubernetes", **section}))
        yield Place(
            platform=platform,
            folder=folder,
            live_jobs=lambda: len(cluster.objects(f"{workload}s")),
            written=lambda: [
                call for call in cluster.traffic.calls.items() if call[0][0] not in {"get", "list", "watch"}
            ],
            runs=not simulate,
        )
        platform.close()


@contextlib.contextmanager
def batch_place(folder: Path, *, simulate: bool = True) -> Iterator[Place]:
    from batch import running_batch
    from batch_jobs import settings_of

    from launcher.platforms.batch.platform import BatchPlatform

    settings = settings_of(nfs="10.0.0.2:/data", nfs_path=str(folder), network_test=0, grace_period=2, spot=True)
    with running_batch(None if simulate else folder / "cloud") as cloud:
        yield Place(
            platform=BatchPlatform(settings, grace_period=0 if simulate else 4, settle=0),
            folder=folder,
            live_jobs=lambda: len(cloud.live()),
            written=lambda: cloud.calls.count("CancelJob") + cloud.calls.count("CreateJob"),
            environment=cloud.environment,
            runs=not simulate,
            lose=lambda: [record.vms[1].end(50001) for record in cloud.records.values()],
        )


@contextlib.contextmanager
def runai_place(
    folder: Path, *, simulate: bool = True, variant: str = "rest", version: str = "2.18"
) -> Iterator[Place]:
    """By REST or by the command line; each generation with the environment that pods had in its time."""
    import runai
    from runai_jobs import settings_of

    from launcher.platforms.runai.platform import RunaiPlatform
    from launcher.platforms.runai.rest import Rest

    options = {
        "pvcs": {"scratch": str(folder)},
        "version": version,
        "told_gpus": 2,
        "pods": not simulate,
        "grace_period": 9,
    }
    section: dict[str, Any] = {"pvcs": [{"name": "scratch", "path": str(folder)}], "grace_period": 2}
    with (
        runai.running(folder / "runai", **options) as cluster,
        runai.serving(cluster) as api,
        runai.program(folder, cluster, variant) as program,
    ):
        by = {"api": "rest", "url": api.url} if variant == "rest" else {"api": "cli", "cli": "runai"}
        settings = settings_of(**section, **by)
        yield Place(
            platform=RunaiPlatform(settings, Rest(settings, api.credentials()) if variant == "rest" else None),
            folder=folder,
            live_jobs=lambda: len(cluster.live()),
            written=lambda: (len(cluster.submissions), [training.wanted for training in cluster.trainings.values()]),
            environment={"PATH": f"{program.parent}:{os.environ['PATH']}", **api.credentials()},
            runs=not simulate,
            points_apart=1 if variant == "rest" else 4,
            lose=lambda: [
                runai.signal_pod(training.pods[1], signal.SIGKILL) for training in cluster.trainings.values()
            ],
        )


@contextlib.contextmanager
def slurm_place(folder: Path) -> Iterator[Place]:
    from slurm_commands import slurm_commands

    from launcher.platforms.slurm.platform import SlurmPlatform
    from launcher.platforms.slurm.settings import SlurmPlatformConfig

    with slurm_commands() as cluster:
        yield Place(
            platform=SlurmPlatform(SlurmPlatformConfig.model_validate({"kind": "slurm", "nodes": 2}), settle=0),
            folder=folder,
            live_jobs=lambda: len(cluster.live()),
            written=lambda: [call for call in cluster.calls if call[0] in {"sbatch", "scancel"}],
            runs=False,
        )


PLACES = {
    "local": local_place,
    "strict": strict_place,
    "kubernetes": kubernetes_place,
    "runai": runai_place,
    "runai-v1": partial(runai_place, variant="v1", version="2.13"),
    "runai-v2": partial(runai_place, variant="v2"),
    "batch": batch_place,
    "slurm": slurm_place,
}


@pytest.fixture(scope="module", params=PLACES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    """One for all tests: each has jobs of its own names, and leaves none."""
    with PLACES[request.param](tmp_path_factory.mktemp(request.param)) as place:
        yield place


@pytest.fixture
def place(made: Place, monkeypatch: pytest.MonkeyPatch) -> Place:
    for name, value in made.environment.items():
        monkeypatch.setenv(name, value)
    return made


@pytest.fixture
def running_place(tmp_path: Path) -> Iterator[Place]:
    """The one that nodes are tried on as processes: each costs as much as torch takes to start."""
    with local_place(tmp_path) as place:
        yield place


SLEEP = "import time; time.sleep(600)"


def job(place: Place, name: str, text: str, **changes: Any) -> Job:
    script = place.folder / f"{name}.py"
    script.write_text(text)
    values: dict[str, Any] = {
        "name": f"contract-{name}", "attempt": 1, "nodes": 2, "processes": 1, "program": (str(script),),
        "directory": str(place.folder / "runs" / name), "image": IMAGE,
    }  # fmt: skip
    return Job(**{**values, **changes})


@contextlib.contextmanager
def submitted(place: Place, name: str, text: str) -> Iterator[JobId]:
    job_id = place.platform.submit(place.platform.render(job(place, name, text)))
    try:
        yield job_id
    finally:
        place.platform.cancel(job_id)


def test_render_and_check_access_start_nothing(
    place: Place,
) -> None:
    """Rendering twice returns the same plain data."""
    rendered = job(place, "render", SLEEP, env={"MARKER": "shown"}, code="gs://bucket/code/a.tar")
    first = place.platform.render(rendered)
    assert first == place.platform.render(rendered)
    assert json.loads(json.dumps(first.body)) == first.body
    assert re.search(r"MARKER(: |=|\s+value: )shown", str(first))  # as a mapping has it, or a list of names and values
    assert re.search(r"--code\W+gs://bucket/code/a\.tar", str(first))
    second = replace(rendered, attempt=2, directory=f"{rendered.directory}-2")
    assert place.platform.render(second).job_id != first.job_id
    assert re.fullmatch(".+", place.platform.check_access())
    assert place.platform.status(first.job_id).state is JobState.ABSENT
    assert place.live_jobs() == 0


def test_looking_at_a_job_changes_nothing(place: Place) -> None:
    with submitted(place, "looked-at", SLEEP) as job_id:
        before = place.written()
        for look in (place.platform.status, place.platform.logs, place.platform.remaining_resources):
            look(job_id)
        assert place.written() == before


MALFORMED = ["[]", "[" * 9_999, "null", '{"0": null}', '{"x": [1]}', '{"0": [-1, "ffffffff"]}', '{"uid": 1}', "\x00"]


def test_malformed_position_in_the_log_is_a_value_error(place: Place) -> None:
    """Positions are kept in the run index, and nodes can write there."""
    with submitted(place, "positions", SLEEP) as job_id:
        for position in MALFORMED:
            with pytest.raises(ValueError):  # noqa: PT011  the words are pydantic's
                place.platform.logs(job_id, position)


def test_one_config_under_two_roots_is_two_independent_jobs(place: Place) -> None:
    def submit_under(root: str, nonce: str) -> JobId:
        rooted = job(place, "rooted", SLEEP, root=root, nonce=nonce, directory=str(place.folder / root))
        return place.platform.submit(place.platform.render(rooted))

    first, second = submit_under("ours", "aaaaaa"), submit_under("theirs", "bbbbbb")
    assert place.live_jobs() == 2
    place.platform.cancel(first)
    assert place.platform.status(second).state.is_live
    place.platform.cancel(second)
    assert place.live_jobs() == 0


def test_job_of_a_deleted_root_is_neither_adopted_nor_doubled(place: Place) -> None:
    """The root was deleted while its job ran, and is made again: the new attempt is 1 too, with another nonce."""
    if place.platform.name == "runai":
        pytest.skip("Run:ai lists jobs by their names alone, which two roots may share")
    begun = place.folder / "begun"
    text = f"import os, time; open(f'{begun}-{{os.environ[\"RANK\"]}}', 'w'); time.sleep(600)"
    old = job(place, "deleted", text, root="root", nonce="aaaaaa")
    old_id = place.platform.submit(place.platform.render(old))
    if place.runs:  # a node that just begins ends where its folder is gone
        until(lambda: len([*place.folder.glob("begun-*")]) == 2)
    new = place.platform.render(replace(old, nonce="bbbbbb"))
    if place.platform.name != "local":  # whose ids are folders
        assert place.platform.status(new.job_id).state is JobState.ABSENT
    shutil.rmtree(place.folder / "runs/deleted", ignore_errors=True)
    with pytest.raises(PlatformRefused):
        place.platform.submit(new)
    assert place.live_jobs() == 1
    place.platform.cancel(old_id)
    shutil.rmtree(place.folder / "runs/deleted", ignore_errors=True)
    assert place.platform.submit(new) == new.job_id
    assert place.live_jobs() == 1
    place.platform.cancel(new.job_id)


def test_submit_and_cancel_can_be_repeated(place: Place) -> None:
    begun = place.folder / "begun"
    text = f"import pathlib, time; pathlib.Path({str(begun)!r}).touch(); time.sleep(600)"
    submission = place.platform.render(job(place, "twice", text))
    first = place.platform.submit(submission)
    assert place.platform.status(first).state.is_live
    assert place.platform.submit(submission) == first
    assert place.live_jobs() == 1
    if place.runs:
        until(begun.exists)  # as pids 1, nodes that just begin do not hear that they shall go
    assert place.platform.remaining_resources(first), "what costs money is listed"
    place.platform.cancel(first)
    assert place.platform.remaining_resources(first) == ()
    assert not place.platform.status(first).state.is_live
    assert place.live_jobs() == 0
    place.platform.cancel(first)


class Killed(BaseException):
    """The death of an orchestrator."""


STARTING = {"take", "submit", "create", "_create", "_launch", "_start"}
"""The functions of launcher/ that start a job, between whose lines an orchestrator is killed."""


def is_killed_at(point: int, start: Callable[[], object]) -> bool:
    """Start a job; return whether this was cut off before its line of that number."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal lines
        code = frame.f_code
        if code.co_name not in STARTING or "/launcher/" not in code.co_filename or "/tests/" in code.co_filename:
            return None
        lines += event == "line"
        if lines == point:
            raise Killed
        return trace

    sys.settrace(trace)
    try:
        start()
    except Killed:
        return True
    finally:
        sys.settrace(None)
    return False


def started(place: Place, run: str, nodes: int) -> AttemptRecord:
    """Start an attempt as the leader of a run does, or reattach to it."""
    script = place.folder / "sleep.py"
    script.write_text(SLEEP)
    plain = handle_on(place.platform, place.folder, run, platform={"kind": "local", "nodes": nodes})

    def make_job(number: int) -> Job:
        return replace(plain.make_job(number), nodes=nodes, image=IMAGE, program=(str(script),))

    handle = replace(plain, make_job=make_job)
    record = handle.reattach_or_create()
    assert record is not None
    if not place.platform.status(record.job_id).state.is_live:
        place.platform.submit(place.platform.render(handle.job_of(record)))
    return record


@pytest.mark.parametrize("nodes", [1, 2], ids=["other-nodes", "same-nodes"])
def test_job_is_started_once_wherever_its_orchestrator_dies(place: Place, nodes: int) -> None:
    """The next orchestrator of the run has the same config, or one of fewer nodes."""
    points_apart = 12 if place.runs else place.points_apart
    for point in range(nodes, 400, 2 * points_apart):
        run = f"killed-{nodes}{point:09}"
        is_killed = is_killed_at(point, partial(started, place, run, 2))
        record = started(place, run, nodes)
        assert (point, place.live_jobs()) == (point, 1)
        assert place.platform.status(record.job_id).state.is_live
        place.platform.cancel(record.job_id)
        if not is_killed:
            return
    raise AssertionError("a job takes more lines to start than there are points")


def test_cancelling_a_job_that_never_was_is_success(place: Place) -> None:
    unknown = place.platform.render(job(place, "unknown", SLEEP)).job_id
    place.platform.cancel(unknown)
    assert place.platform.remaining_resources(unknown) == ()
    assert place.platform.status(unknown).state is JobState.ABSENT
    assert place.platform.logs(unknown).lines == ()


WORLD = """
import sys, torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor(dist.get_rank() + 1.0)
dist.all_reduce(total)
sys.stdout.write(f"rank {dist.get_rank()} of {dist.get_world_size()}: {total.item():.0f}\\n")
for number in range(40):
    sys.stdout.write(f"line {number}\\n")
dist.destroy_process_group()
"""


def test_program_runs_in_each_rank_and_its_logs_can_be_continued(
    running_place: Place,
) -> None:
    platform, lines, position = running_place.platform, [], ""
    with submitted(running_place, "world", WORLD) as job_id:

        def followed() -> bool:
            nonlocal position
            ended = platform.status(job_id).state.is_final
            page = platform.logs(job_id, position)
            lines.extend(page.lines)
            position = page.position
            return ended and not page.more

        until(followed)
        seen = platform.status(job_id)
        assert (seen.state, seen.exit_codes) == (JobState.SUCCEEDED, {0: 0, 1: 0})
        assert platform.logs(job_id, position).lines == ()
    for node in (0, 1):
        texts = [line.text for line in lines if line.node == node and re.search(r"\]:(rank|line)", line.text)]
        counted = [f"[rank{node}]:line {number}" for number in range(40)]
        assert texts == [f"[rank{node}]:rank {node} of 2: 3", *counted]


# --- the registry -----------------------------------------------------------------------------------------------------


def test_each_platform_is_registered_under_its_kind() -> None:
    for kind, settings in zip(PLATFORMS, settings_classes(), strict=True):
        assert settings.model_json_schema()["properties"]["kind"]["const"] == kind


def test_unknown_platform_is_refused_with_the_known_ones() -> None:
    choices = "'local', 'gke', 'kubernetes', 'runai', 'batch', 'slurm'"
    with pytest.raises(ConfigProblem, match=rf"platform\.kind: 'toy' is unknown; choose one of {choices}"):
        validated(RunConfig, {"platform": {"kind": "toy"}}, where="here")
