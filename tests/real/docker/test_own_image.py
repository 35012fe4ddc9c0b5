"""The product's own image: really built, pushed and looked into.

Needs a Docker engine, docker-registry and debootstrap (see docker_engine); the first run takes some minutes.
The base is a Debian of debootstrap, and torch comes without CUDA: a checkout of its own has a stack with the same
versions and the hashes of the wheels that this machine's pip finds, from a package mirror with a password.
"""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from docker_engine import docker, docker_registry, require_engine
from packaging.utils import parse_wheel_filename
from serving_thread import served

from launcher.images import settings
from launcher.images.builders import prepare_image, recipes
from launcher.images.context import context_paths
from launcher.images.sbom import locked_packages
from launcher.images.settings import DockerImage
from launcher.images.stacks import DEFAULT_STACK, LABELS, STACKS

CHECKOUT = Path(__file__).parents[3]
PASSWORD = "planted-in-pip-conf"
PLANTED = {"WANDB_API_KEY": "planted-in-the-environment", "HF_TOKEN": "planted-in-another-variable"}
DEBIAN = "python3,python3-pip,python3-venv,python-is-python3,ca-certificates,gcc,libc6-dev"
FOR_CUDA = re.compile(r"(nvidia-(?!ml-py)|cuda-|triton$)")


def push_debian(base: str, root: Path) -> None:
    command = ["debootstrap", "--variant=minbase", f"--include={DEBIAN}", "bookworm", str(root)]
    made = subprocess.run(command, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"debootstrap made no Debian: {made.stdout[-300:]}{made.stderr[-300:]}")
    # Debian keeps pip from its own Python; the image for Python that the product builds upon has no such file.
    next(root.glob("usr/lib/python3*/EXTERNALLY-MANAGED")).unlink()
    subprocess.run(f"tar --directory={root} --create . | docker import - {base}", shell=True, check=True)
    docker("push", base)


def wheels_in(cache: Path) -> Path:
    """A folder with the wheels of the stack for CPUs, as this machine's pip finds them."""
    lock = (CHECKOUT / DEFAULT_STACK.lock).read_text()
    versions = locked_packages(lock, DEFAULT_STACK, DEFAULT_STACK.contents("amd64"))
    wanted = [f"{name}=={version}" for name, version in versions.items() if not FOR_CUDA.match(name)]
    wanted[wanted.index(f"torch=={DEFAULT_STACK.torch}")] += "+cpu"
    folder = cache / sha256("\n".join(wanted).encode()).hexdigest()[:12]
    if not folder.exists():
        unfinished = folder.with_suffix(".new")
        shutil.rmtree(unfinished, ignore_errors=True)
        options = ["--no-deps", "--only-binary=:all:", "--python-version=3.11", f"--dest={unfinished}"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", *options, *wanted]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"pip does not find the wheels for CPUs: {done.stderr[-300:]}")
        unfinished.rename(folder)
    return folder


def checkout_with_lock_of(wheels: Path, lock: str, folder: Path) -> Path:
    for path in context_paths(CHECKOUT):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / path, folder / path)
    shutil.copy(CHECKOUT / ".dockerignore", folder)
    lines = []
    for wheel in sorted(wheels.iterdir()):
        name, version, *_ = parse_wheel_filename(wheel.name)
        lines.append(f"{name}=={version.public} \\\n    --hash=sha256:{sha256(wheel.read_bytes()).hexdigest()}\n")
    (folder / lock).write_text("".join(lines))
    return folder


class WithPassword(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.headers.get("Authorization") == "Basic " + base64.b64encode(f"ada:{PASSWORD}".encode()).decode():
            super().do_GET()
            return
        self.send_response(401)
        self.send_header("WWW-Authenticate", 'Basic realm="wheels"')
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *words: object) -> None:
        """Say nothing."""


@contextmanager
def package_mirror(wheels: Path, folder: Path) -> Iterator[Path]:
    """A pip.conf with the address of a mirror that asks for a password."""
    host = docker("network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Gateway}}")
    service = ThreadingHTTPServer((host, 0), partial(WithPassword, directory=str(wheels)))
    path = folder / "pip.conf"
    address = f"http://ada:{PASSWORD}@{host}:{service.server_port}/"
    path.write_text(f"[global]\nno-index = true\nfind-links = {address}\ntrusted-host = {host}\n")
    with served(service):
        yield path


@dataclass
class Built:
    """An image that was built, and what its builder printed."""

    image: DockerImage
    reference: str
    lines: list[str]


@pytest.fixture(scope="module")
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """The image, built by somebody with secrets around."""
    require_engine("docker-registry", "debootstrap")
    wheels, folder = wheels_in(request.config.cache.mkdir("wheels")), tmp_path_factory.mktemp("own-image")
    stack = replace(DEFAULT_STACK, name="cpu", cuda="", nccl="")
    checkout = checkout_with_lock_of(wheels, stack.lock, folder / "checkout")
    with (
        pytest.MonkeyPatch.context() as patch,
        docker_registry(folder) as host,
        package_mirror(wheels, folder) as pip_config,
    ):
        push_debian(f"{host}/team/debian:1", folder / "debian")
        patch.setattr(settings, "STACKS", {**STACKS, stack.name: stack})
        for name, secret in PLANTED.items():
            patch.setenv(name, secret)
        image = DockerImage(
            kind="docker", repository=f"{host}/team/train", context=str(checkout), base=f"{host}/team/debian:1",
            pip_config=str(pip_config), stack=stack.name,
        )  # fmt: skip
        lines: list[str] = []
        reference = prepare_image(image, log=lines.append).image
        assert reference is not None
        yield Built(image, reference, lines)


def in_the_image(built: Built, *command: str) -> str:
    """What a command prints, confined as on Kubernetes."""
    rights = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=none"]
    return docker("run", "--rm", *rights, "--tmpfs=/tmp:exec", "--env=HOME=/tmp", built.reference, *command)


def test_the_image_runs_as_an_ordinary_user_imports_what_it_needs_and_says_what_it_holds(built: Built) -> None:
    assert in_the_image(built, "id", "-u") == "1000"
    imports = "import litgpt, lightning, torch, litgpt_demo.training.loop; print(torch.__version__)"
    assert in_the_image(built, "python", "-c", imports) == f"{DEFAULT_STACK.torch}+cpu"
    said = docker("image", "inspect", "--format", f'{{{{index .Config.Labels "{LABELS}torch"}}}}', built.reference)
    assert said == DEFAULT_STACK.torch
    found = set(in_the_image(built, "find", "/opt/train-litgpt", "-not", "-type", "d", "-printf", "%P\\n").splitlines())
    sources = set(context_paths(Path(built.image.context), recipes(built.image)[1].context.ignored))
    assert {path for path in found if not path.endswith(".pyc")} == sources


def test_no_layer_holds_a_secret_or_a_path_of_the_builder(built: Built) -> None:
    docker("pull", "--quiet", built.reference)
    secrets = [PASSWORD, *PLANTED.values()]
    assert not any(secret in line for secret in secrets for line in built.lines), "the build's own output"
    needles = [needle.encode() for needle in (*secrets, str(CHECKOUT), built.image.context)]
    found, rest = set[bytes](), b""
    with subprocess.Popen(["docker", "save", built.reference], stdout=subprocess.PIPE) as saving:
        assert saving.stdout is not None
        while chunk := saving.stdout.read(1 << 24):
            text = rest + chunk
            found |= {needle for needle in needles if needle in text}
            rest = text[-200:]
    assert saving.returncode == 0
    assert found == set()
