"""A pipeline in the foreground of a terminal: its display, the jobs that it has started, and its shutdown.

The pipeline runs in a thread, and the main thread waits for its end or for a signal. Ctrl-C is blocked in that thread
and so in every process that it starts: a terminal sends Ctrl-C to the whole process group, and if Prefect's ephemeral
server dies first, its clients retry for minutes. Prefect's own handler of SIGTERM, which raises inside the flow, is not
installed outside the main thread.
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
from launcher import DEFAULT_ROOT, events
from launcher.curves import summary
from launcher.events import TRAINING_STEPS, TRIAL, Event, JobChanged, Listener, Step
from launcher.formatting import duration_text
from launcher.runs.attempts import Attempts, cancel_all, platform_opener
from launcher.runs.index import Index
from litgpt_demo.imports import importing

T = TypeVar("T")

# Seconds from the signal to the end of this process; a second Ctrl-C within them cancels.
_LEAVE = 1.5
# Seconds of those for a submission in progress, and for Prefect to end the flows.
_SETTLE = 0.6
# Seconds after a signal in which another is its echo: the program that started this one may forward it too.
_ECHO = 0.2
# Seconds for a submission, or the cancellation of an image's remote build, if its result matters more than speed.
_SUBMISSION = 20.0


def in_foreground(
    load: Callable[[], Callable[[], Coroutine[Any, Any, T]]], console: Console, *, output: bool = False
) -> T:
    """Run the pipeline that `load` imports, and show it. Ctrl-C and a closed terminal end this process and print which
    jobs continue. SIGTERM cancels, as a second Ctrl-C does."""
    tracker, running = Tracker(), SimpleQueue[asyncio.Task[Any]]()
    with interrupts.queued() as signals, Listener(tracker.receive):
        with Watch(console, output=output) as watch:

            async def with_a_server() -> T:
                running.put(cast(asyncio.Task[Any], asyncio.current_task()))
                with importing():
                    from flows.server import run_served

                what = "starting Prefect's own server for this run (train-litgpt serve starts one that stays)"
                return await run_served(load, on_own_server=lambda: watch.waiting(what))

            result = in_background(lambda: asyncio.run(with_a_server()))
            result.add_done_callback(lambda _: signals.put(None))
            number = signals.get()
        if number is not None:
            handler = _ShutdownHandler(tracker, result, signals)
            with suppress(Empty, RuntimeError):  # it has not started, or has just ended
                # No further step, trial or attempt starts. Prefect ends the flow and task runs as crashed.
                task = running.get_nowait()
                task.get_loop().call_soon_threadsafe(task.cancel)
            handler.shut_down(number)
    return result.result()


def in_background(work: Callable[[], T]) -> Future[T]:
    """Run `work` in a thread of its own. Ctrl-C reaches neither the thread nor the processes that it starts."""
    blocked: tuple[Any, ...] = (signal.SIG_BLOCK, {signal.SIGINT})
    return ThreadPoolExecutor(1, initializer=signal.pthread_sigmask, initargs=blocked).submit(copy_context().run, work)


class Tracker:
    """The steps, flow runs and jobs that a pipeline has started, from its events."""

    def __init__(self) -> None:
        self.flow_runs: list[str] = []
        self.steps: set[Step] = set()
        """The running steps. The first two run in parallel."""
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
        return [job for job in list(self._jobs.values()) if job.phase != "ended"]

    def settle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while any(job.phase == "submitting" for job in self.jobs) and time.monotonic() < deadline:
            time.sleep(0.02)


_STYLES = {"error": "bold red", "warning": "yellow", "info": "dim"}
_QUICK = 3.0  # seconds; shorter work shows no time
_REMEMBERED = 200  # metrics rows: more than the speed and the remaining time need
_BAR = BarColumn(bar_width=12)


class Measured(ProgressColumn):
    """A bar and a count for work with a known end; for other work the elapsed seconds."""

    def render(self, task: Task) -> Table:
        grid = Table.grid(padding=(0, 1))
        if task.total is not None:
            grid.add_row(_BAR.render(task), f"{task.completed:.0f}/{task.total:.0f}")
        elif (task.elapsed or 0.0) >= _QUICK:
            grid.add_row(f"[dim]({duration_text(task.elapsed)})[/]")
        return grid


class Description(TextColumn):
    """Text that is cut at the end of the line; a column without wrapping would take all the space."""

    def render(self, task: Task) -> Text:
        text = super().render(task)
        text.no_wrap = True
        return text


@dataclass
class _TrialDisplay:
    rows: list[Mapping[str, Any]] = field(default_factory=list)
    started: dict[str, float] = field(default_factory=dict)
    lines: dict[Step | None, TaskID] = field(default_factory=dict)
    percent: int = 0


class Watch:
    """Prints a pipeline's events for a person while its context is active.

    Lines of a sweep's trial begin with its varied settings. Lines that all trials share are printed once.
    On a terminal each running step is a live line. Elsewhere (a file, CI) every tenth of the training is a line.
    """

    def __init__(self, console: Console, *, output: bool = False) -> None:
        """`output`: also print the lines that jobs print."""
        self._console, self._output = console, output
        self._steps: tuple[Step, ...] = TRAINING_STEPS
        self._displays, self._printed = defaultdict[str, _TrialDisplay](_TrialDisplay), set[str]()
        uncut = Column(no_wrap=True)  # only `what` is cut if a line is too long
        what = Description("{task.fields[what]}", table_column=Column())
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
    def _display(self) -> _TrialDisplay:
        return self._displays[TRIAL.get()]

    def waiting(self, what: str) -> None:
        self._clear(None)
        self._live(None, what)
        if not self._console.is_terminal:
            self._print(f"  [dim]{escape(what)}[/]")

    def _receive(self, event: Event) -> None:
        """Show an event. A closed terminal must not end the pipeline."""
        with suppress(OSError):
            match event:
                case events.FlowRunStarted():
                    self._steps = event.steps
                case events.StepStarted():
                    self._display.rows, self._display.percent = [], 0
                    self._display.started[event.step] = time.monotonic()
                    self._clear(None, event.step)
                    self._live(event.step, event.what)
                case events.StepProgress():
                    self._show_progress(event)
                case events.MetricsRow():
                    self._show_metrics(event.row)
                case events.MetricsKnown(rows=[first, *rows]):
                    self._display.rows = [first, *rows[-_REMEMBERED:]]
                case events.StepDone():
                    self._show_done(event)
                case events.Note():
                    if event.ends:
                        self._clear(*self._display.lines)
                    self._print(f"  [{_STYLES[event.severity]}]{escape(event.what)}[/]")
                case events.Output() if self._output:
                    self._print(f"  [dim]{escape(event.line)}[/]")

    def _show_progress(self, event: events.StepProgress) -> None:
        if event.fraction is None:
            self._live(event.step, event.what)
            return
        percent = int(100 * event.fraction)
        self._live(event.step, event.what, done=percent, total=100)
        if percent < 100:  # the step's own line follows at the end
            self._tenth(percent, f"{percent} %  {escape(event.what)}")

    def _show_metrics(self, row: Mapping[str, Any]) -> None:
        rows = self._display.rows
        rows.append(row)
        if len(rows) > 2 * _REMEMBERED:  # the start and the newest rows are enough
            rows[:] = [rows[0], *rows[-_REMEMBERED:]]
        if row.get("kind") in {"step", "start"}:
            progress = summary(rows)
            what = "  ".join(progress.facts)
            self._live(Step.TRAINING, what, done=progress.step, total=progress.steps)
            self._tenth(int(progress.percent), f"step {progress.step}/{progress.steps}  {what}")

    def _show_done(self, event: events.StepDone) -> None:
        self._clear(event.step)
        now = time.monotonic()
        duration = duration_text(now - self._display.started.get(event.step, now))
        step = f"[green]✓[/] {self._position(event.step)} [bold]{event.step:<12}[/]"
        line = f"{step} {escape(event.what)} [dim]({'already done' if event.reused else duration})[/]"
        if event.step in (Step.TRAINING, Step.CHECKPOINTS):
            self._print(line)
        elif not TRIAL.get() or event.what not in self._printed:  # all trials share it
            self._console.print(line, soft_wrap=True)
        self._printed.add(event.what)

    def _tenth(self, percent: int, line: str) -> None:
        if not self._console.is_terminal and percent // 10 > self._display.percent // 10:
            self._display.percent = percent
            self._print(f"  {line}")

    def _position(self, step: Step) -> str:
        count = len(self._steps)  # the output of a script may look like metrics of a training
        return f"{min(count, [*self._steps, step].index(step) + 1)}/{count}"

    def _print(self, markup: str) -> None:
        if TRIAL.get():
            markup = f"[cyan]{escape(TRIAL.get())}[/] {markup}"
        self._console.print(markup, soft_wrap=True)

    def _clear(self, *steps: Step | None) -> None:
        for step in steps:
            if step in self._display.lines:
                self._progress.remove_task(self._display.lines.pop(step))

    def _live(self, step: Step | None, what: str, *, done: int = 0, total: int | None = None) -> None:
        position = f"{self._position(step)} {step}" if step else ""
        fields: dict[str, Any] = {"description": f"{escape(TRIAL.get())} {position}".strip(), "what": escape(what)}
        lines = self._display.lines
        if step not in lines:
            lines[step] = self._progress.add_task(total=total, **fields)
        self._progress.update(lines[step], completed=done, total=total, visible=True, **fields)


def program() -> list[str]:
    """Return the arguments that start this command line again from the same folder."""
    if os.access(sys.argv[0], os.X_OK) and not sys.argv[0].endswith(".py"):
        return [sys.argv[0]]
    return sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]  # python -m …


def cancel_commands(jobs: Sequence[JobChanged]) -> list[str]:
    """Return the commands that cancel these jobs: one for each run, and one for all trials of a sweep."""
    commands = []
    for name, root in dict.fromkeys((job.sweep or job.run, job.root) for job in jobs):
        options = [] if root == DEFAULT_ROOT else ["--root", root]
        commands.append(shlex.join([*program(), "cancel", name, *options]))
    return commands


def farewell(tracker: Tracker, *, again: str) -> list[str]:
    """Return the last lines for a user: which jobs continue, and the commands to reattach (`again`) and to cancel."""
    jobs = tracker.jobs
    if not jobs:
        status = "nothing was started"
        if tracker.flow_runs:
            status = "no job is running. Run the command again: finished steps are reused, started ones continue"
        return [status, f"  run again  {again}"]
    lines = []
    for job in jobs:
        line = f"{job.run} was being submitted to platform {job.platform.kind}, and may run there"
        if job.phase == "started":
            line = f"the job continues as {job.run} on {job.platform.kind}"
        lines.append(line)
    lines += [f"reattach   {again}", *(f"cancel     {command}" for command in cancel_commands(jobs))]
    return [lines[0], *(f"  {line}" for line in lines[1:])]


class _ShutdownHandler:
    def __init__(self, tracker: Tracker, result: Future[Any], signals: SimpleQueue[int | None]) -> None:
        self._tracker, self._result, self._signals = tracker, result, signals
        self._deadline = time.monotonic() + _LEAVE
        # Nothing else in this process prints from now on: libraries would report, in their logs or from native code,
        # that they have been interrupted.
        stderr, null = os.fdopen(os.dup(2), "w"), os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        self._console = Screen(file=stderr, highlight=False, emoji=False)

    def shut_down(self, number: int) -> NoReturn:
        """Print which jobs continue, or cancel them on request; end with 128 plus the signal's number."""
        self._tracker.settle(_SETTLE)
        jobs = self._tracker.jobs
        terminated = number == signal.SIGTERM and not machine_stops()
        if terminated and jobs:
            self._say(f"\n[yellow]terminated:[/] {escape(', '.join(job.run for job in jobs))} is cancelled")
            is_cancelled = self._cancel(jobs)
        else:
            first, *more = farewell(self._tracker, again=shlex.join([*program(), *sys.argv[1:]]))
            word = "interrupted"
            if terminated:
                word = "terminated"
            self._say(f"\n[yellow]{word}:[/] {escape(first)}", *map(escape, more))
            if terminated and Step.IMAGE in self._tracker.steps:
                wait([self._result], timeout=_SUBMISSION)  # it cancels a remote build
            is_cancelled = terminated
        if terminated:
            self._deadline = time.monotonic() + _LEAVE
        ended = in_background(lambda: self._end_flow_runs("Cancelled" if is_cancelled else "Interrupted"))
        if number == signal.SIGINT and jobs and self._pressed_again(jobs) and self._cancel(jobs):
            wait([ended], timeout=_LEAVE)
            self._deadline = time.monotonic() + _LEAVE
            ended = in_background(lambda: self._end_flow_runs("Cancelled"))
        wait([ended], timeout=self._remaining())
        interrupts.finish(128 + number)

    def _pressed_again(self, jobs: Sequence[JobChanged]) -> bool:
        time.sleep(_ECHO)
        while not self._signals.empty():
            self._signals.get()
        offer = f"  press Ctrl-C once more now to cancel {'it' if len(jobs) == 1 else 'them all'}"
        self._say(offer, end="" if self._console.is_terminal else "\n")
        number = None
        with suppress(Empty):
            while number is None:  # None: the pipeline has ended
                number = self._signals.get(timeout=self._remaining())
        with suppress(OSError):  # the offer is over
            self._console.control(Control((ControlType.CARRIAGE_RETURN,), (ControlType.ERASE_IN_LINE, 2)))
        return number not in {None, signal.SIGHUP}

    def _cancel(self, jobs: Sequence[JobChanged]) -> bool:
        def cancel_all() -> bool:
            self._tracker.settle(_SUBMISSION)
            with ThreadPoolExecutor(max_workers=16) as pool:
                return all(list(pool.map(self._cancel_one, jobs)))

        self._say("cancelling; this takes as long as a job needs to save and end")
        cancelling = in_background(cancel_all)
        cancelling.add_done_callback(lambda _: self._signals.put(None))
        while not cancelling.done():
            if self._signals.get() == signal.SIGINT:  # SIGTERM requests this cancellation; a closed terminal, nothing
                self._say("[yellow]interrupted[/] before it was proved that no resources remain. To prove it, run:")
                self._say(*(f"  {escape(command)}" for command in cancel_commands(jobs)))
                return False
        return cancelling.result()

    def _cancel_one(self, job: JobChanged) -> bool:
        problems: list[Any] = []
        try:
            attempts = Attempts(index=Index.of(job.root), run=job.run, open_platform=platform_opener(job.platform))
            problems += cancel_all([attempts], log=lambda what: self._say(f"  {escape(what)}"))[1]
        except Exception as error:  # this process ends: after any error, the job may still exist
            problems.append(error)
        submitting = [current.job_id for current in self._tracker.jobs if current.phase == "submitting"]
        if not problems and job.job_id in submitting:
            problems.append(f"platform {job.platform.kind} has not answered its submission")
        if problems:
            self._say(f"[bold red]error[/] {escape(f'{job.run} may not be cancelled: {problems[0]}')}")
            self._say(f"  cancel     {escape(cancel_commands([job])[0])}")
        else:
            self._say(f"cancelled {escape(job.run)}; no resources remain")
        return not problems

    def _end_flow_runs(self, name: Literal["Interrupted", "Cancelled"]) -> None:
        if self._tracker.flow_runs:
            wait([self._result], timeout=_SETTLE)  # Prefect ends them as crashed first
            end_flow_runs(self._tracker.flow_runs, name=name)

    def _remaining(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    def _say(self, *lines: str, end: str = "\n") -> None:
        with suppress(OSError):  # the terminal is closed
            for line in lines:
                self._console.print(line, soft_wrap=True, end=end)


def machine_stops() -> bool:
    """Return True if this machine shuts down: every process then gets SIGTERM, which does not request to cancel a
    remote job."""
    command = ["systemctl", "is-system-running"]  # https://www.freedesktop.org/software/systemd/man/systemctl.html
    try:
        state = subprocess.run(command, capture_output=True, text=True, timeout=1.0, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    return state.strip() == "stopping"


def end_flow_runs(ids: Sequence[str], *, name: Literal["Interrupted", "Cancelled"]) -> None:
    """End flow runs in Prefect that their user has left; they would stay running forever. After the first Ctrl-C they
    are Crashed with a name of its own, because Cancelled would mean that their jobs are gone."""
    from prefect import get_client
    from prefect.client.schemas.objects import State, StateType

    kind, why = StateType.CANCELLED, "Cancelled by its user, with all of its jobs"
    if name == "Interrupted":
        kind, why = StateType.CRASHED, "Left by its user; a job that was started continues"
    state = State[Any](type=kind, name=name, message=why)
    with get_client(sync_client=True) as client, ThreadPoolExecutor(max_workers=16) as pool:

        def end(flow_run: UUID) -> None:
            if client.read_flow_run(flow_run).state_type not in {StateType.COMPLETED, StateType.FAILED}:
                client.set_flow_run_state(flow_run, state, force=True)

        # In parallel: a sweep has many trials, and all must end within a second.
        list(pool.map(end, map(UUID, ids)))
