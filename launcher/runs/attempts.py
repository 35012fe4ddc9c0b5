"""Attempts of a run: which there are, which one lives, and which comes next. The run index decides, no key is computed.

A live job is never doubled: a caller that starts one claims its number in the index first, and takes up what lives.
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
    AttemptEnd,
    AttemptRecord,
    AttemptVerdict,
    DamagedRecords,
    Index,
    this_machine,
    whoami,
)
from launcher.runs.restarts import blamed
from launcher.runs.run import Run, Script
from litgpt_demo import timeouts
from litgpt_demo.data.dataset import PlannedDataset
from litgpt_demo.errors import DataError, TrainLitgptError, is_marked_no_retry
from litgpt_demo.runs import CONFIG, read_document
from litgpt_demo.storage import open_storage
from litgpt_demo.training import checkpoints

_KEPT = 600.0  # seconds
OpenPlatform: TypeAlias = Callable[[Mapping[str, Any]], Platform]
"""The `platform` section of a record to the platform."""


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One attempt, with its state as its platform tells it, or told it when it ended."""

    record: AttemptRecord
    status: JobStatus

    @property
    def number(self) -> int:
        return self.record.attempt


def recorded_platform(section: Mapping[str, Any], given: PlatformSettings | None = None) -> Platform:
    """Return the platform that a record's `platform` section means, as far as a record alone is believed.

    A ConfigProblem where this version does not know it, or it names a place where credentials are not sent unasked:
    `given` is the section of the config that the user gave.
    """
    try:
        settings: PlatformConfig = TypeAdapter(PlatformConfig).validate_python(section)
    except ValidationError as error:
        what = f"the platform that a job was submitted to cannot be read by this version ({error.errors()[0]['msg']})"
        raise ConfigProblem(what, fix="use the version that submitted it") from error
    return settings.open_recorded(given)


def opening_beside(given: PlatformSettings | None = None) -> OpenPlatform:
    """Return `recorded_platform` for who was given a config with this `platform` section, or none.

    Each section is opened once in ten minutes: a platform keeps its login, its connections and what it has just learned
    of its jobs, and its address may change while a run goes on for weeks.
    """
    opened, lock = dict[str, tuple[float, Platform]](), Lock()

    def open(section: Mapping[str, Any]) -> Platform:
        key, now = json.dumps(section, sort_keys=True), time.monotonic()
        with lock:
            if key not in opened or now > opened[key][0] + _KEPT:
                opened[key] = now, recorded_platform(section, given)
            return opened[key][1]

    return open


def has_begun(directory: str) -> bool:
    """Return whether an attempt was submitted: its folder then has more than the config that its claimant wrote."""
    return any(path != CONFIG for path in open_storage(directory).list())


@dataclass(frozen=True, kw_only=True)
class Attempts:
    """All attempts of one run. What asks for one raises PlatformUnreachable where that cannot be asked for."""

    index: Index
    run: str
    """`<name>-<key>`."""
    open: OpenPlatform = field(default_factory=opening_beside)

    def records(self) -> list[AttemptRecord]:
        """Return what was started, oldest first."""
        return self.index.records(self.run)

    def all(self) -> list[Attempt]:
        """Return every attempt with its state, oldest first; those that are not known to have ended are asked for."""
        ends = self.index.ends(self.run)
        return [self._with_status(record, ends.get(record.attempt)) for record in self.records()]

    def live(self) -> Attempt | None:
        """Return the attempt that runs, if one does: only the last can."""
        last = self.last()
        return last if last is not None and last.status.state.is_live else None

    def last(self) -> Attempt | None:
        """Return the last attempt with its state, None before the first."""
        record = self.index.last(self.run)
        if record is None:
            return None
        return self._with_status(record, self.index.end_of(record))

    def next(self) -> int:
        """Return the number of the attempt that runs, or else of the one to start."""
        last = self.last()
        return 1 if last is None else last.number if last.status.state.is_live else last.number + 1

    def sweep(self) -> None:
        """Remove what the last attempt may have left although it ended: it must not compete with the next one.

        One that never began is left alone: somebody may be about to submit it. So is one that is known to have ended
        on a machine that only itself can ask: what it left competes with nothing here.
        """
        last = self.last()
        if last is None or last.status.state.is_live or self.is_out_of_reach(last.record):
            return
        if last.status.state.is_final:  # its orchestrator may have died before it wrote that down
            self.index.record_end(last.record, last.status)
        if last.status.state.is_final or has_begun(last.record.directory):
            self.platform_of(last.record).cancel(last.record.job_id)

    def cancel(self, *, patience: float = 0.0) -> list[JobId]:
        """Cancel what lives, prove it, and return it; the orchestrator of the run starts nothing more of it.

        Every attempt that is not known to have ended is asked for, so that [] says that nothing runs. A platform that
        does not answer is asked again for `patience` seconds. One that refuses (the job is another user's) leaves no
        request behind, which would end the run where it next starts an attempt.
        """
        request = self.index.request_cancel(self.run)
        try:
            return self.stop(patience=patience)
        except PlatformRefused:
            self.index.withdraw_cancel(self.run, request)
            raise

    def stop(self, *, patience: float = 0.0) -> list[JobId]:
        """Cancel what lives, as `cancel` does, without a request to the run's orchestrators."""
        ends, live = time.monotonic() + patience, dict[JobId, Attempt]()
        while True:
            try:
                live |= {attempt.record.job_id: attempt for attempt in self.all() if attempt.status.state.is_live}
                self.sweep()
                for job_id, attempt in live.items():
                    self.platform_of(attempt.record).cancel(job_id)
                    cancelled = replace(attempt.status, state=JobState.CANCELLED, native="cancelled")
                    self.index.record_end(attempt.record, cancelled)
                return list(live)
            except PlatformUnreachable as error:
                if time.monotonic() > ends or is_marked_no_retry(error):
                    raise
                time.sleep(min(3.0, patience))

    def left(self) -> tuple[str, ...]:
        """Return what there is of the last attempt on its platform, in words."""
        records = self.records()
        return self.platform_of(records[-1]).remaining_resources(records[-1].job_id) if records else ()

    def recorded_end(self, record: AttemptRecord) -> JobStatus | None:
        """Return how an attempt ended for the first who saw it, None where nobody has written that down."""
        end = self.index.end_of(record)
        return None if end is None else end.status

    def _with_status(self, record: AttemptRecord, end: AttemptEnd | None) -> Attempt:
        if end is not None:
            return Attempt(record=record, status=end.status)
        return Attempt(record=record, status=self.platform_of(record).status(record.job_id))

    def is_out_of_reach(self, record: AttemptRecord) -> bool:
        """Return whether only another machine, which submitted the attempt, can ask for it."""
        return not self.open(record.platform).is_remote_service and record.machine != this_machine()

    def platform_of(self, record: AttemptRecord) -> Platform:
        """Return the platform that an attempt was submitted to.

        A DataError where the id of its job is another's, and would be shown or cancelled as this one's.
        """
        if self.is_out_of_reach(record):
            which = f"attempt {record.attempt} of {record.run} was started on {record.host}"
            fix = f"ask there; if that machine is gone for good, remove {INDEX}/{record.run} under the root"
            raise PlatformUnreachable(f"{which}, and only that machine knows of it", fix=fix, no_retry=True)
        platform = self.open(record.platform)
        if not platform.owns_job_id(record.job_id, attempt_name=record.job_name, directory=record.directory):
            what = f"the record of attempt {record.attempt} of {record.run} says that its job is {record.job_id!r}"
            where = f"on {platform.name}, kept in {record.directory}"
            raise DataError(f"{what}, which is not what that attempt is called {where}; {FIX}")
        return platform


def cancel_each(
    those: Sequence[Attempts],
    *,
    tell: Callable[[str], object],
    patience: float = timeouts.CANCELLATION,
    told: float = 30.0,
) -> tuple[list[str], list[TrainLitgptError]]:
    """Cancel the jobs of all these runs side by side: none is asked to end only when another has saved and gone.

    `tell` gets what is still there of a job that takes longer than `told` seconds to go. A platform that does not
    answer is asked again for `patience` seconds. Returns the runs of what was cancelled, with the proof that nothing of
    it is left, and the problems of the others.
    """
    cancelled, problems = list[str](), list[TrainLitgptError]()
    with ThreadPoolExecutor(max_workers=max(1, len(those))) as pool:
        asked = {pool.submit(attempts.cancel, patience=patience): attempts for attempts in those}
        for future in wait(asked, timeout=told).not_done:
            try:
                left = ", ".join(asked[future].left())
                there = f"still there: {left}" if left else "it is about to be gone"
            except TrainLitgptError as error:
                there = f"what is left of it cannot be listed now: {error}"
            tell(f"{asked[future].run} was asked to end; {there}")
        for future in asked:
            try:
                cancelled += [asked[future].run] if future.result() else []
            except TrainLitgptError as error:  # the others are cancelled all the same
                problems.append(error)
    return cancelled, problems


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A config's job under a run's name, which an orchestrator starts or takes up."""

    attempts: Attempts
    config: RunConfig | ScriptConfig
    platform: Platform
    make_job: Callable[[int], Job]
    progress: Callable[[], int] = lambda: 0
    """Returns the step of the run's newest committed checkpoint; 0 for a script, whose own are not known."""
    seconds: Callable[[], float | None] = lambda: None
    """Returns how long a new attempt may hold its machines before it has to save and leave; None for ever. A
    LauncherError where it had better not begin."""
    prepare: Callable[[AttemptRecord], None] = lambda record: None
    """Writes what the nodes of an attempt read, before it is submitted. The claimant calls it, and nobody else."""
    flow_runs: Sequence[str] = ()
    """The Prefect flow run's own id, then those of the flow runs that it belongs to."""

    @property
    def names(self) -> list[str]:
        """What a cancellation of this job may be asked for by: its run's name, or its sweep's."""
        return [name for name in (self.attempts.run, self.config.start.sweep) if name]

    @property
    def orchestrator(self) -> str | None:
        """The outermost flow run, which keeps its id when a crashed orchestrator is resumed."""
        return self.flow_runs[-1] if self.flow_runs else None

    def job_of(self, record: AttemptRecord) -> Job:
        """Return the job of an attempt as it was claimed: it avoids the machines that were known to be bad then."""
        return replace(self.make_job(record.attempt), nonce=record.nonce, exclude_nodes=record.exclude_nodes)

    def job_as_rendered(self, number: int) -> Job:
        """Return the job of an attempt as it was started, or with the machines that it would avoid if it was now."""
        attempts = self.attempts
        for record in attempts.records():
            if record.attempt == number:
                return self.job_of(record)
        return replace(self.make_job(number), exclude_nodes=self.blamed(attempts.index.verdicts(attempts.run)))

    def blamed(self, verdicts: Sequence[AttemptVerdict]) -> tuple[str, ...]:
        """Return the machines that these attempts blame often enough to be avoided."""
        config = self.config
        restarts = config.train.restarts if isinstance(config, RunConfig) else config.restarts
        return blamed(verdicts, times=restarts.exclude_after)

    def should_reattach(self, last: Attempt) -> bool:
        """Return whether the last attempt is this claim's to reattach to: its job lives on the config's platform and
        writes under this root, or it was claimed for that platform and never submitted."""
        record = last.record
        if last.status.state.is_live:
            return not self._conflict(record)
        if last.status.state is not JobState.ABSENT or has_begun(record.directory):
            return False
        section = self.config.platform.model_dump(mode="json")
        return (record.directory, record.platform) == (self.make_job(last.number).directory, section)

    def require_replaceable(self, last: Attempt) -> None:
        """Raise RunIsLive for a live attempt that the claim does not reattach to, unless `start.others` cancels it."""
        if self.config.start.others != "cancel":
            raise _run_is_live(last, self._conflict(last.record), fix="wait for it, or cancel it first (--cancel-old)")

    def _conflict(self, record: AttemptRecord) -> str:
        """Return why this claim cannot reattach to a live attempt of its run; empty if it can."""
        if record.root != self.attempts.index.root.address():
            return f"it writes to {record.root}, where this root was"
        if record.platform.get("kind") != self.config.platform.kind:
            return f"this config's platform is {self.config.platform.kind}"
        return ""

    def take(
        self, *, ended: int = 0, exclude: tuple[str, ...] = (), leads: Callable[[], bool] = lambda: True
    ) -> AttemptRecord | None:
        """Return the attempt to reattach to, or claim the next one, which avoids the machines `exclude`.

        Only the holder of the run's lease may call this. None where `leads` says that it is another's by now. The
        platform is not asked to start anything yet. `ended` is the last attempt that is over, though its platform may
        know nothing of it any more. A RunIsLive where one lives on another platform than the config's.
        """
        if unknown := self.make_job(1).unknown:
            raise ConfigProblem(f"{self.attempts.run} can be looked at, and not be started: {unknown}")
        index = self.attempts.index
        index.restrict_permissions(self.attempts.run)
        while True:
            last = self.attempts.last()
            if last is not None and last.number <= ended:
                last = None
            adopted = last is not None and self.should_reattach(last)
            if last is not None and last.status.state.is_live and not adopted:
                self.require_replaceable(last)
                self.attempts.stop()
                continue
            if last is not None and adopted:
                record, lives = last.record, last.status.state.is_live
            else:
                first = max(last.number if last else 0, ended) + 1
                record, lives = self._record(self._unused(first), exclude), False
                newest = index.last(self.attempts.run)
                if record.attempt > first and newest is not None and newest.attempt >= first:
                    continue  # another orchestrator has claimed an attempt since, whose folder was the used one
                if not leads():
                    return None
                if not index.create(record):
                    continue
            if not lives:
                self.prepare(record)
            index.link_flow_run(self.flow_runs, record)
            return record

    def _unused(self, number: int) -> int:
        """Return the first number from this one on whose folder is empty: where the index was deleted and the folders
        were not, reports of an earlier attempt must not pass for those of the new one."""
        while has_begun(self.make_job(number).directory):
            number += 1
        return number

    def _record(self, number: int, exclude: tuple[str, ...] = ()) -> AttemptRecord:
        job = replace(self.make_job(number), nonce=new_nonce())
        user, host = whoami()
        return AttemptRecord(
            run=job.name,
            name=self.config.name,
            key=job.name.rpartition("-")[2],
            attempt=number,
            nonce=job.nonce,
            sweep=self.config.start.sweep,
            trial=self.config.start.trial,
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


def claim_at(run: Run | Script, *, steps: int | None = None) -> Claim:
    """Return the claim on a run that is planned already: planning reads every file of a corpus, and all code.

    A training makes no progress beyond its `steps`, where they are known.
    """
    config = run.config

    def progress() -> int:
        if not isinstance(run, Run):
            return 0
        least = 2 * run.parameters  # bytes: a checkpoint has all weights in 16 bits or more
        return checkpoints.newest_step(run.storage, most=steps, least=least)

    open = opening_beside(config.platform)
    return Claim(
        attempts=Attempts(index=Index(run.root), run=run.name, open=open),
        config=config,
        platform=open(config.platform.model_dump(mode="json")),
        make_job=lambda number: run.job(attempt=number, image=known_image(config.image)),
        progress=progress,
    )


def script_of_flow_run(config: ScriptConfig, flow_run: str | None) -> Script | None:
    """Return the script that a flow run has started already, None before that: one that is resumed goes on with it.

    The folder that the config mounts may hold other code by now; a DataError where that code is not under the root.
    """
    record = _started_by(config, flow_run) if config.code is not None else None
    if record is None or record.code is None:
        return None
    return Script(config=config, code=CodeArchive.stored(open_storage(config.root), record.code))


def run_of_flow_run(config: RunConfig, flow_run: str | None) -> Run | None:
    """Return the training that a flow run has started already, None before that: one that is resumed goes on with it.

    The corpus may have changed or gone by now: it is not looked at, for the run's dataset is done.
    """
    if (record := _started_by(config, flow_run)) is None:
        return None
    spec = read_document(open_storage(config.root).within(f"runs/{record.run}")).training
    name = spec.dataset.rpartition("/")[2].removesuffix(f"-{spec.dataset_key}")
    dataset = PlannedDataset(data=config.data, sources=(), tokenizer=None, name=name, key=spec.dataset_key)
    return Run(config=config, dataset=dataset, key=record.key, origin=spec.origin)


def _started_by(config: RunConfig | ScriptConfig, flow_run: str | None) -> AttemptRecord | None:
    if flow_run is None:
        return None
    index = Index.of(config.root)
    followed = index.attempts_of_flow_run(flow_run).items()
    own = [record for run, attempt in followed for record in index.records(run) if record.attempt == attempt]
    return max(own, key=lambda record: record.created, default=None)


class CancelWatch:
    """Notices that somebody asked for a run or its sweep to end, also while no job of it lives to be cancelled."""

    def __init__(self, index: Index, names: Sequence[str]) -> None:
        self._index = index
        self._before = {name: index.cancellations(name) for name in names}

    def replace_live(self, attempts: Attempts) -> None:
        """Cancel the live job of a run that this orchestrator will start elsewhere. Its other orchestrators end; the
        request is none to this one."""
        request = attempts.index.request_cancel(attempts.run)
        self._before[attempts.run] = self._before.get(attempts.run, frozenset()) | {request}
        attempts.stop()

    def check(self) -> None:
        """Raise JobCancelled if a request has come since this watch began."""
        for name, before in self._before.items():
            if self._index.cancellations(name) - before:
                raise JobCancelled(f"{name} was cancelled; the same command goes on from its last checkpoint")


def _run_is_live(live: Attempt, conflict: str, *, fix: str) -> RunIsLive:
    record = live.record
    job = f"{record.job_id} on {record.platform.get('kind')}, {live.status.native}, attempt {live.number}"
    started = f"started by {record.user} on {record.host}"
    return RunIsLive(f"{record.run} is already running ({job}, {started}), but {conflict}", fix=fix)


def resolve_name_conflicts(
    config: RunConfig | ScriptConfig, *, run: str = "", sweep: str | None = None, open: OpenPlatform | None = None
) -> DamagedRecords:
    """A RunIsLive for a live job that has the config's name and is not `run`, unless `start.others` says otherwise.

    Trials of one sweep are not in each other's way, and are not asked for: each costs one read until it has ended. A
    PlatformUnreachable where it cannot be known whether a job lives; a DataError where its record is damaged. Of a
    sweep such a record stops nothing, and is returned.
    """
    others, sweep = config.start.others, config.start.sweep or sweep
    index, open = Index.of(config.root), open or opening_beside(config.platform)
    bad = DamagedRecords()
    for record in index.unended(config.name, bad) if others != "keep" else ():
        other = record.run
        if other == run or (sweep is not None and record.sweep == sweep):
            continue
        attempts = Attempts(index=index, run=other, open=open)
        if (live := attempts.live()) is None:
            continue
        if others != "cancel":
            conflict = f"this config means {run or 'a sweep'}: its corpus, code, model or settings differ"
            raise _run_is_live(live, conflict, fix="cancel the old job first (--cancel-old), or run both (--new)")
        report(Note(what=f"cancelling {live.record.job_id} of {other}, which has this config's name, and runs"))
        attempts.cancel()
    bad.pop(run, None)
    if bad and sweep is None:
        raise DataError(bad[min(bad)])
    return bad


def recorded_software(work: Run | Script) -> SoftwareIdentity | None:
    """Return the software of the newest attempt; None for a script whose image is not named by its config."""
    if isinstance(work, Run):
        return TypeAdapter(SoftwareIdentity).validate_python(read_document(work.storage).software)
    image = known_image(work.config.image)
    return None if image is None else SoftwareIdentity(image=image, commit=None, dirty=False)


def known_image(image: Image) -> str | None:
    """Return what is known of an image before the image step: the reference of one that is there already."""
    return image.reference if isinstance(image, PrebuiltImage) else None
