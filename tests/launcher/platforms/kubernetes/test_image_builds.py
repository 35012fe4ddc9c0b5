"""Images that a Job in the cluster builds: what is created, what is followed, and every end with its fix."""

from __future__ import annotations

import asyncio
import os
import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from bucket_emulator import bucket_emulator
from gke_jobs import gke
from kubernetes_cluster import Cluster, running_cluster
from kubernetes_cluster.environment import command
from waiting import until

from launcher.errors import ImageProblem, ImageUnreachable
from launcher.images.build import Build, Site
from launcher.images.context import Context
from launcher.images.settings import ClusterImage
from launcher.platforms.kubernetes import cluster as api
from launcher.platforms.kubernetes.builds import CONTAINER, ClusterBuilds, build_job, job_name

GOLDEN = Path(__file__).parents[3] / "golden" / "gke-image-job.yaml"
ROOT = "gs://mine/runs"
DIGEST = "sha256:" + "ab" * 32


def image(**changes: Any) -> ClusterImage:
    given = {"kind": "cluster", "repository": "europe-west4-docker.pkg.dev/my-project/litgpt/train"}
    return ClusterImage.model_validate(given | changes)


@pytest.fixture
def build(tmp_path: Path) -> Build:
    (tmp_path / "context").mkdir()
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    return Build(
        tag=f"{image().repository}:0123456789abcdef", platform="linux/amd64", target="ours",
        context=Context.of(tmp_path / "context", tmp_path / "Dockerfile"),
        args={"BASE": f"python@{DIGEST}", "FLAGS": "-Wl,-rpath,$ORIGIN $(HOME)"}, labels={"stack": "default"},
    )  # fmt: skip


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    with bucket_emulator("mine") as bucket, running_cluster(simulate=True, nodes=1) as made:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", bucket)
        yield made


def builder(cluster: Cluster, pause: Callable[[float], None] | None = None, **changes: Any) -> ClusterBuilds:
    settings = gke(cluster)._settings
    size = {"cpus": "1", "memory": "1Gi", "disk": "1Gi"}
    wait = pause or (lambda seconds: threading.Event().wait(0.05) and None)
    return ClusterBuilds(settings, image(**size, **changes), Site(root=ROOT, pause=wait))


def test_the_job_is_the_golden_one(build: Build) -> None:
    """`make golden` writes it anew; the difference is read in review."""
    context = f"{ROOT}/images/contexts/{'cd' * 32}.tar.gz"
    job = build_job(
        build, image(push_secret="registry"), context=context, namespace="research", service_account="trainer",
    )  # fmt: skip
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(yaml.safe_dump(job, sort_keys=False))
    assert job == yaml.safe_load(GOLDEN.read_text())
    kubernetes_validate.validate(job, "1.33", strict=True)


def test_the_builder_has_no_more_rights_than_a_baseline_namespace_gives(build: Build, cluster: Cluster) -> None:
    cluster.add_namespace("strict", labels={"pod-security.kubernetes.io/enforce": "baseline"})
    pod = build_job(build, image(), context="gs://b/c.tar.gz", namespace="strict", service_account=None)["spec"][
        "template"
    ]
    made = cluster.apply("pods", {"metadata": {"name": "b", "namespace": "strict"}, "spec": pod["spec"]})
    assert made["spec"]["automountServiceAccountToken"] is False
    assert "privileged" not in yaml.safe_dump(pod)


def finished(
    cluster: Cluster, code: int = 0, *, lines: tuple[str, ...] = ("Unpacking rootfs", "Pushed"), last_word: str = ""
) -> None:
    """End the builder as soon as it runs."""
    until(lambda: [one for one in cluster.objects("pods") if one.get("status", {}).get("phase") == "Running"])
    [pod] = cluster.objects("pods")
    name = pod["metadata"]["name"]
    for line in lines:
        cluster.say(name, line, container=CONTAINER)
    assert cluster.finish(name, code=code, container=CONTAINER, last_word=last_word) == 1


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    told: list[Any] = []

    def run() -> None:
        try:
            told.append(work())
        except BaseException as error:
            told.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, told


def test_the_digest_is_the_last_word_of_the_builder_and_its_lines_are_passed_on(cluster: Cluster, build: Build) -> None:
    lines: list[str] = []
    thread, told = in_thread(lambda: builder(cluster).build(build, log=lines.append))
    finished(cluster, lines=("Unpacking rootfs", "Pushed"), last_word=f"{DIGEST}\n")
    thread.join(15)
    assert told == [DIGEST]
    assert [line for line in lines if line in {"Unpacking rootfs", "Pushed"}] == ["Unpacking rootfs", "Pushed"]


def test_a_long_log_is_not_fetched_again_and_again(
    cluster: Cluster, build: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str | None] = []
    log = api.Cluster.log

    def counted(self: api.Cluster, *words: Any, since: str | None = None, follow: bool) -> api.Stream:
        asked.append(since)
        return log(self, *words, since=since, follow=follow)

    monkeypatch.setattr(api.Cluster, "log", counted)
    lines: list[str] = []
    thread, told = in_thread(lambda: builder(cluster).build(build, log=lines.append))
    until(lambda: [one for one in cluster.objects("pods") if one.get("status", {}).get("phase") == "Running"])
    [pod] = cluster.objects("pods")
    for number in range(5):
        cluster.say(pod["metadata"]["name"], f"step {number}", container=CONTAINER)
        until(lambda n=number: f"step {n}" in lines)
    finished(cluster, lines=("step 4", "step 5"), last_word=f"{DIGEST}\n")
    thread.join(15)
    assert told == [DIGEST]
    assert [line for line in lines if line.startswith("step")] == [*(f"step {n}" for n in range(5)), "step 4", "step 5"]
    assert all(asked[3:])


def test_a_builder_has_a_service_account_of_its_own(cluster: Cluster, build: Build) -> None:
    cluster.apply("serviceaccounts", {"metadata": {"name": "builder"}})
    thread, told = in_thread(lambda: builder(cluster, service_account="builder").build(build, log=print))
    until(lambda: cluster.objects("jobs"))
    [made] = cluster.objects("jobs")
    finished(cluster, last_word=DIGEST)
    thread.join(15)
    assert told == [DIGEST]
    assert made["spec"]["template"]["spec"]["serviceAccountName"] == "builder"


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("error building image: exit status 1", "fix that step of the Dockerfile"),
        (
            "checking push permission: 403 DENIED: Permission denied",
            r"image\.push_secret.*roles/artifactregistry\.writer",
        ),
        ("error resolving source context: storage: object doesn't exist", r"roles/storage\.objectViewer"),
    ],
)
def test_a_job_that_fails_is_told_with_its_last_lines_and_a_fix(
    cluster: Cluster, build: Build, line: str, fix: str
) -> None:
    thread, told = in_thread(lambda: builder(cluster).build(build, log=print))
    finished(cluster, 1, lines=(line,))
    thread.join(15)
    [error] = told
    assert isinstance(error, ImageProblem)
    assert f"Job {job_name(build.tag)} failed" in str(error)
    assert line in str(error)
    assert re.search(fix, str(error))


@pytest.mark.parametrize(
    ("harm", "error", "fix"),
    [
        (lambda cluster, pod: cluster.kill(pod, container=CONTAINER, out_of_memory=True), ImageProblem, "image.memory"),
        (lambda cluster, pod: cluster.run_out(pod, "ephemeral-storage"), ImageProblem, "image.disk"),
        (lambda cluster, pod: cluster.preempt(pod), ImageUnreachable, "run again"),
    ],
    ids=["memory", "disk", "preempted"],
)
def test_a_builder_that_is_ended_from_outside_is_no_fault_of_the_dockerfile(
    cluster: Cluster, build: Build, harm: Callable[[Cluster, str], None], error: type[ImageProblem], fix: str
) -> None:
    thread, told = in_thread(lambda: builder(cluster).build(build, log=print))
    until(lambda: [one for one in cluster.objects("pods") if one.get("status", {}).get("phase") == "Running"])
    harm(cluster, cluster.objects("pods")[0]["metadata"]["name"])
    thread.join(15)
    assert type(told[0]) is error
    assert fix in str(told[0])
    assert "fix that step" not in str(told[0])


def stop_once_it_is_there(cluster: Cluster) -> Callable[[float], None]:
    def stop(seconds: float) -> None:
        if cluster.objects("jobs"):
            raise KeyboardInterrupt

    return stop


def test_a_job_of_ours_is_deleted_when_the_step_is_cancelled(cluster: Cluster, build: Build) -> None:
    with pytest.raises(KeyboardInterrupt):
        builder(cluster, stop_once_it_is_there(cluster)).build(build, log=print)
    until(lambda: cluster.objects("jobs") == [])


def test_a_step_cancelled_while_the_job_is_created_leaves_no_job(cluster: Cluster, build: Build) -> None:
    """The first line of the log is the first that a cancelled step hears of."""

    def stopped(line: str) -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        builder(cluster).build(build, log=stopped)
    until(lambda: cluster.objects("jobs") == [])


def test_a_step_cancelled_while_the_files_are_sent_creates_no_job(cluster: Cluster, build: Build) -> None:
    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        builder(cluster, stop).build(build, log=print)
    assert cluster.objects("events") == []


def test_the_reason_of_a_stop_is_told_where_the_job_cannot_be_deleted(cluster: Cluster, build: Build) -> None:
    def stop(seconds: float) -> None:
        if cluster.objects("jobs"):
            cluster.allow([])
            raise KeyboardInterrupt

    lines: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        builder(cluster, stop).build(build, log=lines.append)
    assert any("could not be deleted" in line for line in lines)


def test_an_outage_of_the_api_is_waited_out(cluster: Cluster, build: Build, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_PAUSES", (0.01,))
    thread, told = in_thread(lambda: builder(cluster).build(build, log=print))
    until(lambda: [one for one in cluster.objects("pods") if one.get("status", {}).get("phase") == "Running"])
    back = cluster.outage()
    time.sleep(1)  # many looks, each with all its tries
    back()
    finished(cluster, last_word=DIGEST)
    thread.join(15)
    assert told == [DIGEST]


def test_a_repeated_step_takes_up_the_job_that_runs(cluster: Cluster, build: Build) -> None:
    lines: list[str] = []
    first, one = in_thread(lambda: builder(cluster).build(build, log=lines.append))
    until(lambda: len(cluster.objects("jobs")) == 1)
    second, two = in_thread(lambda: builder(cluster).build(build, log=lines.append))
    until(lambda: any("already" in line for line in lines))
    finished(cluster, last_word=DIGEST)
    first.join(15)
    second.join(15)
    assert one == two == [DIGEST]
    assert len(cluster.objects("jobs")) == 1


def test_a_job_that_failed_is_replaced(cluster: Cluster, build: Build) -> None:
    thread, told = in_thread(lambda: builder(cluster).build(build, log=print))
    finished(cluster, 1)
    thread.join(15)
    assert isinstance(told[0], ImageProblem)
    [failed] = cluster.objects("jobs")
    thread, told = in_thread(lambda: builder(cluster).build(build, log=print))
    until(lambda: [one["metadata"]["uid"] for one in cluster.objects("jobs")] not in ([], [failed["metadata"]["uid"]]))
    finished(cluster, last_word=DIGEST)
    thread.join(15)
    assert told == [DIGEST]


def test_a_colleagues_job_is_left_alone_when_the_step_is_cancelled(cluster: Cluster, build: Build) -> None:
    theirs, told = in_thread(lambda: builder(cluster).build(build, log=print))
    until(lambda: len(cluster.objects("jobs")) == 1)
    with pytest.raises(KeyboardInterrupt):
        builder(cluster, stop_once_it_is_there(cluster)).build(build, log=print)
    finished(cluster, last_word=DIGEST)
    theirs.join(15)
    assert told == [DIGEST]


def test_a_builder_that_cannot_be_pulled_ends_the_step_and_its_job(cluster: Cluster, build: Build) -> None:
    cluster.break_image(image().builder)
    with pytest.raises(ImageProblem, match=r"does not start: (ErrImagePull|ImagePullBackOff).*fix image.builder"):
        builder(cluster).build(build, log=print)
    until(lambda: cluster.objects("jobs") == [])


def test_a_registry_that_is_away_for_a_moment_does_not_end_the_step(cluster: Cluster, build: Build) -> None:
    cluster.break_image(image().builder)
    thread, told = in_thread(lambda: builder(cluster).build(build, log=print))
    until(lambda: "ErrImagePull" in str(cluster.objects("pods")))
    cluster.mend_image(image().builder)
    finished(cluster, last_word=DIGEST)
    thread.join(15)
    assert told == [DIGEST]


def test_a_job_that_does_not_start_is_replaced_once_the_settings_are_mended(cluster: Cluster, build: Build) -> None:
    settings = gke(cluster)._settings
    large = build_job(build, image(cpus="4000"), context="gs://b/c", namespace=settings.namespace, service_account=None)
    cluster.apply("jobs", large)
    until(lambda: cluster.objects("pods"))
    thread, told = in_thread(lambda: builder(cluster).build(build, log=print))
    finished(cluster, last_word=DIGEST)
    thread.join(15)
    assert told == [DIGEST]


def test_a_namespace_that_refuses_builders_ends_the_step_with_its_words(cluster: Cluster, build: Build) -> None:
    cluster.secure("restricted")
    with pytest.raises(ImageProblem, match=r"PodSecurity.*image\.kind=cloudbuild"):
        builder(cluster).build(build, log=print)


@pytest.mark.parametrize(("kind", "words"), [(None, "does not exist"), ("Opaque", "is of type Opaque")])
def test_a_push_secret_that_no_pod_could_mount_is_refused_before_the_job(
    cluster: Cluster, build: Build, kind: str | None, words: str
) -> None:
    if kind is not None:
        cluster.apply("secrets", {"metadata": {"name": "registry"}, "type": kind, "data": {}})
    with pytest.raises(ImageProblem, match=rf"image\.push_secret names, {words}.*create secret docker-registry"):
        builder(cluster, push_secret="registry").build(build, log=print)
    assert cluster.objects("jobs") == []


def test_dollars_of_build_arguments_reach_the_builder_as_they_are(build: Build) -> None:
    job = build_job(build, image(), context="gs://b/c", namespace="research", service_account=None)
    [container] = job["spec"]["template"]["spec"]["containers"]
    assert "--build-arg=FLAGS=-Wl,-rpath,$ORIGIN $(HOME)" in command({"command": ["x"], **container}, {"HOME": "/root"})


def test_a_builder_runs_on_the_processor_that_it_builds_for(build: Build) -> None:
    job = build_job(
        replace(build, platform="linux/arm64"), image(), context="gs://b/c", namespace="research", service_account=None
    )
    assert job["spec"]["template"]["spec"]["nodeSelector"] == {"kubernetes.io/arch": "arm64"}


def test_the_name_says_what_is_built_and_is_one_per_image() -> None:
    name = job_name("gcr.io/team/train_x:default-0123")
    assert name.startswith("image-train-x-default-0123-")
    assert name != job_name("gcr.io/others/train_x:default-0123")
    assert len(job_name(f"gcr.io/team/{'a' * 100}:tcpxo-0123456789abcdef")) <= 63
    assert CONTAINER == "builder"
