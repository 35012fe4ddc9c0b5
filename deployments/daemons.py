"""Processes that outlive the command that started them, and how a later command finds and ends them."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from litgpt_demo.documents import parse_json
from litgpt_demo.processes import is_there, started
from litgpt_demo.storage.private import close_folder
from litgpt_demo.storage.reserving import write_whole


@dataclass(frozen=True, kw_only=True)
class Daemon:
    """One detached process; `<folder>/<name>.json` says which it is, `<folder>/<name>.log` has its output."""

    name: str
    folder: Path
    grace: float = 20
    """Seconds between SIGTERM and SIGKILL: a Prefect server takes 3 to end."""

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def _record(self) -> Path:
        return self.folder / f"{self.name}.json"

    def process(self) -> psutil.Process | None:
        """The live process, if there is one. A pid may be another process's by now, so its start has to agree."""
        with contextlib.suppress(FileNotFoundError, psutil.NoSuchProcess):
            fix = f"end {self.name} if it runs, and remove that file"
            written = parse_json(self._record.read_bytes(), dict[str, Any], where=str(self._record), fix=fix)
            process = psutil.Process(written["pid"])
            if "began" in written:
                same = is_there(process.pid, written["began"])
            else:  # an older version's record
                same = process.create_time() == written["created"]
            if same and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None

    def start(self, command: Sequence[str], *, env: Mapping[str, str], cwd: Path) -> None:
        """Start it in a session of its own, so that neither Ctrl-C nor the end of this terminal reaches it.

        What it writes is for its user alone, as are its output and the folder of both.
        """
        close_folder(self.folder)
        with open(self.log, "ab", opener=_open_private) as log:
            process = subprocess.Popen(
                command,
                env=env,
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                umask=0o077,
            )
        write_whole(self._record, {"pid": process.pid, "began": started(process.pid)})

    def stop(self) -> bool:
        """End it if it lives; returns whether it did."""
        process = self.process()
        if process is not None:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.terminate()
            for stubborn in psutil.wait_procs([process], timeout=self.grace)[1]:
                stubborn.kill()
                stubborn.wait()
        self._record.unlink(missing_ok=True)
        return process is not None

    def last_words(self) -> str:
        """The end of its log."""
        return "\n".join(self.log.read_text(errors="replace").strip().splitlines()[-8:])


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)
