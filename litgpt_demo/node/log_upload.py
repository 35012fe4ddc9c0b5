"""Logs and error files brought to where they outlive the machine, while it runs and at its end."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.node.printing import LossyLog

if TYPE_CHECKING:
    from litgpt_demo.storage import Storage

# Objects in a bucket cannot grow: each copy is a whole one. A file of n times this many bytes is copied at every n-th
# look only, so that a log of a week costs no more per minute than one of an hour; at the end all are copied.
_CHEAP = 8 * 2**20

# Seconds that the last copy may take; a pod that is told to leave has little more.
_LAST = 60.0


class LogUploader:
    """Copies a node's log, its report, and what its ranks left, to `address`, as long as it is entered."""

    def __init__(self, directory: Path, address: str, node: int, *, life: int = 0, interval: float = 60.0) -> None:
        """
        Args:
            life: how often the job has been restarted within its attempt, where the platform tells. What the last life
                left is kept next to it.
            interval: seconds between two looks: what a machine that is gone took with it.
        """
        from litgpt_demo.storage import open_storage

        self._directory, self._node, self._life, self._interval = directory, node, life, interval
        self.log = directory / f"node-{node}.log"
        self._target: Storage = open_storage(address)
        self._done: dict[str, tuple[int, float]] = {}
        self._looks, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._run, name="uploader", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(_LAST)

    def _run(self) -> None:
        self._attempt(self._set_aside)
        while not self._over.wait(self._interval):
            self._attempt(self._copy)
        self._attempt(lambda: self._copy(last=True))

    def _attempt(self, action: Callable[[], None]) -> None:
        # A bucket that does not answer must not end a training; the next look copies what this one could not.
        try:
            action()
        except (TrainLitgptError, OSError) as error:
            message = f"logs could not be copied: {error} -> they are in {self._directory}"
            print(f"warning [node.log-uri] {message}", flush=True)

    def _copy(self, *, last: bool = False) -> None:
        self._looks += 1
        # This node's files alone, as nodes may share the directory; neither the dataset nor signs of life. The report
        # first: if there is no time for the rest, it tells most.
        own = self._directory / f"node-{self._node}"
        files = [path for path in (own.with_suffix(".json"), self.log) if path.exists()]
        for folder in (own / "ranks", own / "gate"):
            files += sorted(path for path in folder.glob("**/*") if path.is_file() and not path.name.startswith("."))
        for path in (*files, *sorted(own.glob("*.json"))):
            name = path.relative_to(self._directory).as_posix()
            told = path.stat()
            if self._done.get(name) == (told.st_size, told.st_mtime):
                continue
            if not last and self._looks % (told.st_size // _CHEAP + 1):
                continue
            # A copy of its own, because a log that grows while it is read would not have one checksum.
            aside = self._directory / f".keep-{self._node}"
            shutil.copyfile(path, aside)
            self._target.upload(aside, name, move=True)
            self._done[name] = (told.st_size, told.st_mtime)

    def _set_aside(self) -> None:
        """Move what an earlier life of this node left: its report must not be taken for this one's.

        Run:ai starts a pod again without telling it, so what is found is what says so.
        """
        names, own = self._target.list(), f"node-{self._node}"
        places = {own, f"{own}.log", f"{own}.json"}
        mine = [name for name in names if name.split("/")[0] in places]
        before = {name.split("/")[0] for name in names if name.partition("/")[2].split("/")[0] in places}
        place = f"restart-{max(self._life - 1, len(before))}"
        for name in mine:
            self._target.join([name], f"{place}/{name}")
            self._target.remove(name)


@contextlib.contextmanager
def tee(log: Path) -> Iterator[None]:
    """Everything that this process and its children print also goes to a file, if it can be written."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        file = LossyLog(log, "ab")
    except OSError as error:
        print(f"warning [node.log] {log} cannot be written ({error.strerror}) -> only the platform has this log")
        yield
        return
    read, write = os.pipe()
    sys.stdout.flush()
    before = os.dup(1), os.dup(2)
    printed = LossyLog(before[0], "w", closefd=False)

    def pour() -> None:
        while block := os.read(read, 65536):
            with contextlib.suppress(OSError):  # a reader that has gone, or a disk: the other one still has it
                file.write(block)
            with contextlib.suppress(OSError):
                printed.write(block)

    pouring = threading.Thread(target=pour, name="log", daemon=True)
    pouring.start()
    os.dup2(write, 1)
    os.dup2(write, 2)
    os.close(write)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(before[0], 1)
        os.dup2(before[1], 2)
        pouring.join(5)  # a child that outlives us still holds the other end
