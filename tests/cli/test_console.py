"""What a pipeline shows: lines in a file, a live line on a terminal, and nothing that steers that terminal."""

import io
import re
from collections.abc import Callable
from contextvars import copy_context
from typing import Any, cast

import pytest
from rich.console import Console
from rich.table import Table
from waiting import until

from cli.foreground import Watch
from cli.terminal import Screen
from launcher.events import (
    SCRIPT_STEPS,
    TRIAL,
    Event,
    FlowRunStarted,
    MetricsRow,
    Note,
    Output,
    Step,
    StepDone,
    StepProgress,
    StepStarted,
    report,
)


def training(steps: int, *, first: int = 1) -> list[Event]:
    start: dict[str, Any] = {"kind": "start", "steps": steps, "tokens_per_step": 100}
    if first > 1:
        start |= {"resumed_from": first - 1, "step": first - 1}
    rate = {"loss": 2.5, "tokens_per_second": 1000.0, "step_seconds": 2.0}
    rows = [{"kind": "step", "step": step, "tokens": 100 * step, **rate} for step in range(first, steps + 1)]
    return [MetricsRow(row=row) for row in (start, *rows)]


def shown(*events: Event, output: bool = False) -> list[str]:
    """The lines that are left in a file when these events have been told."""
    file = io.StringIO()
    with Watch(Console(file=file, width=60, highlight=False, emoji=False), output=output):
        for event in events:
            report(event)
    report(Note(what="nothing is shown after the watch has ended"))
    return [line.rstrip() for line in file.getvalue().splitlines()]


def test_training_of_any_length_prints_at_most_ten_lines() -> None:
    """Also where steps are repeated after a restart."""
    done = StepDone(step=Step.DATASET, what="8,012 documents", reused=True)
    first, *lines = shown(done, *training(60)[:40], *training(60, first=21))
    assert first == "✓ 1/5 dataset      8,012 documents (already done)"
    assert len(lines) == 10
    assert lines[-1].startswith("  step 60/60  loss 2.5000  1,000 tok/s")


def test_narrow_terminal_cuts_only_the_text_of_a_step() -> None:
    """What it does is cut instead."""
    file, long = io.StringIO(), "comparing it in transformers with the checkpoint, a sample at a time"
    with Watch(Screen(file=file, width=80, force_terminal=True, highlight=False)) as watch:
        report(StepStarted(step=Step.CHECKPOINTS))
        report(StepProgress(step=Step.CHECKPOINTS, what=long))
        for task in watch._progress.tasks:
            task.start_time = -1000.0
        watch._progress.refresh()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    *_, line = filter(None, map(str.rstrip, re.split(r"[\r\n]", text)))
    assert re.fullmatch(r"[\u2800-\u28ff] 5/5 checkpoints \(.+\) comparing it in transformers.*…", line)
    assert len(line) <= 80


def test_narrow_terminal_shows_time_left_of_a_training() -> None:
    """The MFU, which comes behind it, is cut instead."""
    file = io.StringIO()
    steps = training(8_000)[:400]
    for event in steps[1:]:
        cast(MetricsRow, event).row["mfu"] = 0.25
    with Watch(Screen(file=file, width=80, force_terminal=True, highlight=False)) as watch:
        report(StepStarted(step=Step.TRAINING))
        for event in steps:
            report(event)
        watch._progress.refresh()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())
    assert re.search(r"399/8000 loss 2\.5000  1,000 tok/s  4 h 13 min left", text), text[-200:]


def test_a_script_has_three_steps_of_its_own() -> None:
    done = [StepDone(step=step, what="done", reused=True) for step in SCRIPT_STEPS]
    lines = shown(FlowRunStarted(id="0", steps=SCRIPT_STEPS), *done)
    assert [line.split()[1:3] for line in lines] == [["1/3", "image"], ["2/3", "credentials"], ["3/3", "script"]]


def test_output_of_jobs_is_shown_only_with_verbose() -> None:
    """Notes are shown as they are."""
    odd = "[bold]/runs/[x]/" + "very-long-" * 20 + ":boom:"
    events: list[Event] = [Note(what=odd, severity="warning"), Output(line="[node 0] hello"), Note(what="bye")]
    assert shown(*events) == [f"  {odd}", "  bye"]
    assert shown(*events, output=True) == [f"  {odd}", "  [node 0] hello", "  bye"]


def drawn(file: io.StringIO, texts: str) -> Callable[[], bool]:
    """Whether a terminal was shown these words."""
    return lambda: re.search(texts, re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", file.getvalue())) is not None


def test_a_terminal_shows_a_live_line_instead_of_tenths() -> None:
    file = io.StringIO()
    terminal = Console(file=file, force_terminal=True, width=100, highlight=False, color_system=None)

    with Watch(terminal) as watch:
        watch.waiting("starting [the] server")
        until(drawn(file, r"starting \[the\] server"))
        report(StepProgress(step=Step.DATASET, what="encode: 7 documents", fraction=0.42))
        until(drawn(file, "1/5 dataset .*42/100 .*encode: 7 documents"))
        report(StepStarted(step=Step.TRAINING, what="gpt-1: 20 steps"))
        for event in training(20):
            report(event)
        until(drawn(file, r"4/5 training .*20/20.*loss 2\.5000  1,000 tok/s"))
    assert "  step 2/20" not in file.getvalue()


def test_live_line_of_a_step_ends_with_the_step() -> None:
    """Two steps in parallel are two live lines."""
    file = io.StringIO()
    with Watch(Console(file=file, force_terminal=True, width=100, highlight=False, color_system=None)):
        report(StepStarted(step=Step.DATASET, what="files"))
        report(StepStarted(step=Step.IMAGE, what="docker"))
        until(drawn(file, r"1/5 dataset +files\s+\S 2/5 image +docker"))
        report(StepDone(step=Step.IMAGE, what="the image"))
        report(StepProgress(step=Step.DATASET, what="encode", fraction=0.42))
        until(drawn(file, "1/5 dataset .*42/100 .*encode"))
    _, done, after = file.getvalue().partition("42/100")
    assert done
    assert "2/5 image" not in after


def test_lines_of_a_trial_begin_with_its_settings() -> None:
    """Lines that trials share are printed once."""
    shared: list[Event] = [StepDone(step=Step.DATASET, what="8 documents"), StepDone(step=Step.IMAGE, what="this one")]

    def trial(name: str, *events: Event) -> None:
        TRIAL.set(name)
        for event in events:
            report(event)

    file = io.StringIO()
    with Watch(Console(file=file, width=60, highlight=False, emoji=False)):
        report(shared[0])
        first_item, second_item = copy_context(), copy_context()
        both = list(zip(training(20), training(40), strict=False))
        first_item.run(trial, "seed=1", *shared)
        second_item.run(trial, "seed=2", *shared)
        for first, second in both[:12]:  # each has a bar of its own
            first_item.run(trial, "seed=1", first)
            second_item.run(trial, "seed=2", second)
        second_item.run(trial, "seed=2", Note(what="pruned at step 11", severity="warning", ends=True))
    assert [line.rstrip().partition("  loss")[0] for line in file.getvalue().splitlines()] == [
        "✓ 1/5 dataset      8 documents (0.0 s)",
        "✓ 2/5 image        this one (0.0 s)",
        *(f"seed=1   step {step}/20" for step in (2, 4)),
        "seed=2   step 4/40",
        *(f"seed=1   step {step}/20" for step in (6, 8)),
        "seed=2   step 8/40",
        "seed=1   step 10/20",
        "seed=2   pruned at step 11",
    ]


EVIL = "\x1b]0;owned\x07\x1b[2J\x9b1A\u202e"


def told_of_evil(**kind: Any) -> str:
    """What a screen of this kind shows of a job that says nothing else."""
    file = io.StringIO()
    screen = Screen(file=file, width=100, highlight=False, **kind)
    with Watch(screen, output=True):
        report(StepStarted(step=Step.TRAINING, what=EVIL))
        report(Output(line=f"[node 0] {EVIL}\x1b[31mred"))
        report(Note(what=f"attempt 1 ended: {EVIL}", severity="error"))
        report(StepDone(step=Step.TRAINING, what=EVIL))
    table = Table("reason")
    table.add_row(EVIL)
    screen.print(table)
    return file.getvalue()


def test_no_color_is_printed_if_the_user_disables_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert re.search(r"\x1b\[[\d;]*3\d", told_of_evil(force_terminal=True, color_system="truecolor"))
    monkeypatch.setenv("NO_COLOR", "1")
    shown = told_of_evil(force_terminal=True, color_system="truecolor")
    assert re.search(r"\x1b\[[\d;]*[349]\d", shown) is None
    assert "red" in shown


def test_output_of_a_node_never_controls_the_terminal() -> None:
    shown = told_of_evil(force_terminal=True)
    # Colours are harmless; the live line is drawn by hiding and moving the cursor, which is rich's own.
    rest = re.sub(r"\x1b\[(\?25[lh]|2K|1A|[0-9;]*m)", "", shown)
    assert re.search(r"[\x1b\x07\x9b\u202e]", rest) is None
    assert "\x1b[31mred" in shown
    assert "\\x1b]0;owned\\x1b[2J\\x9b1A\\u202e" in shown
    assert f"[node 0] {EVIL}".replace("\x07", "") in told_of_evil().replace("\x07", ""), "into a pipe as it is"
