"""Images that Google Cloud Build builds: sent once, followed, adopted, cancelled, and every end with its fix."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from bucket_emulator import bucket_emulator
from google.cloud.devtools.cloudbuild_v1 import types
from waiting import until

from launcher.errors import ImageProblem, ImageUnreachable, JobCancelled
from launcher.images import oci
from launcher.images.build import Build, Site
from launcher.images.builders import build_key, prepare_image
from launcher.images.cloudbuild import CloudBuild, mark_of, request
from launcher.images.context import Context
from launcher.images.settings import CloudBuildImage
from litgpt_demo.storage import open_storage

sys.path.append(str(Path(__file__).parents[2] / "fakes"))
import cloudbuild as standin
from registry_server import Running, registry

ROOT = "gs://mine/team/runs"
Status = types.Build.Status
ACCOUNT = next(iter(standin.ACCOUNTS))


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[standin.CloudBuild]:
    with bucket_emulator("mine") as bucket, standin.running_cloud_build() as running:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", bucket)
        monkeypatch.setenv("CLOUDBUILD_EMULATOR_HOST", f"127.0.0.1:{running.port}")
        monkeypatch.setattr(oci, "PATIENCE", 0.7)
        yield running


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with registry(tmp_path_factory.mktemp("registry")) as running:
        yield running


@pytest.fixture
def image(tmp_path: Path, public: Running) -> CloudBuildImage:
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "name.txt").write_text(str(tmp_path))
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY . /\n")
    return CloudBuildImage(
        kind="cloudbuild", repository=f"{public.host}/team/train", project=standin.PROJECT,
        build_args={"A": "b c $ORIGIN"},
        context=str(tmp_path / "context"),
        dockerfile=str(tmp_path / "Dockerfile"), service_account=ACCOUNT,
    )  # fmt: skip


def site(pause: Callable[[float], None] = lambda seconds: time.sleep(0.02)) -> Site:
    return Site(root=ROOT, pause=pause)


def build_of(image: CloudBuildImage) -> Build:
    context = Context.of(Path(image.context), Path(str(image.dockerfile)))
    return Build(tag=f"{image.repository}:0123", context=context, platform=image.platform, args=image.build_args)


# --- what is sent -----------------------------------------------------------------------------------------------------


def test_a_build_is_one_step_whose_image_cloud_build_pushes(image: CloudBuildImage) -> None:
    build = build_of(image)
    sent = request(build, image, root=ROOT, context=f"{ROOT}/images/contexts/{build.context.digest}.tar.gz")
    assert sent == {
        "source": {
            "storage_source": {"bucket": "mine", "object_": f"team/runs/images/contexts/{build.context.digest}.tar.gz"}
        },
        "steps": [
            {
                "id": "build", "name": "gcr.io/cloud-builders/docker",
                "env": ["DOCKER_BUILDKIT=1", "SOURCE_DATE_EPOCH=315619200"],
                "args": [
                    "build", "--force-rm", "--platform=linux/amd64", f"--tag={build.tag}",
                    "--file=Dockerfile.train-litgpt", "--build-arg=A=b c $$ORIGIN", ".",
                ],
            }
        ],
        "images": [build.tag],
        "tags": ["train-litgpt", mark_of(build.tag)],
        "timeout": {"seconds": 7200},
        "logs_bucket": f"{ROOT}/images/logs",
        "options": {"logging": "GCS_ONLY", "machine_type": "E2_HIGHCPU_8", "disk_size_gb": 200},
        "service_account": f"projects/my-project/serviceAccounts/{ACCOUNT}",
    }  # fmt: skip
    types.Build(sent)


def test_an_image_is_built_elsewhere_pinned_and_not_built_again(
    cloud: standin.CloudBuild, image: CloudBuildImage
) -> None:
    lines: list[str] = []
    pinned = prepare_image(image, log=lines.append, site=site()).image
    [made] = cloud.builds.values()
    assert pinned == f"{image.repository}@{made.results.images[0].digest}"
    assert cloud.contexts == [
        {
            "name.txt": image.context.removesuffix("/context").encode(),
            "Dockerfile.train-litgpt": b"FROM scratch\nCOPY . /\n",
        }
    ]
    assert [line for line in lines if line.startswith("Step")] == cloud.lines
    assert "--build-arg=A=b c $ORIGIN" in cloud.commands[0], "a dollar is no substitution of Cloud Build's"
    assert prepare_image(image, log=lines.append, site=site()).image == pinned
    assert len(cloud.builds) == 1


def test_the_same_files_are_sent_once(cloud: standin.CloudBuild, image: CloudBuildImage) -> None:
    prepare_image(image, log=print, site=site())
    prepare_image(image.model_copy(update={"build_args": {"A": "another"}}), log=print, site=site())
    storage = open_storage(ROOT)
    assert len(cloud.builds) == 2
    [sent] = storage.list("images/contexts")
    before = storage.read(sent)
    storage.remove(sent)
    build_of(image).context.store(ROOT)
    assert storage.read(sent) == before, "the same files make the same archive"


def test_a_password_for_pip_is_not_stored(cloud: standin.CloudBuild, image: CloudBuildImage, tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text("[global]\n")
    context = Context.of(Path(image.context), Path(str(image.dockerfile)), pip_config=tmp_path / "pip.conf")
    with pytest.raises(ImageProblem, match=r"may hold a password.*image\.kind=docker"):
        context.store(ROOT)


# --- one build per image ----------------------------------------------------------------------------------------------


def test_a_repeated_step_takes_up_the_build_that_runs(cloud: standin.CloudBuild, image: CloudBuildImage) -> None:
    cloud.held.clear()
    results: list[str | None] = []
    lines: list[str] = []

    def prepare() -> None:
        results.append(prepare_image(image, log=lines.append, site=site()).image)

    first = threading.Thread(target=prepare)
    first.start()
    until(lambda: len(cloud.contexts) == 1)
    second = threading.Thread(target=prepare)
    second.start()
    until(lambda: any("is being built already" in line for line in lines))
    cloud.held.set()
    first.join()
    second.join()
    assert len(cloud.builds) == 1
    assert results[0] == results[1]


@pytest.mark.parametrize("behind", [0, 3])
def test_a_create_whose_answer_was_lost_is_not_doubled(
    cloud: standin.CloudBuild, image: CloudBuildImage, behind: int
) -> None:
    cloud.faults.append(("CreateBuild", grpc.StatusCode.UNAVAILABLE, True))
    cloud.behind = behind
    pinned = prepare_image(image, log=print, site=site()).image
    [made] = cloud.builds.values()
    assert pinned == f"{image.repository}@{made.results.images[0].digest}"


def test_a_create_that_was_lost_altogether_is_said_to_be(cloud: standin.CloudBuild, image: CloudBuildImage) -> None:
    cloud.faults.append(("CreateBuild", grpc.StatusCode.UNAVAILABLE, False))
    with pytest.raises(ImageUnreachable, match="starting a build"):
        prepare_image(image, log=print, site=site())
    assert cloud.builds == {}


def test_of_two_builds_that_were_started_at_once_the_later_one_is_cancelled(
    cloud: standin.CloudBuild, image: CloudBuildImage
) -> None:
    cloud.held.clear()
    theirs = colleagues_build(cloud, image)
    cloud.behind = 1
    pinned = prepare_image(image, log=print, site=site(lambda seconds: seconds and cloud.held.set())).image
    [mine] = [one for number, one in cloud.builds.items() if number != theirs]
    assert mine.status is Status.CANCELLED
    assert pinned == f"{image.repository}@{cloud.builds[theirs].results.images[0].digest}"


def test_a_build_that_ended_while_we_looked_for_it_is_not_repeated(
    cloud: standin.CloudBuild, image: CloudBuildImage
) -> None:
    build = replace(build_of(image), tag=f"{image.repository}:ended")
    digest = standin.push(build.tag)
    assert CloudBuild(image, site()).build(build, log=print) == digest
    assert cloud.builds == {}


def test_a_build_of_another_repository_is_not_taken_up(cloud: standin.CloudBuild, image: CloudBuildImage) -> None:
    cloud.held.clear()
    theirs = colleagues_build(cloud, image.model_copy(update={"repository": f"{image.repository}-of-others"}))
    prepare_image(image, log=print, site=site(lambda seconds: seconds and cloud.held.set()))
    assert len(cloud.builds) == 2
    assert cloud.builds[theirs].status is not Status.CANCELLED


def test_silence_while_it_is_followed_is_waited_out(cloud: standin.CloudBuild, image: CloudBuildImage) -> None:
    cloud.faults += [("GetBuild", grpc.StatusCode.INTERNAL, False)] * 3
    assert prepare_image(image, log=print, site=site()).image is not None


def test_silence_that_lasts_leaves_the_build_for_the_next_try(
    cloud: standin.CloudBuild, image: CloudBuildImage
) -> None:
    cloud.held.clear()
    cloud.faults += [("GetBuild", grpc.StatusCode.INTERNAL, False)] * 500
    with pytest.raises(ImageUnreachable, match="asking after build"):
        prepare_image(image, log=print, site=site(lambda seconds: None))
    cloud.faults.clear()
    assert "CancelBuild" not in cloud.calls
    cloud.held.set()
    prepare_image(image, log=print, site=site())
    assert len(cloud.builds) == 1


def test_a_build_of_ours_is_cancelled_when_the_step_is(cloud: standin.CloudBuild, image: CloudBuildImage) -> None:
    cloud.held.clear()

    def stop(seconds: float) -> None:
        if seconds:
            until(lambda: len(cloud.contexts) == 1)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_image(image, log=print, site=site(stop))
    [made] = cloud.builds.values()
    assert made.status is Status.CANCELLED


def test_a_step_cancelled_while_the_build_is_created_leaves_no_build(
    cloud: standin.CloudBuild, image: CloudBuildImage
) -> None:
    """The next line of the log is the first that a cancelled step hears of."""
    cloud.held.clear()

    def stopped(line: str) -> None:
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        CloudBuild(image, site()).build(build_of(image), log=stopped)
    [made] = cloud.builds.values()
    assert made.status is Status.CANCELLED


def test_a_step_cancelled_while_the_files_are_sent_starts_no_build(
    cloud: standin.CloudBuild, image: CloudBuildImage
) -> None:
    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_image(image, log=print, site=site(stop))
    assert cloud.builds == {}


def test_the_reason_of_a_stop_is_told_where_the_build_cannot_be_cancelled(
    cloud: standin.CloudBuild, image: CloudBuildImage
) -> None:
    cloud.faults.append(("CancelBuild", grpc.StatusCode.FAILED_PRECONDITION, False))
    lines: list[str] = []

    def stop(seconds: float) -> None:
        if seconds:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_image(image, log=lines.append, site=site(stop))
    assert any("could not be cancelled" in line for line in lines)


def colleagues_build(cloud: standin.CloudBuild, image: CloudBuildImage) -> str:
    """Start a build of the image as another launcher would; its id."""
    asked = request(build_of(image), image, root=ROOT, context=build_of(image).context.store(ROOT))
    asked |= {"images": [tag := f"{image.repository}:{build_key(image)}"], "tags": [mark_of(tag)]}
    cloud.create_build(types.CreateBuildRequest(parent="projects/my-project/locations/global", build=asked))
    return next(reversed(cloud.builds))


def test_a_colleagues_build_is_left_alone_when_the_step_is_cancelled(
    cloud: standin.CloudBuild, image: CloudBuildImage
) -> None:
    cloud.held.clear()
    colleagues_build(cloud, image)

    def stop(seconds: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare_image(image, log=print, site=site(stop))
    assert "CancelBuild" not in cloud.calls
    assert len(cloud.builds) == 1


# --- how it ends ------------------------------------------------------------------------------------------------------

FailureType = types.Build.FailureInfo.FailureType


@pytest.mark.long
@pytest.mark.parametrize(
    ("ends", "failure", "error", "fix"),
    [
        (Status.FAILURE, FailureType.USER_BUILD_STEP, ImageProblem, "fix that step of the Dockerfile"),
        (Status.FAILURE, FailureType.PUSH_NOT_AUTHORIZED, ImageProblem, "roles/artifactregistry.writer"),
        (Status.FAILURE, FailureType.LOGGING_FAILURE, ImageProblem, "roles/storage.objectUser"),
        (Status.FAILURE, None, ImageProblem, "see the lines above"),
        (Status.TIMEOUT, None, ImageProblem, "raise image.timeout"),
        (Status.EXPIRED, None, ImageUnreachable, "run again"),
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
        prepare_image(image, log=lambda line: None, site=site())
    if error is not JobCancelled:
        assert "line 39" in str(caught.value)
        assert "line 20\n" not in str(caught.value)
    assert type(caught.value) is error


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"project": "their-project"}, r"does not have permission.*roles/cloudbuild\.builds\.editor"),
        ({"location": "europe-west9"}, "Location europe-west9 is not found"),
        ({"service_account": "no@my-project.iam.gserviceaccount.com"}, "permission to act as service account"),
    ],
)
def test_a_refusal_is_told_in_googles_words(
    cloud: standin.CloudBuild, image: CloudBuildImage, changes: dict[str, str], words: str
) -> None:
    with pytest.raises(ImageProblem, match=words) as caught:
        prepare_image(image.model_copy(update=changes), log=print, site=site())
    assert not isinstance(caught.value, ImageUnreachable)
    assert cloud.builds == {}


def test_the_registry_has_the_last_word_on_what_was_pushed(cloud: standin.CloudBuild, image: CloudBuildImage) -> None:
    cloud.pushes = lambda tag: "sha256:" + "ab" * 32
    with pytest.raises(ImageProblem, match="no such image"):
        prepare_image(image, log=print, site=site())


def test_without_its_client_the_extra_is_named(image: CloudBuildImage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "google.cloud.devtools.cloudbuild_v1", None)
    with pytest.raises(Exception, match=r"pip install \"train-litgpt\[cloudbuild\]\""):
        CloudBuild(image, site()).build(build_of(image), log=print)
