"""A pipeline in the foreground of a terminal: what is shown of it, what it has started, and how it is left.

The pipeline runs in a thread, and the main thread waits for its end or for a signal. Ctrl-C is blocked in that thread,
hence in every process that it starts: a terminal sends Ctrl-C to the whole process group, and Prefect's ephemeral
server, should it die first, leaves its clients retrying for minutes. Prefect's own handler of SIGTERM, which raises
where the flow is at work, is not installed outside the main thread.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, Literal, NoReturn, Self, TypeVar, cast
from uuid import UUID

from rich.console import Console
from rich.control import Control
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, SpinnerColumn, Task, TaskID, TextColumn
from rich.segment import ControlType
from rich.table import Column, Table
from rich.text import Text

from cli import interrupts
from cli.terminal import Screen
from launcher import events
from launcher.config import RunConfig
from launcher.curves import summary
from launcher.events import TRAINING_STEPS, TRIAL, Event, JobChanged, Listener, Step
from launcher.formatting import duration_text
from launcher.runs.attempts import Attempts, cancel_all, platform_opener
from launcher.runs.index import Index

T = TypeVar("T")

# Seconds from the signal to the end of this process; a second Ctrl-C within them cancels.
_LEAVE = 1.5
# Seconds of those that a submission under way may take to end, and that Prefect may take to end the flows.
_SETTLE = 0.6
# Seconds after a signal in which another is taken for its echo: programs that started this one may pass theirs on too.
_ECHO = 0.2
# Seconds that a submission, or cancelling an image's build elsewhere, may take when proof is wanted more than haste.
_SUBMISSION = 20.0


def in_foreground(
    load: Callable[[], Callable[[], Coroutine[Any, Any, T]]], console: Console, *, output: bool = False
) -> T:
    """Run the pipeline that `load` imports, and show it.

    Ctrl-C and a closed terminal end this process and say what goes on without it. SIGTERM cancels, as a second Ctrl-C
    does.
    """
    tracker, running = Tracker(), SimpleQueue[asyncio.Task[Any]]()
    with interrupts.queued() as signals, Listener(tracker.receive):
        with Watch(console, output=output) as watch:

            async def with_a_server() -> T:
                running.put(cast(asyncio.Task[Any], asyncio.current_task()))
                from flows.server import run_served

                what = "starting Prefect's own server for this run (train-litgpt serve starts one that stays)"
                return await run_served(load, on_own_server=lambda: watch.waiting(what))

            result = in_background(lambda: asyncio.run(with_a_server()))
            result.add_done_callback(lambda _: signals.put(None))
            number = signals.get()
        if number is not None:
            departure = _Departure(tracker, result, signals)
            with suppress(Empty, RuntimeError):  # it has not begun, or has just ended
                # Nothing more begins: no next step, trial or attempt. Prefect ends the flow and task runs as crashed.
                task = running.get_nowait()
                task.get_loop().call_soon_threadsafe(task.cancel)
            departure.leave(number)
    return result.result()


def in_background(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a thread of its own, which Ctrl-C reaches as little as the processes that it starts."""
    blocked: tuple[Any, ...] = (signal.SIG_BLOCK, {signal.SIGINT})
    return ThreadPoolExecutor(1, initializer=signal.pthread_sigmask, initargs=blocked).submit(copy_context().run, work)


class Tracker:
    """The steps, flow runs and jobs that a pipeline has begun, as its events tell."""

    def __init__(self) -> None:
        self.flow_runs: list[str] = []
        self.steps: set[Step] = set()
        """The steps at work: none between two, and the first two at once."""
        self._jobs: dict[str, JobChanged] = {}

    def receive(self, event: Event) -> None:
        match event:
            case events.FlowRunStarted():
                self.flow_runs.append(event.id)
            case events.StepStarted():
                self.steps.add(event.step)
            case events.StepDone():
                self.steps.discard(event.step)
            case events.JobChanged():
                self._jobs[event.job_id] = event

    @property
    def jobs(self) -> list[JobChanged]:
        """Return the jobs that have not ended, oldest first."""
        return [job for job in list(self._jobs.values()) if job.phase != "ended"]

    def settle(self, seconds: float) -> None:
        """Wait until no submission is under way, of which nobody knows yet what comes, `seconds` at the most."""
        deadline = time.monotonic() + seconds
        while any(job.phase == "submitting" for job in self.jobs) and time.monotonic() < deadline:
            time.sleep(0.02)


_STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}
_QUICK = 3.0  # seconds that nobody minds
_REMEMBERED = 200  # metrics rows: more than the pace and the time left are taken from
_BAR = BarColumn(bar_width=12)


class Measured(ProgressColumn):
    """A bar and a count, for what has a known end; the seconds that have passed for other work that is not quick."""

    def render(self, task: Task) -> Table:
        shown = Table.grid(padding=(0, 1))
        if task.total is not None:
            shown.add_row(_BAR.render(task), f"{task.completed:.0f}/{task.total:.0f}")
        elif (task.elapsed or 0.0) >= _QUICK:
            shown.add_row(f"[dim]({duration_text(task.elapsed)})[/]")
        return shown


class What(TextColumn):
    """Text that is cut where the line ends; a column without wrapping would take all the room."""

    def render(self, task: Task) -> Text:
        text = super().render(task)
        text.no_wrap = True
        return text


@dataclass
class _Shown:
    rows: list[Mapping[str, Any]] = field(default_factory=list)
    started: dict[str, float] = field(default_factory=dict)
    lines: dict[Step | None, TaskID] = field(default_factory=dict)
    percent: int = 0


class Watch:
    """Listens to a pipeline's events while it is entered, and prints them for a person.

    Lines of a sweep's trial begin with what it varies; what all trials share is told once.
    On a terminal each running step is a live line; elsewhere (a file, CI) every tenth of the training is a line.
    """

    def __init__(self, console: Console, *, output: bool = False) -> None:
        """`output`: also print the lines that jobs print."""
        self._console, self._output = console, output
        self._steps: tuple[Step, ...] = TRAINING_STEPS
        self._every, self._told = defaultdict[str, _Shown](_Shown), set[str]()
        uncut = Column(no_wrap=True)  # where a line is too long, `what` alone is cut
        what = What("{task.fields[what]}", table_column=Column())
        columns = SpinnerColumn(table_column=uncut), TextColumn("{task.description}"), Measured(table_column=uncut)
        self._progress = Progress(*columns, what, console=console, transient=True, disable=not console.is_terminal)
        self._listener = Listener(self._receive)

    def __enter__(self) -> Self:
        self._listener.__enter__()
        self._progress.start()
        self._live(None, "starting")  # importing Prefect takes seconds
        return self

    def __exit__(self, *exception: object) -> None:
        self._listener.__exit__()
        with suppress(OSError):
            self._progress.stop()

    @property
    def _shown(self) -> _Shown:
        return self._every[TRIAL.get()]

    def waiting(self, what: str) -> None:
        """Say what is waited for before the first step."""
        self._clear(None)
        self._live(None, what)
        if not self._console.is_terminal:
            self._print(f"  [dim]{escape(what)}[/]")

    def _receive(self, event: Event) -> None:
        """Show an event. A terminal that is gone must not end the pipeline."""
        with suppress(OSError):
            match event:
                case events.FlowRunStarted():
                    self._steps = event.steps
                case events.StepStarted():
                    self._shown.rows, self._shown.percent = [], 0
                    self._shown.started[event.step] = time.monotonic()
                    self._clear(None, event.step)
                    self._live(event.step, event.what)
                case events.StepProgress(fraction=None):
                    self._live(event.step, event.what)
                case events.StepProgress(fraction=float() | int() as fraction):
                    percent = int(100 * fraction)
                    self._live(event.step, event.what, done=percent, total=100)
                    if percent < 100:  # then the step's own line follows
                        self._tenth(percent, f"{percent} %  {escape(event.what)}")
                case events.MetricsRow():
                    self._shown.rows.append(event.row)
                    if len(self._shown.rows) > 2 * _REMEMBERED:  # the start and the newest say it all
                        self._shown.rows = [self._shown.rows[0], *self._shown.rows[-_REMEMBERED:]]
                    if event.row.get("kind") in {"step", "start"}:
                        seen = summary(self._shown.rows)
                        what = "  ".join(seen.facts)
                        self._live(Step.TRAINING, what, done=seen.step, total=seen.steps)
                        self._tenth(int(seen.percent), f"step {seen.step}/{seen.steps}  {what}")
                case events.MetricsKnown(rows=[first, *others]):
                    self._shown.rows = [first, *others[-_REMEMBERED:]]
                case events.StepDone():
                    self._clear(event.step)
                    seconds = time.monotonic() - self._shown.started.get(event.step, time.monotonic())
                    how = "found done" if event.reused else duration_text(seconds)
                    step = f"[green]✓[/] {self._place(event.step)} [bold]{event.step:<12}[/]"
                    line = f"{step} {escape(event.what)} [dim]({how})[/]"
                    if event.step in (Step.TRAINING, Step.CHECKPOINTS):
                        self._print(line)
                    elif not TRIAL.get() or event.what not in self._told:  # it is the same of every trial
                        self._console.print(line, soft_wrap=True)
                    self._told.add(event.what)
                case events.Note():
                    if event.ends:
                        self._clear(*self._shown.lines)
                    self._print(f"  [{_STYLES[event.severity]}]{escape(event.what)}[/]")
                case events.Output() if self._output:
                    self._print(f"  [dim]{escape(event.line)}[/]")

    def _tenth(self, percent: int, line: str) -> None:
        if not self._console.is_terminal and percent // 10 > self._shown.percent // 10:
            self._shown.percent = percent
            self._print(f"  {line}")

    def _place(self, step: Step) -> str:
        count = len(self._steps)  # what a script prints may read as metrics of a training
        return f"{min(count, [*self._steps, step].index(step) + 1)}/{count}"

    def _print(self, markup: str) -> None:
        whose = f"[cyan]{escape(trial)}[/] " if (trial := TRIAL.get()) else ""
        self._console.print(f"{whose}{markup}", soft_wrap=True)

    def _clear(self, *steps: Step | None) -> None:
        for step in steps:
            if step in self._shown.lines:
                self._progress.remove_task(self._shown.lines.pop(step))

    def _live(self, step: Step | None, what: str, *, done: int = 0, total: int | None = None) -> None:
        words = " ".join(filter(None, [escape(TRIAL.get()), f"{self._place(step)} {step}" if step else ""]))
        shown: dict[str, Any] = {"description": words, "what": escape(what)}
        lines = self._shown.lines
        if step not in lines:
            lines[step] = self._progress.add_task(total=total, **shown)
        self._progress.update(lines[step], completed=done, total=total, visible=True, **shown)


def program() -> list[str]:
    """The words that call this command line again from the same folder."""
    if os.access(sys.argv[0], os.X_OK) and not sys.argv[0].endswith(".py"):
        return [sys.argv[0]]
    return sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]  # python -m …


def cancel_commands(jobs: Sequence[JobChanged]) -> list[str]:
    """The commands that cancel these jobs: one for each run, and one for all trials of a sweep."""
    default = RunConfig.model_fields["root"].default
    named = dict.fromkeys((job.sweep or job.run, job.root) for job in jobs)
    elsewhere = {root: [] if root == default else ["--root", root] for _, root in named}
    return [shlex.join([*program(), "cancel", name, *elsewhere[root]]) for name, root in named]


def farewell(tracker: Tracker, *, again: str) -> list[str]:
    """Tell an interrupted user what goes on, how to take it up (by the command `again`) and how to cancel it."""
    jobs = tracker.jobs
    if not jobs:
        known = "no job is running; run again, and what is done is found, what was begun goes on where it was"
        return [known if tracker.flow_runs else "nothing was started", f"  run again  {again}"]
    standing = [
        f"the job goes on as {job.run} on {job.platform.kind}"
        if job.phase == "started"
        else f"{job.run} was being submitted to {job.platform.kind}, and may have been started"
        for job in jobs
    ]
    commands = [f"take up    {again}", *(f"cancel     {command}" for command in cancel_commands(jobs))]
    return [standing[0], *(f"  {line}" for line in [*standing[1:], *commands])]


class _Departure:
    """The end of this process after a signal: one message, the flow runs ended in Prefect, and nothing more."""

    def __init__(self, tracker: Tracker, result: Future[Any], signals: SimpleQueue[int | None]) -> None:
        self._tracker, self._result, self._signals = tracker, result, signals
        self._deadline = time.monotonic() + _LEAVE
        # Nothing else in this process prints from now on: libraries would tell, in their logs or from native code, that
        # they have been interrupted.
        stderr, null = os.fdopen(os.dup(2), "w"), os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        self._console = Screen(file=stderr, highlight=False, emoji=False)

    def leave(self, number: int) -> NoReturn:
        """Say what goes on, and cancel it if that is asked for; end with 128 plus the signal's number."""
        self._tracker.settle(_SETTLE)
        jobs, gone = self._tracker.jobs, False
        terminated = number == signal.SIGTERM and not machine_stops()
        if terminated and jobs:
            self._say(f"\n[yellow]terminated:[/] {escape(', '.join(job.run for job in jobs))} is cancelled")
            gone = self._cancel(jobs)
        else:
            first, *more = farewell(self._tracker, again=shlex.join([*program(), *sys.argv[1:]]))
            word = "terminated" if terminated else "interrupted"
            self._say(f"\n[yellow]{word}:[/] {escape(first)}", *map(escape, more))
            if terminated and Step.IMAGE in self._tracker.steps:
                wait([self._result], timeout=_SUBMISSION)  # it cancels a build elsewhere
            gone = terminated
        if terminated:
            self._deadline = time.monotonic() + _LEAVE
        ended = in_background(lambda: self._end_flow_runs("Cancelled" if gone else "Interrupted"))
        if number == signal.SIGINT and jobs and self._pressed_again(jobs) and self._cancel(jobs):
            wait([ended], timeout=_LEAVE)
            self._deadline = time.monotonic() + _LEAVE
            ended = in_background(lambda: self._end_flow_runs("Cancelled"))
        wait([ended], timeout=self._left())
        interrupts.finish(128 + number)

    def _pressed_again(self, jobs: Sequence[JobChanged]) -> bool:
        time.sleep(_ECHO)
        while not self._signals.empty():
            self._signals.get()
        offer = f"  press Ctrl-C once more now to cancel {'it' if len(jobs) == 1 else 'them all'}"
        self._say(offer, end="" if self._console.is_terminal else "\n")
        number = None
        with suppress(Empty):
            while (number := self._signals.get(timeout=self._left())) is None:
                continue  # the pipeline has ended
        with suppress(OSError):  # the offer is erased: it holds no longer
            self._console.control(Control((ControlType.CARRIAGE_RETURN,), (ControlType.ERASE_IN_LINE, 2)))
        return number not in {None, signal.SIGHUP}

    def _cancel(self, jobs: Sequence[JobChanged]) -> bool:
        """Cancel the jobs; say for each that nothing is left of it, or why that is not known. True if nothing is."""

        def cancel_all() -> bool:
            self._tracker.settle(_SUBMISSION)
            with ThreadPoolExecutor(max_workers=16) as pool:
                return all(list(pool.map(self._cancel_one, jobs)))

        self._say("cancelling; this takes as long as a job needs to save and end")
        cancelling = in_background(cancel_all)
        cancelling.add_done_callback(lambda _: self._signals.put(None))
        while not cancelling.done():
            if self._signals.get() == signal.SIGINT:  # SIGTERM asks for just this; a closed terminal for nothing
                self._say("[yellow]interrupted[/] before it was proved that nothing is left; this proves it:")
                self._say(*(f"  {escape(command)}" for command in cancel_commands(jobs)))
                return False
        return cancelling.result()

    def _cancel_one(self, job: JobChanged) -> bool:
        problems: list[Any] = []
        try:
            attempts = Attempts(index=Index.of(job.root), run=job.run, open_platform=platform_opener(job.platform))
            problems += cancel_all([attempts], log=lambda what: self._say(f"  {escape(what)}"))[1]
        except Exception as error:  # this process ends: whatever it was, the job is not known to be gone
            problems.append(error)
        if not problems and any(one.job_id == job.job_id and one.phase == "submitting" for one in self._tracker.jobs):
            problems.append(f"its submission to {job.platform.kind} has not been answered")
        if problems:
            self._say(f"[bold red]error[/] {escape(f'{job.run} is not known to be cancelled: {problems[0]}')}")
            self._say(f"  cancel     {escape(cancel_commands([job])[0])}")
        else:
            self._say(f"cancelled {escape(job.run)}; nothing of it is left")
        return not problems

    def _end_flow_runs(self, name: Literal["Interrupted", "Cancelled"]) -> None:
        if self._tracker.flow_runs:
            wait([self._result], timeout=_SETTLE)  # Prefect ends them as crashed first; the last word is ours
            end_flow_runs(self._tracker.flow_runs, name=name)

    def _left(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _say(self, *lines: str, end: str = "\n") -> None:
        with suppress(OSError):  # the terminal is gone
            for line in lines:
                self._console.print(line, soft_wrap=True, end=end)


def machine_stops() -> bool:
    """Return whether this machine shuts down: SIGTERM, which every process then gets, is nobody's wish to cancel.

    A job elsewhere goes on through that, and is taken up after the start. A machine without systemd does not tell.
    """
    command = ["systemctl", "is-system-running"]  # https://www.freedesktop.org/software/systemd/man/systemctl.html
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=1.0, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    return said.strip() == "stopping"


def end_flow_runs(ids: Sequence[str], *, name: Literal["Interrupted", "Cancelled"]) -> None:
    """End flow runs in Prefect that their user has left, else they would pass for running forever.

    After the first Ctrl-C they are not Cancelled, which would mean that nothing of their jobs is left. Prefect's type
    for them is Crashed; they get a name of their own, which says why. The automation `resume-crashed` does not revive
    them: it looks for a tag that only deployments give. A run that has ended by itself keeps its state.
    """
    from prefect import get_client
    from prefect.client.schemas.objects import State, StateType

    kind, why = StateType.CANCELLED, "Cancelled by its user, with all of its jobs"
    if name == "Interrupted":
        kind, why = StateType.CRASHED, "Left by its user; a job that was started goes on by itself"
    state = State[Any](type=kind, name=name, message=why)
    with get_client(sync_client=True) as client, ThreadPoolExecutor(max_workers=16) as pool:

        def end(flow_run: UUID) -> None:
            if client.read_flow_run(flow_run).state_type not in {StateType.COMPLETED, StateType.FAILED}:
                client.set_flow_run_state(flow_run, state, force=True)

        # All at once: a sweep has many trials, and there is a second for all.
        list(pool.map(end, map(UUID, ids)))
