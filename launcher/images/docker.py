"""Container engines on this machine: docker and podman, which share the words of their command lines."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO

from launcher.errors import ImageProblem, ImageUnreachable
from launcher.images.context import DOCKERFILE, TIME, Build, Log, Pause
from launcher.images.oci import ImageReference, is_local, login_command, resolve
from litgpt_demo.secrets import redacted

TAIL = 15
"""Lines of an engine's output that an error message repeats."""

# Phrases of Docker's client, engine and two builders, and of Podman, in lower case, and what to do about them.
# The first that is found counts: a failed step of a Dockerfile may well have printed "permission denied".
_FIXES = {
    "permission denied while trying": "add this user to the group docker and log in again, or use rootless Docker",
    "cannot connect to the docker daemon|failed to connect to the docker api": "start the engine (`sudo systemctl "
    "start docker`), or set DOCKER_HOST to one that runs",
    "no space left on device": "make room on the engine's disk, for example with `{engine} system prune`",
    "exec format error": "the base image is for another processor: make image.architecture and image.base agree",
    'returned a non-zero code|did not complete successfully|building at step "run': "fix that step of the Dockerfile "
    "and run again: the steps before it are cached",
    '(copy|add) failed|failed to compute cache key|building at step "(copy|add)': "a file that the Dockerfile copies "
    "is not in image.context, or .dockerignore leaves it out",
    "pull access denied|manifest (unknown|for )|did not resolve to an alias": "the base image does not exist, or needs "
    "a login: check image.base and the Dockerfile's FROM; Podman wants it with its registry "
    "(docker.io/library/python:3.11)",
    "server gave http response to https client": "the registry speaks plain HTTP: give it TLS, or name it under "
    "insecure-registries of the engine",
    "denied|unauthorized|no basic auth credentials|authentication required|insufficient_scope": "this account may not "
    "push there: check image.repository, then log in with `{login}`",
}
# Phrases for a registry that is unavailable, busy, or closed the connection during a push. A retry may succeed.
_SILENCE = (
    "no such host", "connection refused", "connection reset", "i/o timeout", "tls handshake timeout", "unexpected eof",
    "broken pipe", "toomanyrequests", "too many requests", "500 internal", "502 bad", "503 service", "504 gateway",
)  # fmt: skip

_GRACE = 5.0
"""Seconds that an engine has to clean up before it is killed."""


def build_here(build: Build, *, program: str, log: Log, pause: Pause = time.sleep) -> str:
    """Build with the engine `program`, any for `auto`, and push; return the digest that the engine reports."""
    engines = ("docker", "podman") if program == "auto" else (program,)
    engine = next((engine for engine in engines if shutil.which(engine)), None)
    if engine is None:
        fix = "install Docker or Podman, set image.kind=cloudbuild, or give an image: {kind: prebuilt, reference: …}"
        raise ImageProblem(f"image.engine={program}: this machine has no command {' or '.join(engines)}", fix=fix)
    run = partial(run_engine, engine, subject=build.tag, log=log, pause=pause)
    with build.context.tar() as tar:
        run([*build_command(engine, build), "-"], stdin=tar)

    def push() -> str:
        if engine == "docker":
            digests = re.findall(r"digest: (sha256:[0-9a-f]{64})", "\n".join(run(["push", build.tag])))
        else:
            with tempfile.NamedTemporaryFile() as file:
                run(["push", *_plain_http(build.tag), f"--digestfile={file.name}", build.tag])
                digests = Path(file.name).read_text("utf-8").split()
        if not digests:
            return resolve(build.tag).partition("@")[2]
        return str(digests[-1])

    # A retry does not send the layers again that the registry has. Engines retry single requests themselves.
    for seconds in (2.0, 10.0):
        try:
            return push()
        except ImageUnreachable as error:
            log(f"{error}; trying again in {seconds:.0f} s")
            pause(seconds)
    return push()


def build_command(engine: str, build: Build) -> list[str]:
    """The arguments of the engine for a build whose context comes as a tar on its standard input."""
    named = [("build-arg", build.args), ("label", build.labels)]
    options = [
        f"--platform={build.platform}",
        f"--tag={build.tag}",
        f"--file={DOCKERFILE}",
        *(f"--{option}={name}={value}" for option, values in named for name, value in values.items()),
    ]
    if engine == "docker":
        return ["build", "--force-rm", *options]
    # Docker's format has SHELL and HEALTHCHECK, which OCI's has not; but it names containers, each time other ones.
    only_dockers = re.search(r"^\s*(SHELL|HEALTHCHECK)\s", build.context.dockerfile.read_text("utf-8"), re.M | re.I)
    own = [f"--format={'docker' if only_dockers else 'oci'}", f"--timestamp={TIME}"]
    return ["build", *own, *_plain_http(build.args.get("BASE", "")), *options]


def _plain_http(reference: str) -> list[str]:
    """Return the option that Podman needs for a registry on this machine; Docker needs none."""
    return ["--tls-verify=false"] if is_local(reference.partition("/")[0]) else []


def run_engine(
    engine: str, arguments: Sequence[str], *, subject: str, log: Log, pause: Pause, stdin: IO[bytes] | None = None
) -> list[str]:
    """Run `<engine> <arguments>` on the image `subject` and return its last lines; `log` gets all. `pause` is called
    with 0 seconds while the engine is silent; if it or `log` raises, the engine is ended."""
    # https://docs.docker.com/build/ci/github-actions/reproducible-builds/: buildx hands SOURCE_DATE_EPOCH on
    environment = {"SOURCE_DATE_EPOCH": str(TIME), **os.environ, "BUILDKIT_PROGRESS": "plain"}
    if engine == "docker" and arguments[0] == "build":
        # Docker older than 23 uses BuildKit only on request, and only where the plugin buildx is installed.
        command = ["docker", "buildx", "version"]
        with suppress(OSError, subprocess.SubprocessError):
            subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=10.0, check=True)
            environment.setdefault("DOCKER_BUILDKIT", "1")
    process = subprocess.Popen(
        [engine, *arguments],
        stdin=stdin or subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env=environment,
    )
    try:
        tail = _follow(process, log, pause)
    except BaseException:
        # An interrupted caller must not wait for the rest of the build. The program may remove its working container
        # first, which Podman leaves behind if it is killed.
        process.terminate()
        try:
            process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        raise
    if process.returncode != 0:
        raise _problem(engine, arguments[0], subject, "\n".join(tail))
    return tail


def _follow(process: subprocess.Popen[str], log: Log, pause: Pause) -> list[str]:
    lines, tail = SimpleQueue[str | None](), deque[str](maxlen=TAIL)

    def read() -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in process.stdout:
                lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=0.5)
        except Empty:
            pause(0)  # pip and pushes are silent for minutes
            continue
        if line is None:
            break
        tail.append(redacted(line.rstrip()))
        log(tail[-1])
    process.wait()
    return list(tail)


def _problem(engine: str, command: str, subject: str, output: str) -> ImageProblem | ImageUnreachable:
    what, lowered = f"{subject}: {engine} {command} failed:\n{output}\n-> ", output.lower()
    for phrases, fix in _FIXES.items():
        if re.search(phrases, lowered):
            login = login_command(ImageReference.parse(subject).host, engine)
            return ImageProblem(what + fix.format(engine=engine, login=login))
    if any(phrase in lowered for phrase in _SILENCE):
        return ImageUnreachable(f"{what}the registry does not answer: check image.repository and the network")
    return ImageProblem(f"{what}see the lines above")
