"""The docker command: run it, pass its output on, and say what to do when it fails."""

from __future__ import annotations

import os
import subprocess
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import BinaryIO

from launcher.errors import ImageProblem
from litgpt_demo.secrets import redacted

TAIL = 15
"""Lines of Docker's output that an error message repeats."""

Log = Callable[[str], None]

# Phrases of Docker's client, engine and two builders, in lower case, and what to do about them.
# The first that is found counts: a failed step of a Dockerfile may well have printed "permission denied".
_FIXES: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("permission denied while trying to connect",),
        "add this user to the group docker and log in anew, or use rootless Docker",
    ),
    (
        ("cannot connect to the docker daemon", "failed to connect to the docker api"),
        "start the engine (`sudo systemctl start docker`), or set DOCKER_HOST to one that runs",
    ),
    (
        ("no space left on device",),
        "make room on the engine's disk, for example with `docker system prune`",
    ),
    (
        ("exec format error",),
        "the base image is for another processor: make image.platform and image.base agree",
    ),
    (
        ("returned a non-zero code", "did not complete successfully"),
        "fix that step of the Dockerfile and run again: the steps before it are cached",
    ),
    (
        ("copy failed", "add failed", "failed to compute cache key"),
        "a file that the Dockerfile copies is not in image.context, or .dockerignore leaves it out",
    ),
    (
        ("pull access denied", "manifest unknown", "manifest for "),
        "the base image does not exist, or needs a login: check image.base and the Dockerfile's FROM",
    ),
    (
        ("server gave http response to https client",),
        "the registry speaks plain HTTP: give it TLS, or name it under insecure-registries of the engine",
    ),
    (
        ("denied", "unauthorized", "no basic auth credentials", "authentication required", "insufficient_scope"),
        "this account may not push there: check image.repository, then log in with `{login}`",
    ),
    (
        ("no such host", "connection refused", "i/o timeout", "tls handshake timeout"),
        "the registry does not answer: check image.repository and the network",
    ),
)


def run_docker(
    arguments: Sequence[str], *, subject: str, login: str, log: Log, stdin: BinaryIO | None = None
) -> list[str]:
    """Run `docker <arguments>` and give `log` its lines as they come; returns the last ones.

    `subject` and `login` are for the error message: what it is about, and the command that logs in to its registry.

    Raises:
        ImageProblem: there is no docker command, or it failed.
    """
    try:
        process = subprocess.Popen(
            ["docker", *arguments],
            stdin=stdin or subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env={**os.environ, "BUILDKIT_PROGRESS": "plain"},  # the older builder does not know it and does not mind
        )
    except FileNotFoundError:
        raise ImageProblem(
            f"{subject}: there is no docker command here; install Docker (on Debian: apt install docker.io), "
            "or build the image elsewhere and set image to {kind: prebuilt, reference: …}"
        ) from None
    tail = _follow(process, log)
    if process.returncode:
        said = "\n".join(tail)
        raise ImageProblem(f"{subject}: docker {arguments[0]} failed:\n{said}\n-> {_fix(said).format(login=login)}")
    return tail


def _follow(process: subprocess.Popen[str], log: Log) -> list[str]:
    lines: Iterable[str] = process.stdout or ()
    tail: deque[str] = deque(maxlen=TAIL)
    with process:
        try:
            for line in lines:
                tail.append(redacted(line.rstrip()))
                log(tail[-1])
        except BaseException:
            process.kill()  # a caller that is interrupted here must not wait for the rest of the build
            raise
    return list(tail)


def _fix(said: str) -> str:
    lowered = said.lower()
    return next((fix for phrases, fix in _FIXES if any(phrase in lowered for phrase in phrases)), "see the lines above")
