"""A real Docker engine and Debian's docker-registry."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import yaml
from waiting import until


def require_engine(*programs: str) -> None:
    """Skip the test where there is no engine, or one of the programs that it needs besides."""
    for program in ("docker", *programs):
        if shutil.which(program) is None:
            pytest.skip(f"{program} is not installed (apt install docker.io docker-registry busybox-static)")
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
    storage = {"filesystem": {"rootdirectory": str(folder / "data")}}
    config = {"version": "0.1", "storage": storage, "http": {"addr": "127.0.0.1:0"}, **settings}
    (folder / "config.yml").write_text(yaml.safe_dump(config))
    command, log = ["docker-registry", "serve", str(folder / "config.yml")], folder / "log"
    with log.open("wb") as said, subprocess.Popen(command, stdout=said, stderr=said) as process:
        host = ""
        try:
            host = until(lambda: re.search(r"listening on (127\.0\.0\.1:\d+)", log.read_text()))[1]  # type: ignore[index]
            yield host
        finally:
            process.terminate()
            remove_images(host or "nowhere")


def remove_images(host: str) -> None:
    """Names and digests of this test's registry; what the engine had before stays, and what it has cached of builds."""
    rows = docker("image", "ls", "--digests", "--format", "{{.Repository}} {{.Tag}} {{.Digest}}").splitlines()
    ours = [row.split() for row in rows if row.startswith(f"{host}/")]
    names = {f"{name}:{tag}" for name, tag, _ in ours if tag != "<none>"}
    digests = {f"{name}@{digest}" for name, _, digest in ours if digest != "<none>"}
    for reference in (*names, *digests):
        # The engine may have forgotten a digest with the last name of its image.
        subprocess.run(["docker", "image", "rm", "--force", reference], capture_output=True, check=False)
