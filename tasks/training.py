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
from launcher.images.identity import SoftwareIdentity
from launcher.job import JobState, JobStatus, LogLine
from launcher.reports.goodput import attempt_times, ledger
from launcher.runs.attempts import CancelWatch, Claim, claim_at
from launcher.runs.diagnosis import ADVICE, Verdict, diagnose
from launcher.runs.index import AttemptRecord, AttemptVerdict, Index
from launcher.runs.lease import BEAT, LOOK, Lease
from launcher.runs.restarts import Budget, without_machine
from launcher.runs.run import Run, training_spec, write_config
from launcher.runs.waiting import asked, follow, pause, read_logs
from litgpt_demo import timeouts
from litgpt_demo.config import InitialWeights, RestartSettings
from litgpt_demo.data.dataset import DatasetManifest
from litgpt_demo.documents import Unreadable
from litgpt_demo.errors import FailureClass, TrainLitgptError, UserError, one_line
from litgpt_demo.metrics import Row, damaged_lines, from_log_line
from litgpt_demo.runs import node_reports, read_metrics
from litgpt_demo.secrets import Cleaner
from litgpt_demo.storage import MANIFEST, open_storage
from litgpt_demo.training import checkpoints
from litgpt_demo.training.origins import fetch_initial_weights
from tasks.report import LINE, LiveArtifacts, show_state, show_verdict
from tasks.steps import emit, emit_milestone, opaque, report_unreadable, step_task

T = TypeVar("T")

_TAIL = 200  # lines that are kept for the verdict
_LONGEST = 10_000  # characters of each; a line may have 4 MiB
_LONGEST_WHY = 4_000  # characters of a verdict in an event: Prefect refuses long ones
_LOGGED = 40  # lines of node 0 that Prefect's database gets of a minute: NCCL alone prints thousands
_MOST_UNFOUNDED = 20  # checkpoints of an attempt that do not exist or are not looked up yet; more rows are left out
_MOST_WARNINGS = 20  # of an attempt that are told
# As `warn` of the trainer and a node's findings have it, behind what torchrun puts before it.
_WARNING = re.compile(r"(?:\[\w+\]:)?warning(?:: | \[)(?P<what>.+)")


@step_task(Step.TRAINING.task, retry=False)
async def train(
    run: Run, dataset: DatasetManifest, identity: SoftwareIdentity, *, on_row: Callable[[Row], None],
    watch: CancelWatch | None = None,
) -> None:  # fmt: skip
    """Train until the run's last checkpoint is committed, or find that it is; `on_row` gets each row of metrics."""
    spec = training_spec(run, dataset)
    platform, train = run.config.platform, run.config.train
    on = f"{platform.nodes} nodes x {platform.processes} processes ({platform.kind})"
    emit(StepStarted(step=Step.TRAINING, what=f"{run.name}: {spec.steps} steps on {on}"))
    there = await asyncio.to_thread(checkpoints.list_complete, run.storage)
    done = bool(there) and checkpoints.reached_end(there[0], spec)  # collection reads every byte of it
    if not done:
        metrics = await asyncio.to_thread(read_metrics, run.storage)
        if needed := arithmetic.needs(run.config, vocab_size=dataset.vocab_size, metrics=metrics):
            spec = spec.model_copy(update={"train": needed.train})  # of the strategy that `auto` comes to
        if run.origin is not None:
            check = partial(_require_fit, run, dataset.vocab_size)
            found = await asyncio.to_thread(fetch_initial_weights, run.origin, run.root, check)
            spec = spec.model_copy(update={"origin": found})
        labels = {"litgpt-demo.dev/flow-run-id": str(flow_run.id or "none")}
        claim = replace(
            claim_at(run, steps=spec.steps),
            make_job=lambda attempt: run.job(attempt=attempt, image=identity.image, labels=labels),
            seconds=partial(_affordable, run),
            prepare=lambda record: write_config(run, spec, identity, attempt=record.attempt),
        )
        step = there[0].step if there else 0
        await run_job(
            claim, max_restarts=train.max_restarts, restarts=train.restarts, on_row=on_row, step=step, watch=watch
        )
    emit(StepDone(step=Step.TRAINING, what=f"{spec.steps} steps", reused=done))


def _require_fit(run: Run, vocab_size: int, origin: InitialWeights) -> None:
    for finding in origin_problems(run, origin, vocab_size=vocab_size):
        raise UserError(finding.what, fix=finding.fix)


def _affordable(run: Run) -> float | None:
    """Return the seconds after which the next attempt has to leave to stay within start.max_usd; None without one."""
    most, platform = run.config.start.max_usd, run.config.platform
    if most is None or (price := platform.price) is None:
        return None
    # Each attempt costs what its own machines do: the run may have moved to other ones since.
    spent = ledger(attempt_times(Index(run.root), run.name), read_metrics(run.storage)).usd
    hour = platform.nodes * price.usd
    seconds = (most - spent) / hour * 3600 - platform.grace
    if seconds <= 0:
        rest = f"at ${hour:,.2f} an hour the rest pays no start and {platform.grace} s to save (platform.grace)"
        what = f"the budget is spent: {run.name} has cost ${spent:,.2f} of start.max_usd={most:g}, and {rest}"
        raise LauncherError(what, fix="raise start.max_usd and run again: the run goes on from its last checkpoint")
    return seconds


async def run_job(
    claim: Claim, *, max_restarts: int, restarts: RestartSettings | None = None,
    on_row: Callable[[Row], None] = lambda row: None, step: int = 0, watch: CancelWatch | None = None,
) -> AttemptRecord:  # fmt: skip
    """Bring a job to its good end: reattach to it if it lives, else start it, and start it again where that helps.

    Of several orchestrators of a run one leads: it holds the lease, starts attempts, judges their ends and emits the
    run's events. The others follow until the lease is free. A flow run that is resumed continues the count of its
    attempts; a new command begins a new one. `step` is the run's newest checkpoint; 0 without one, as for every script.
    `watch` has looked for cancellations since the flow began. Returns the attempt that ended well.
    """
    claim = replace(claim, flow_runs=flow_runs())
    attempts = claim.attempts
    if watch is None:
        watch = await asyncio.to_thread(CancelWatch, attempts.index, claim.names)
    last = await ask(claim, attempts.last)
    if last is not None and last.status.state.is_live and not claim.should_reattach(last):
        claim.require_replaceable(last)
        await ask(claim, partial(watch.replace_live, attempts))
    # Those on the attempts that this flow run has counted, oldest first.
    verdicts = await asyncio.to_thread(attempts.index.verdicts_of_flow_run, attempts.run, claim.orchestrator)
    with Lease(attempts.index, attempts.run, flow_run=claim.orchestrator) as lease:
        orchestrator = _Orchestrator(
            claim=claim,
            lease=lease,
            watch=watch,
            budget=Budget(run=attempts.run, max_restarts=max_restarts, settings=restarts or RestartSettings()),
            on_row=on_row,
            verdicts=verdicts,
            step=max((judged.after for judged in verdicts), default=step),
            ended=verdicts[-1].attempt if verdicts else 0,
            before=last.number - (not last.status.state.is_final) if last is not None else 0,
        )
        while True:
            done = await orchestrator.follow() or await orchestrator.lead()
            if done is not None:
                return done


@dataclass(kw_only=True)
class _Orchestrator:
    """One orchestrator of a run: it leads while it holds the lease, and follows while another one does."""

    claim: Claim
    lease: Lease
    watch: CancelWatch
    budget: Budget
    on_row: Callable[[Row], None]
    verdicts: list[AttemptVerdict]
    """The attempts that count, oldest first."""
    step: int
    """The newest checkpoint before the attempt that is followed."""
    ended: int
    """The last attempt that is known to be over."""
    before: int
    """The last attempt that was over before this orchestrator began: a later one that ended well is its good end."""
    verdict: Verdict | None = None
    """Why `ended` ended badly, once this orchestrator has followed it to its end."""

    async def follow(self) -> AttemptRecord | None:
        """Follow what the leader starts, until the lease is this orchestrator's: None then. Nothing is created, judged
        or cancelled. Returns an attempt that ended well; JobFailed where the leader stopped for good."""
        claim, attempts = self.claim, self.claim.attempts
        waits = False
        while not await asyncio.to_thread(self.lease.take, unless_stopped_after=self.ended if self.verdict else 0):
            last = await ask(claim, attempts.last)
            if (
                last is not None
                and last.number > self.ended
                and last.status.state.is_live
                and claim.should_reattach(last)
            ):
                await asyncio.to_thread(attempts.index.link_flow_run, claim.flow_runs, last.record)
                _tell(claim, last.record, "started")
                emit(Note(what=f"{self._leader} leads {last.record.job_name}; this one follows"))
                if await self._await(last.record) is None:
                    continue
                return last.record
            if self.verdict is not None and await asyncio.to_thread(self.lease.stopped_after, self.ended):
                raise JobFailed(str(self.verdict), fault=self.verdict.fault)
            if not waits:
                waits = True
                emit(Note(what=f"{attempts.run} is orchestrated by {self._leader}; this one follows"))
            await asyncio.to_thread(self.watch.check)
            await asyncio.sleep(LOOK)
        last = await ask(claim, attempts.last)
        if last is None or last.number <= max(self.ended, self.before) or last.status.state is not JobState.SUCCEEDED:
            return None
        return last.record

    async def lead(self) -> AttemptRecord | None:
        """Start attempts and judge their ends, until one ends well, which is returned; None where another orchestrator
        has taken the lease. JobFailed where another attempt would not help."""
        claim, attempts, lease = self.claim, self.claim.attempts, self.lease
        if lease.inherited is not None:
            inherited = await asyncio.to_thread(attempts.index.verdicts_of_flow_run, attempts.run, lease.inherited)
            counted = {judged.attempt: judged for judged in [*self.verdicts, *inherited]}
            self.verdicts = [counted[number] for number in sorted(counted)]
        while True:
            if self.verdict is not None:
                await self._judge(self.verdict)
            decision = self.budget.after(self.verdicts)
            known = [record.attempt for record in await asyncio.to_thread(attempts.records)] if decision.wait else []
            if (wait := decision.wait) and max(known, default=0) <= self.ended:  # the index may have been deleted
                what = f"waiting {wait:.0f} s before attempt {self.ended + 1}: {decision.why}"
                emit(Note(what=what, severity="warning"))
                await pause(wait, look=self.watch.check)
            await ask(claim, attempts.sweep)
            await asyncio.to_thread(self.watch.check)
            # A machine that is taken away early has left nothing of its attempt, which is over all the same.
            exclude = await ask(claim, partial(_excluded, claim))
            record = await ask(claim, partial(claim.take, ended=self.ended, exclude=exclude, leads=lease.take))
            if record is None:
                return None
            if not await submit_job(opaque(claim), record, opaque(lease)):
                return None
            try:
                await asyncio.to_thread(self.watch.check)
            except JobCancelled:  # asked for before its platform knew the job, so that there was nothing to end
                await ask(claim, attempts.stop)
                raise
            if await self._await(record) is not None:
                return record
            if not await asyncio.to_thread(lease.take, unless_stopped_after=self.ended):
                return None

    async def _await(self, record: AttemptRecord) -> AttemptRecord | None:
        """Return the attempt if it ends well; else None, and `ended` and `verdict` have the end."""
        verdict = await await_job(opaque(self.claim), record, self.on_row, opaque(self.lease))
        if verdict is None:
            return record
        self.ended, self.verdict = record.attempt, verdict
        return None

    async def _judge(self, verdict: Verdict) -> None:
        """Count the end of the attempt `ended`, unless an earlier leader has; JobFailed where none may follow."""
        attempts, is_news = self.claim.attempts, False
        verdict = without_machine(verdict, [judged for judged in self.verdicts if judged.attempt != self.ended])
        if self.ended not in {judged.attempt for judged in self.verdicts}:
            judged, is_news = await _judged(self.claim, verdict, attempt=self.ended, before=self.step)
            self.verdicts.append(judged)
        decision = self.budget.after(self.verdicts)
        self.step, self.verdict = max(self.step, self.verdicts[-1].after), None
        if is_news:
            facts = {"verdict": verdict.code, "why": str(verdict)[:_LONGEST_WHY], "again": decision.wait is not None}
            emit_milestone("attempt.ended", attempts.run, attempts.index.root.address(), attempt=self.ended, **facts)
        if decision.wait is None:
            if decision.why:
                emit(Note(what=decision.why, severity="error"))
            await asyncio.to_thread(self.lease.release, stopped=self.ended)
            raise JobFailed(str(verdict), fault=verdict.fault)
        emit(Note(what=f"attempt {self.ended} ended: {verdict}", severity="warning"))
        if verdict.fault is FailureClass.PREEMPTED:
            await show_state("Preempted")

    @property
    def _leader(self) -> str:
        return str(self.lease.holder or "another process")


async def _judged(claim: Claim, verdict: Verdict, *, attempt: int, before: int) -> tuple[AttemptVerdict, bool]:
    judged = AttemptVerdict(
        attempt=attempt,
        code=verdict.code,
        fault=verdict.fault,
        node=verdict.node,
        rank=verdict.rank,
        host=verdict.host,
        clear=verdict.clear,
        before=before,
        after=await asyncio.to_thread(claim.progress),
        machine=verdict.machine,
        step=verdict.step,
        flow_run=claim.orchestrator,
        evidence=verdict.lines,
        action=verdict.action,
        advice=ADVICE[verdict.fault],
    )
    is_news = await asyncio.to_thread(claim.attempts.index.record_verdict, claim.attempts.run, judged)
    return judged, is_news


def _excluded(claim: Claim) -> tuple[str, ...]:
    verdicts = claim.attempts.index.verdicts(claim.attempts.run)
    machines = claim.blamed(verdicts)
    if not machines:
        return ()
    most, fix = claim.platform.max_excluded_nodes(claim.make_job(verdicts[-1].attempt + 1))
    avoided = machines[: len(machines) if most is None else most]
    news = {*machines} - {*claim.blamed(verdicts[:-1])}
    for machine in machines:
        blamed_by = ", ".join(str(one.attempt) for one in verdicts if one.machine == machine)
        told = f"the machine {machine} is to blame for the ends of attempts {blamed_by}"
        if machine in avoided:
            emit(Note(what=f"{told}; the next attempt avoids it", severity="warning"))
        elif machine in news and not claim.config.platform.on_this_machine:
            emit(Note(what=f"{told}, and cannot be avoided: {fix}", severity="warning"))
    return avoided


async def ask(claim: Claim, question: Callable[[], T]) -> T:
    """Return what a claim's platform answers, however long it is away: jobs go on meanwhile, and so does their run."""
    about = f"{claim.attempts.run} on {claim.platform.name}"
    return await asked(question, about=about, on_silence=_tell_of_silence)


def _tell_of_silence(error: LauncherError) -> None:
    emit(Note(what=f"{error}; waiting, the job goes on", severity="warning"))


def flow_runs() -> list[str]:
    """Return the ids of this flow run and of the outermost one that it belongs to, as a sweep's trial does."""
    ids = [flow_run.id, flow_run.root_flow_run_id]
    return [str(known) for known in dict.fromkeys(ids) if known]


@step_task("submit-job", run_name="submit attempt {record.attempt}", retry=False)
async def submit_job(claim: Claim, record: AttemptRecord, lease: Lease) -> bool:
    """Start the attempt, or reattach to it if it is there: submitting again never makes a second one.

    Returns False, and submits nothing, where another orchestrator has the lease by now, as after a suspension.
    """
    job = claim.job_of(record)
    platform = claim.attempts.open(record.platform)

    def submit() -> bool:  # it tells so from the same thread, which goes on when this task is cancelled
        limit = () if (seconds := claim.seconds()) is None else ("--seconds", f"{seconds:.0f}")
        if not lease.take():
            return False
        _tell(claim, record, "submitting")
        claim.platform.submit(claim.platform.render(replace(job, program=(*job.program, *limit))))
        _tell(claim, record, "started")
        return True

    lives = (await ask(claim, partial(platform.status, record.job_id))).state.is_live
    if lives:
        _tell(claim, record, "started")
    else:
        try:
            if not await ask(claim, submit):
                return False
        except PlatformRefused as error:  # the attempt is over, so that `status` tells why, and no time is its own
            status = await ask(claim, partial(platform.status, record.job_id))
            if not status.state.is_live:  # otherwise another orchestrator was faster
                refused = JobStatus(state=JobState.FAILED, native=f"refused: {one_line(error)}")
                await asyncio.to_thread(claim.attempts.index.record_end, record, refused)
                emit_milestone("attempt.ended", job.name, job.root, attempt=job.attempt, verdict="refused", again=False)
            raise
        emit_milestone("run.started", job.name, job.root, attempt=job.attempt, platform=platform.name)
    verb = "adopted" if lives else "submitted"
    emit(Note(what=f"{verb} {record.job_name} on {platform.name}: {record.nodes} nodes x {job.processes} processes"))
    return True


def _tell(claim: Claim, record: AttemptRecord, phase: JobPhase) -> None:
    root, platform = claim.config.root, claim.config.platform
    job, run, sweep = record.job_id, record.run, record.sweep
    emit(JobChanged(phase=phase, run=run, sweep=sweep, root=root, job_id=job, platform=platform))


@step_task("await-job", run_name="run attempt {record.attempt}", retry=False)
async def await_job(claim: Claim, record: AttemptRecord, on_row: Callable[[Row], None], lease: Lease) -> Verdict | None:
    """Follow the attempt to its end; None if it ended well, else why it did not.

    JobCancelled is raised where somebody stopped it, JobRefused where its platform does not run it, and
    PlatformUnreachable where that fell silent: then the job is left alone. Events are emitted while the lease is held.
    """
    platform, job_id, index = claim.attempts.open(record.platform), record.job_id, claim.attempts.index
    root = index.root.address()
    # What an orchestrator before has handed on is not told again.
    if position := await asyncio.to_thread(index.log_position, record):
        try:
            with suppress(PlatformUnreachable):
                await asyncio.to_thread(platform.logs, job_id, position)
        except ValueError:  # a place that somebody else wrote: the log is read from its beginning
            position = ""
    async with LiveArtifacts(record.run) as live, _keeping(lease, record.attempt):
        lines = Lines(record, root, live, on_row, leads=lambda: lease.held)
        if position:
            lines.know(await asyncio.to_thread(read_metrics, index.root.within(f"runs/{record.run}")))

        def keep(position: str) -> None:
            lines.announce()
            index.save_log_position(record, position)

        refused = None
        try:
            status = await follow(
                platform,
                job_id,
                on_lines=lines,
                on_status=lines.look,
                on_silence=_tell_of_silence,
                poll=platform.poll_seconds,
                position=position,
                on_position=keep,
                recorded=partial(claim.attempts.recorded_end, record),
            )
        except JobRefused as error:  # it lingers: it would start when nobody watches it
            native, refused = "refused by its platform", error
            status = JobStatus(state=JobState.FAILED, native=native, has_running_nodes=True)
    lines.log()
    report_unreadable(lines.damaged)
    if status.has_running_nodes and lease.held:
        await ask(claim, partial(platform.cancel, job_id))
    await asyncio.to_thread(index.record_end, record, status)
    _tell(claim, record, "ended")
    if lease.held and (refused is not None or status.state in {JobState.SUCCEEDED, JobState.CANCELLED}):
        why = status.state if refused is None else "refused"
        emit_milestone("attempt.ended", record.run, root, attempt=record.attempt, verdict=why, again=False)
    if refused is not None:
        raise refused
    if status.state is JobState.SUCCEEDED:
        return None
    if status.state is JobState.CANCELLED:
        raise JobCancelled(f"{record.job_name} was cancelled; the same command goes on from its last checkpoint")
    if position:  # what it was before may be in the lines that another orchestrator has handed on
        lines.tail.clear()
        with suppress(PlatformUnreachable):  # the nodes' reports tell most
            await read_logs(platform, job_id, on_lines=lines.keep)
    reports = await asyncio.to_thread(node_reports, open_storage(record.directory), bad := Unreadable("nodes' reports"))
    report_unreadable(bad)
    verdict = diagnose(status, reports, lines.tail, logs=record.directory, nodes=record.nodes)
    await show_verdict(verdict, attempt=record.job_name)
    return verdict


@asynccontextmanager
async def _keeping(lease: Lease, attempt: int) -> AsyncIterator[None]:
    """Take the lease while an attempt is followed, once its holder is gone: its events would be emitted by nobody."""

    async def look() -> None:
        while True:
            with suppress(TrainLitgptError):
                await asyncio.to_thread(lease.take, unless_stopped_after=attempt)
            await asyncio.sleep(BEAT)

    looking = asyncio.create_task(look())
    try:
        yield
    finally:
        looking.cancel()
        await asyncio.gather(looking, return_exceptions=True)


class Lines:
    """Tells what becomes of a job, and sorts what it prints: metrics to live artifacts and `on_row`, words to the log.

    A warning of any node is a note. Of the other words Prefect's log has node 0's newest; the run's folder has all.
    """

    def __init__(
        self, record: AttemptRecord, root: str, live: LiveArtifacts, on_row: Callable[[Row], None], *,
        leads: Callable[[], bool],
    ) -> None:  # fmt: skip
        self._record, self._root, self._leads = record, root, leads
        self._live, self._on_row, self._logger = live, on_row, get_run_logger()
        self._clean = Cleaner()
        self._status: JobStatus | None = None
        # A bucket that is away must not hold up the log for as long as a step may wait for it.
        self._run = replace(open_storage(root).within(f"runs/{record.run}"), patience=timeouts.INTERACTIVE)
        self._unannounced, self._announced, self._unfounded = dict[int, float | None](), set[int](), 0
        self._losses = dict[int, float]()  # of the steps since the last checkpoint
        self.tail: deque[LogLine] = deque(maxlen=_TAIL)
        self.damaged = damaged_lines()
        self._warned: set[str] = set()
        self._unlogged: deque[str] = deque(maxlen=_LOGGED)
        self._dropped, self._logged_at = 0, -math.inf

    def look(self, status: JobStatus) -> None:
        """Tell what the job waits for on its platform, and of restarts, whenever that changes."""
        known, self._status = self._status, status
        self._live.queued = status.state is JobState.PENDING
        self._live.revision += known is None or known.state is not status.state
        for reason in status.reasons:
            if known is None or reason not in known.reasons:
                waits = " waits" if status.state is JobState.PENDING else ""
                emit(Note(what=f"{self._record.job_name}{waits}: {reason}", severity="warning"))
        if status.refused is not None:
            what, fix = status.refused.what, status.refused.fix
            raise JobRefused(f"{self._record.job_name} is not let in, and was taken back: {what} -> {fix}")
        if known is not None and status.restarts > known.restarts:
            what = f"{self._record.job_name} was restarted by its platform, {status.native}"
            emit(Note(what=what, severity="warning"))
        begins = known is None or known.state is JobState.PENDING
        # At a first look the platform's words are news where they say more than that, as Slurm's number does.
        if begins and status.state is JobState.RUNNING and status.native.lower() != status.state:
            emit(Note(what=f"{self._record.job_name} runs: {status.native}"))

    def know(self, rows: Sequence[Row]) -> None:
        """Take up the rows that an orchestrator before has handed on: they are no news, and the curve has them."""
        emit(MetricsKnown(rows=rows))
        for row in rows:
            self._live.add(row)
            self._on_row(row)

    def keep(self, lines: Iterable[LogLine]) -> None:
        """Add lines that were handed on before to the tail."""
        self.tail.extend(replace(line, text=line.text[:_LONGEST]) for line in lines if from_log_line(line.text) is None)

    def __call__(self, lines: Iterable[LogLine]) -> None:
        for line in lines:
            row = from_log_line(line.text, self.damaged)
            if row is not None:
                emit(MetricsRow(row=row))
                self._live.add(row)
                self._on_row(row)
                if "loss" in row:
                    self._losses[row["step"]] = row["loss"]
                if row["kind"] == "checkpoint":  # which is told when it is written, and some steps were done meanwhile
                    loss = None
                    for step in [step for step in self._losses if step <= row["step"]]:
                        loss = self._losses.pop(step)
                    looks = len(self._unannounced) + self._unfounded
                    if self._leads() and row["step"] not in self._announced and looks < _MOST_UNFOUNDED:
                        self._unannounced[row["step"]] = loss
                continue
            clean = replace(line, text=self._clean(line.text))
            short = replace(clean, text=clean.text[:_LONGEST])
            self.tail.append(short)
            if (warning := _WARNING.match(short.text)) and self._is_news(warning["what"]):
                emit(Note(what=str(short), severity="warning"))
                continue
            emit(Output(line=str(clean)))
            if line.node == 0:
                self._dropped += len(self._unlogged) == _LOGGED
                self._unlogged.append(str(short))
        if time.monotonic() > self._logged_at + LINE:
            self.log()

    def announce(self) -> None:
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
                self._unfounded += 1

    def _is_news(self, warning: str) -> bool:
        if warning in self._warned or len(self._warned) > _MOST_WARNINGS:
            return False
        self._warned.add(warning)
        if last := len(self._warned) > _MOST_WARNINGS:
            emit(Note(what="the job prints more warnings; they are in its logs", severity="warning"))
        return not last

    def log(self) -> None:
        """Hand the words that wait to Prefect's log: one record for all, for it costs per record and not per byte."""
        if self._unlogged:
            left_out = [f"({self._dropped:,} lines more are in the run's folder)"] * bool(self._dropped)
            self._logger.info("\n".join([*left_out, *self._unlogged]))
            self._unlogged.clear()
            self._dropped, self._logged_at = 0, time.monotonic()
