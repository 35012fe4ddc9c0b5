"""A node's log: printed where its disk may be full, and brought with error files to where it outlives the machine."""

from __future__ import annotations

import contextlib
import fcntl
import io
import itertools
import os
import re
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.secrets import Mask, secrets_of
from litgpt_demo.storage.local import NO_ROOM

# Bytes: what a log holds back for lines that tell of trouble, what a file system gives back at the least, and a line,
# which waits in memory for its end; one that goes on is broken.
_RESERVE, _BLOCK, _LONGEST = 16 * 1024, 4096, 2**20
_TELLING = re.compile(rb"warning|error|node \d+ ends with", re.IGNORECASE)

_turn = threading.RLock()


class LossyLog(io.FileIO):
    """A file, which streams and processes may share, that has a line whole or, where its disk is full, not at all."""

    def __init__(self, file: Path | int, mode: str, *, closefd: bool = True, mask: Mask | None = None) -> None:
        super().__init__(file, mode, closefd=closefd)
        self._mask = mask
        self._begun = b""
        self._reserve: Any = None
        with contextlib.suppress(OSError):  # a terminal, or a system without /proc
            if stat.S_ISREG(os.fstat(self.fileno()).st_mode):
                folder = Path(f"/proc/self/fd/{self.fileno()}").readlink().parent
                self._reserve = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
                self._is_reserved()

    def write(self, block: Any, /) -> int:
        given = bytes(block)
        text = self._begun + given
        end = text.rfind(b"\n") + 1
        if len(text) - end <= _LONGEST:
            self._begun, text = text[end:], text[:end]
            text = text if self._mask is None else self._mask(text)
        elif self._mask is None:
            self._begun = b""
        else:
            text, self._begun = self._mask.begin(text)
        with _turn:  # of this process; the others wait for the file's lock, as a cut line is taken back from its end
            if self._reserve is not None:  # on a terminal or /dev/null somebody may hold such a lock for ever
                with contextlib.suppress(OSError):  # of a file system without locks
                    fcntl.lockf(self, fcntl.LOCK_EX)
            try:
                for line in re.findall(rb"[^\n]+\n?|\n", text):
                    self._add(line if line.endswith(b"\n") else line + b"\n")
            finally:
                with contextlib.suppress(OSError):
                    fcntl.lockf(self, fcntl.LOCK_UN)
        return len(given)

    def close(self) -> None:
        if not self.closed and self._begun:
            self._begun = self._begun if self._mask is None else self._mask.last(self._begun)
            self.write(b"\n")
        if self._reserve is not None:
            self._reserve.close()
        super().close()

    def _add(self, line: bytes) -> None:
        if not _TELLING.search(line):
            _ = self._is_reserved() and self._fits(line)
            return
        while not self._fits(line) and self._reserve is not None and (held := self._reserve.seek(0, os.SEEK_END)):
            self._reserve.truncate(max(0, held - _BLOCK))

    def _is_reserved(self) -> bool:
        missing = 0 if self._reserve is None else _RESERVE - self._reserve.seek(0, os.SEEK_END)
        with contextlib.suppress(OSError):
            return not missing or bool(self._reserve.write(b" " * missing) == missing)
        return False

    def _fits(self, line: bytes) -> bool:
        done = 0
        try:
            while done < len(line):
                done += super().write(line[done:]) or 0
        except OSError as error:
            if done and self.tell() == os.fstat(self.fileno()).st_size:
                self.truncate(self.seek(-done, os.SEEK_CUR))
            if error.errno not in NO_ROOM:
                raise
        return done == len(line)


def drop_what_does_not_fit() -> None:
    """Let `print` lose a line where the log's disk is full: else it raises OSError, and Python ends with 120."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        stream.flush()
        log = LossyLog(stream.fileno(), "w", closefd=False)
        raw = log if stream.write_through else io.BufferedWriter(log)  # with PYTHONUNBUFFERED nothing is held back
        flags = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
        setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, **flags))


@contextlib.contextmanager
def uploaded(directory: Path, address: str, node: int, *, life: int = 0, interval: float = 60.0) -> Iterator[None]:
    """Copy a node's log, its report, and what its ranks left, to `address`, every `interval` seconds and in the end.

    What an earlier `life` left is kept next to it, a number of restarts within the attempt, where the platform tells.
    """
    from litgpt_demo.storage import open_storage

    target, own, over = open_storage(address), directory / f"node-{node}", threading.Event()
    mask = Mask(secrets_of(os.environ))
    done: dict[str, tuple[int, float]] = {}

    def set_aside() -> None:
        # An earlier life's report must not be taken for this one's. Run:ai starts a pod again without telling it, so
        # what is found is what says so.
        names, places = target.list(), {own.name, f"{own.name}.log", f"{own.name}.json"}
        before = {name.split("/")[0] for name in names if name.partition("/")[2].split("/")[0] in places}
        place = f"restart-{max(life - 1, len(before))}"
        for name in names:
            if name.split("/")[0] in places:
                target.join([name], f"{place}/{name}")
                target.remove(name)

    def copy(look: int, last: bool) -> None:
        # This node's files alone, as nodes may share the directory; neither the dataset nor signs of life. The report
        # first: if there is no time for the rest, it tells most.
        files = [path for path in (own.with_suffix(".json"), own.with_suffix(".log")) if path.exists()]
        for folder in (own / "ranks", own / "gate"):
            files += sorted(path for path in folder.glob("**/*") if path.is_file() and not path.name.startswith("."))
        for path in (*files, *sorted(own.glob("*.json"))):
            name, told = path.relative_to(directory).as_posix(), path.stat()
            # Objects in a bucket cannot grow: each copy is a whole one. A file of n times 8 MiB is copied at every n-th
            # look only, so that a log of a week costs no more per minute than one of an hour; at the end all are.
            if done.get(name) == (told.st_size, told.st_mtime) or (not last and look % (told.st_size // 2**23 + 1)):
                continue
            # A copy of its own, because a log that grows while it is read would not have one checksum, and because
            # whoever may read the run may read it.
            aside = directory / f".keep-{node}"
            complete = mask.copy(path, aside, cut=path.suffix == ".log" and not last)
            target.upload(aside, name, move=True)
            if complete:
                done[name] = (told.st_size, told.st_mtime)

    def run() -> None:
        for look in itertools.count():
            last = look > 0 and over.wait(interval)
            try:
                if look == 0:
                    set_aside()
                else:
                    copy(look, last)
            # A bucket that does not answer must not end a training; the next look copies what this one could not.
            except (TrainLitgptError, OSError) as error:
                print(f"warning [node.log-uri] logs are not copied: {error} -> they are in {directory}", flush=True)
            if last:
                return

    thread = threading.Thread(target=run, name="uploader", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join(60.0)  # seconds: a pod that is told to leave has little more


@contextlib.contextmanager
def tee(log: Path) -> Iterator[None]:
    """Everything that this process and its children print also goes to a file, if it can be written."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        mask = Mask(secrets_of(os.environ))
        file = LossyLog(log, "ab", mask=mask)
    except OSError as error:
        print(f"warning [node.log] {log} cannot be written ({error.strerror}) -> only the platform has this log")
        yield
        return
    read, write = os.pipe()
    sys.stdout.flush()
    before = os.dup(1), os.dup(2)
    printed = LossyLog(before[0], "w", closefd=False, mask=mask)

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
