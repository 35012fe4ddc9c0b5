"""Step 4: a job on its platform, from submission to its end, attempt by attempt."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import takewhile
from typing import TypeVar

from prefect import get_run_logger, task
from prefect.runtime import flow_run

from launcher.checks.cost import listed_price
from launcher.config import RunConfig
from launcher.errors import JobCancelled, JobFailed, JobRefused, LoginProblem, PlatformUnreachable
from launcher.events import (
    JobChanged,
    JobPhase,
    MetricsKnown,
    MetricsRow,
    Note,
    Output,
    Step,
    StepDone,
    StepStarted,
    report,
)
from launcher.images.identity import SoftwareIdentity
from launcher.job import Job, JobState, JobStatus, LogLine
from launcher.platforms.base import HasPages, Platform
from launcher.reports.live import LivePage
from launcher.reports.places import run_places
from launcher.runs.attempts import Attempts, CancelWatch, Claim, claim_at
from launcher.runs.diagnosis import Verdict, diagnose, write_verdict
from launcher.runs.evidence import damaged_reports, node_reports
from launcher.runs.index import AttemptRecord, AttemptVerdict, Index
from launcher.runs.lease import LOOK, Lease
from launcher.runs.restarts import Budget, Decision, Stop
from launcher.runs.run import Run, training_job, training_spec, write_bill, write_config
from launcher.runs.sweeps import TOGETHER
from launcher.runs.waiting import asked, follow, pause, read_logs
from litgpt_demo.config import RestartSettings, TrainingSpec
from litgpt_demo.data.dataset import DatasetManifest
from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.metrics import Row, damaged_lines, parsed
from litgpt_demo.runs import read_metrics
from litgpt_demo.storage import open_storage
from litgpt_demo.training import checkpoints
from tasks.assets import checkpoint_key, materialized, origins
from tasks.report import LiveArtifacts, attempt_ends, show_verdict
from tasks.run_events import AttemptEvents, VerdictGiven, emit_run_event
from tasks.steps import ONCE, as_it_is, emit, options_of, report_unreadable

T = TypeVar("T")

_TAIL = 200  # lines that are kept for the verdict
_LONGEST = 10_000  # characters of each; a line may have 4 MiB


@task(**options_of(Step.TRAINING, ONCE))
async def train(
    run: Run, dataset: DatasetManifest, identity: SoftwareIdentity, *, on_row: Callable[[Row], None]
) -> None:
    """Train until the run's last checkpoint is committed, or find that it is.

    Args:
        on_row: called with each row of metrics.
    """
    spec = training_spec(run, dataset)
    emit(StepStarted(step=Step.TRAINING, what=_described(run, spec)))
    there = await asyncio.to_thread(checkpoints.committed, run.storage)
    done = bool(there) and checkpoints.reached_end(there[0], spec)  # collection reads every byte of it
    if not done:
        await asyncio.to_thread(write_config, run, spec, asdict(identity))
        await asyncio.to_thread(write_bill, run, identity)
        labels = {"litgpt-demo.dev/flow-run-id": str(flow_run.id or "none")}

        def make_job(attempt: int) -> Job:
            return training_job(run, attempt=attempt, image=identity.image, labels=labels)

        claim = replace(claim_at(run, steps=spec.steps), make_job=make_job)
        step = there[0].step if there else 0
        train = run.config.train
        await run_job(claim, max_restarts=train.max_restarts, restarts=train.restarts, on_row=on_row, step=step)
        name, facts = f"checkpoints of {run.name}", {"step": spec.steps}
        await materialized("checkpoint", checkpoint_key(run), name=name, of=origins(run), facts=facts)
    emit(StepDone(step=Step.TRAINING, what=f"{spec.steps} steps", reused=done))


def _described(run: Run, spec: TrainingSpec) -> str:
    platform = run.config.platform
    return f"{run.name}: {spec.steps} steps on {_nodes(run)} nodes x {platform.processes} processes ({platform.kind})"


def _nodes(run: Run) -> str:
    """Return the numbers of nodes that it may train on, the one that it begins with first."""
    return ", or ".join(map(str, reversed(run.config.node_counts)))


async def run_job(
    claim: Claim, *, max_restarts: int, restarts: RestartSettings | None = None,
    on_row: Callable[[Row], None] = lambda row: None, step: int = 0,
) -> AttemptRecord:  # fmt: skip
    """Bring a job to its good end: adopt it if it lives, else start it, and start it again where that helps.

    A flow run that is resumed goes on with the count of its attempts; a new command begins a new one.

    Args:
        on_row: called with each row of metrics.
        step: the run's newest checkpoint; 0 without one, as for every script.
        restarts: the rules of new attempts, by class of failure.

    Returns the attempt that ended well.

    Raises:
        JobFailed: it ended in a way that another attempt would not fix, or too often.
        JobCancelled: somebody asked for the run or its sweep to end.
        RunIsLive: it lives on another platform than the config's.
    """
    claim = replace(claim, flow_runs=flow_runs())
    attempts = claim.attempts
    budget = Budget(run=attempts.run, max_restarts=max_restarts, settings=restarts or RestartSettings())
    verdicts = await asyncio.to_thread(attempts.index.verdicts, attempts.run, claim.orchestrator)
    work = await asyncio.to_thread(attempts.index.at_work, claim.orchestrator, attempts.run)
    resumed = work is not None and work.resumed
    if not resumed:  # else it has made room before, and what lives elsewhere by now came later
        await ask(claim, claim.make_room)
    watch = await asyncio.to_thread(partial(CancelWatch, attempts.index, claim.names, orchestrator=claim.orchestrator))
    with lease_of(attempts, claim.orchestrator) as lease:
        run = _Orchestration(claim, budget, lease, watch, verdicts, step)
        ended = await ask(claim, run.end_of_meanwhile) if resumed else None
        return await run.to_its_good_end(on_row, ended=ended)


@asynccontextmanager
async def at_work(index: Index, name: str) -> AsyncIterator[None]:
    """Write down that this flow run is at work on a run or sweep, until an orderly end, which a failure is too.

    Prefect starts a flow run again under its id when its orchestrator has died, and when a person asks for it. Only
    the first finds what was written down, ends by a cancellation of meanwhile, and takes up what ended meanwhile.
    """
    known = flow_runs()
    if not known:
        yield
        return
    flow_run, what = known[-1], name if len(known) > 1 else ""  # with a sweep all its trials have ended
    await asyncio.to_thread(index.begin_work, flow_run, name)
    try:
        yield
    except Exception:
        await _end_work(index, flow_run, what)
        raise
    await _end_work(index, flow_run, what)


async def _end_work(index: Index, flow_run: str, what: str) -> None:
    with suppress(TrainLitgptError):  # a person who starts it again may then have to do so twice
        await asyncio.to_thread(index.end_work, flow_run, what)


async def is_resumed(index: Index, name: str) -> bool:
    """Return whether an orchestrator of this flow run died while it was at work on a run or sweep."""
    return await asyncio.to_thread(index.at_work, orchestrator(), name) is not None


def lease_of(attempts: Attempts, orchestrator: str | None) -> Lease:
    """Return this orchestrator's side of the run's lease."""
    return Lease(attempts.index, attempts.run, flow_run=orchestrator)


@dataclass
class _Orchestration:
    """The attempts of a run, one after the other, as their orchestrator counts them."""

    claim: Claim
    budget: Budget
    lease: Lease
    watch: CancelWatch
    verdicts: list[AttemptVerdict]
    """The verdicts on the attempts that this flow run has counted, oldest first."""
    step: int
    """The run's newest checkpoint."""
    followed: AttemptRecord | None = None
    """The attempt that this orchestrator started or took up last."""

    def end_of_meanwhile(self) -> AttemptRecord | None:
        """Return the attempt that this flow run followed, if it ended while its orchestrator was dead.

        Raises:
            JobFailed: it had been judged, and none was to follow.
        """
        attempts, orchestrator = self.claim.attempts, self.claim.orchestrator
        last = attempts.last()
        if last is None or orchestrator is None or last.status.state.live:
            return None
        if attempts.index.followed_by(orchestrator).get(attempts.run) != last.number or attempts.never_began(last):
            return None
        judged = next((one for one in attempts.index.judged(attempts.run) if one.attempt == last.number), None)
        if judged is None:
            return last.record
        if self.verdicts and judged == self.verdicts[-1] and isinstance(self.budget.after(self.verdicts), Stop):
            raise JobFailed(f"attempt {last.number} ended: {judged.fault}, and none follows", fault=judged.fault)
        return None

    async def to_its_good_end(self, on_row: Callable[[Row], None], *, ended: AttemptRecord | None) -> AttemptRecord:
        """Return the attempt that ended well; every attempt that ends badly is followed by another, or by an error.

        Args:
            ended: the last attempt, if it has ended and nobody has judged it.
        """
        self.step = max((one.after for one in self.verdicts), default=self.step)
        last, verdict, record = self.verdicts[-1].attempt if self.verdicts else 0, None, ended
        while True:
            if record is None:
                if (done := await self._turn(last, verdict)) is not None:
                    return done
                record = await self._next(last)
            self.followed = record
            verdict = await await_job(as_it_is(self.claim), record, on_row)
            if verdict is None:
                return record
            last, record = record.attempt, None

    async def _next(self, ended: int) -> AttemptRecord:
        """Start the attempt after `ended`, or take up the one that lives.

        Raises:
            JobCancelled: somebody asked for the run or its sweep to end; what lives of it has.
        """
        await _wait_for_turn(self.claim, self.budget.after(self.verdicts), self.watch, ended=ended)
        await ask(self.claim, self.claim.attempts.sweep)
        await self._end_if_cancelled()
        # A machine that is taken away early has left nothing of its attempt, which is over all the same.
        exclude = await ask(self.claim, self._excluded)
        record = await ask(self.claim, partial(self.claim.take, ended=ended, exclude=exclude))
        self.followed = record
        await submit_job(as_it_is(self.claim), record)
        await self._end_if_cancelled()
        return record

    async def _end_if_cancelled(self) -> None:
        """End a job whose cancellation found nothing to end, as its platform did not know it yet, or did not answer.

        Raises:
            JobCancelled: it has ended.
        """
        try:
            await asyncio.to_thread(self.watch.check)
        except JobCancelled:
            await ask(self.claim, self.claim.attempts.cancel)
            raise

    async def _turn(self, ended: int, verdict: Verdict | None) -> AttemptRecord | None:
        """Return when this orchestrator may start what comes after `ended`, or another one has started it.

        Args:
            verdict: why the attempt `ended` did, if this orchestrator has followed it.

        Returns the attempt that ended well meanwhile, if one did.
        """
        attempts, before, told = self.claim.attempts, ended, False
        while not await asyncio.to_thread(
            partial(self.lease.take, unless_stopped_after=ended if verdict is not None else 0)
        ):
            last = await ask(self.claim, attempts.last)
            if last is not None and last.number > ended and last.status.state.live:
                return None
            if verdict is not None and await asyncio.to_thread(self.lease.stopped_after, ended):
                raise JobFailed(str(verdict), fault=verdict.fault)
            if not told:
                told, before = True, max(ended, last.number if last is not None else 0)
                holder = self.lease.holder or "another process"
                emit(Note(what=f"{attempts.run} is orchestrated by {holder}; this one follows"))
            await asyncio.to_thread(self.watch.check)
            await asyncio.sleep(LOOK)
        last = await ask(self.claim, attempts.last) if told else None
        if last is not None and last.number > before and last.status.state is JobState.SUCCEEDED:
            return last.record
        await self._judge(ended, verdict)
        return None

    def _excluded(self) -> tuple[str, ...]:
        """Return the machines that the next attempt avoids; tell which, and once of each that cannot be avoided."""
        verdicts = self.claim.attempts.index.judged(self.claim.attempts.run)
        machines = self.claim.blamed(verdicts)
        if not machines:
            return ()
        most, fix = self.claim.platform.avoidable(self.claim.make_job(verdicts[-1].attempt + 1))
        avoided = machines[: len(machines) if most is None else most]
        news = {*machines} - {*self.claim.blamed(verdicts[:-1])}
        for machine in machines:
            blamed_by = ", ".join(str(one.attempt) for one in verdicts if one.machine == machine)
            told = f"the machine {machine} is to blame for the ends of attempts {blamed_by}"
            if machine in avoided:
                emit(Note(what=f"{told}; the next attempt avoids it", severity="warning"))
            elif machine in news and not self.claim.config.platform.on_this_machine:
                emit(Note(what=f"{told}, and cannot be avoided: {fix}", severity="warning"))
        return avoided

    async def _judge(self, ended: int, verdict: Verdict | None) -> None:
        """Count the attempt that ended badly, with those of a holder that died; the lease is this one's.

        Raises:
            JobFailed: none may follow it.
        """
        index, run = self.claim.attempts.index, self.claim.attempts.run
        if self.lease.inherited is not None:
            theirs = await asyncio.to_thread(index.verdicts, run, self.lease.inherited)
            counted = {one.attempt: one for one in [*self.verdicts, *theirs]}
            self.verdicts[:] = [counted[number] for number in sorted(counted)]
        if verdict is None:
            return
        if ended not in {one.attempt for one in self.verdicts}:
            self.verdicts.append(await asyncio.to_thread(_judged, self.claim, ended, verdict, before=self.step))
        self.step = max(self.step, self.verdicts[-1].after)
        decision = self.budget.after(self.verdicts)
        emit_run_event(self._told(verdict, decision))
        if isinstance(decision, Stop):
            if decision.why:
                emit(Note(what=decision.why, severity="error"))
            await self._leave_nothing(ended)
            await asyncio.to_thread(partial(self.lease.release, stopped=ended))
            raise JobFailed(str(verdict), fault=verdict.fault)
        emit(Note(what=f"attempt {ended} ended: {verdict}", severity="warning"))

    def _told(self, verdict: Verdict, decision: Decision) -> VerdictGiven:
        """Return the event of the verdict on the attempt that was followed, and of what comes next."""
        record = self.followed
        assert record is not None
        folder = self.claim.attempts.index.root.address(f"runs/{record.run}")
        return VerdictGiven(
            run=record.run, folder=folder, sweep=record.sweep, attempt=record.attempt, submitted=record.created,
            step=self.step, fault=str(verdict.fault), node=verdict.node, rank=verdict.rank, machine=verdict.machine,
            action="stop" if isinstance(decision, Stop) else "restart", reason=decision.why, advice=verdict.advice,
            logs=verdict.logs,
        )  # fmt: skip

    async def _leave_nothing(self, ended: int) -> None:
        """End what an attempt that none will follow has left running, as ranks whose supervisor was killed."""
        attempts = self.claim.attempts
        try:
            if await ask(self.claim, attempts.left):
                await ask(self.claim, attempts.sweep)
        except TrainLitgptError as error:  # the verdict is what the user has to read
            told = f"attempt {ended} may have left something that runs, and it cannot be removed now: {error}"
            emit(Note(what=f"{told}; `{attempts.index.command('reap')}` lists and removes it", severity="warning"))


async def ask(claim: Claim, question: Callable[[], T]) -> T:
    """Return what a claim's platform answers, however long it is away: jobs go on meanwhile, and so does their run."""
    return await asked(question, platform=claim.platform.name, about=claim.attempts.run, on_silence=tell_of_silence)


def tell_of_silence(error: PlatformUnreachable | LoginProblem) -> None:
    emit(Note(what=f"{error}; waiting, the job goes on", severity="warning"))


async def _wait_for_turn(claim: Claim, decision: Decision, watch: CancelWatch, *, ended: int) -> None:
    """Wait as the budget asks for after the attempt that ended last, unless somebody has started the next one."""
    if isinstance(decision, Stop) or not decision.wait:
        return
    records = await asyncio.to_thread(claim.attempts.records)
    if records[-1].attempt > ended:
        return
    emit(Note(what=f"waiting {decision.wait:.0f} s before attempt {ended + 1}: {decision.why}", severity="warning"))
    await pause(decision.wait, look=watch.check)


def _judged(claim: Claim, attempt: int, verdict: Verdict, *, before: int) -> AttemptVerdict:
    """Write down why the attempt ended, and how far it got: what a resumed flow run counts."""
    judged = AttemptVerdict(
        attempt=attempt,
        fault=verdict.fault,
        before=before,
        after=claim.progress(),
        machine=verdict.machine,
        flow_run=claim.orchestrator,
    )
    claim.attempts.index.judge(claim.attempts.run, judged)
    write_verdict(open_storage(verdict.logs), verdict)
    return judged


def flow_runs() -> list[str]:
    """Return the ids of this flow run and of the outermost one that it belongs to, as a sweep's trial does."""
    ids = [flow_run.id, flow_run.root_flow_run_id]
    return [str(known) for known in dict.fromkeys(ids) if known]


def orchestrator() -> str | None:
    """Return the id of the outermost flow run; None outside of Prefect's flow runs."""
    return next(reversed(flow_runs()), None)


@task(name="submit-job", task_run_name="submit attempt {record.attempt}", **ONCE)
async def submit_job(claim: Claim, record: AttemptRecord) -> None:
    """Start the attempt, or adopt it if it is there: submitting again never makes a second one."""
    job = claim.job_of(record)
    platform = claim.attempts.open(record.platform)
    before = await ask(claim, partial(platform.status, record.job_id))
    if before.state.live:
        report(_changed(claim, record, "started"))
    elif not await _submitted_with_others(claim, record):
        await ask(claim, partial(_submit, claim, record))
    verb = "adopted" if before.state.live else "submitted"
    emit(Note(what=f"{verb} {job.attempt_name} on {platform.name}: {job.nodes} nodes x {job.processes} processes"))


async def _submitted_with_others(claim: Claim, record: AttemptRecord) -> bool:
    """Return whether the job was submitted with those of its sweep's other trials, where the platform takes several."""
    together = TOGETHER.get()
    if together is None or not together.awaits(record.run):
        return False
    report(_changed(claim, record, "submitting"))
    done = await together.submit(record.run, claim.platform.render(claim.job_of(record)))
    if done:
        report(_changed(claim, record, "started"))
    return done


def _submit(claim: Claim, record: AttemptRecord) -> None:
    """Submit, and tell so from the same thread: it goes on when the task that waits for it is cancelled."""
    report(_changed(claim, record, "submitting"))
    claim.platform.submit(claim.platform.render(claim.job_of(record)))
    report(_changed(claim, record, "started"))


def _changed(claim: Claim, record: AttemptRecord, phase: JobPhase) -> JobChanged:
    root = claim.config.root
    return JobChanged(
        phase=phase, run=record.run, sweep=record.sweep, root=root, job_id=record.job_id, platform=claim.config.platform
    )


@task(name="await-job", task_run_name="run attempt {record.attempt}", **ONCE)
async def await_job(
    claim: Claim, record: AttemptRecord, on_row: Callable[[Row], None] = lambda row: None
) -> Verdict | None:
    """Follow the attempt to its end; None if it ended well, else why it did not.

    Raises:
        JobCancelled: somebody stopped it.
        JobRefused: the platform does not run it; it was removed.
        PlatformUnreachable: the platform fell silent; the job is left alone.
    """
    platform, job, index = claim.attempts.open(record.platform), claim.job_of(record), claim.attempts.index
    position = await asyncio.to_thread(_place_in_log, index, record, platform)
    run = index.root.within(f"runs/{record.run}")
    async with LiveArtifacts(record.run, await asyncio.to_thread(_page_so_far, claim, record, platform)) as live:
        lines = Lines(live, on_row, AttemptEvents(record, index.root.address(f"runs/{record.run}")))
        known = await asyncio.to_thread(read_metrics, run) if position or record.attempt > 1 else []
        lines.know(known) if position else lines.recall(known, before=record.attempt)
        try:
            status = await follow(
                platform,
                record.job_id,
                on_lines=lines,
                on_status=Progress(job, live),
                on_silence=tell_of_silence,
                poll=platform.poll_seconds,
                position=position,
                on_position=partial(index.read_up_to, record),
            )
        except JobRefused:
            await ask(claim, partial(platform.cancel, record.job_id))  # or it would start when nobody watches it
            refused = JobStatus(state=JobState.FAILED, native="refused by its platform")
            await asyncio.to_thread(index.end, record, refused)
            report(_changed(claim, record, "ended"))
            raise
    lines.finish()
    await asyncio.to_thread(index.end, record, status)
    report(_changed(claim, record, "ended"))
    if status.state is JobState.SUCCEEDED:
        return None
    if status.state is JobState.CANCELLED:
        raise JobCancelled(f"{job.attempt_name} was cancelled; the same command goes on from its last checkpoint")
    if position:  # what it was before may be in the lines that another orchestrator has handed on
        lines.tail.clear()
        with suppress(PlatformUnreachable):  # the nodes' reports tell most
            await read_logs(platform, record.job_id, on_lines=lines.keep, patience=0)
    reports = await asyncio.to_thread(node_reports, open_storage(record.directory), bad := damaged_reports())
    report_unreadable(bad)
    verdict = diagnose(status, reports, lines.tail, logs=record.directory, nodes=job.nodes)
    await show_verdict(verdict, attempt=job.attempt_name)
    return verdict


def _page_so_far(claim: Claim, record: AttemptRecord, platform: Platform) -> LivePage:
    """Return the page of an attempt before its first row."""
    attempts, config = claim.attempts, claim.config
    return LivePage(
        attempt=record.attempt,
        times=[one for one in attempt_ends(attempts.index, record.run) if one.record.attempt <= record.attempt],
        price=listed_price(config.platform),
        places=run_places(
            attempts.index.root.within(f"runs/{record.run}"),
            name=record.run,
            logs=record.directory,
            train=config.train if isinstance(config, RunConfig) else None,
            pages=_pages(platform, record),
        ),
    )


def _pages(platform: Platform, record: AttemptRecord) -> Mapping[str, str]:
    with suppress(TrainLitgptError):  # a run is worth more than a link
        return platform.pages(record.job_id) if isinstance(platform, HasPages) else {}
    return {}


class Lines:
    """Sorts what a job prints: metrics to live artifacts, events and `on_row`, words to the log and to the tail."""

    def __init__(self, live: LiveArtifacts, on_row: Callable[[Row], None], events: AttemptEvents) -> None:
        self._live, self._on_row, self._events, self._logger = live, on_row, events, get_run_logger()
        self.tail: deque[LogLine] = deque(maxlen=_TAIL)
        self.damaged = damaged_lines()

    def know(self, rows: Sequence[Row]) -> None:
        """Take up the rows that an orchestrator before has handed on: they are no news, and the curve has them."""
        emit(MetricsKnown(rows=rows))
        self._events.know(rows)
        for row in rows:
            self._live.add(row)
            self._on_row(row)

    def recall(self, rows: Sequence[Row], *, before: int) -> None:
        """Show the rows of the attempts before this one: they have been handed on, and the curves begin with them."""
        for row in takewhile(lambda row: row.get("attempt", 0) < before, rows):
            self._live.add(row)

    def finish(self) -> None:
        """Tell what is left when the job has ended: the newest checkpoint, and how much could not be read."""
        for event in self._events.rest():
            emit_run_event(event)
        report_unreadable(self.damaged)

    def keep(self, lines: Iterable[LogLine]) -> None:
        """Add lines that were handed on before to the tail."""
        self.tail.extend(_cut(line) for line in lines if parsed(line.text) is None)

    def __call__(self, lines: Iterable[LogLine]) -> None:
        words = []
        for line in lines:
            row = parsed(line.text, self.damaged)
            if row is not None:
                emit(MetricsRow(row=row))
                for event in self._events.take(row):
                    emit_run_event(event)
                self._live.add(row)
                self._on_row(row)
            else:
                emit(Output(line=str(line)))
                self.tail.append(_cut(line))
                words.append(str(line))
        if words:  # one record for all of them: Prefect's log costs per record, not per byte
            self._logger.info("\n".join(words))


def _cut(line: LogLine) -> LogLine:
    return replace(line, text=line.text[:_LONGEST])


def _place_in_log(index: Index, record: AttemptRecord, platform: Platform) -> str:
    """Return from where to read the attempt's log: what an orchestrator before has handed on is not told again.

    A place that the platform cannot read was written by somebody else; the log is then read from its beginning.
    """
    if not (position := index.place_in_log(record)):
        return ""
    try:
        platform.logs(record.job_id, position)
    except PlatformUnreachable:
        return position
    except (TypeError, ValueError):
        return ""
    return position


class Progress:
    """Tells what becomes of a job on its platform, whenever that changes: what it waits for, and restarts."""

    def __init__(self, job: Job, live: LiveArtifacts) -> None:
        self._job, self._live = job, live
        self._known: JobStatus | None = None

    def __call__(self, status: JobStatus) -> None:
        self._live.see(status)
        known, self._known = self._known, status
        for reason in status.reasons:
            if known is None or reason not in known.reasons:
                waits = " waits" if status.state is JobState.PENDING else ""
                emit(Note(what=f"{self._job.attempt_name}{waits}: {reason}", severity="warning"))
        if status.refused is not None:
            what, fix = status.refused.what, status.refused.fix
            raise JobRefused(f"{self._job.attempt_name} is not let in, and was taken back: {what} -> {fix}")
        if known is None:
            return
        if status.restarts > known.restarts:
            emit(
                Note(
                    what=f"{self._job.attempt_name} was restarted by its platform, {status.native}", severity="warning"
                )
            )
        if known.state is JobState.PENDING and status.state is JobState.RUNNING:
            emit(Note(what=f"{self._job.attempt_name} runs: {status.native}"))
