"""The run index: every attempt that was ever started under a root, so that a run is found by its name.

index/<run>/<attempt>.json                       the attempt: created before its job is submitted, never changed
index/<run>/<attempt>.ended.json                 its end, created by the first orchestrator that has seen it
index/<run>/<attempt>.read.json                  the position up to which its log is logged, for the next orchestrator
index/<run>/lease/                               which orchestrator starts its attempts (launcher.runs.lease)
index/<run>/announced-<what>.json                an event was emitted that a run has once
index/<name>/cancel-<token>.json                 a request to cancel the run or sweep
index/flow-runs/<flow run>/<run>/<attempt>.json  a Prefect flow run that has started this attempt, or reattached to it

All are small. Each but the position is created once (Storage.create), so that two writers never overwrite each other.
So is the diagnosis of an attempt that ended badly, runs/<run>/attempts/<attempt>/diagnosis.json.
"""

from __future__ import annotations

import json
import re
import secrets
import socket
import time
import uuid
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar
from urllib.parse import quote

import psutil
from pydantic import Field, JsonValue

from launcher.job import JobId, JobState, JobStatus, MachineName, Moment, attempt_name
from litgpt_demo.config import Settings
from litgpt_demo.documents import parse_json, with_checksum
from litgpt_demo.errors import DataError, TrainLitgptError, UserError
from litgpt_demo.runs import ATTEMPTS, JobFault
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.storage.local import translate_os_errors
from litgpt_demo.storage.private import make_private

INDEX = "index"
_FLOW_RUNS = "flow-runs"  # no run has this name, because names of runs end with an id
_LINK = re.compile(rf"{_FLOW_RUNS}/(?P<flow_run>[^/]+)/(?P<run>[^/]+)/(?P<attempt>[0-9]{{1,9}})\.json")
_READERS = 16  # files that are read in parallel; a bucket takes 50 ms for each

MOST_EXCLUDED = 16
"""The most machines that an attempt avoids: if more are blamed, the machines are not the cause."""

_LONGEST_POSITION = 1 << 20  # characters; a thousand nodes have 60 kB
_MOST_RECORD = 8 << 20  # bytes; a config of a thousand corpus files has 100 kB
FIX = "check on the platform that the job does not run, then remove that file"

_END_FIX = "remove that file; the attempt's end is then queried from its platform"
_DIAGNOSIS_FIX = "remove that file; its attempt is then not counted"

T = TypeVar("T")
AttemptId: TypeAlias = tuple[str, int]
"""The run and the number of an attempt."""


class DamagedRecords(dict[str, str]):
    """The runs whose last record cannot be read, each with the reason."""

    def __str__(self) -> str:
        if not self:
            return ""
        return f"{len(self):,} records of the run index could not be read; the first: {self[min(self)]}"


class AttemptRecord(Settings):
    """One attempt as it was started. It holds no secret: a config only names them."""

    format: Literal[1] = 1
    run: str
    """`<name>-<run id>`."""
    name: str
    """The config's name."""
    run_id: str
    attempt: int
    nonce: str = Field(pattern="^[0-9a-f]{6}$")
    """A random part of the job's name on its platform, so that a deleted index never leads to the same name again."""
    sweep: str | None = None
    trial: str | None = None
    config: dict[str, JsonValue]
    platform: dict[str, JsonValue]
    """Only the `platform` section, so that a version that reads the config differently can still cancel the job."""
    job_id: JobId
    directory: str
    """Address of the attempt's logs and reports, below the root as it is mounted here."""
    root: str = Field("", exclude=True)
    """The root's address when the attempt was submitted; not stored by itself."""
    exclude_nodes: tuple[MachineName, ...] = Field((), max_length=MOST_EXCLUDED)
    """The machines that it avoids, because the diagnoses of earlier attempts blame them."""
    code: str | None = None
    """Address of the archive of the user's own code, named by its sha256; None if the image has all code."""
    flow_run: str | None = None
    user: str
    host: str
    machine: str
    """A stable id of the machine that submitted it, because host names change with the network."""
    created: Moment

    @property
    def nodes(self) -> int:
        nodes = self.platform.get("nodes")
        return nodes if isinstance(nodes, int) and nodes > 0 else 1

    @property
    def job_name(self) -> str:
        return attempt_name(self.run, self.attempt, self.nonce)


class AttemptEnd(Settings):
    """The end of an attempt, as its platform first reported it."""

    state: JobState
    native: str
    """The platform's own word."""
    seen: Moment
    scheduled: Moment | None = None
    pulled: Moment | None = None
    ended: Moment | None = None
    """The platform's times, as a JobStatus has them."""

    @property
    def status(self) -> JobStatus:
        return JobStatus(state=self.state, native=self.native)


class AttemptDiagnosis(Settings):
    """diagnosis.json of an attempt that ended badly: the leader's diagnosis, and what the restart budget counts."""

    format: Literal[1] = 1
    attempt: int
    code: str = ""
    fault: JobFault
    node: int | None = None
    rank: int | None = None
    host: str = ""
    """The node's machine by its platform's name, where it is known."""
    clear: bool = False
    """True if no other node can have been the cause."""
    before: int = Field(ge=0, le=2**53)
    """The step of the run's newest checkpoint when the attempt began; 0 without one, as for every script."""
    after: int = Field(ge=0, le=2**53)
    """The same when it had ended."""
    machine: MachineName | Literal[""] = ""
    """The host, if the end counts against it."""
    step: int | None = Field(None, ge=0, le=2**53)
    """The steps that were done when a GPU failed in the middle of its work; None for any other end."""
    flow_run: str | None = None
    """The outermost flow run that orchestrated the attempt. If it is resumed, it continues its count."""
    evidence: tuple[str, ...] = ()
    action: str = ""
    """The consequence of the failure class only; the run's budget may be used up."""
    advice: str = ""

    @property
    def progressed(self) -> bool:
        """True if the attempt committed a new checkpoint."""
        return self.after > self.before


@dataclass(frozen=True)
class Index:
    root: Storage

    @classmethod
    def of(cls, root: str) -> Index:
        return cls(open_storage(root))

    @property
    def _folder(self) -> Storage:
        return self.root.within(INDEX)

    def restrict_permissions(self, run: str) -> None:
        """Make the folders of the index and of a run; new ones are closed to other users of this machine."""
        for folder in (self._folder.local_path(), self.root.within(f"runs/{run}").local_path()):
            if folder is not None:
                with translate_os_errors(str(folder)):
                    make_private(folder)

    def create(self, record: AttemptRecord) -> bool:
        """Store a record unless its attempt has one; return whether this call has stored it."""
        return self._folder.create(f"{record.run}/{record.attempt}.json", _content(record))

    def records(self, run: str) -> list[AttemptRecord]:
        return self._read_all(self._record, self._attempts_of(run, ".json"))

    def last(self, run: str) -> AttemptRecord | None:
        """Return the last attempt of a run, None before the first. No other record is read."""
        attempts = self._attempts_of(run, ".json")
        if not attempts:
            return None
        return self._record(max(attempts))

    def newest(self, bad: DamagedRecords | None = None) -> list[AttemptRecord]:
        """Return the last attempt of every run of this root, the newest first; `bad` gets the damaged records."""
        attempts = _newest_of_each(_find_attempts(".json", self._folder.list()))
        return sorted(self._readable(attempts, bad), key=lambda record: record.created, reverse=True)

    def of_name(self, name: str, bad: DamagedRecords) -> list[AttemptRecord]:
        """Return every attempt of all runs of this name; `bad` gets the damaged records."""
        attempts = _find_attempts(".json", self._folder.list())
        return self._readable([attempt for attempt in attempts if _has_name(attempt, name)], bad)

    def unended(self, name: str, bad: DamagedRecords) -> list[AttemptRecord]:
        """Return the last attempt of each run of this name unless its end is recorded; `bad` gets the damaged
        records."""
        paths = self._folder.list()
        ended = set(_find_attempts(".ended.json", paths))
        newest = _newest_of_each(_find_attempts(".json", paths))
        return self._readable([attempt for attempt in newest if _has_name(attempt, name) and attempt not in ended], bad)

    def runs(self) -> list[str]:
        return [run for run, _ in _newest_of_each(_find_attempts(".json", self._folder.list()))]

    def record_end(self, record: AttemptRecord, status: JobStatus) -> None:
        """Store how an attempt ended, unless its end is recorded."""
        end = AttemptEnd(
            state=status.state, native=status.native, seen=time.time(), scheduled=status.scheduled,
            pulled=status.pulled, ended=status.ended,
        )  # fmt: skip
        self._folder.create(f"{record.run}/{record.attempt}.ended.json", _content(end))

    def end_of(self, record: AttemptRecord) -> AttemptEnd | None:
        with suppress(FileNotFoundError):
            return self._end((record.run, record.attempt))
        return None

    def ends(self, run: str) -> dict[int, AttemptEnd]:
        attempts = self._attempts_of(run, ".ended.json")
        ends = self._read_all(self._end, attempts)
        return {number: end for (_, number), end in zip(attempts, ends, strict=True)}

    def record_diagnosis(self, run: str, diagnosis: AttemptDiagnosis) -> bool:
        """Store why an attempt ended badly, unless another orchestrator has; return whether this call has stored it."""
        return self.root.create(_diagnosis_path(run, diagnosis.attempt), _content(diagnosis))

    def diagnoses_of_flow_run(self, run: str, flow_run: str | None) -> list[AttemptDiagnosis]:
        """Return the diagnoses of a run's attempts under this flow run, oldest first."""
        if not flow_run:
            return []
        return [diagnosis for diagnosis in self.diagnoses(run) if diagnosis.flow_run == flow_run]

    def diagnoses(self, run: str) -> list[AttemptDiagnosis]:
        """Return the diagnoses of all attempts of a run that ended badly, oldest first."""
        diagnoses = self._read_all(self._diagnosis, self._attempts_of(run, ".json"))
        return [diagnosis for diagnosis in diagnoses if diagnosis is not None]

    def save_log_position(self, record: AttemptRecord, position: str) -> None:
        """Store the position in an attempt's log up to which its lines are logged (LogPage)."""
        content = with_checksum(json.dumps({"position": position}, indent=1).encode(), "record")
        with suppress(TrainLitgptError):  # the lines are then logged again
            replace(self._folder, durable=False).write(f"{record.run}/{record.attempt}.read.json", content)

    def log_position(self, record: AttemptRecord) -> str:
        """Return the stored position in an attempt's log; empty, for the beginning, without one."""
        path = f"{record.run}/{record.attempt}.read.json"
        with suppress(FileNotFoundError, DataError):
            position = self._read(dict[str, str], path, fix="the log is read again").get("position", "")
            if len(position) <= _LONGEST_POSITION:
                return position
        return ""

    def request_cancel(self, name: str) -> str:
        """Request that the orchestrators of this run or sweep start nothing more of it; return the request's name."""
        request = f"cancel-{secrets.token_hex(8)}.json"
        self._folder.create(f"{name}/{request}", b"{}")
        return request

    def withdraw_cancel(self, name: str, request: str) -> None:
        self._folder.remove(f"{name}/{request}")

    def cancellations(self, name: str) -> frozenset[str]:
        """Return every request ever made. An orchestrator compares them with those that existed at its start."""
        return frozenset(path for path in self._folder.within(name).list() if path.startswith("cancel-"))

    def announce(self, run: str, what: str) -> bool:
        """Return whether this call is the first for this event of a run, because several orchestrators may emit it."""
        return self._folder.create(f"{run}/announced-{what}.json", b"{}")

    def link_flow_run(self, flow_runs: Iterable[str], record: AttemptRecord) -> None:
        for flow_run in flow_runs:
            self._folder.create(f"{_FLOW_RUNS}/{flow_run}/{record.run}/{record.attempt}.json", b"{}")

    def attempts_of_flow_run(self, flow_run: str) -> dict[str, int]:
        """Return the runs that a flow run has orchestrated, each with its last attempt under this flow run."""
        return dict(_newest_of_each(self.flow_runs_of_attempts(flow_run)))

    def flow_runs_of_attempts(self, flow_run: str = "") -> dict[AttemptId, tuple[str, ...]]:
        """Return the flow runs of every attempt by run and number; only the attempts of `flow_run`, if it is set."""
        folder = "/".join(filter(None, (_FLOW_RUNS, flow_run)))
        flow_runs: dict[AttemptId, tuple[str, ...]] = {}
        for path in self._folder.within(folder).list():
            match = _LINK.fullmatch(f"{folder}/{path}")
            if match:
                attempt = match["run"], int(match["attempt"])
                flow_runs[attempt] = (*flow_runs.get(attempt, ()), match["flow_run"])
        return flow_runs

    def _attempts_of(self, run: str, kind: str) -> list[AttemptId]:
        return _find_attempts(kind, [f"{run}/{path}" for path in self._folder.within(run).list()])

    def _readable(self, attempts: Iterable[AttemptId], bad: DamagedRecords | None) -> list[AttemptRecord]:
        def read(attempt: AttemptId) -> AttemptRecord | None:
            try:
                return self._record(attempt)
            except DataError as error:  # it must not stop a command for another run
                if bad is not None:
                    bad[attempt[0]] = str(error)
                return None

        return [record for record in self._read_all(read, attempts) if record is not None]

    def _read_all(self, read: Callable[[AttemptId], T], attempts: Iterable[AttemptId]) -> list[T]:
        with ThreadPoolExecutor(_READERS) as pool:
            return list(pool.map(read, attempts))

    def _end(self, attempt: AttemptId) -> AttemptEnd:
        run, number = attempt
        return self._read(AttemptEnd, f"{run}/{number}.ended.json", fix=_END_FIX)

    def _diagnosis(self, attempt: AttemptId) -> AttemptDiagnosis | None:
        path = _diagnosis_path(*attempt)
        try:
            content = self.root.read(path, most=_MOST_RECORD)
        except FileNotFoundError:
            return None
        diagnosis = parse_json(content, AttemptDiagnosis, where=self.root.address(path), fix=_DIAGNOSIS_FIX)
        if diagnosis.attempt != attempt[1]:
            raise DataError(f"{self.root.address(path)} is of attempt {diagnosis.attempt}", fix=_DIAGNOSIS_FIX)
        return diagnosis

    def _record(self, attempt: AttemptId) -> AttemptRecord:
        run, number = attempt
        path = f"{run}/{number}.json"
        record = self._read(AttemptRecord, path)
        if (record.run, record.attempt) != attempt:
            raise DataError(f"{self._folder.address(path)} is of attempt {record.attempt} of {record.run}", fix=FIX)
        folder = f"runs/{run}/{ATTEMPTS}/{number}"
        root = self._root_above(record.directory, folder)
        if root is None:
            what = f"{self._folder.address(path)} says that its logs and reports are in {record.directory!r}"
            raise DataError(f"{what}, but they are in {folder} of a root; {FIX}")
        # The root may have been moved, or be mounted elsewhere. Job ids that name the attempt's folder follow it.
        directory, job_id = self.root.address(folder), record.job_id
        job_id = JobId(job_id.replace(record.directory, directory))
        job_id = JobId(job_id.replace(quote(record.directory, safe="/:"), quote(directory, safe="/:")))
        return record.model_copy(update={"directory": directory, "job_id": job_id, "root": root})

    def _root_above(self, directory: str, folder: str) -> str | None:
        above, found, rest = directory.rpartition(folder)
        if not found or rest:
            return None
        try:
            return (open_storage(above) if above else self.root).address()
        except UserError:
            return None

    def _read(self, kind: type[T], path: str, *, fix: str = FIX) -> T:
        content = self._folder.read(path, most=_MOST_RECORD)
        return parse_json(content, kind, where=self._folder.address(path), fix=fix)


def _find_attempts(kind: str, paths: Iterable[str]) -> list[AttemptId]:
    pattern = re.compile(rf"([^/]+)/([0-9]{{1,9}}){re.escape(kind)}")
    matches = map(pattern.fullmatch, paths)
    return sorted([(match[1], int(match[2])) for match in matches if match])


def _newest_of_each(attempts: Iterable[AttemptId]) -> list[AttemptId]:
    newest = dict[str, int]()
    for run, number in attempts:
        newest[run] = max(number, newest.get(run, 0))
    return list(newest.items())


def _has_name(attempt: AttemptId, name: str) -> bool:
    return attempt[0].rpartition("-")[0] == name


def _diagnosis_path(run: str, attempt: int) -> str:
    return f"runs/{run}/{ATTEMPTS}/{attempt}/diagnosis.json"


def _content(value: Settings) -> bytes:
    return with_checksum(value.model_dump_json(indent=1).encode(), "record")


@cache
def this_machine() -> str:
    """Return an id of this machine that does not change with its host name."""
    return machine_below(Path("/"))


def machine_below(root: Path) -> str:
    """Return the id of the machine that has its files below a folder. Cloned machines share /etc/machine-id but have
    different names. Containers of one host share its boot id, and see each other's locks."""

    def text(path: str) -> str:
        with suppress(OSError):
            return (root / path).read_text().strip()
        return ""

    machine_id, node = text("etc/machine-id"), uuid.getnode()
    if any((root / mark).exists() for mark in (".dockerenv", "run/.containerenv", "run/secrets/kubernetes.io")):
        name = text("proc/sys/kernel/random/boot_id")
    elif re.fullmatch("[0-9a-f]{32}", machine_id):  # it may be "uninitialized" (machine-id(5))
        name = machine_id + text("etc/hostname")
    elif node >> 40 & 3:  # random in each process (RFC 9562, section 6.10), or made up by a virtual machine's host
        name = ""
    else:
        name = f"{node:x}"
    return sha256((name or socket.gethostname()).encode()).hexdigest()[:12]


def whoami() -> tuple[str, str]:
    return psutil.Process().username(), socket.gethostname()
