"""A real Docker engine and Debian's docker-registry, for tests marked `docker`."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
import yaml
from waiting import free_port


def require_engine(*programs: str) -> None:
    """Skip the test where there is no engine, or one of the programs that it needs besides."""
    for program in ("docker", *programs):
        if shutil.which(program) is None:
            needed = "docker.io docker-registry busybox-static debootstrap"
            pytest.skip(f"{program} is not installed (apt install {needed})")
    asked = subprocess.run(["docker", "info", "--format", "{{.ServerVersion}}"], capture_output=True, check=False)
    if asked.returncode:
        pytest.skip(f"no Docker engine answers: {asked.stderr.decode().strip()}; start one with `dockerd` as root")


def docker(*arguments: str, stdin: bytes | None = None) -> str:
    done = subprocess.run(["docker", *arguments], input=stdin, capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


@contextmanager
def docker_registry(folder: Path, **settings: object) -> Iterator[str]:
    """The address of a docker-registry of our own, with these parts of its configuration besides address and folder."""
    host = f"127.0.0.1:{free_port()}"
    storage = {"filesystem": {"rootdirectory": str(folder / "data")}}
    config = {"version": "0.1", "storage": storage, "http": {"addr": host}, **settings}
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(["docker-registry", "serve", str(folder / "config.yml")], stdout=log, stderr=log)
    try:
        wait_for(host)
        yield host
    finally:
        process.terminate()
        process.wait()
        remove_images(host)


def wait_for(host: str, limit: float = 20.0) -> None:
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        try:
            httpx.get(f"http://{host}/v2/", trust_env=False)
            return
        except httpx.TransportError:
            time.sleep(0.1)
    pytest.fail(f"docker-registry did not answer at {host} within {limit:.0f} s")


def remove_images(host: str) -> None:
    """Names and digests of this test's registry; what the engine had before stays, and what it has cached of builds."""
    rows = docker("image", "ls", "--digests", "--format", "{{.Repository}} {{.Tag}} {{.Digest}}").splitlines()
    ours = [row.split() for row in rows if row.startswith(f"{host}/")]
    names = {f"{name}:{tag}" for name, tag, _ in ours if tag != "<none>"}
    digests = {f"{name}@{digest}" for name, _, digest in ours if digest != "<none>"}
    for reference in (*names, *digests):
        # The engine may have forgotten a digest with the last name of its image.
        subprocess.run(["docker", "image", "rm", "--force", reference], capture_output=True, check=False)
