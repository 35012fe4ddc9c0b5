"""Images that Google Cloud Build builds: sent once, followed, adopted, cancelled, and every end with its fix."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from bucket_emulator import bucket_emulator
from cloudbuild import PROJECT, CloudBuild, Status
from registry_server import Running, registry

from launcher.errors import ImageProblem, ImageUnreachable, JobCancelled
from launcher.images import cloudbuild, oci
from launcher.images.build import prepare_image
from launcher.images.settings import CloudBuildImage

ROOT = "gs://cloudbuild-tests/team/runs"


@pytest.fixture
def public() -> Iterator[Running]:
    with registry() as running:
        yield running


@pytest.fixture
def cloud(public: Running, monkeypatch: pytest.MonkeyPatch) -> Iterator[CloudBuild]:
    running = CloudBuild(push=lambda tag: public.push(*tag.removeprefix(f"{public.host}/").split(":")))
    monkeypatch.setattr(cloudbuild.CloudBuild, "_client", running)
    monkeypatch.setattr(oci, "_PAUSES", (0.0,))
    with bucket_emulator("cloudbuild-tests") as bucket:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", bucket)
        yield running


@pytest.fixture
def image(tmp_path: Path, public: Running) -> CloudBuildImage:
    (tmp_path / "context").mkdir()
    (tmp_path / "context" / "name.txt").write_text("train")
    (tmp_path / "Dockerfile").write_text("FROM scratch\nCOPY . /\n")
    return CloudBuildImage(
        kind="cloudbuild", repository=f"{public.host}/team/train", project=PROJECT,
        build_args={"A": "b c $ORIGIN"}, context=str(tmp_path / "context"), dockerfile=str(tmp_path / "Dockerfile"),
        service_account=f"builder@{PROJECT}.iam.gserviceaccount.com",
    )  # fmt: skip


def prepared(
    image: CloudBuildImage,
    log: Callable[[str], None] = lambda line: None,
    pause: Callable[[float], None] = lambda seconds: None,
) -> str | None:
    return prepare_image(image, log=log, root=ROOT, pause=pause).image


def build_on_its_way(cloud: CloudBuild, image: CloudBuildImage) -> str:
    """A build that its launcher lost sight of, and that goes on; its id."""
    cloud.silent = True
    with pytest.raises(ImageUnreachable, match="querying build"):
        prepared(image)
    cloud.silent = False
    [number] = cloud.builds
    return number


def test_an_image_is_built_elsewhere_pinned_and_not_built_again(cloud: CloudBuild, image: CloudBuildImage) -> None:
    lines: list[str] = []
    pinned = prepared(image, lines.append)
    [made] = cloud.builds.values()
    assert pinned == f"{image.repository}@{made.results.images[0].digest}"
    assert cloud.contexts == [{"name.txt": b"train", "Dockerfile.train-litgpt": b"FROM scratch\nCOPY . /\n"}]
    assert [line for line in lines if line.startswith("Step")] == cloud.lines
    assert "--build-arg=A=b c $$ORIGIN" in made.steps[0].args, "a dollar is no substitution of Cloud Build's"
    assert prepared(image) == pinned
    assert len(cloud.builds) == 1
    cloud.push = lambda tag: "sha256:" + "ab" * 32
    with pytest.raises(ImageProblem, match="no such image"):  # the registry has the last word on what was pushed
        prepared(image.model_copy(update={"build_args": {"A": "another"}}))


@pytest.mark.parametrize("behind", [0, 1])
def test_running_build_is_followed_not_doubled(cloud: CloudBuild, image: CloudBuildImage, behind: int) -> None:
    """A build that was started in parallel is cancelled."""
    first = build_on_its_way(cloud, image)
    cloud.behind = behind
    assert prepared(image) == f"{image.repository}@{cloud.builds[first].results.images[0].digest}"
    own = [build.status for number, build in cloud.builds.items() if number != first]
    assert own == [Status.CANCELLED] * behind, "it is not started where the first one is seen in time"


@pytest.mark.parametrize("started", [True, False])
def test_cancelled_step_cancels_only_its_own_build(cloud: CloudBuild, image: CloudBuildImage, started: bool) -> None:
    cloud.held = True
    if not started:
        build_on_its_way(cloud, image)

    def stop(seconds: float) -> None:
        if seconds:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared(image, pause=stop)
    [made] = cloud.builds.values()
    assert (made.status is Status.CANCELLED) is started


@pytest.mark.parametrize(
    ("ends", "error", "fix"),
    [
        (Status.FAILURE, ImageProblem, "line 39(.|\n)*fix that step of the Dockerfile"),
        (Status.TIMEOUT, ImageProblem, "raise image.timeout"),
        (Status.INTERNAL_ERROR, ImageUnreachable, "run again"),
        (Status.CANCELLED, JobCancelled, "was cancelled; run again"),
    ],
)
def test_failed_build_is_reported_with_last_lines_plus_fix(
    cloud: CloudBuild, image: CloudBuildImage, ends: Any, error: type[Exception], fix: str
) -> None:
    cloud.ends, cloud.lines = ends, [f"line {number}" for number in range(40)]
    with pytest.raises(error, match=fix) as caught:
        prepared(image)
    assert type(caught.value) is error
