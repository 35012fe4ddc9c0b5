"""Images with a real engine and Debian's docker-registry.

Nothing is pulled from elsewhere: the base image is made of the static busybox.
"""

from __future__ import annotations

import io
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from docker_engine import docker, docker_registry, remove_images, require_engine

from launcher.errors import ImageProblem
from launcher.images.builders import build_key, prepare_image
from launcher.images.oci import resolve
from launcher.images.settings import DockerImage

DOCKERFILE = """
ARG BASE
FROM ${BASE}
COPY . /app/
RUN echo "good morning from $(cat /app/name.txt)" > /greeting
CMD ["cat", "/greeting"]
"""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image with a shell and nothing else, in a registry."""
    require_engine("docker-registry", "busybox")
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(str(shutil.which("busybox")), "bin/busybox")
        for name in ("sh", "cat", "echo", "ls"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
    with docker_registry(tmp_path_factory.mktemp("registry")) as host:
        docker("import", "-", f"{host}/team/base:1", stdin=buffer.getvalue())
        docker("push", f"{host}/team/base:1")
        yield f"{host}/team/base:1"


@pytest.fixture
def image(tmp_path: Path, base: str) -> DockerImage:
    """An image to build; the test's own folder is in it, so that no two tests share a layer."""
    (tmp_path / "context").mkdir()
    files = {"name.txt": str(tmp_path), "scratch.log": "not for the image", ".dockerignore": "*.log\n"}
    for name, text in files.items():
        (tmp_path / "context" / name).write_text(text)
    (tmp_path / "Dockerfile").write_text(DOCKERFILE)
    context, dockerfile = str(tmp_path / "context"), str(tmp_path / "Dockerfile")
    return DockerImage(kind="docker", repository="nowhere/train", dockerfile=dockerfile, context=context, base=base)


def test_an_image_is_built_once_pushed_pinned_and_runs_with_what_dockerignore_left(
    image: DockerImage, tmp_path: Path
) -> None:
    with docker_registry(tmp_path) as host:
        image = image.model_copy(update={"repository": f"{host}/team/train"})
        pinned = prepare_image(image, log=print).image
        assert pinned is not None
        assert resolve(f"{image.repository}:{build_key(image)}") == pinned
        remove_images(host)  # so that the engine must pull it, as a node would
        assert docker("run", "--rm", pinned) == f"good morning from {tmp_path}"
        assert docker("run", "--rm", pinned, "ls", "-A", "/app") == "Dockerfile.train-litgpt\nname.txt"
        lines: list[str] = []
        assert prepare_image(image, log=lines.append).image == pinned
        assert [line for line in lines if "built before" not in line] == []
        Path(str(image.dockerfile)).write_text("ARG BASE\nFROM ${BASE}\nRUN cat /nowhere/to/be/found\n")
        with pytest.raises(ImageProblem, match=r"can't open '/nowhere/to/be/found'(.|\n)*fix that step"):
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
        assert resolve(f"{private.repository}:{build_key(private)}") == prepare_image(private, log=print).image
