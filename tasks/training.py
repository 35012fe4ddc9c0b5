"""Step 4: a job on its platform, from submission to its end, attempt by attempt."""

from __future__ import annotations

import asyncio
import math
import re
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from prefect import get_run_logger
from prefect.runtime import flow_run

from launcher.checks import arithmetic
from launcher.checks.preflight import origin_problems
from launcher.errors import JobCancelled, JobFailed, JobRefused, LauncherError, PlatformRefused, PlatformUnreachable
from launcher.events import JobChanged, JobPhase, MetricsKnown, MetricsRow, Note, Output, Step, StepDone, StepStarted
from launcher.formatting import size_text
from launcher.images.identity import SoftwareIdentity
from launcher.job import JobState, JobStatus, LogLine
from launcher.reports.goodput import attempt_times, ledger
from launcher.runs.attempts import CancelWatch, JobHandle, job_handle
from launcher.runs.diagnosis import ADVICE, Diagnosis, diagnose
from launcher.runs.index import AttemptDiagnosis, AttemptRecord, Index
from launcher.runs.lease import HEARTBEAT_INTERVAL, POLL_INTERVAL, Lease
from launcher.runs.restarts import RestartPolicy, without_machine
from launcher.runs.run import Run, training_spec, write_config
from launcher.runs.waiting import follow, pause, read_logs, retry_until_reachable
from litgpt_demo import timeouts
from litgpt_demo.config import InitialWeights
from litgpt_demo.data.dataset import DatasetManifest
from litgpt_demo.documents import Unreadable
from litgpt_demo.errors import FailureClass, TrainLitgptError, UserError, one_line
from litgpt_demo.metrics import Row, damaged_lines, from_log_line
from litgpt_demo.runs import node_reports, read_metrics
from litgpt_demo.secrets import Cleaner
from litgpt_demo.storage import MANIFEST, open_storage
from litgpt_demo.training import checkpoints
from litgpt_demo.training.origins import fetch_initial_weights
from tasks.report import LINE, LiveArtifacts, show_diagnosis, show_state
from tasks.steps import emit, emit_milestone, opaque, report_unreadable, step_task, warn

T = TypeVar("T")

_TAIL = 200  # lines that are kept for the diagnosis
_LONGEST = 10_000  # characters of each; a line may have 4 MiB
_LONGEST_WHY = 4_000  # characters of a diagnosis in an event: Prefect refuses long ones
_LOGGED = 40  # lines of node 0 that Prefect's database gets in a minute: NCCL itself prints thousands
_MOST_PENDING = 20  # checkpoints of an attempt that do not exist or are not checked yet; further rows are ignored
_MOST_WARNINGS = 20  # that are reported of an attempt
# The warnings of the trainer and of a node's checks, behind the prefix that torchrun adds.
_WARNING = re.compile(r"(?:\[\w+\]:)?warning(?:: | \[)(?P<what>.+)")


@step_task(Step.TRAINING.task, retry=False)
async def train(
    run: Run, dataset: DatasetManifest, identity: SoftwareIdentity, *, on_row: Callable[[Row], None],
    watch: CancelWatch | None = None,
) -> None:  # fmt: skip
    """Train until the run's last checkpoint is committed, unless it is already; `on_row` gets each row of metrics."""
    spec = training_spec(run, dataset)
    platform = run.config.platform
    size = size_text(platform.nodes, platform.processes_per_node)
    emit(StepStarted(step=Step.TRAINING, what=f"{run.name}: {spec.steps} steps on {size} ({platform.kind})"))
    committed = await asyncio.to_thread(checkpoints.list_complete, run.storage)
    done = bool(committed) and checkpoints.reached_end(committed[0], spec)  # collection reads every byte of it
    if not done:
        metrics = await asyncio.to_thread(read_metrics, run.storage)
        needs = arithmetic.needs(run.config, vocab_size=dataset.vocab_size, metrics=metrics)
        if needs:
            spec = spec.model_copy(update={"train": needs.train})  # with the strategy that `auto` chooses
        if run.origin is not None:
            check = partial(_require_fit, run, dataset.vocab_size)
            weights = await asyncio.to_thread(fetch_initial_weights, run.origin, run.root, check)
            spec = spec.model_copy(update={"origin": weights})
        labels = {"litgpt-demo.dev/flow-run-id": str(flow_run.id or "none")}
        handle = replace(
            job_handle(run, steps=spec.steps),
            make_job=lambda attempt: run.job(attempt=attempt, image=identity.image, labels=labels),
            seconds=partial(_remaining_budget_seconds, run),
            prepare=lambda record: write_config(run, spec, identity, attempt=record.attempt),
        )
        step = max((manifest.step for manifest in committed), default=0)
        await run_job(handle, on_row=on_row, step=step, watch=watch)
        committed = await asyncio.to_thread(checkpoints.list_complete, run.storage)
    what = f"{spec.steps} steps"
    if committed and committed[0].step < spec.steps:
        what = f"{committed[0].step} of {what}, ended by train.max_time"
    emit(StepDone(step=Step.TRAINING, what=what, reused=done))


def _require_fit(run: Run, vocab_size: int, origin: InitialWeights) -> None:
    for finding in origin_problems(run, origin, vocab_size=vocab_size):
        raise UserError(finding.what, fix=finding.fix)


def _remaining_budget_seconds(run: Run) -> float | None:
    limit, platform = run.config.budget.max_usd, run.config.platform
    price = platform.price
    if limit is None or price is None:
        return None
    # Each attempt is booked at the price of its own machines, because the run may have moved since.
    spent = ledger(attempt_times(Index(run.root), run.name), read_metrics(run.storage)).usd
    per_hour = platform.nodes * price.usd
    seconds = (limit - spent) / per_hour * 3600 - platform.grace_period
    if seconds <= 0:
        needed = f"a start and {platform.grace_period} s to save (platform.grace_period)"
        costs = f"{needed} cost more at ${per_hour:,.2f} an hour"
        what = f"the budget is spent: {run.name} has cost ${spent:,.2f} of budget.max_usd={limit:g}, and {costs}"
        raise LauncherError(what, fix="raise budget.max_usd and run again: the run continues from its last checkpoint")
    return seconds


async def run_job(
    handle: JobHandle,
    *,
    on_row: Callable[[Row], None] = lambda row: None,
    step: int = 0,
    watch: CancelWatch | None = None,
) -> AttemptRecord:
    """Reattach to a job or start it, restart it as its policy says, and return the attempt that ended well. The
    orchestrator that holds the run's lease starts attempts, records their diagnoses and emits events; the others
    follow. A resumed flow run continues the count of attempts, a new command begins a new one. `step` is the run's
    newest checkpoint, 0 without one."""
    handle = replace(handle, flow_runs=flow_runs())
    attempts = handle.attempts
    if watch is None:
        watch = await asyncio.to_thread(CancelWatch, attempts.index, handle.names)
    last = await query_platform(handle, attempts.last)
    ended_before = 0
    if last is not None:
        ended_before = last.number if last.status.state.is_final else last.number - 1
        if last.status.state.is_live and not handle.should_reattach(last):
            handle.require_replaceable(last)
            await query_platform(handle, partial(watch.replace_live, attempts))
    diagnoses = await asyncio.to_thread(attempts.index.diagnoses_of_flow_run, attempts.run, handle.orchestrator)
    with Lease(attempts.index, attempts.run, flow_run=handle.orchestrator) as lease:
        orchestrator = _Orchestrator(
            handle=handle,
            lease=lease,
            watch=watch,
            policy=RestartPolicy.of(handle.config, attempts.run),
            on_row=on_row,
            diagnoses=diagnoses,
            newest_step=max((diagnosis.after for diagnosis in diagnoses), default=step),
            last_ended=max((diagnosis.attempt for diagnosis in diagnoses), default=0),
            ended_before=ended_before,
        )
        succeeded = None
        while succeeded is None:
            succeeded = await orchestrator.follow()
            if succeeded is None:
                succeeded = await orchestrator.lead()
        return succeeded


@dataclass(kw_only=True)
class _Orchestrator:
    """One orchestrator of a run: it leads while it holds the lease, and follows while another one does."""

    handle: JobHandle
    lease: Lease
    watch: CancelWatch
    policy: RestartPolicy
    on_row: Callable[[Row], None]
    diagnoses: list[AttemptDiagnosis]
    """The attempts that count, oldest first."""
    newest_step: int
    """The newest checkpoint before the current attempt."""
    last_ended: int
    """The last attempt that is known to have ended."""
    ended_before: int
    """The last attempt that had ended before this orchestrator began. If a later one ended well, the run has."""
    diagnosis: Diagnosis | None = None
    """The diagnosis of `last_ended`, if this orchestrator has followed that attempt to a bad end."""

    async def follow(self) -> AttemptRecord | None:
        """Follow the leader's attempts until this orchestrator has the lease, and return None then; or return an
        attempt that ended well. Nothing is created, recorded or cancelled."""
        handle, attempts = self.handle, self.handle.attempts
        is_waiting = False
        while not await self._try_to_lead(unless_stopped_after=self.last_ended if self.diagnosis else 0):
            last = await query_platform(handle, attempts.last)
            is_next = last is not None and last.number > self.last_ended and last.status.state.is_live
            if last is not None and is_next and handle.should_reattach(last):
                await asyncio.to_thread(attempts.index.link_flow_run, handle.flow_runs, last.record)
                _emit_job_changed(handle, last.record, "started")
                emit(Note(what=f"{self._leader} leads {last.record.job_name}; this orchestrator follows"))
                if await self._await(last.record):
                    return last.record
                continue
            if self.diagnosis is not None and await asyncio.to_thread(self.lease.stopped_after, self.last_ended):
                raise JobFailed(str(self.diagnosis), fault=self.diagnosis.fault)
            if not is_waiting:
                is_waiting = True
                emit(Note(what=f"{attempts.run} is orchestrated by {self._leader}; this orchestrator follows"))
            await asyncio.to_thread(self.watch.check)
            await asyncio.sleep(POLL_INTERVAL)
        last = await query_platform(handle, attempts.last)
        is_new = last is not None and last.number > max(self.last_ended, self.ended_before)
        if last is not None and is_new and last.status.state is JobState.SUCCEEDED:
            return last.record
        return None

    async def lead(self) -> AttemptRecord | None:
        """Start attempts and record their diagnoses until one ends well, and return it; None if another orchestrator
        has the lease by now."""
        if self.lease.inherited is not None:
            attempts = self.handle.attempts
            inherited = await asyncio.to_thread(
                attempts.index.diagnoses_of_flow_run, attempts.run, self.lease.inherited
            )
            known = {diagnosis.attempt for diagnosis in self.diagnoses}
            self.diagnoses += [diagnosis for diagnosis in inherited if diagnosis.attempt not in known]
            self.diagnoses.sort(key=lambda diagnosis: diagnosis.attempt)
        while True:
            if self.diagnosis is not None:
                await self._conclude(self.diagnosis)
            await self._wait_before_next()
            record = await self._start_next()
            if record is None:
                return None
            if await self._await(record):
                return record
            if not await self._try_to_lead(unless_stopped_after=self.last_ended):
                return None

    async def _try_to_lead(self, *, unless_stopped_after: int) -> bool:
        return await asyncio.to_thread(self.lease.take, unless_stopped_after=unless_stopped_after)

    async def _conclude(self, diagnosis: Diagnosis) -> None:
        attempts, number = self.handle.attempts, self.last_ended
        diagnosis = without_machine(diagnosis, [earlier for earlier in self.diagnoses if earlier.attempt != number])
        is_new = False
        if number not in {counted.attempt for counted in self.diagnoses}:
            recorded = await _record_of(self.handle, diagnosis, attempt=number, before=self.newest_step)
            is_new = await asyncio.to_thread(attempts.index.record_diagnosis, attempts.run, recorded)
            self.diagnoses.append(recorded)
        decision = self.policy.decide(self.diagnoses)
        self.newest_step = max(self.newest_step, self.diagnoses[-1].after)
        self.diagnosis = None
        if is_new:
            why = str(diagnosis)[:_LONGEST_WHY]
            facts = {"outcome": diagnosis.code, "why": why, "again": decision.wait is not None}
            emit_milestone("attempt.ended", attempts.run, attempts.index.root.address(), attempt=number, **facts)
        if decision.wait is None:
            if decision.why:
                emit(Note(what=decision.why, severity="error"))
            await asyncio.to_thread(self.lease.release, stopped=number)
            raise JobFailed(str(diagnosis), fault=diagnosis.fault)
        warn(f"attempt {number} ended: {diagnosis}")
        if diagnosis.fault is FailureClass.PREEMPTED:
            await show_state("Preempted")

    async def _wait_before_next(self) -> None:
        attempts = self.handle.attempts
        decision = self.policy.decide(self.diagnoses)
        if not decision.wait:
            return
        newest = await asyncio.to_thread(attempts.index.last, attempts.run)
        if newest is None or newest.attempt <= self.last_ended:  # the index may have been deleted
            warn(f"waiting {decision.wait:.0f} s before attempt {self.last_ended + 1}: {decision.why}")
            await pause(decision.wait, look=self.watch.check)

    async def _start_next(self) -> AttemptRecord | None:
        handle, attempts = self.handle, self.handle.attempts
        await query_platform(handle, attempts.cleanup_last_attempt)
        await asyncio.to_thread(self.watch.check)
        exclude = await query_platform(handle, partial(_nodes_to_exclude, handle))
        # A preempted node may leave no trace: `ended` keeps the number of its attempt from being reused.
        take = partial(handle.reattach_or_create, ended=self.last_ended, exclude=exclude, leads=self.lease.take)
        record = await query_platform(handle, take)
        if record is None or not await submit_job(opaque(handle), record, opaque(self.lease)):
            return None
        try:
            await asyncio.to_thread(self.watch.check)
        except JobCancelled:  # the request came before the platform knew the job, so that there was nothing to cancel
            await query_platform(handle, attempts.stop)
            raise
        return record

    async def _await(self, record: AttemptRecord) -> bool:
        diagnosis = await await_job(opaque(self.handle), record, self.on_row, opaque(self.lease))
        if diagnosis is None:
            return True
        self.last_ended, self.diagnosis = record.attempt, diagnosis
        return False

    @property
    def _leader(self) -> str:
        return str(self.lease.holder or "another process")


async def _record_of(handle: JobHandle, diagnosis: Diagnosis, *, attempt: int, before: int) -> AttemptDiagnosis:
    return AttemptDiagnosis(
        attempt=attempt,
        code=diagnosis.code,
        fault=diagnosis.fault,
        node=diagnosis.node,
        rank=diagnosis.rank,
        host=diagnosis.host,
        clear=diagnosis.clear,
        before=before,
        after=await asyncio.to_thread(handle.progress),
        machine=diagnosis.machine,
        step=diagnosis.step,
        flow_run=handle.orchestrator,
        evidence=diagnosis.lines,
        action=diagnosis.action,
        advice=ADVICE[diagnosis.fault],
    )


def _nodes_to_exclude(handle: JobHandle) -> tuple[str, ...]:
    diagnoses = handle.attempts.index.diagnoses(handle.attempts.run)
    machines = handle.nodes_to_exclude(diagnoses)
    if not machines:
        return ()
    most, fix = handle.platform.max_excluded_nodes(handle.make_job(diagnoses[-1].attempt + 1))
    excluded = machines[:most]
    reported = handle.nodes_to_exclude(diagnoses[:-1])
    for machine in machines:
        numbers = ", ".join(str(diagnosis.attempt) for diagnosis in diagnoses if diagnosis.machine == machine)
        blame = f"machine {machine} caused the ends of attempts {numbers}"
        if machine in excluded:
            warn(f"{blame}; the next attempt avoids it")
        elif machine not in reported and not handle.config.platform.on_this_machine:
            warn(f"{blame}, but {handle.platform.name} cannot avoid it: {fix}")
    return excluded


async def query_platform(handle: JobHandle, query: Callable[[], T]) -> T:
    """Return the answer of a handle's platform, which is queried again while it does not answer."""
    about = f"{handle.attempts.run} on {handle.platform.name}"
    return await retry_until_reachable(query, about=about, on_silence=_warn_of_silence)


def _warn_of_silence(error: LauncherError) -> None:
    warn(f"{error}; waiting for an answer, while the job continues")


def flow_runs() -> list[str]:
    """Return the ids of this flow run and of the outermost one that it belongs to, as a sweep's trial does."""
    ids = [flow_run.id, flow_run.root_flow_run_id]
    return [str(known) for known in dict.fromkeys(ids) if known]


@step_task("submit-job", run_name="submit attempt {record.attempt}", retry=False)
async def submit_job(handle: JobHandle, record: AttemptRecord, lease: Lease) -> bool:
    """Submit the attempt unless its job exists; return False if another orchestrator has the lease by now."""
    job = handle.job_of(record)
    platform = handle.attempts.open_platform(record.platform)

    def submit() -> bool:  # it emits from its own thread, which continues when this task is cancelled
        seconds = handle.seconds()
        limit = () if seconds is None else ("--seconds", f"{seconds:.0f}")
        if not lease.take():
            return False
        _emit_job_changed(handle, record, "submitting")
        handle.platform.submit(handle.platform.render(replace(job, program=(*job.program, *limit))))
        _emit_job_changed(handle, record, "started")
        return True

    async def is_live() -> bool:
        status = await query_platform(handle, partial(platform.status, record.job_id))
        return status.state.is_live

    size = size_text(record.nodes, job.processes)
    if await is_live():
        _emit_job_changed(handle, record, "started")
        emit(Note(what=f"reattached to {record.job_name} on {platform.name}: {size}"))
        return True
    try:
        if not await query_platform(handle, submit):
            return False
    except PlatformRefused as error:
        if not await is_live():  # otherwise another orchestrator was faster
            # The attempt is over, so that `status` shows the reason, and no time is booked on it.
            refused = JobStatus(state=JobState.FAILED, native=f"refused: {one_line(error)}")
            await asyncio.to_thread(handle.attempts.index.record_end, record, refused)
            emit_milestone("attempt.ended", job.name, job.root, attempt=job.attempt, outcome="refused", again=False)
        raise
    emit_milestone("run.started", job.name, job.root, attempt=job.attempt, platform=platform.name)
    emit(Note(what=f"submitted {record.job_name} on {platform.name}: {size}"))
    return True


def _emit_job_changed(handle: JobHandle, record: AttemptRecord, phase: JobPhase) -> None:
    root, platform = handle.config.root, handle.config.platform
    job, run, sweep = record.job_id, record.run, record.sweep
    emit(JobChanged(phase=phase, run=run, sweep=sweep, root=root, job_id=job, platform=platform))


@step_task("await-job", run_name="run attempt {record.attempt}", retry=False)
async def await_job(
    handle: JobHandle, record: AttemptRecord, on_row: Callable[[Row], None], lease: Lease
) -> Diagnosis | None:
    """Follow the attempt to its end; return None if it ended well, and its diagnosis otherwise. If the platform stays
    silent, the job is not changed. Events are emitted while the lease is held."""
    platform, job_id, index = handle.attempts.open_platform(record.platform), record.job_id, handle.attempts.index
    root = index.root.address()
    # The lines that an earlier orchestrator has logged are not logged again.
    position = await asyncio.to_thread(index.log_position, record)
    if position:
        try:
            with suppress(PlatformUnreachable):
                await asyncio.to_thread(platform.logs, job_id, position)
        except ValueError:  # another program has written it: the log is read from its beginning
            position = ""
    async with LiveArtifacts(record.run) as live, _take_over_lease(lease, record.attempt):
        router = LogRouter(record, root, live, on_row, leads=lambda: lease.is_held)
        if position:
            router.replay_metrics(await asyncio.to_thread(read_metrics, index.root.within(f"runs/{record.run}")))

        def on_position(position: str) -> None:
            router.announce_checkpoints()
            index.save_log_position(record, position)

        refused = None
        try:
            status = await follow(
                platform,
                job_id,
                on_lines=router.on_lines,
                on_status=router.on_status,
                on_silence=_warn_of_silence,
                poll=platform.poll_seconds,
                position=position,
                on_position=on_position,
                recorded=partial(handle.attempts.recorded_end, record),
            )
        except JobRefused as error:  # its nodes are cancelled: the job would start unwatched
            native, refused = "refused by its platform", error
            status = JobStatus(state=JobState.FAILED, native=native, has_running_nodes=True)
    router.flush_log()
    report_unreadable(router.damaged)
    if status.has_running_nodes and lease.is_held:
        await query_platform(handle, partial(platform.cancel, job_id))
    await asyncio.to_thread(index.record_end, record, status)
    _emit_job_changed(handle, record, "ended")
    if lease.is_held and (refused is not None or status.state in {JobState.SUCCEEDED, JobState.CANCELLED}):
        end = status.state if refused is None else "refused"
        emit_milestone("attempt.ended", record.run, root, attempt=record.attempt, outcome=end, again=False)
    if refused is not None:
        raise refused
    if status.state is JobState.SUCCEEDED:
        return None
    if status.state is JobState.CANCELLED:
        raise JobCancelled(f"{record.job_name} was cancelled; the same command continues from its last checkpoint")
    if position:  # the lines before it may have the cause
        router.tail.clear()
        with suppress(PlatformUnreachable):  # the nodes' reports say most
            await read_logs(platform, job_id, on_lines=router.append_tail)
    bad = Unreadable("nodes' reports")
    reports = await asyncio.to_thread(node_reports, open_storage(record.directory), bad)
    report_unreadable(bad)
    diagnosis = diagnose(status, reports, router.tail, logs=record.directory, nodes=record.nodes)
    await show_diagnosis(diagnosis, attempt=record.job_name)
    return diagnosis


@asynccontextmanager
async def _take_over_lease(lease: Lease, attempt: int) -> AsyncIterator[None]:
    """Take the lease once its holder is gone, while an attempt is followed: otherwise none would emit its events."""

    async def retry() -> None:
        while True:
            if not lease.is_held:
                with suppress(TrainLitgptError):
                    await asyncio.to_thread(lease.take, unless_stopped_after=attempt)
            await asyncio.sleep(HEARTBEAT_INTERVAL)

    retrying = asyncio.create_task(retry())
    try:
        yield
    finally:
        retrying.cancel()
        await asyncio.gather(retrying, return_exceptions=True)


class LogRouter:
    """Routes a job's output: metrics to live artifacts and `on_row`, warnings to notes, the newest other lines of node
    0 to Prefect's log. The run's folder has all."""

    def __init__(
        self, record: AttemptRecord, root: str, live: LiveArtifacts, on_row: Callable[[Row], None], *,
        leads: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._record, self._root, self._leads = record, root, leads
        self._live, self._on_row, self._logger = live, on_row, get_run_logger()
        self._clean = Cleaner()
        self._status: JobStatus | None = None
        # A bucket that does not answer must not delay the log for as long as a step may wait for it.
        self._run = replace(open_storage(root).within(f"runs/{record.run}"), patience=timeouts.INTERACTIVE)
        self._unannounced, self._announced, self._missing = dict[int, float | None](), set[int](), 0
        self._losses = dict[int, float]()  # of the steps since the last checkpoint
        self.tail: deque[LogLine] = deque(maxlen=_TAIL)
        self.damaged = damaged_lines()
        self._warned: set[str] = set()
        self._unlogged: deque[str] = deque(maxlen=_LOGGED)
        self._dropped, self._logged_at = 0, -math.inf

    def on_status(self, status: JobStatus) -> None:
        """Report new reasons of the job's wait, and its restarts and starts; JobRefused if it waits in vain."""
        name, previous, self._status = self._record.job_name, self._status, status
        is_waiting = status.state is JobState.PENDING
        self._live.queued = is_waiting
        if previous is None or previous.state is not status.state:
            self._live.revision += 1
        for reason in status.reasons:
            if previous is None or reason not in previous.reasons:
                warn(f"{name} waits: {reason}" if is_waiting else f"{name}: {reason}")
        if status.refused is not None:
            what, fix = status.refused.what, status.refused.fix
            raise JobRefused(f"the platform keeps refusing {name}, so the job was cancelled: {what} -> {fix}")
        if previous is not None and status.restarts > previous.restarts:
            warn(f"its platform restarted {name}: {status.native}")
        begins = previous is None or previous.state is JobState.PENDING
        # At first sight the platform's words are reported only if they say more than the state: Slurm's have a number.
        if begins and status.state is JobState.RUNNING and status.native.lower() != status.state:
            emit(Note(what=f"{name} runs: {status.native}"))

    def replay_metrics(self, rows: Sequence[Row]) -> None:
        """Add the rows that an earlier orchestrator has reported to the curve, without reporting them again."""
        emit(MetricsKnown(rows=rows))
        for row in rows:
            self._live.add(row)
            self._on_row(row)

    def append_tail(self, lines: Iterable[LogLine]) -> None:
        """Add lines that were logged before to the tail."""
        for line in lines:
            if from_log_line(line.text) is None:
                self.tail.append(replace(line, text=line.text[:_LONGEST]))

    def on_lines(self, lines: Iterable[LogLine]) -> None:
        for line in lines:
            row = from_log_line(line.text, self.damaged)
            if row is None:
                self._on_text(line)
            else:
                self._on_metrics(row)
        if time.monotonic() > self._logged_at + LINE:
            self.flush_log()

    def _on_metrics(self, row: Row) -> None:
        emit(MetricsRow(row=row))
        self._live.add(row)
        self._on_row(row)
        step = row["step"]
        if "loss" in row:
            self._losses[step] = row["loss"]
        if row["kind"] != "checkpoint":
            return
        # The row arrives after the save, when further steps are done: the loss is that of the saved step.
        loss = None
        for earlier in [earlier for earlier in self._losses if earlier <= step]:
            loss = self._losses.pop(earlier)
        pending = len(self._unannounced) + self._missing
        if self._leads() and step not in self._announced and pending < _MOST_PENDING:
            self._unannounced[step] = loss

    def _on_text(self, line: LogLine) -> None:
        clean = replace(line, text=self._clean(line.text))
        short = replace(clean, text=clean.text[:_LONGEST])
        self.tail.append(short)
        warning = _WARNING.match(short.text)
        if warning and self._count_warning(warning["what"]):
            warn(str(short))
            return
        emit(Output(line=str(clean)))
        if line.node == 0:
            if len(self._unlogged) == _LOGGED:
                self._dropped += 1
            self._unlogged.append(str(short))

    def announce_checkpoints(self) -> None:
        """Emit an event for each new checkpoint that exists: any program can print such a row. It reads the storage."""
        for step, loss in [*self._unannounced.items()]:
            try:
                exists = self._run.exists(f"{checkpoints.folder_of(step)}/{MANIFEST}")
            except TrainLitgptError:
                return  # the next lines repeat it
            del self._unannounced[step]
            if exists:
                self._announced.add(step)
                emit_milestone("checkpoint.committed", self._record.run, self._root, step=step, loss=loss)
            else:
                self._missing += 1

    def _count_warning(self, warning: str) -> bool:
        if warning in self._warned or len(self._warned) > _MOST_WARNINGS:
            return False
        self._warned.add(warning)
        if len(self._warned) <= _MOST_WARNINGS:
            return True
        warn("the job prints more warnings, which are only in its logs")
        return False

    def flush_log(self) -> None:
        """Log the waiting lines in Prefect as one record, because Prefect's cost is per record."""
        if not self._unlogged:
            return
        lines = [*self._unlogged]
        if self._dropped:
            lines.insert(0, f"({self._dropped:,} more lines are in the run's folder)")
        self._logger.info("\n".join(lines))
        self._unlogged.clear()
        self._dropped, self._logged_at = 0, time.monotonic()
