"""A node's log: lines that survive a full disk, and copies of log, report and error files that outlive the machine."""

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
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.storage.local import NO_ROOM

# In bytes: the disk space that a log reserves for warnings and errors, the piece of it that is released at a time, and
# the longest line that waits in memory for its end; a longer one is broken.
_RESERVE, _BLOCK, _LONGEST = 16 * 1024, 4096, 2**20
_IMPORTANT = re.compile(rb"warning|error|node \d+ ends with", re.IGNORECASE)

_process_lock = threading.RLock()


class BestEffortLog(io.FileIO):
    """A log file that writes each line completely or, if the disk is full, drops it. Processes may share the file."""

    def __init__(self, file: Path | int, mode: str, *, closefd: bool = True, mask: Mask | None = None) -> None:
        super().__init__(file, mode, closefd=closefd)
        self._mask = mask
        self._unfinished = b""
        self._reserve: Any = None
        with contextlib.suppress(OSError):  # a terminal, or a system without /proc
            if stat.S_ISREG(os.fstat(self.fileno()).st_mode):
                folder = Path(f"/proc/self/fd/{self.fileno()}").readlink().parent
                self._reserve = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
                self._fill_reserve()

    def write(self, block: Any, /) -> int:
        data = bytes(block)
        text = self._complete_lines(data)
        with _process_lock:
            self._lock_file(fcntl.LOCK_EX)
            try:
                for line in re.findall(rb"[^\n]+\n?|\n", text):
                    self._write_line(line.removesuffix(b"\n") + b"\n")
            finally:
                self._lock_file(fcntl.LOCK_UN)
        return len(data)

    def close(self) -> None:
        if not self.closed and self._unfinished:
            if self._mask is not None:
                self._unfinished = self._mask.last(self._unfinished)
            self.write(b"\n")
        if self._reserve is not None:
            self._reserve.close()
        super().close()

    def _complete_lines(self, data: bytes) -> bytes:
        """Return the lines that are complete by now, masked, and keep the rest."""
        text = self._unfinished + data
        end = text.rfind(b"\n") + 1
        if len(text) - end <= _LONGEST:
            self._unfinished = text[end:]
            return text[:end] if self._mask is None else self._mask(text[:end])
        if self._mask is None:
            self._unfinished = b""
            return text
        text, self._unfinished = self._mask.begin(text)
        return text

    def _lock_file(self, operation: int) -> None:
        """Let other processes wait, because a line that was cut is removed from the end of the file."""
        if self._reserve is not None:  # another process may hold the lock of a terminal or of /dev/null forever
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.lockf(self, operation)

    def _write_line(self, line: bytes) -> None:
        if not _IMPORTANT.search(line):
            if self._fill_reserve():
                self._try_write(line)
            return
        while not self._try_write(line):
            reserved = 0 if self._reserve is None else self._reserve.seek(0, os.SEEK_END)
            if not reserved:
                return
            self._reserve.truncate(max(0, reserved - _BLOCK))

    def _fill_reserve(self) -> bool:
        """Return True if the reserve is complete, or none is possible."""
        if self._reserve is None:
            return True
        missing: int = _RESERVE - self._reserve.seek(0, os.SEEK_END)
        try:
            written: int = self._reserve.write(b" " * missing)
        except OSError:
            return False
        return written == missing

    def _try_write(self, line: bytes) -> bool:
        written = 0
        try:
            while written < len(line):
                written += super().write(line[written:]) or 0
        except OSError as error:
            if written and self.tell() == os.fstat(self.fileno()).st_size:
                self.truncate(self.seek(-written, os.SEEK_CUR))
            if error.errno not in NO_ROOM:
                raise
        return written == len(line)


def drop_lines_without_room() -> None:
    """Let `print` drop a line if the log's disk is full. Otherwise it raises OSError, and Python ends with 120."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        stream.flush()
        log = BestEffortLog(stream.fileno(), "w", closefd=False)
        raw = log if stream.write_through else io.BufferedWriter(log)  # PYTHONUNBUFFERED allows no buffer
        flags = {"line_buffering": stream.line_buffering, "write_through": stream.write_through}
        setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, stream.errors, **flags))


@contextlib.contextmanager
def uploaded(
    directory: Path, address: str, node: int, *, restart_count: int = 0, interval: float = 60.0
) -> Iterator[None]:
    """Copy a node's log, its report and the files of its ranks to `address`, every `interval` seconds and at the end.

    Files of an earlier start of this node are kept in a folder next to them. `restart_count` is the number of restarts
    within the attempt, if the platform reports it.
    """
    uploader = _Uploader(directory, open_storage(address), node, restart_count)
    is_over = threading.Event()

    def run() -> None:
        for round_number in itertools.count():
            is_last = round_number > 0 and is_over.wait(interval)
            try:
                if round_number == 0:
                    uploader.move_earlier_files()
                else:
                    uploader.copy(round_number, is_last)
            # A bucket that does not answer must not end a training. The next round copies the missing files.
            except (TrainLitgptError, OSError) as error:
                print(f"warning [node.log-uri] logs are not copied: {error} -> they are in {directory}", flush=True)
            if is_last:
                return

    thread = threading.Thread(target=run, name="uploader", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join(60.0)  # seconds: a node that has to leave has little more


class _Uploader:
    def __init__(self, directory: Path, target: Storage, node: int, restart_count: int) -> None:
        self._directory, self._target, self._restart_count = directory, target, restart_count
        self._own = directory / f"node-{node}"
        self._temporary = directory / f".keep-{node}"
        self._mask = Mask(secrets_of(os.environ))
        self._copied: dict[str, tuple[int, float]] = {}

    def move_earlier_files(self) -> None:
        """Move the files of an earlier start away, because its report must not be read as this one's.

        Run:ai restarts a pod without a restart count, so only the files show it.
        """
        names, of_node = self._target.list(), {self._own.name, f"{self._own.name}.log", f"{self._own.name}.json"}
        earlier = {name.split("/")[0] for name in names if name.partition("/")[2].split("/")[0] in of_node}
        folder = f"restart-{max(self._restart_count - 1, len(earlier))}"
        for name in names:
            if name.split("/")[0] in of_node:
                self._target.join([name], f"{folder}/{name}")
                self._target.remove(name)

    def copy(self, round_number: int, is_last: bool) -> None:
        """Copy the files that changed. Only this node's, because nodes may share the directory."""
        for path in self._files():
            name, status = path.relative_to(self._directory).as_posix(), path.stat()
            # Objects in a bucket cannot grow: each copy is a complete one. A file of n times 8 MiB is copied in every
            # n-th round, so that a log of a week costs no more per minute than one of an hour. The last copies all.
            is_skipped = not is_last and round_number % (status.st_size // 2**23 + 1) != 0
            if is_skipped or self._copied.get(name) == (status.st_size, status.st_mtime):
                continue
            # A masked copy, which everybody who may read the run may read. A log also grows while it is uploaded, and
            # would have no single checksum.
            is_complete = self._mask.copy(path, self._temporary, cut=path.suffix == ".log" and not is_last)
            self._target.upload(self._temporary, name, move=True)
            if is_complete:
                self._copied[name] = (status.st_size, status.st_mtime)

    def _files(self) -> list[Path]:
        """Return the report first: if there is no time for the rest, it is the most useful file."""
        files = [path for path in (self._own.with_suffix(".json"), self._own.with_suffix(".log")) if path.exists()]
        for folder in (self._own / "ranks", self._own / "network-test"):
            files += sorted(path for path in folder.glob("**/*") if path.is_file() and not path.name.startswith("."))
        return [*files, *sorted(self._own.glob("*.json"))]


@contextlib.contextmanager
def tee(log: Path) -> Iterator[None]:
    """Also write to a file, if possible, what this process and its children print."""
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        mask = Mask(secrets_of(os.environ))
        file = BestEffortLog(log, "ab", mask=mask)
    except OSError as error:
        print(f"warning [node.log] {log} cannot be written ({error.strerror}) -> only the platform has this log")
        yield
        return
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    stdout, stderr = os.dup(1), os.dup(2)
    printed = BestEffortLog(stdout, "w", closefd=False, mask=mask)

    def pump() -> None:
        while block := os.read(read_end, 65536):
            for log_file in (file, printed):
                with contextlib.suppress(OSError):  # a closed pipe or a broken disk: the other one still gets it
                    log_file.write(block)

    thread = threading.Thread(target=pump, name="log", daemon=True)
    thread.start()
    os.dup2(write_end, 1)
    os.dup2(write_end, 2)
    os.close(write_end)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.dup2(stderr, 2)
        thread.join(5)  # a child that outlives this process still holds the pipe
