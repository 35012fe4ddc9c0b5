"""Images that a Job in the cluster builds: what is created, what is followed, and every end with its fix."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from bucket_emulator import bucket_emulator
from gke_jobs import gke
from kubernetes_cluster import Cluster, running_cluster
from waiting import until

from launcher.errors import ImageProblem
from launcher.images.build import Build, Site
from launcher.images.context import Context
from launcher.images.settings import ClusterImage
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
        args={"BASE": f"python@{DIGEST}"}, labels={"stack": "default"},
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


@pytest.mark.parametrize(
    ("line", "fix"),
    [
        ("error building image: exit status 1", "fix that step of the Dockerfile"),
        (
            "checking push permission: 403 DENIED: Permission denied",
            r"image\.push_secret.*roles/artifactregistry\.writer",
        ),
        ("error resolving source context: storage: object doesn't exist", r"roles/storage\.objectUser"),
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


def test_a_job_of_ours_is_deleted_when_the_step_is_cancelled(cluster: Cluster, build: Build) -> None:
    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        builder(cluster, stop).build(build, log=print)
    until(lambda: cluster.objects("jobs") == [])


def test_a_builder_that_cannot_be_pulled_ends_the_step(cluster: Cluster, build: Build) -> None:
    cluster.break_image(image().builder)
    with pytest.raises(ImageProblem, match=r"does not start: (ErrImagePull|ImagePullBackOff).*kubectl delete job"):
        builder(cluster).build(build, log=print)


def test_the_name_says_what_is_built_and_is_one_per_image() -> None:
    assert job_name("gcr.io/team/Train_x:default-0123".lower()) == "image-train-x-default-0123"
    assert len(job_name(f"gcr.io/team/{'a' * 100}:tcpxo-0123456789abcdef")) <= 63
    assert CONTAINER == "builder"
