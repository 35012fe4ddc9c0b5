"""The attempts of a run: the existing ones, the live one, and the next one, as the run index has them.

No run has two live jobs: a caller creates an attempt's record before it submits a job, and reattaches to a live one.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import Any, TypeAlias

from pydantic import TypeAdapter, ValidationError

from launcher.config import PlatformConfig, RunConfig, ScriptConfig
from launcher.errors import ConfigProblem, JobCancelled, PlatformRefused, PlatformUnreachable, RunIsLive
from launcher.events import Note, report
from launcher.images.identity import SoftwareIdentity
from launcher.images.settings import Image, PrebuiltImage
from launcher.job import Job, JobId, JobState, JobStatus, new_nonce
from launcher.platforms.base import Platform
from launcher.platforms.settings import PlatformSettings
from launcher.runs.code import CodeArchive
from launcher.runs.index import (
    FIX,
    INDEX,
    AttemptDiagnosis,
    AttemptEnd,
    AttemptRecord,
    DamagedRecords,
    Index,
    this_machine,
    whoami,
)
from launcher.runs.restarts import RestartPolicy, nodes_to_exclude
from launcher.runs.run import Run, Script
from litgpt_demo import timeouts
from litgpt_demo.data.dataset import PlannedDataset
from litgpt_demo.errors import DataError, TrainLitgptError, is_marked_no_retry
from litgpt_demo.runs import CONFIG, read_document
from litgpt_demo.storage import open_storage
from litgpt_demo.training import checkpoints

_REUSED = 600.0  # seconds
OpenPlatform: TypeAlias = Callable[[Mapping[str, Any]], Platform]
"""Opens the platform of a record's `platform` section."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt with its state: the recorded end, or its platform's answer."""

    record: AttemptRecord
    status: JobStatus

    @property
    def number(self) -> int:
        return self.record.attempt


def recorded_platform(section: Mapping[str, Any], trusted: PlatformSettings | None = None) -> Platform:
    """Open the platform of a record's `platform` section, which is not trusted (`open_recorded`). `trusted` is the
    section of the user's config."""
    try:
        settings: PlatformConfig = TypeAdapter(PlatformConfig).validate_python(section)
    except ValidationError as error:
        what = f"this version cannot read the platform that a job was submitted to ({error.errors()[0]['msg']})"
        raise ConfigProblem(what, fix="use the version that submitted it") from error
    return settings.open_recorded(trusted)


def platform_opener(trusted: PlatformSettings | None = None) -> OpenPlatform:
    """Return `recorded_platform` for a user's config. Each platform is reused for ten minutes, with its login and its
    connections: its address may change while a run continues for weeks."""
    opened, lock = dict[str, tuple[float, Platform]](), Lock()

    def open_platform(section: Mapping[str, Any]) -> Platform:
        key, now = json.dumps(section, sort_keys=True), time.monotonic()
        with lock:
            if key not in opened or now > opened[key][0] + _REUSED:
                opened[key] = now, recorded_platform(section, trusted)
            return opened[key][1]

    return open_platform


def has_begun(directory: str) -> bool:
    """Return whether an attempt was submitted: its folder then has more than the config that its creator wrote."""
    return any(path != CONFIG for path in open_storage(directory).list())


@dataclass(frozen=True, kw_only=True)
class Attempts:
    """All attempts of one run. A method that queries the platform raises PlatformUnreachable if it does not answer."""

    index: Index
    run: str
    """`<name>-<run id>`."""
    open_platform: OpenPlatform = field(default_factory=platform_opener)

    def records(self) -> list[AttemptRecord]:
        return self.index.records(self.run)

    def all(self) -> list[Attempt]:
        """Return every attempt with its state, oldest first. Those without a recorded end are queried."""
        ends = self.index.ends(self.run)
        return [self._with_status(record, ends.get(record.attempt)) for record in self.records()]

    def live(self) -> Attempt | None:
        """Return the live attempt, if one is: only the last can be."""
        last = self.last()
        if last is None or not last.status.state.is_live:
            return None
        return last

    def last(self) -> Attempt | None:
        record = self.index.last(self.run)
        if record is None:
            return None
        return self._with_status(record, self.index.end_of(record))

    def next(self) -> int:
        last = self.last()
        if last is None:
            return 1
        if last.status.state.is_live:
            return last.number
        return last.number + 1

    def cleanup_last_attempt(self) -> None:
        """Remove the remaining resources of the last attempt, if it was submitted and has ended: they must not compete
        with the next one."""
        last = self.last()
        if last is None or last.status.state.is_live or self.only_on_submit_host(last.record):
            return
        if last.status.state.is_final:  # its orchestrator may have died before it recorded the end
            self.index.record_end(last.record, last.status)
        if last.status.state.is_final or has_begun(last.record.directory):
            self.platform_of(last.record).cancel(last.record.job_id)

    def cancel(self, *, patience: float = 0.0) -> list[JobId]:
        """Cancel the live jobs, prove their end, and return them; the run's orchestrators start nothing more of it. If
        the platform refuses (the job is another user's), no request remains, which would end the run later."""
        request = self.index.request_cancel(self.run)
        try:
            return self.stop(patience=patience)
        except PlatformRefused:
            self.index.withdraw_cancel(self.run, request)
            raise

    def stop(self, *, patience: float = 0.0) -> list[JobId]:
        """Cancel the live jobs as `cancel` does, without a request to the run's orchestrators."""
        deadline, live = time.monotonic() + patience, dict[JobId, Attempt]()
        while True:
            try:
                live |= {attempt.record.job_id: attempt for attempt in self.all() if attempt.status.state.is_live}
                self.cleanup_last_attempt()
                for job_id, attempt in live.items():
                    self.platform_of(attempt.record).cancel(job_id)
                    cancelled = replace(attempt.status, state=JobState.CANCELLED, native="cancelled")
                    self.index.record_end(attempt.record, cancelled)
                return list(live)
            except PlatformUnreachable as error:
                if time.monotonic() > deadline or is_marked_no_retry(error):
                    raise
                time.sleep(min(3.0, patience))

    def remaining_resources(self) -> tuple[str, ...]:
        record = self.index.last(self.run)
        if record is None:
            return ()
        return self.platform_of(record).remaining_resources(record.job_id)

    def recorded_end(self, record: AttemptRecord) -> JobStatus | None:
        end = self.index.end_of(record)
        return None if end is None else end.status

    def _with_status(self, record: AttemptRecord, end: AttemptEnd | None) -> Attempt:
        if end is not None:
            return Attempt(record=record, status=end.status)
        return Attempt(record=record, status=self.platform_of(record).status(record.job_id))

    def only_on_submit_host(self, record: AttemptRecord) -> bool:
        """Return whether only the machine that submitted the attempt can query it, and this is another one."""
        return not self.open_platform(record.platform).is_remote_service and record.machine != this_machine()

    def platform_of(self, record: AttemptRecord) -> Platform:
        """Return the platform that an attempt was submitted to. A job id of another attempt, as in a forged record, is
        a DataError."""
        if self.only_on_submit_host(record):
            what = f"attempt {record.attempt} of {record.run} was started on {record.host}"
            fix = f"run the command on that machine; if it no longer exists, remove {INDEX}/{record.run} under the root"
            raise PlatformUnreachable(f"{what}, and only that machine can query it", fix=fix, no_retry=True)
        platform = self.open_platform(record.platform)
        if not platform.owns_job_id(record.job_id, attempt_name=record.job_name, directory=record.directory):
            what = f"the record of attempt {record.attempt} of {record.run} has the job id {record.job_id!r}"
            reason = f"which {platform.name} does not give to that attempt in {record.directory}"
            raise DataError(f"{what}, {reason}; {FIX}")
        return platform


def cancel_all(
    runs: Sequence[Attempts],
    *,
    log: Callable[[str], object],
    patience: float = timeouts.CANCELLATION,
    report_after: float = 30.0,
) -> tuple[list[str], list[TrainLitgptError]]:
    """Cancel the jobs of all these runs in parallel; return the runs whose jobs are proved to be cancelled, and the
    problems of the others. `log` gets what remains of a job after `report_after` seconds."""
    cancelled, problems = list[str](), list[TrainLitgptError]()
    with ThreadPoolExecutor(max_workers=max(1, len(runs))) as pool:
        futures = {pool.submit(attempts.cancel, patience=patience): attempts for attempts in runs}
        for future in wait(futures, timeout=report_after).not_done:
            attempts = futures[future]
            try:
                remaining = ", ".join(attempts.remaining_resources()) or "nothing"
            except TrainLitgptError as error:
                remaining = f"unknown ({error})"
            log(f"{attempts.run} is being cancelled, and these resources remain: {remaining}")
        for future, attempts in futures.items():
            try:
                if future.result():
                    cancelled.append(attempts.run)
            except TrainLitgptError as error:  # the others are cancelled all the same
                problems.append(error)
    return cancelled, problems


@dataclass(frozen=True, kw_only=True)
class JobHandle:
    """A config's job under a run's name: an orchestrator starts it or reattaches to it through this."""

    attempts: Attempts
    config: RunConfig | ScriptConfig
    platform: Platform
    make_job: Callable[[int], Job]
    progress: Callable[[], int] = lambda: 0
    """Returns the step of the run's newest committed checkpoint; 0 for a script, whose checkpoints are unknown."""
    seconds: Callable[[], float | None] = lambda: None
    """Returns the seconds after which a new attempt must save and leave; None without a limit. Raises LauncherError if
    the attempt is not worth its start."""
    prepare: Callable[[AttemptRecord], None] = lambda record: None
    """Writes the files that the nodes of an attempt read. Only the creator of the attempt calls it."""
    flow_runs: Sequence[str] = ()
    """The id of the Prefect flow run, then those of the flow runs that it belongs to."""

    @property
    def names(self) -> list[str]:
        return [name for name in (self.attempts.run, self.config.launch.sweep) if name]

    @property
    def orchestrator(self) -> str | None:
        """The outermost flow run, which keeps its id when a crashed orchestrator is resumed."""
        return self.flow_runs[-1] if self.flow_runs else None

    def job_of(self, record: AttemptRecord) -> Job:
        return replace(self.make_job(record.attempt), nonce=record.nonce, exclude_nodes=record.exclude_nodes)

    def job_as_rendered(self, number: int) -> Job:
        """Return the job of an attempt as it was started, or as it would be started now."""
        attempts = self.attempts
        for record in attempts.records():
            if record.attempt == number:
                return self.job_of(record)
        exclude = self.nodes_to_exclude(attempts.index.diagnoses(attempts.run))
        return replace(self.make_job(number), exclude_nodes=exclude)

    def nodes_to_exclude(self, diagnoses: Sequence[AttemptDiagnosis]) -> tuple[str, ...]:
        policy = RestartPolicy.of(self.config, self.attempts.run)
        return nodes_to_exclude(diagnoses, times=policy.settings.exclude_machine_after)

    def should_reattach(self, last: Attempt) -> bool:
        """Return whether the last attempt can continue: its job is live on the config's platform and writes
        under this root, or it was never submitted."""
        record = last.record
        if last.status.state.is_live:
            return not self._conflict(record)
        if last.status.state is not JobState.ABSENT or has_begun(record.directory):
            return False
        section = self.config.platform.model_dump(mode="json")
        return (record.directory, record.platform) == (self.make_job(last.number).directory, section)

    def require_replaceable(self, last: Attempt) -> None:
        """Raise RunIsLive for a live attempt without a reattach, unless `launch.if_running` cancels it."""
        if self.config.launch.if_running != "cancel":
            raise _run_is_live(last, self._conflict(last.record), fix="wait for it, or cancel it first (--replace)")

    def _conflict(self, record: AttemptRecord) -> str:
        if record.root != self.attempts.index.root.address():
            return f"it writes to {record.root}, from which this root was moved"
        if record.platform.get("kind") != self.config.platform.kind:
            return f"this config's platform is {self.config.platform.kind}"
        return ""

    def reattach_or_create(
        self, *, ended: int = 0, exclude: tuple[str, ...] = (), leads: Callable[[], bool] = lambda: True
    ) -> AttemptRecord | None:
        """Return the attempt to reattach to, or create the next one, which avoids the machines `exclude`. Nothing is
        submitted. Returns None if `leads` says that another process holds the lease by now. `ended` is the last attempt
        that has ended, even if its platform has forgotten it."""
        unknown = self.make_job(1).unknown
        if unknown:
            raise ConfigProblem(f"{self.attempts.run} can be inspected, but not started: {unknown}")
        index = self.attempts.index
        index.restrict_permissions(self.attempts.run)
        while True:
            last = self.attempts.last()
            is_current = last is not None and last.number > ended
            if last is not None and is_current and self.should_reattach(last):
                record = last.record
                if not last.status.state.is_live:
                    self.prepare(record)
                break
            if last is not None and is_current and last.status.state.is_live:
                self.require_replaceable(last)
                self.attempts.stop()
                continue
            first = number = max(last.number if last else 0, ended) + 1
            # If only the index was deleted, the folders still have the reports of earlier attempts.
            while has_begun(self.make_job(number).directory):
                number += 1
            record = self._record(number, exclude)
            newest = index.last(self.attempts.run)
            if record.attempt > first and newest is not None and newest.attempt >= first:
                continue  # another orchestrator has created an attempt meanwhile, in the folder that is used
            if not leads():
                return None
            if index.create(record):
                self.prepare(record)
                break
        index.link_flow_run(self.flow_runs, record)
        return record

    def _record(self, number: int, exclude: tuple[str, ...]) -> AttemptRecord:
        job = replace(self.make_job(number), nonce=new_nonce())
        user, host = whoami()
        return AttemptRecord(
            run=job.name,
            name=self.config.name,
            run_id=job.name.rpartition("-")[2],
            attempt=number,
            nonce=job.nonce,
            sweep=self.config.launch.sweep,
            trial=self.config.launch.trial,
            config=self.config.model_dump(mode="json"),
            platform=self.config.platform.model_dump(mode="json"),
            job_id=self.platform.render(job).job_id,
            directory=job.directory,
            exclude_nodes=exclude,
            code=job.code,
            flow_run=self.flow_runs[0] if self.flow_runs else None,
            user=user,
            host=host,
            machine=this_machine(),
            created=time.time(),
        )


def job_handle(run: Run | Script, *, steps: int | None = None) -> JobHandle:
    """Return the job handle of a planned run. If `steps` is set, checkpoints beyond it do not count as progress."""
    config = run.config

    def progress() -> int:
        if not isinstance(run, Run):
            return 0
        least = 2 * run.parameters  # bytes: a checkpoint has all weights in 16 bits or more
        return checkpoints.newest_step(run.storage, max_step=steps, min_bytes=least)

    open_platform = platform_opener(config.platform)
    return JobHandle(
        attempts=Attempts(index=Index(run.root), run=run.name, open_platform=open_platform),
        config=config,
        platform=open_platform(config.platform.model_dump(mode="json")),
        make_job=lambda number: run.job(attempt=number, image=known_image(config.image)),
        progress=progress,
    )


def script_of_flow_run(config: ScriptConfig, flow_run: str | None) -> Script | None:
    """Return the script that a flow run has started, None before that. A resumed flow run continues it, also if the
    folder that the config mounts has other code by now."""
    record = _started_by(config, flow_run) if config.code is not None else None
    if record is None or record.code is None:
        return None
    return Script(config=config, code=CodeArchive.stored(open_storage(config.root), record.code))


def run_of_flow_run(config: RunConfig, flow_run: str | None) -> Run | None:
    """Return the training that a flow run has started, None before that. A resumed flow run continues it, also if the
    corpus has changed or gone by now."""
    record = _started_by(config, flow_run)
    if record is None:
        return None
    spec = read_document(open_storage(config.root).within(f"runs/{record.run}")).training
    name = spec.dataset.rpartition("/")[2].removesuffix(f"-{spec.dataset_hash}")
    dataset = PlannedDataset(data=config.data, sources=(), tokenizer=None, name=name, content_hash=spec.dataset_hash)
    return Run(config=config, dataset=dataset, id=record.run_id, origin=spec.origin)


def _started_by(config: RunConfig | ScriptConfig, flow_run: str | None) -> AttemptRecord | None:
    if flow_run is None:
        return None
    index, started = Index.of(config.root), list[AttemptRecord]()
    for run, attempt in index.attempts_of_flow_run(flow_run).items():
        started += [record for record in index.records(run) if record.attempt == attempt]
    return max(started, key=lambda record: record.created, default=None)


class CancelWatch:
    """Detects requests to cancel a run or its sweep, even while no job of it is running."""

    def __init__(self, index: Index, names: Sequence[str]) -> None:
        self._index = index
        self._before = {name: index.cancellations(name) for name in names}

    def replace_live(self, attempts: Attempts) -> None:
        """Cancel the live job of a run that this orchestrator will start elsewhere, and end its other orchestrators."""
        request = attempts.index.request_cancel(attempts.run)
        self._before[attempts.run] = self._before.get(attempts.run, frozenset()) | {request}
        attempts.stop()

    def check(self) -> None:
        for name, before in self._before.items():
            if self._index.cancellations(name) - before:
                raise JobCancelled(f"{name} was cancelled; the same command continues from its last checkpoint")


def _run_is_live(live: Attempt, conflict: str, *, fix: str) -> RunIsLive:
    record = live.record
    job = f"{record.job_id} on {record.platform.get('kind')}, {live.status.native}, attempt {live.number}"
    started = f"started by {record.user} on {record.host}"
    return RunIsLive(f"{record.run} is already running ({job}, {started}), but {conflict}", fix=fix)


def resolve_name_conflicts(
    config: RunConfig | ScriptConfig,
    *,
    run: str = "",
    sweep: str | None = None,
    open_platform: OpenPlatform | None = None,
) -> DamagedRecords:
    """Refuse to start `run` if a job of the config's name is live, or cancel or keep it, as `launch.if_running` says.
    Trials of one sweep do not conflict. For a trial, damaged records are returned instead of raised."""
    sweep = config.launch.sweep or sweep
    index, bad = Index.of(config.root), DamagedRecords()
    if config.launch.if_running == "keep":
        return bad
    open_platform = open_platform or platform_opener(config.platform)
    for record in index.unended(config.name, bad):
        is_same_sweep = sweep is not None and record.sweep == sweep
        if record.run == run or is_same_sweep:
            continue
        attempts = Attempts(index=index, run=record.run, open_platform=open_platform)
        live = attempts.live()
        if live is None:
            continue
        if config.launch.if_running != "cancel":
            conflict = f"this config means {run or 'a sweep'}: its corpus, code, model or settings differ"
            fix = "cancel the old job first (--replace), or run both (--allow-duplicate)"
            raise _run_is_live(live, conflict, fix=fix)
        report(Note(what=f"cancelling {live.record.job_id} of {record.run}, a live job with this config's name"))
        attempts.cancel()
    bad.pop(run, None)
    if bad and sweep is None:
        raise DataError(bad[min(bad)])
    return bad


def recorded_software(work: Run | Script) -> SoftwareIdentity | None:
    """Return the software of the newest attempt; None if no record or config names it."""
    if isinstance(work, Run):
        software = read_document(work.storage).software
        return TypeAdapter(SoftwareIdentity).validate_python(software) if software else None
    image = known_image(work.config.image)
    return None if image is None else SoftwareIdentity(image=image, commit=None, dirty=False)


def known_image(image: Image) -> str | None:
    """Return the reference of an image that exists already; None for an image that is still to be built."""
    return image.reference if isinstance(image, PrebuiltImage) else None
