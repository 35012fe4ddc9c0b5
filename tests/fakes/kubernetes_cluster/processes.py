"""Containers that run: real processes, and those that are only said to run."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path


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
        """As `GET …/log` asks: with the time before each line, from a moment on, to the end or beyond it."""
        at = 0
        if "sinceTime" in query:
            # The API server hands it on to the kubelet in whole seconds: what came earlier in that second comes again.
            since = datetime.fromisoformat(query["sinceTime"]).replace(microsecond=0)
            at = sum(when < since for when, _ in self.lines)
        while True:
            more = self._more
            while at < len(self.lines):
                when, line = self.lines[at]
                at += 1
                yield when.strftime("%Y-%m-%dT%H:%M:%S.%f000Z ").encode() + line
            if query.get("follow") != "true" or self.ended:
                return
            await more.wait()


class Running:
    """A container that was started."""

    log: Log

    def __init__(self) -> None:
        self._ended: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    async def wait(self) -> int:
        return await asyncio.shield(self._ended)

    def signal(self, number: int) -> None:
        raise NotImplementedError


class Real(Running):
    """A process of this machine, in its own group."""

    def __init__(self, process: asyncio.subprocess.Process, log: Log) -> None:
        super().__init__()
        self.process, self.log = process, log
        self._task = asyncio.get_running_loop().create_task(self._follow())

    @classmethod
    async def start(cls, argv: Sequence[str], folder: Path, log: Log) -> Real:
        process = await asyncio.create_subprocess_exec(
            *argv, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            start_new_session=True, cwd=folder, limit=2**24,
        )  # fmt: skip
        return cls(process, log)

    def signal(self, number: int) -> None:
        """To the container's first process, as runtimes do; a kill reaches all."""
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                (os.killpg if number == signal.SIGKILL else os.kill)(self.process.pid, number)

    async def _follow(self) -> None:
        assert self.process.stdout is not None
        async for line in self.process.stdout:
            self.log.write(line)
        code = await self.process.wait()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.log.end()
        self._ended.set_result(128 - code if code < 0 else code)


class Said(Running):
    """A container whose image only exists in the cloud: it is said to run until told to stop."""

    def __init__(self, log: Log, *, ends_with: int | None, after_term: int) -> None:
        super().__init__()
        self.log, self._after_term = log, after_term
        if ends_with is not None:
            self.end(ends_with)

    def signal(self, number: int) -> None:
        self.end(self._after_term if number == signal.SIGTERM else 128 + number)

    def end(self, code: int) -> None:
        if not self._ended.done():
            self._ended.set_result(code)
            self.log.end()
