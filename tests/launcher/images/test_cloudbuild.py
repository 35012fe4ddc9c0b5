"""Images that Google Cloud Build builds: sent once, followed, adopted, cancelled, and every end with its fix."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudbuild as standin
import grpc
import pytest
from bucket_emulator import bucket_emulator
from google.cloud.devtools.cloudbuild_v1 import types
from registry_server import Running, registry
from waiting import until

from launcher.errors import ImageProblem, ImageUnreachable, JobCancelled
from launcher.images import oci
from launcher.images.build import Build, Site
from launcher.images.builders import build_key, prepare_image
from launcher.images.cloudbuild import mark_of, request
from launcher.images.context import Context
from launcher.images.settings import CloudBuildImage

ROOT = "gs://cloudbuild-tests/team/runs"
Status = types.Build.Status


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[standin.CloudBuild]:
    with bucket_emulator("cloudbuild-tests") as bucket, standin.running_cloud_build() as running:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", bucket)
        monkeypatch.setenv("CLOUDBUILD_EMULATOR_HOST", f"127.0.0.1:{running.port}")
        monkeypatch.setattr(oci, "_PAUSES", (0.0,))
        yield running


@pytest.fixture(scope="module")
def public() -> Iterator[Running]:
    with registry() as running:
        yield running


@pytest.fixture
def image(tmp_path: Path, public: Running) -> CloudBuildImage:
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "name.txt").write_text(str(tmp_path))
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY . /\n")
    return CloudBuildImage(
        kind="cloudbuild", repository=f"{public.host}/team/train", project=standin.PROJECT,
        build_args={"A": "b c $ORIGIN"}, context=str(tmp_path / "context"), dockerfile=str(tmp_path / "Dockerfile"),
        service_account=f"builder@{standin.PROJECT}.iam.gserviceaccount.com",
    )  # fmt: skip


def prepared(
    image: CloudBuildImage,
    log: Callable[[str], None] = lambda line: None,
    pause: Callable[[float], None] = lambda seconds: None,
) -> str | None:
    return prepare_image(image, log=log, site=Site(root=ROOT, pause=pause)).image


def colleagues_build(cloud: standin.CloudBuild, image: CloudBuildImage) -> str:
    """Start a build of the image as another launcher would; its id."""
    context, tag = (
        Context.of(Path(image.context), Path(str(image.dockerfile))),
        f"{image.repository}:{build_key(image)}",
    )
    build = Build(tag=tag, context=context, platform=image.platform, args=image.build_args)
    asked = request(build, image, root=ROOT, context=context.store(ROOT)) | {"images": [tag], "tags": [mark_of(tag)]}
    cloud.create_build(types.CreateBuildRequest(parent="projects/my-project/locations/global", build=asked))
    return next(reversed(cloud.builds))


def test_an_image_is_built_elsewhere_pinned_and_not_built_again(
    cloud: standin.CloudBuild, image: CloudBuildImage
) -> None:
    lines: list[str] = []
    pinned = prepared(image, lines.append)
    [made] = cloud.builds.values()
    assert pinned == f"{image.repository}@{made.results.images[0].digest}"
    name = image.context.removesuffix("/context").encode()
    assert cloud.contexts == [{"name.txt": name, "Dockerfile.train-litgpt": b"FROM scratch\nCOPY . /\n"}]
    assert [line for line in lines if line.startswith("Step")] == cloud.lines
    assert "--build-arg=A=b c $ORIGIN" in cloud.commands[0], "a dollar is no substitution of Cloud Build's"
    assert prepared(image) == pinned
    assert len(cloud.builds) == 1
    cloud.pushes = lambda tag: "sha256:" + "ab" * 32
    with pytest.raises(ImageProblem, match="no such image"):  # the registry has the last word on what was pushed
        prepared(image.model_copy(update={"build_args": {"A": "another"}}))


def test_a_repeated_step_takes_up_the_build_that_runs(cloud: standin.CloudBuild, image: CloudBuildImage) -> None:
    cloud.held.clear()
    results: list[str | None] = []
    lines: list[str] = []
    steps = [threading.Thread(target=lambda: results.append(prepared(image, lines.append))) for _ in range(2)]
    steps[0].start()
    until(lambda: len(cloud.contexts) == 1)
    steps[1].start()
    until(lambda: any("is being built already" in line for line in lines))
    cloud.held.set()
    for step in steps:
        step.join()
    assert len(cloud.builds) == 1
    assert results[0] == results[1] is not None


def test_a_create_whose_answer_was_lost_is_not_doubled(cloud: standin.CloudBuild, image: CloudBuildImage) -> None:
    cloud.faults.append(("CreateBuild", grpc.StatusCode.UNAVAILABLE, True))
    cloud.behind = 3
    pinned = prepared(image)
    [made] = cloud.builds.values()
    assert pinned == f"{image.repository}@{made.results.images[0].digest}"


def test_of_two_builds_that_were_started_at_once_the_later_one_is_cancelled(
    cloud: standin.CloudBuild, image: CloudBuildImage
) -> None:
    cloud.held.clear()
    theirs = colleagues_build(cloud, image)
    cloud.behind = 1
    pinned = prepared(image, pause=lambda seconds: seconds and cloud.held.set())
    [mine] = [one for number, one in cloud.builds.items() if number != theirs]
    assert mine.status is Status.CANCELLED
    assert pinned == f"{image.repository}@{cloud.builds[theirs].results.images[0].digest}"


def test_silence_that_lasts_leaves_the_build_for_the_next_try(
    cloud: standin.CloudBuild, image: CloudBuildImage
) -> None:
    cloud.held.clear()
    cloud.faults += [("GetBuild", grpc.StatusCode.INTERNAL, False)] * 500
    with pytest.raises(ImageUnreachable, match="asking after build"):
        prepared(image)
    cloud.faults.clear()
    assert "CancelBuild" not in cloud.calls
    cloud.held.set()
    prepared(image)
    assert len(cloud.builds) == 1


@pytest.mark.parametrize("ours", [True, False])
def test_a_step_that_is_cancelled_cancels_its_own_build_and_no_colleagues(
    cloud: standin.CloudBuild, image: CloudBuildImage, ours: bool
) -> None:
    cloud.held.clear()
    if not ours:
        colleagues_build(cloud, image)

    def stop(seconds: float) -> None:
        if seconds:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared(image, pause=stop)
    [made] = cloud.builds.values()
    assert (made.status is Status.CANCELLED) is ours


USER_STEP = types.Build.FailureInfo.FailureType.USER_BUILD_STEP


@pytest.mark.parametrize(
    ("ends", "failure", "error", "fix"),
    [
        (Status.FAILURE, USER_STEP, ImageProblem, "line 39(.|\n)*fix that step of the Dockerfile"),
        (Status.TIMEOUT, None, ImageProblem, "raise image.timeout"),
        (Status.INTERNAL_ERROR, None, ImageUnreachable, "run again"),
        (Status.CANCELLED, None, JobCancelled, "somebody cancelled build"),
    ],
)
def test_a_build_that_fails_is_told_with_its_last_lines_and_a_fix(
    cloud: standin.CloudBuild, image: CloudBuildImage, ends: Any, failure: Any, error: type[Exception], fix: str
) -> None:
    cloud.ends, cloud.lines = ends, [f"line {number}" for number in range(40)]
    if failure is not None:
        cloud.failure = types.Build.FailureInfo(type_=failure, detail="Build step failure: exit status 2")
    with pytest.raises(error, match=fix) as caught:
        prepared(image)
    assert type(caught.value) is error


def test_a_refusal_is_told_in_googles_words(cloud: standin.CloudBuild, image: CloudBuildImage) -> None:
    with pytest.raises(ImageProblem, match=r"does not have permission.*roles/cloudbuild\.builds\.editor"):
        prepared(image.model_copy(update={"project": "their-project"}))
    assert cloud.builds == {}
