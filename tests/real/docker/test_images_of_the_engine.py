"""Images are built and pushed with a real engine and registry (apt install docker.io docker-registry busybox-static).

The product's own image needs Docker Hub, Debian and PyPI besides, and 30 GB of disk; the others pull nothing.
"""

import io
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from waiting import until

from launcher.errors import ImageProblem, ImageUnreachable
from launcher.images.build import builds_of, prepare_image
from launcher.images.oci import resolve
from launcher.images.settings import DockerImage
from launcher.images.stacks import DEFAULT_STACK, LABELS

CHECKOUT = Path(__file__).parents[3]


def docker(*arguments: str, stdin: bytes | None = None) -> str:
    done = subprocess.run(["docker", *arguments], input=stdin, stdout=subprocess.PIPE, check=True)
    return done.stdout.decode().strip()


@contextmanager
def docker_registry(folder: Path, **settings: object) -> Iterator[str]:
    """The address of a docker-registry of our own, with these parts of its configuration besides address and folder."""
    storage = {"filesystem": {"rootdirectory": str(folder / "data")}}
    config = {"version": "0.1", "storage": storage, "http": {"addr": "127.0.0.1:0"}, **settings}
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    command, log = ["docker-registry", "serve", str(folder / "config.yml")], folder / "log"
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output) as process:
        try:
            yield until(lambda: re.search(r"listening on (127\.0\.0\.1:\d+)", log.read_text()))[1]  # type: ignore[index]
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    missing = [program for program in ("docker", "docker-registry", "busybox") if shutil.which(program) is None]
    if missing or subprocess.run(["docker", "info"], capture_output=True, check=False).returncode:
        pytest.skip(f"not installed: {missing}, or no Docker engine answers; start one with `dockerd` as root")
    with docker_registry(tmp_path_factory.mktemp("registry")) as running:
        yield running
        names = docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}}").splitlines()
        docker("image", "rm", "--force", *(name for name in names if name.startswith(running)))


@pytest.fixture(scope="module")
def base(host: str) -> str:
    """An image with a shell and nothing else, made of the static busybox."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        tar.add(str(shutil.which("busybox")), "bin/busybox")
        for name in ("sh", "cat", "echo", "ls"):
            link = tarfile.TarInfo(f"bin/{name}")
            link.type, link.linkname = tarfile.SYMTYPE, "busybox"
            tar.addfile(link)
    docker("import", "-", f"{host}/team/base:1", stdin=buffer.getvalue())
    docker("push", f"{host}/team/base:1")
    return f"{host}/team/base:1"


@pytest.fixture
def image(tmp_path: Path, base: str, host: str) -> DockerImage:
    """An image to build; the test's own folder is in it, so that no two tests share a layer."""
    files = {"name.txt": str(tmp_path), "scratch.log": "not for the image", ".dockerignore": "*.log\n"}
    (tmp_path / "context").mkdir()
    for name, text in files.items():
        (tmp_path / "context" / name).write_text(text)
    (tmp_path / "Dockerfile").write_text('ARG BASE\nFROM ${BASE}\nCOPY . /app/\nCMD ["cat", "/app/name.txt"]\n')
    context, dockerfile = str(tmp_path / "context"), str(tmp_path / "Dockerfile")
    return DockerImage(
        kind="docker", repository=f"{host}/team/train", dockerfile=dockerfile, context=context, base=base
    )


def test_image_is_built_once_then_runs_pinned(image: DockerImage, tmp_path: Path) -> None:
    """It has the files that .dockerignore leaves."""
    pinned = prepare_image(image, log=print).image
    assert resolve(f"{image.repository}:{builds_of(image)[-1].content_hash}") == pinned
    assert docker("run", "--rm", pinned) == str(tmp_path)
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
        assert prepare_image(private, log=print).image == resolve(builds_of(private)[-1].tag)


def test_products_image_trains_as_an_ordinary_user(host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No layer holds a secret of its builder."""
    secrets = ["planted-in-the-environment", "planted-in-pip-conf"]
    monkeypatch.setenv("HF_TOKEN", secrets[0])
    (tmp_path / "pip.conf").write_text(f"[planted]\npassword = {secrets[1]}\n")
    pip_config = str(tmp_path / "pip.conf")
    image = DockerImage(kind="docker", repository=f"{host}/team/own", context=str(CHECKOUT), pip_config=pip_config)
    lines: list[str] = []
    try:
        reference = str(prepare_image(image, log=lines.append).image)
    except ImageUnreachable as error:
        pytest.skip(f"its base cannot be pulled here: {error}")
    confined = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=none", "--tmpfs=/tmp"]
    program = "import os, torch, litgpt_demo.training.loop; print(os.getuid(), torch.__version__)"
    output = docker("run", "--rm", *confined, "--env=HOME=/tmp", reference, "python", "-c", program)
    assert output.startswith(f"1000 {DEFAULT_STACK.torch}")
    label = f'{{{{index .Config.Labels "{LABELS}torch"}}}}'
    assert docker("image", "inspect", "--format", label, reference) == DEFAULT_STACK.torch
    assert not [line for line in lines if any(secret in line for secret in secrets)]
    docker("save", "--output", str(tmp_path / "image.tar"), reference)
    found = subprocess.run(["grep", "-c", "-a", "-e", "planted-in-", str(tmp_path / "image.tar")], capture_output=True)
    assert found.stdout.strip() == b"0"
