"""Containers that run: real processes, and those that are only said to run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

from .errors import ApiError

# util-linux (2.38) cannot end by SIGKILL as its child did, says so, and ends with 1.
NOT_KILLED = b"unshare: sigprocmask unblock failed"


class Log:
    """A container's output, by line, with the time when the kubelet saw it."""

    def __init__(self) -> None:
        self.lines: list[tuple[datetime, bytes]] = []
        self.ended = False
        self._more = asyncio.Event()

    def write(self, line: bytes) -> None:
        now = datetime.now(UTC)
        if self.lines and now <= self.lines[-1][0]:
            now = self.lines[-1][0] + timedelta(microseconds=1)
        self.lines.append((now, line if line.endswith(b"\n") else line + b"\n"))
        self._wake()

    def end(self) -> None:
        self.ended = True
        self._wake()

    def _wake(self) -> None:
        self._more.set()
        self._more = asyncio.Event()

    async def read(self, query: Mapping[str, str]) -> AsyncIterator[bytes]:
        """As `GET …/log` asks: since, tail, timestamps, follow, limitBytes."""
        stamps, follow = (query.get(name, "").lower() in ("true", "1") for name in ("timestamps", "follow"))
        left = int(query["limitBytes"]) if "limitBytes" in query else None
        at = self._start(query)
        while True:
            more = self._more
            while at < len(self.lines):
                when, line = self.lines[at]
                at += 1
                text = _stamp(when) + b" " + line if stamps else line
                if left is not None:
                    text = text[:left]
                    left -= len(text)
                yield text
                if left == 0:
                    return
            if not follow or self.ended:
                return
            await more.wait()

    def _start(self, query: Mapping[str, str]) -> int:
        if "sinceTime" in query and "sinceSeconds" in query:
            raise ApiError(
                422, 'PodLogOptions "" is invalid: at most one of `sinceTime` or `sinceSeconds` may be specified'
            )
        since = None
        if "sinceTime" in query:
            # The API server hands it on to the kubelet in whole seconds: what came earlier in that second comes again.
            since = datetime.fromisoformat(query["sinceTime"]).replace(microsecond=0)
        elif "sinceSeconds" in query:
            since = datetime.now(UTC) - timedelta(seconds=int(query["sinceSeconds"]))
        first = 0
        if since is not None:
            first = next((i for i, (when, _) in enumerate(self.lines) if when >= since), len(self.lines))
        if "tailLines" in query:
            first = max(first, len(self.lines) - int(query["tailLines"]))
        return first


def _stamp(when: datetime) -> bytes:
    return when.strftime("%Y-%m-%dT%H:%M:%S.%f000Z").encode()


class Running(Protocol):
    """A container that was started."""

    async def wait(self) -> int: ...
    def signal(self, number: int) -> None: ...


class Real:
    """A process of this machine, in its own group."""

    def __init__(self, process: asyncio.subprocess.Process, log: Log, *, nested: bool) -> None:
        self.process, self.log, self._nested = process, log, nested
        self._ended = asyncio.get_running_loop().create_task(self._follow())

    @classmethod
    async def start(cls, argv: Sequence[str], folder: Path, log: Log, *, nested: bool) -> Real:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            start_new_session=True, cwd="/" if nested else folder, limit=2**24,
        )  # fmt: skip
        return cls(process, log, nested=nested)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def signal(self, number: int) -> None:
        """To the container's first process, as runtimes do; a kill reaches all."""
        if self.process.returncode is not None:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if self._nested:
                for pid in self._first():
                    os.kill(pid, number)
            elif number == signal.SIGKILL:
                os.killpg(self.process.pid, number)
            else:
                os.kill(self.process.pid, number)
        if number == signal.SIGKILL and self._nested and not self._first():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def _first(self) -> list[int]:
        """The one process below `unshare`: number 1 in there."""
        try:
            text = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        except OSError:
            return []
        return [int(one) for one in text.split()]

    async def _follow(self) -> int:
        assert self.process.stdout is not None
        killed = False
        while line := await self._line():
            if self._nested and line.startswith(NOT_KILLED):
                killed = True
            else:
                self.log.write(line)
        code = await self.process.wait()
        if killed:
            code = -signal.SIGKILL
        if not self._nested:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.process.pid, signal.SIGKILL)
        self.log.end()
        return 128 - code if code < 0 else code

    async def _line(self) -> bytes:
        assert self.process.stdout is not None
        try:
            return await self.process.stdout.readuntil(b"\n")
        except asyncio.IncompleteReadError as rest:
            return rest.partial
        except asyncio.LimitOverrunError as error:
            return await self.process.stdout.readexactly(error.consumed)


class Said:
    """A container whose image only exists in the cloud: it is said to run until told to stop."""

    def __init__(self, log: Log, *, ends_with: int | None, after_term: int) -> None:
        self.log, self._after_term = log, after_term
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        if ends_with is not None:
            self.end(ends_with)

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def signal(self, number: int) -> None:
        self.end(self._after_term if number == signal.SIGTERM else 128 + number)

    def end(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)
            self.log.end()
