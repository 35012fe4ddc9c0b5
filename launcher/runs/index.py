"""The run index: every attempt that was ever started under a root, so that it is found again by name alone.

index/<run>/<attempt>.json                       what was started: created before the platform is asked, never changed
index/<run>/<attempt>.ended.json                 how it ended, created by the first who saw it
index/<run>/<attempt>.read.json                  up to where its log was handed on: the next orchestrator goes on there
index/<run>/lease/                               which orchestrator starts its attempts (launcher.runs.lease)
index/<run>/announced-<what>.json                an event was emitted that a run has once
index/<name>/cancel-<token>.json                 somebody asked for the run or sweep to end
index/flow-runs/<flow run>/<run>/<attempt>.json  a Prefect flow run that started this attempt, or took it up

All of them are small, and each but the place in the log is created once (Storage.create), so that two writers never
overwrite each other. So is the verdict on an attempt that ended badly, runs/<run>/attempts/<attempt>/verdict.json.
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
from functools import cache, partial
from hashlib import sha256
from pathlib import Path
from typing import Literal, TypeVar
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
_FLOW_RUNS = "flow-runs"  # no run's name: those end with a key
_FOLLOWED = re.compile(r"(?P<flow_run>[^/]+)/(?P<run>[^/]+)/(?P<attempt>[0-9]{1,9})\.json")
_READERS = 16  # small files read at once; a bucket takes 50 ms for each

MOST_EXCLUDED = 16
"""Machines that an attempt avoids at the most: where more are blamed, it is not the machines."""

_LONGEST_POSITION = 1 << 20  # characters; a thousand nodes have 60 kB
_MOST_RECORD = 8 << 20  # bytes; a config of a thousand corpus files has 100 kB
FIX = "whether its job runs cannot be known: look for the job on its platform, then remove that file"

_END_FIX = "remove that file; the platform is then asked how the attempt ended"
_VERDICT_FIX = "remove that file; its attempt is then not counted"

S = TypeVar("S")
T = TypeVar("T")


class DamagedRecords(dict[str, str]):
    """The runs whose last record nobody can read, each with what is wrong."""

    def __str__(self) -> str:
        return f"{len(self):,} records of the run index could not be read; one: {self[min(self)]}" if self else ""


class AttemptRecord(Settings):
    """One attempt as it was started. It holds no secret: a config only names them."""

    format: Literal[1] = 1
    run: str
    """`<name>-<key>`."""
    name: str
    """The config's name."""
    key: str
    attempt: int
    nonce: str = Field(pattern="^[0-9a-f]{6}$")
    """Part of the job's name on its platform, which does not come back when the index is deleted and made again."""
    sweep: str | None = None
    trial: str | None = None
    config: dict[str, JsonValue]
    platform: dict[str, JsonValue]
    """The `platform` section alone, so that a job can be cancelled by a version that reads the config otherwise."""
    job_id: JobId
    directory: str
    """Address of the attempt's logs and reports: below the root that it was read from, wherever that was when the
    attempt was submitted."""
    root: str = Field("", exclude=True)
    """The root's address when the attempt was submitted; not stored by itself."""
    exclude_nodes: tuple[MachineName, ...] = Field((), max_length=MOST_EXCLUDED)
    """The machines that it avoids, because earlier attempts blamed them."""
    code: str | None = None
    """Address of the archive of the user's own code, named by its sha256; None where the image has it all."""
    flow_run: str | None = None
    user: str
    host: str
    machine: str
    """A stable id of the machine that submitted it: host names change with the network."""
    created: Moment

    @property
    def nodes(self) -> int:
        """The number of nodes that it was submitted for."""
        nodes = self.platform.get("nodes")
        return nodes if isinstance(nodes, int) and nodes > 0 else 1

    @property
    def job_name(self) -> str:
        """The name of its job on its platform."""
        return attempt_name(self.run, self.attempt, self.nonce)


class AttemptEnd(Settings):
    """The end of an attempt, as its platform told it to the first who asked."""

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


class AttemptVerdict(Settings):
    """verdict.json of an attempt that ended badly: the leader's diagnosis, and what the restart budget counts."""

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
    """The steps that were done when a GPU stopped in the middle of the program's work; None for any other end."""
    flow_run: str | None = None
    """The outermost flow run that orchestrated the attempt: one that is resumed goes on with its count."""
    evidence: tuple[str, ...] = ()
    action: str = ""
    """What follows by the failure class alone; the run's budget may be used up."""
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
        """Make the folders of the index and of a run, closed to other users of this machine where they are new."""
        for folder in (self._folder.local_path(), self.root.within(f"runs/{run}").local_path()):
            if folder is not None:
                with translate_os_errors(str(folder)):
                    make_private(folder)

    def create(self, record: AttemptRecord) -> bool:
        """Write an attempt down unless that number is taken; return whether it is this one's."""
        return self._folder.create(f"{record.run}/{record.attempt}.json", _content(record))

    def records(self, run: str) -> list[AttemptRecord]:
        """Return every attempt of a run, oldest first."""
        return self._read_all(self._record, self._attempts(".json", run))

    def last(self, run: str) -> AttemptRecord | None:
        """Return the last attempt of a run, None before the first. No other is read."""
        numbered = self._attempts(".json", run)
        return self._record(numbers) if (numbers := max(numbered, default=None)) else None

    def newest(self, bad: DamagedRecords | None = None) -> list[AttemptRecord]:
        """Return the last attempt of every run of this root, the newest first; `bad` gets those that are damaged."""
        found = self._readable(_newest_of_each(self._attempts(".json")).items(), bad)
        return sorted(found, key=lambda record: record.created, reverse=True)

    def of_name(self, name: str, bad: DamagedRecords) -> list[AttemptRecord]:
        """Return every attempt of all runs of this name; `bad` gets the runs of those that are damaged."""
        return self._readable(_of_name(name, self._attempts(".json")), bad)

    def unended(self, name: str, bad: DamagedRecords) -> list[AttemptRecord]:
        """Return the last attempt of each run of this name, unless it is known to have ended; `bad` as in `newest`.

        That is one list of the index, and a read of each attempt that is returned.
        """
        paths = self._folder.list()
        ended = set(_numbered_paths(".ended.json", paths))
        last = _newest_of_each(_of_name(name, _numbered_paths(".json", paths))).items()
        return self._readable([attempt for attempt in last if attempt not in ended], bad)

    def runs(self) -> list[str]:
        """Return the name of every run, without reading what was written of it."""
        return list(_newest_of_each(self._attempts(".json")))

    def record_end(self, record: AttemptRecord, status: JobStatus) -> None:
        """Write down how an attempt ended, unless somebody has."""
        ended = AttemptEnd(
            state=status.state, native=status.native, seen=time.time(), scheduled=status.scheduled,
            pulled=status.pulled, ended=status.ended,
        )  # fmt: skip
        self._folder.create(f"{record.run}/{record.attempt}.ended.json", _content(ended))

    def end_of(self, record: AttemptRecord) -> AttemptEnd | None:
        """Return how an attempt ended, None where nobody saw it."""
        with suppress(FileNotFoundError):
            return self._read(AttemptEnd, f"{record.run}/{record.attempt}.ended.json", fix=_END_FIX)
        return None

    def ends(self, run: str) -> dict[int, AttemptEnd]:
        """Return how each attempt of a run ended, as far as somebody saw it."""
        return self._numbered(AttemptEnd, run, ".ended.json", _END_FIX)

    def record_verdict(self, run: str, verdict: AttemptVerdict) -> bool:
        """Store why an attempt ended badly, unless another orchestrator has; return whether this one did."""
        return self.root.create(_verdict_path(run, verdict.attempt), _content(verdict))

    def verdicts_of_flow_run(self, run: str, flow_run: str | None) -> list[AttemptVerdict]:
        """Return the attempts of a run that ended badly under this flow run, oldest first."""
        return [judged for judged in self.verdicts(run) if judged.flow_run == flow_run] if flow_run else []

    def verdicts(self, run: str) -> list[AttemptVerdict]:
        """Return all attempts of a run that ended badly, oldest first."""

        def read(number: int) -> AttemptVerdict | None:
            path = _verdict_path(run, number)
            try:
                content = self.root.read(path, most=_MOST_RECORD)
            except FileNotFoundError:
                return None
            verdict = parse_json(content, AttemptVerdict, where=self.root.address(path), fix=_VERDICT_FIX)
            if verdict.attempt != number:
                raise DataError(f"{self.root.address(path)} is of attempt {verdict.attempt}", fix=_VERDICT_FIX)
            return verdict

        verdicts = self._read_all(read, [number for _, number in self._attempts(".json", run)])
        return [verdict for verdict in verdicts if verdict is not None]

    def save_log_position(self, record: AttemptRecord, position: str) -> None:
        """Write down up to where an attempt's log was handed on, as its platform named the place (LogPage)."""
        place = with_checksum(json.dumps({"position": position}, indent=1).encode(), "record")
        with suppress(TrainLitgptError):  # the lines are then handed on again
            replace(self._folder, durable=False).write(f"{record.run}/{record.attempt}.read.json", place)

    def log_position(self, record: AttemptRecord) -> str:
        """Return that place; the beginning where nothing tells of one."""
        with suppress(FileNotFoundError, DataError):
            path = f"{record.run}/{record.attempt}.read.json"
            position = self._read(dict[str, str], path, fix="the log is read anew").get("position", "")
            return position if len(position) <= _LONGEST_POSITION else ""
        return ""

    def request_cancel(self, name: str) -> str:
        """Ask the orchestrators of this run or sweep to start nothing more of it; return the request."""
        request = f"cancel-{secrets.token_hex(8)}.json"
        self._folder.create(f"{name}/{request}", b"{}")
        return request

    def withdraw_cancel(self, name: str, request: str) -> None:
        self._folder.remove(f"{name}/{request}")

    def cancellations(self, name: str) -> frozenset[str]:
        """Return every such request ever made. An orchestrator compares them with those that it found at its start."""
        return frozenset(path for path in self._folder.within(name).list() if path.startswith("cancel-"))

    def announce(self, run: str, what: str) -> bool:
        """Return whether the caller is the first to announce this of a run: several orchestrators may come to it."""
        return self._folder.create(f"{run}/announced-{what}.json", b"{}")

    def link_flow_run(self, flow_runs: Iterable[str], record: AttemptRecord) -> None:
        """Note that these flow runs of Prefect's orchestrate an attempt."""
        for flow_run in flow_runs:
            self._folder.create(f"{_FLOW_RUNS}/{flow_run}/{record.run}/{record.attempt}.json", b"{}")

    def attempts_of_flow_run(self, flow_run: str) -> dict[str, int]:
        """Return the runs that a flow run has orchestrated, each with the last attempt that was this flow run's."""
        return _newest_of_each(self.flow_runs_of_attempts(flow_run))

    def flow_runs_of_attempts(self, flow_run: str = "") -> dict[tuple[str, int], tuple[str, ...]]:
        """Return the flow runs of every attempt by run and number; only the attempts of `flow_run`, if it is set."""
        found: dict[tuple[str, int], tuple[str, ...]] = {}
        for path in self._folder.within(f"{_FLOW_RUNS}/{flow_run}" if flow_run else _FLOW_RUNS).list():
            if which := _FOLLOWED.fullmatch(f"{flow_run}/{path}" if flow_run else path):
                attempt = which["run"], int(which["attempt"])
                found[attempt] = (*found.get(attempt, ()), which["flow_run"])
        return found

    def _attempts(self, kind: str, run: str = "") -> list[tuple[str, int]]:
        paths = [f"{run}/{path}" for path in self._folder.within(run).list()] if run else self._folder.list()
        return _numbered_paths(kind, paths)

    def _numbered(self, kind: type[T], run: str, name: str, fix: str) -> dict[int, T]:
        numbers = [number for _, number in self._attempts(name, run)]
        read = partial(self._read, kind, fix=fix)
        return dict(zip(numbers, self._read_all(read, [f"{run}/{number}{name}" for number in numbers]), strict=True))

    def _readable(self, those: Iterable[tuple[str, int]], bad: DamagedRecords | None) -> list[AttemptRecord]:
        def read(which: tuple[str, int]) -> AttemptRecord | None:
            try:
                return self._record(which)
            except DataError as error:  # it must not stop a verb that is about another run
                if bad is not None:
                    bad[which[0]] = str(error)
                return None

        return [record for record in self._read_all(read, those) if record is not None]

    def _read_all(self, read: Callable[[S], T], those: Iterable[S]) -> list[T]:
        with ThreadPoolExecutor(_READERS) as pool:
            return list(pool.map(read, those))

    def _record(self, which: tuple[str, int]) -> AttemptRecord:
        run, number = which
        record = self._read(AttemptRecord, path := f"{run}/{number}.json")
        if (record.run, record.attempt) != which:
            raise DataError(f"{self._folder.address(path)} is of attempt {record.attempt} of {record.run}", fix=FIX)
        place = f"runs/{run}/{ATTEMPTS}/{number}"
        own = self.root.address(place)
        above, found, rest = record.directory.rpartition(place)
        try:
            root = (open_storage(above) if above else self.root).address() if found and not rest else None
        except UserError:
            root = None
        if root is None:
            what = f"{self._folder.address(path)} says that its logs and reports are in {record.directory!r}"
            raise DataError(f"{what}, and they are in {place} of a root; {FIX}")
        # The root may have been moved, or be mounted elsewhere. Ids of jobs that are kept in the folder name it.
        job_id = record.job_id
        for there, here in ((record.directory, own), (quote(record.directory, safe="/:"), quote(own, safe="/:"))):
            job_id = JobId(job_id.replace(there, here))
        return record.model_copy(update={"directory": own, "job_id": job_id, "root": root})

    def _read(self, kind: type[T], path: str, *, fix: str = FIX) -> T:
        content = self._folder.read(path, most=_MOST_RECORD)
        return parse_json(content, kind, where=self._folder.address(path), fix=fix)


def _numbered_paths(kind: str, paths: Iterable[str]) -> list[tuple[str, int]]:
    pattern = re.compile(rf"([^/]+)/([0-9]{{1,9}}){re.escape(kind)}")
    return sorted([(found[1], int(found[2])) for path in paths if (found := pattern.fullmatch(path))])


def _newest_of_each(attempts: Iterable[tuple[str, int]]) -> dict[str, int]:
    """Return the last attempt of each run."""
    newest = dict[str, int]()
    for run, attempt in attempts:
        newest[run] = max(attempt, newest.get(run, 0))
    return newest


def _of_name(name: str, attempts: Iterable[tuple[str, int]]) -> list[tuple[str, int]]:
    return [(run, number) for run, number in attempts if run.rpartition("-")[0] == name]


def _verdict_path(run: str, attempt: int) -> str:
    return f"runs/{run}/{ATTEMPTS}/{attempt}/verdict.json"


def _content(value: Settings) -> bytes:
    return with_checksum(value.model_dump_json(indent=1).encode(), "record")


@cache
def this_machine() -> str:
    """Return an id of this machine that outlives the host names that networks give."""
    return machine_below(Path("/"))


def machine_below(root: Path) -> str:
    """Return the id of the machine that has its files below a folder.

    Machines that were cloned share /etc/machine-id, and have names of their own. In a container both are the image's,
    and the address of the network card is always the same. Containers of one host see each other's locks, and they
    share the kernel's id, which is a new one after a reboot.
    """

    def text(path: str) -> str:
        with suppress(OSError):
            return (root / path).read_text().strip()
        return ""

    known, node = text("etc/machine-id"), uuid.getnode()
    if any((root / mark).exists() for mark in (".dockerenv", "run/.containerenv", "run/secrets/kubernetes.io")):
        name = text("proc/sys/kernel/random/boot_id")
    elif re.fullmatch("[0-9a-f]{32}", known):  # it may be "uninitialized" (machine-id(5))
        name = known + text("etc/hostname")
    else:  # without a network card the number is another one in each process (RFC 9562, section 6.10)
        name = "" if node >> 40 & 3 else f"{node:x}"  # multicast, or made up by whoever runs this machine
    return sha256((name or socket.gethostname()).encode()).hexdigest()[:12]


def whoami() -> tuple[str, str]:
    """Return the user's name, its number where it has none, and the host's."""
    return psutil.Process().username(), socket.gethostname()
