"""Images with real engines and Debian's docker-registry: `pytest -m docker`.

Needs `apt install docker.io docker-registry busybox-static`, and a running engine (`dockerd` as root will do). The
tests of Podman and Buildah are skipped where these are not installed. Nothing is pulled from elsewhere: the base image
is made of the static busybox.
"""

from __future__ import annotations

import io
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from docker_engine import docker, docker_registry, remove_images, require_engine
from waiting import free_port

from launcher.errors import ImageProblem
from launcher.images.builders import build_key, prepare_image
from launcher.images.oci import resolve
from launcher.images.settings import DockerImage, PrebuiltImage

pytestmark = pytest.mark.docker

BASE = "train-litgpt-tests/base:1"
DOCKERFILE = """
ARG BASE
FROM ${BASE}
ARG GREETING=hello
COPY . /app/
RUN echo "$GREETING from $(cat /app/name.txt)" > /greeting
CMD ["cat", "/greeting"]
"""


@pytest.fixture(scope="module", autouse=True)
def _engine() -> None:
    require_engine("docker-registry", "busybox")


@pytest.fixture(scope="module")
def base() -> Iterator[str]:
    """An image with a shell and nothing else."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(str(shutil.which("busybox")), "bin/busybox")
        for name in ("sh", "cat", "echo", "ls"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
    docker("import", "-", BASE, stdin=buffer.getvalue())
    yield BASE
    docker("image", "rm", BASE)


@pytest.fixture(scope="module")
def registry(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with docker_registry(tmp_path_factory.mktemp("registry")) as host:
        yield host


@pytest.fixture
def image(tmp_path: Path, registry: str, base: str) -> DockerImage:
    context = tmp_path / "context"
    context.mkdir()
    # The test's own folder is in it, so that no two tests share a layer.
    (context / "name.txt").write_text(str(tmp_path))
    (context / "scratch.log").write_text("not for the image")
    (context / ".dockerignore").write_text("*.log\n")
    dockerfile = tmp_path / "Dockerfile"
    dockerfile.write_text(DOCKERFILE)
    return DockerImage(
        kind="docker",
        repository=f"{registry}/team/train",
        dockerfile=str(dockerfile),
        context=str(context),
        base=base,
        build_args={"GREETING": "good morning"},
    )


def pushed_digest(image: DockerImage) -> str:
    """What the registry itself says."""
    host, _, path = image.repository.partition("/")
    url = f"http://{host}/v2/{path}/manifests/{build_key(image)}"
    accept = {"Accept": "application/vnd.docker.distribution.manifest.v2+json"}
    return str(httpx.get(url, headers=accept, trust_env=False).raise_for_status().headers["Docker-Content-Digest"])


def steps(lines: list[str]) -> list[str]:
    """Lines of the builder, either of the two."""
    return [line for line in lines if line.startswith(("Step ", "#"))]


def test_an_image_is_built_pushed_and_pinned_by_the_digest_that_the_registry_has(image: DockerImage) -> None:
    lines: list[str] = []
    identity = prepare_image(image, log=lines.append)
    assert identity.image == f"{image.repository}@{pushed_digest(image)}"
    assert identity.packages == {}
    assert steps(lines)
    assert resolve(f"{image.repository}:{build_key(image)}") == identity.image
    reference = f"{image.repository}:{build_key(image)}"
    assert prepare_image(PrebuiltImage(kind="prebuilt", reference=reference), log=print).image == identity.image


def test_the_pinned_image_runs_and_holds_what_dockerignore_left(image: DockerImage) -> None:
    pinned = prepare_image(image, log=print).image
    assert pinned is not None
    remove_images(image.repository.partition("/")[0])  # so that the engine must pull it, as a node would
    assert docker("run", "--rm", pinned) == f"good morning from {Path(image.context).parent}"
    assert docker("run", "--rm", pinned, "ls", "-A", "/app") == "Dockerfile.train-litgpt\nname.txt"


def test_an_unchanged_context_is_not_built_again_anywhere(image: DockerImage, tmp_path: Path) -> None:
    first = prepare_image(image, log=print)
    again, lines = tmp_path / "another checkout", list[str]()
    shutil.copytree(image.context, again)
    (again / "more.log").write_text("ignored")
    second = prepare_image(image.model_copy(update={"context": str(again)}), log=lines.append)
    assert second.image == first.image
    assert steps(lines) == []


def test_a_changed_file_makes_another_image_beside_the_first(image: DockerImage) -> None:
    first, key = prepare_image(image, log=print), build_key(image)
    (Path(image.context) / "name.txt").write_text("somebody else")
    second = prepare_image(image, log=print)
    assert build_key(image) != key
    assert second.image != first.image
    assert resolve(f"{image.repository}:{key}") == first.image


def test_a_failing_step_is_reported_with_its_command_its_output_and_a_fix(image: DockerImage) -> None:
    Path(str(image.dockerfile)).write_text(
        "ARG BASE\nFROM ${BASE}\nRUN echo permission denied; cat /nowhere/to/be/found\n"
    )
    lines: list[str] = []
    with pytest.raises(ImageProblem) as caught:
        prepare_image(image, log=lines.append)
    message = str(caught.value)
    assert "can't open '/nowhere/to/be/found'" in message
    assert "RUN" in "\n".join(lines)
    assert message.endswith("fix that step of the Dockerfile and run again: the steps before it are cached")
    with pytest.raises(ImageProblem, match="no such image"):
        resolve(f"{image.repository}:{build_key(image)}")


def test_a_file_that_is_ignored_cannot_be_copied(image: DockerImage) -> None:
    Path(str(image.dockerfile)).write_text("ARG BASE\nFROM ${BASE}\nCOPY scratch.log /\n")
    with pytest.raises(ImageProblem, match=r"not in image\.context, or \.dockerignore leaves it out"):
        prepare_image(image, log=print)


def test_without_a_push_the_engine_keeps_the_image_and_the_registry_gets_none(image: DockerImage) -> None:
    local = image.model_copy(update={"push": False, "repository": f"{image.repository}-local"})
    found = prepare_image(local, log=print).image
    assert found is not None
    assert docker("run", "--rm", found) == f"good morning from {Path(image.context).parent}"
    lines: list[str] = []
    assert prepare_image(local, log=lines.append).image == found
    assert steps(lines) == []
    with pytest.raises(ImageProblem, match="no such image"):
        resolve(f"{local.repository}:{build_key(local)}")


def test_an_unreachable_registry_is_found_out_before_anything_is_built(image: DockerImage) -> None:
    lines: list[str] = []
    away = image.model_copy(update={"repository": f"127.0.0.1:{free_port()}/team/train"})
    with pytest.raises(ImageProblem, match="cannot be reached"):
        prepare_image(away, log=lines.append)
    assert lines == []


def test_an_engine_that_is_not_running_is_named(image: DockerImage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    with pytest.raises(ImageProblem, match="start the engine"):
        prepare_image(image, log=print)


def test_a_private_registry_takes_the_image_after_docker_login(
    image: DockerImage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    passwords = tmp_path / "htpasswd"
    passwords.write_text("ada:$2y$05$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2\n")  # bcrypt: correct horse
    with docker_registry(tmp_path, auth={"htpasswd": {"realm": "test", "path": str(passwords)}}) as host:
        private = image.model_copy(update={"repository": f"{host}/team/train"})
        with pytest.raises(ImageProblem, match=f"log in with `docker login {host}`"):
            prepare_image(private, log=print)
        docker("login", "--username=ada", "--password-stdin", host, stdin=b"correct horse")
        pinned = prepare_image(private, log=print).image
        assert resolve(f"{private.repository}:{build_key(private)}") == pinned


def test_a_registry_that_takes_no_push_is_reported_in_its_own_words(image: DockerImage, tmp_path: Path) -> None:
    storage = {"filesystem": {"rootdirectory": str(tmp_path / "data")}, "maintenance": {"readonly": {"enabled": True}}}
    with (
        docker_registry(tmp_path, storage=storage) as host,
        pytest.raises(ImageProblem, match="docker push failed") as caught,
    ):
        prepare_image(image.model_copy(update={"repository": f"{host}/team/train"}), log=print)
    assert "405" in str(caught.value)
    assert caught.match(f"^{host}/team/train:")


# --- every engine -----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["docker", "podman", "buildah"])
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    name = str(request.param)
    if shutil.which(name) is None:
        pytest.skip(f"{name} is not installed (apt install {name})")
    # A container of their own needs cgroups that a machine of tests may not have.
    monkeypatch.setenv("BUILDAH_ISOLATION", "chroot")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))
    storage = f'[storage]\ndriver = "vfs"\ngraphroot = "{tmp_path / "images"}"\nrunroot = "{tmp_path / "run"}"\n'
    (tmp_path / "storage.conf").write_text(storage)
    monkeypatch.setenv("CONTAINERS_STORAGE_CONF", str(tmp_path / "storage.conf"))
    return name


@pytest.fixture
def by_engine(engine: str, image: DockerImage, registry: str) -> Iterator[DockerImage]:
    """The image upon a base that every engine can pull, to be built by one of them."""
    pushed = f"{registry}/team/base:1"
    docker("tag", BASE, pushed)
    docker("push", pushed)
    yield image.model_copy(update={"engine": engine, "base": pushed, "repository": f"{image.repository}-{engine}"})
    docker("image", "rm", pushed)


def test_every_engine_builds_pushes_and_does_not_build_again(by_engine: DockerImage) -> None:
    lines: list[str] = []
    pinned = prepare_image(by_engine, log=lines.append).image
    assert pinned == f"{by_engine.repository}@{pushed_digest(by_engine)}"
    docker("pull", pinned)
    assert docker("run", "--rm", pinned) == f"good morning from {Path(by_engine.context).parent}"
    assert any("greeting" in line for line in lines)
    again: list[str] = []
    assert prepare_image(by_engine, log=again.append).image == pinned
    assert [line for line in again if "built before" not in line] == []


def test_every_engine_keeps_an_image_that_is_not_pushed_by_an_id_of_its_own(by_engine: DockerImage) -> None:
    local = by_engine.model_copy(update={"push": False, "repository": f"{by_engine.repository}-local"})
    found = prepare_image(local, log=print).image
    assert found is not None
    assert found.startswith("sha256:")
    lines: list[str] = []
    assert prepare_image(local, log=lines.append).image == found
    assert "built before" in lines[-1]


def test_every_engine_is_quoted_with_the_failing_step_and_a_fix(by_engine: DockerImage) -> None:
    dockerfile = Path(str(by_engine.dockerfile))
    dockerfile.write_text("ARG BASE\nFROM ${BASE}\nRUN cat /nowhere/to/be/found\n")
    with pytest.raises(ImageProblem, match="fix that step of the Dockerfile"):
        prepare_image(by_engine, log=print)
    dockerfile.write_text("ARG BASE\nFROM ${BASE}\nCOPY scratch.log /\n")
    with pytest.raises(ImageProblem, match=r"not in image\.context, or \.dockerignore leaves it out"):
        prepare_image(by_engine, log=print)


def test_every_engine_takes_the_login_that_it_stored(
    by_engine: DockerImage, engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "docker"))
    (tmp_path / "run" / "containers").mkdir(parents=True)
    passwords = tmp_path / "htpasswd"
    passwords.write_text("ada:$2y$05$abcdefghijklmnopqrstuuHNbAKRhpaujgo33bRWs.NLUTJO3lOy2\n")  # bcrypt: correct horse
    with docker_registry(tmp_path, auth={"htpasswd": {"realm": "test", "path": str(passwords)}}) as host:
        private = by_engine.model_copy(update={"repository": f"{host}/team/train"})
        with pytest.raises(ImageProblem, match="log in with"):
            prepare_image(private, log=print)
        plain = [] if engine == "docker" else ["--tls-verify=false"]
        command = [engine, "login", *plain, "--username=ada", "--password-stdin", host]
        subprocess.run(command, input=b"correct horse", check=True, capture_output=True)
        pinned = prepare_image(private, log=print).image
        assert resolve(f"{private.repository}:{build_key(private)}") == pinned
