"""The base and the packages of the product's own image, where neither Docker Hub nor a GPU is at hand.

The base is a Debian of debootstrap. torch's CPU wheels have other hashes than a stack's lock, which is for CUDA: a
checkout of its own has a stack with the same versions and the hashes of the wheels that this machine's pip finds. They
come from a package mirror with a password, whose address only pip's configuration tells.
"""

from __future__ import annotations

import base64
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from hashlib import sha256
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from docker_engine import docker
from packaging.utils import parse_wheel_filename
from serving_thread import served

from launcher.images.context import context_paths
from launcher.images.sbom import locked_packages
from launcher.images.stacks import Stack

CHECKOUT = Path(__file__).parents[2]
BASE = "train-litgpt-tests/debian:bookworm-1"
PASSWORD = "planted-in-pip-conf"
_DEBIAN = "python3,python3-pip,python3-venv,python-is-python3,ca-certificates,gcc,libc6-dev"
_FOR_CUDA = re.compile(r"(nvidia-(?!ml-py)|cuda-|triton$)")


def debian_base() -> str:
    """The name of a base image that the engine keeps: made once a machine, in a minute."""
    if docker("image", "ls", "--quiet", BASE):
        return BASE
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "root")
        command = ["debootstrap", "--variant=minbase", f"--include={_DEBIAN}", "bookworm", str(root)]
        made = subprocess.run(command, capture_output=True, text=True, check=False)
        if made.returncode:
            pytest.skip(f"debootstrap made no Debian: {made.stdout[-300:]}{made.stderr[-300:]}")
        # Debian keeps pip from its own Python; the image for Python that the product builds upon has no such file.
        next(root.glob("usr/lib/python3*/EXTERNALLY-MANAGED")).unlink()
        shutil.rmtree(root / "var/cache/apt")
        subprocess.run(
            f"tar --directory={root} --create . | docker import - {BASE}", shell=True, check=True, capture_output=True
        )
    return BASE


def cpu_stack(stack: Stack) -> Stack:
    """The same versions without CUDA."""
    return replace(stack, name=f"{stack.name}-cpu", cuda="", nccl="")


def wheels_of(stack: Stack, cache: Path) -> Path:
    """A folder with the wheels of a stack for CPUs, as this machine's pip finds them; skips where it finds no torch."""
    versions = locked_packages((CHECKOUT / stack.lock).read_text(), stack, stack.contents("amd64"))
    wanted = [f"{name}=={version}" for name, version in versions.items() if not _FOR_CUDA.match(name)]
    wanted[wanted.index(f"torch=={stack.torch}")] += "+cpu"
    folder = cache / sha256("\n".join(wanted).encode()).hexdigest()[:12]
    if not folder.exists():
        unfinished = folder.with_suffix(".new")
        shutil.rmtree(unfinished, ignore_errors=True)
        options = ["--no-deps", "--only-binary=:all:", "--python-version=3.11", f"--dest={unfinished}"]
        command = [sys.executable, "-m", "pip", "download", "--quiet", *options, *wanted]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"pip does not find the wheels of stack {stack.name} for CPUs: {done.stderr[-300:]}")
        unfinished.rename(folder)
    return folder


def checkout_for(stack: Stack, wheels: Path, folder: Path) -> Path:
    """A checkout with what .dockerignore leaves of ours, and with the lock of a stack of these wheels."""
    for path in context_paths(CHECKOUT):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(CHECKOUT / path, folder / path)
    shutil.copy(CHECKOUT / ".dockerignore", folder)
    lines = []
    for wheel in sorted(wheels.iterdir()):
        name, version, *_ = parse_wheel_filename(wheel.name)
        lines.append(f"{name}=={version.public} \\\n    --hash=sha256:{sha256(wheel.read_bytes()).hexdigest()}\n")
    (folder / stack.lock).write_text("".join(lines))
    return folder


@contextmanager
def package_mirror(wheels: Path, folder: Path) -> Iterator[Path]:
    """A pip.conf with the address of a mirror that asks for a password."""
    host = docker("network", "inspect", "bridge", "--format", "{{(index .IPAM.Config 0).Gateway}}")
    service = ThreadingHTTPServer((host, 0), partial(_WithPassword, directory=str(wheels)))
    path = folder / "pip.conf"
    address = f"http://ada:{PASSWORD}@{host}:{service.server_port}/"
    path.write_text(f"[global]\nno-index = true\nfind-links = {address}\ntrusted-host = {host}\n")
    with served(service):
        yield path


class _WithPassword(SimpleHTTPRequestHandler):
    def do_GET(self) -> None:
        expected = "Basic " + base64.b64encode(f"ada:{PASSWORD}".encode()).decode()
        if self.headers.get("Authorization") != expected:
            self.send_response(401)
            self.send_header("WWW-Authenticate", 'Basic realm="wheels"')
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        super().do_GET()

    def log_message(self, format: str, *words: object) -> None:
        """Say nothing."""
