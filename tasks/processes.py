"""A child process that computes for the orchestrator, so that torch and files that run Python stay out of this one."""

from __future__ import annotations

import asyncio
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from contextvars import copy_context
from typing import IO, TypeAlias, TypeVar, cast

from launcher.runs.diagnosis import ADVICE
from litgpt_demo.errors import TrainLitgptError, fault_of_exit_code
from litgpt_demo.parent import PROGRESS

T = TypeVar("T")
OnLine: TypeAlias = Callable[[str], None]
OnProgress: TypeAlias = Callable[[str, int | None], None]
"""Called with the current work of the process, and with the percentage that its progress bar shows, if it has one."""

_BAR = re.compile(r"(?:(?P<what>[^|]+?): +)? *(?P<percent>\d{1,3})%\|")  # as tqdm draws it


class Child:
    """A child process that ends with this process, however this one ends (litgpt_demo.parent)."""

    def __init__(self, command: Sequence[str], *, environ: Mapping[str, str]) -> None:
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=subprocess.STDOUT, env=environ, encoding="utf-8", errors="replace"
        )

    def write(self, line: str) -> None:
        pipe = cast(IO[str], self._process.stdin)
        with suppress(BrokenPipeError):  # it has ended, and `end` raises the reason
            pipe.write(f"{line}\n")
            pipe.flush()

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()

    async def end(
        self, result: Callable[[], T | None], *, on_line: OnLine = lambda _: None,
        on_progress: OnProgress = lambda *_: None, fix: str = "",
    ) -> T:  # fmt: skip
        """Wait for its end and return its `result`. Without one, raise an error with the failure class of its exit code
        and the last line that it printed."""
        # It has its own thread, because the event loop has only a few, for calls of seconds.
        pool = ThreadPoolExecutor(1)
        try:
            last = await asyncio.wrap_future(pool.submit(copy_context().run, self._read, on_line, on_progress))
        except BaseException:
            self._process.kill()  # which ends the thread that reads its output
            raise
        finally:
            pool.shutdown(wait=False)
        code = self._process.returncode
        if code == 0:
            value = await asyncio.to_thread(result)
            if value is not None:
                return value
        fault = fault_of_exit_code(code or 1)
        raise TrainLitgptError(f"{fault}: {last}", fix=fix or ADVICE[fault], fault=fault)

    def _read(self, on_line: OnLine, on_progress: OnProgress) -> str:
        last = "it printed nothing"
        with cast(IO[str], self._process.stdout) as output:
            for line in output:  # a progress bar ends its lines with a carriage return
                bar = _BAR.match(line)
                if bar is not None:
                    on_progress(bar["what"] or "", int(bar["percent"]))
                elif line.startswith(PROGRESS):
                    on_progress(line.removeprefix(PROGRESS).strip(), None)
                elif line.strip():
                    last = line.strip()
                    on_line(line.rstrip())
        self._process.wait()
        with suppress(BrokenPipeError):  # it has not read its last line
            cast(IO[str], self._process.stdin).close()
        return last
