"""Images with a real engine and Debian's docker-registry, and the packages of an image with a real pip.

Nothing is pulled from elsewhere: the base image is made of the static busybox.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import pytest
from docker_engine import docker, docker_registry, remove_images, require_engine

from launcher.errors import ImageProblem
from launcher.images.builders import build_key, prepare_image
from launcher.images.oci import resolve
from launcher.images.settings import DockerImage

STACKS = Path(__file__).parents[3] / "litgpt_demo" / "stacks"
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


def test_a_package_without_its_hash_is_not_installed(tmp_path: Path) -> None:
    """The very options of the Dockerfile, with a lock of our own."""
    wheel = tmp_path / "sound-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("sound.py", "")
        archive.writestr("sound-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: sound\nVersion: 1.0\n")
        archive.writestr("sound-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("sound-1.0.dist-info/RECORD", "")
    recipe = (STACKS / "Dockerfile").read_text().replace("\\\n", " ")
    (options,) = re.findall(r"python -m pip --python=\S+ install (.*?)(?: &&|$)", recipe, re.MULTILINE)

    def install(line: str) -> subprocess.CompletedProcess[str]:
        (tmp_path / "requirements.lock").write_text(f"{line}\n")
        elsewhere = ["--no-index", f"--find-links={tmp_path}", f"--target={tmp_path / 'installed'}"]
        words = [*elsewhere, *options.replace("${STACK}.lock", "requirements.lock").split()]
        bare = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
        return subprocess.run(
            [sys.executable, "-m", "pip", "install", *words],
            cwd=tmp_path, env={**bare, "PIP_CONFIG_FILE": os.devnull}, capture_output=True, text=True, check=False,
        )  # fmt: skip

    digest = sha256(wheel.read_bytes()).hexdigest()
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in install(f"sound==1.0 --hash=sha256:{'0' * 64}").stderr
    assert "Hashes are required in --require-hashes mode" in install("sound==1.0").stderr
    assert not (tmp_path / "installed").exists()
    assert install(f"sound==1.0 --hash=sha256:{digest}").returncode == 0
    assert (tmp_path / "installed" / "sound.py").exists()
