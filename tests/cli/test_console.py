from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table
from waiting import until

from cli.console import Watch
from cli.terminal import Screen
from launcher.events import Event, MetricsRow, Note, Output, Step, StepDone, StepProgress, StepStarted, report


def start(steps: int) -> Event:
    return MetricsRow(row={"kind": "start", "steps": steps, "tokens_per_step": 100})


def step(number: int, loss: float = 2.5) -> Event:
    row = {"kind": "step", "step": number, "loss": loss, "tokens": 100 * number}
    return MetricsRow(row={**row, "tokens_per_second": 1000.0, "step_seconds": 2.0})


def shown(*events: Event, output: bool = False, **console: Any) -> list[str]:
    """The lines that are left on a console when these events have been told."""
    settings = {"file": io.StringIO(), "width": 60, "highlight": False, "emoji": False, **console}
    made = Console(**settings)
    with Watch(made, output=output):
        for event in events:
            report(event)
    return [line.rstrip() for line in settings["file"].getvalue().splitlines()]


# --- into a file or a pipe --------------------------------------------------------------------------------------------


def test_each_step_leaves_a_line_with_its_number_and_what_came_of_it() -> None:
    lines = shown(
        StepStarted(step=Step.DATASET, what="stdlib, 1,786 files"),
        StepProgress(step=Step.DATASET, what="half of it"),
        StepDone(step=Step.DATASET, what="8,012 documents", reused=True),
        StepStarted(step=Step.IMAGE),
        StepDone(step=Step.IMAGE, what="torch 2.13.0"),
        StepStarted(step=Step.CHECKPOINTS),
        StepDone(step=Step.CHECKPOINTS, what="a sample"),
    )
    assert lines[0] == "✓ 1/5 dataset      8,012 documents (found done)"
    assert re.fullmatch(r"✓ 2/5 image        torch 2\.13\.0 \(0\.\d s\)", lines[1])
    assert lines[2].startswith("✓ 5/5 checkpoints  a sample (")
    assert len(lines) == 3


def test_every_tenth_of_a_training_leaves_a_line() -> None:
    lines = shown(start(60), *(step(number) for number in range(1, 61)))
    assert [line.split()[1] for line in lines] == [f"{number}/60" for number in range(6, 61, 6)]
    assert lines[0] == "  step 6/60  loss 2.5000  1,000 tok/s  1 min 48 s left"


@pytest.mark.parametrize("steps", [1, 3, 7, 1000])
def test_a_training_of_any_length_leaves_at_most_ten_lines_and_the_last_is_the_end(steps: int) -> None:
    lines = shown(start(steps), *(step(number) for number in range(1, steps + 1)))
    assert len(lines) == min(steps, 10)
    assert lines[-1].startswith(f"  step {steps}/{steps}  ")


def test_steps_that_are_repeated_after_a_restart_leave_no_second_line() -> None:
    once = shown(start(10), *(step(number) for number in range(1, 8)))
    resumed = MetricsRow(row={"kind": "start", "steps": 10, "tokens_per_step": 100, "resumed_from": 4, "step": 4})
    again = shown(
        start(10), *(step(number) for number in range(1, 8)), resumed, *(step(number) for number in range(5, 8))
    )
    assert [line.split("  ")[1] for line in again] == [line.split("  ")[1] for line in once]


def test_a_second_training_is_shown_as_the_first_was() -> None:
    """A sweep has many."""
    training = (StepStarted(step=Step.TRAINING), start(20), *(step(number) for number in range(1, 21)))
    assert len(shown(*training, *training)) == 2 * len(shown(*training)) == 20


def test_other_metrics_leave_nothing() -> None:
    rows = [{"kind": "evaluation", "step": 1, "validation_loss": 2.0, "seconds": 1.0}, {"kind": "end", "step": 1}]
    assert shown(*(MetricsRow(row=row) for row in rows)) == []


def test_notes_are_shown_and_what_jobs_print_only_when_asked_for() -> None:
    events = [Note(what="adopted gpt-1", severity="warning"), Output(line="[node 0] hello"), Note(what="bye")]
    assert shown(*events) == ["  adopted gpt-1", "  bye"]
    assert shown(*events, output=True) == ["  adopted gpt-1", "  [node 0] hello", "  bye"]


@pytest.mark.parametrize("severity", ["info", "warning", "error"])
def test_notes_of_every_severity_can_be_shown(severity: str) -> None:
    assert shown(Note(what="read this", severity=severity)) == ["  read this"]


def test_what_is_shown_is_not_taken_for_markup_or_emoji_and_not_broken_into_lines() -> None:
    odd = "[bold]/runs/[x]/" + "very-long-" * 20 + ":boom:"
    assert shown(Note(what=odd), Output(line=odd), output=True) == [f"  {odd}", f"  {odd}"]
    assert shown(StepDone(step=Step.IMAGE, what=odd))[0].startswith(f"✓ 2/5 image        {odd} (")


def test_nothing_is_shown_after_the_watch_has_ended() -> None:
    file = io.StringIO()
    with Watch(Console(file=file)):
        pass
    report(Note(what="too late"))
    assert file.getvalue() == ""


def test_the_watch_ends_with_an_error_too() -> None:
    file = io.StringIO()
    with pytest.raises(KeyboardInterrupt), Watch(Console(file=file)):
        raise KeyboardInterrupt
    report(Note(what="too late"))
    assert file.getvalue() == ""


# --- on a terminal ----------------------------------------------------------------------------------------------------


@pytest.fixture
def terminal() -> Iterator[Console]:
    """One that is 100 columns wide; what it was sent is in `file`."""
    return Console(file=io.StringIO(), force_terminal=True, width=100, highlight=False, color_system=None)


def wait_for(words: str, terminal: Console) -> None:
    """The live line is drawn ten times a second by a thread of its own."""
    until(lambda: re.search(words, sent(terminal)))


def sent(terminal: Console) -> str:
    assert isinstance(terminal.file, io.StringIO)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.file.getvalue())


def test_a_terminal_shows_a_live_line_instead_of_tenths(terminal: Console) -> None:
    with Watch(terminal) as watch:
        watch.waiting("starting the server")
        report(StepStarted(step=Step.TRAINING, what="gpt-1: 20 steps"))
        report(start(20))
        for number in range(1, 21):
            report(step(number))
        wait_for("20/20", terminal)
        report(StepDone(step=Step.TRAINING, what="20 steps"))
    text = sent(terminal)
    assert re.search(r"4/5 training .*20/20.*loss 2\.5000  1,000 tok/s", text)
    assert "  step 2/20" not in text
    assert re.search(r"✓ 4/5 training     20 steps \(0\.\d s\)", text)


def test_what_is_waited_for_is_on_the_live_line(terminal: Console) -> None:
    with Watch(terminal) as watch:
        watch.waiting("starting [the] server")
        wait_for("starting", terminal)
    assert "starting [the] server" in sent(terminal)


def test_what_takes_longer_says_how_long_it_has_taken(terminal: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cli.console._QUICK", 0.3)
    with Watch(terminal) as watch:
        watch.waiting("starting the server")
        wait_for(r"starting the server +\(0\.\d s\)", terminal)
        report(StepStarted(step=Step.IMAGE, what="looking"))  # its time begins anew
        wait_for("looking", terminal)
    assert re.search(r"starting the server +\(0\.[3-9] s\)", sent(terminal))
    assert re.search(r"2/5 image +looking *\r", sent(terminal))


def test_a_log_says_what_is_waited_for() -> None:
    file = io.StringIO()
    with Watch(Console(file=file)) as watch:
        watch.waiting("starting the server")
        assert file.getvalue() == "  starting the server\n"  # at once, not when it is over


def test_every_tenth_of_a_preparation_leaves_a_line_where_its_end_is_known() -> None:
    survey = [StepProgress(step=Step.DATASET, what=f"survey: {number} documents") for number in range(5)]
    encode = [
        StepProgress(step=Step.DATASET, what=f"encode: {number} documents", fraction=number / 40)
        for number in range(41)
    ]
    lines = shown(StepStarted(step=Step.DATASET), *survey, *encode)
    assert lines == [f"  {10 * tenth} %  encode: {4 * tenth} documents" for tenth in range(1, 10)]


def test_a_terminal_shows_how_far_a_preparation_is(terminal: Console) -> None:
    with Watch(terminal):
        report(StepStarted(step=Step.DATASET, what="files, 3 files"))
        report(StepProgress(step=Step.DATASET, what="encode: 7 documents", fraction=0.42))
        wait_for("42/100", terminal)
    assert re.search(r"1/5 dataset .*42/100 .*encode: 7 documents", sent(terminal))


# --- what nodes write -------------------------------------------------------------------------------------------------

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b1A\u202e"
MOVES = re.compile(r"\x1b(?!\[[0-9;]*m)|[\x07\x9b\u202e]")


def told_of_evil(screen: Screen) -> None:
    with Watch(screen, output=True):
        report(StepStarted(step=Step.TRAINING, what=EVIL))
        report(Output(line=f"[node 0] {EVIL}\x1b[31mred"))
        report(Note(what=f"attempt 1 ended: {EVIL}", severity="error"))
        report(StepDone(step=Step.TRAINING, what=EVIL))
    table = Table()
    table.add_column("reason")
    table.add_row(EVIL)
    screen.print(table)


def test_nothing_that_a_node_writes_steers_the_terminal_that_shows_it() -> None:
    file, calm = io.StringIO(), io.StringIO()
    told_of_evil(Screen(file=file, force_terminal=True, width=100, highlight=False))
    with Watch(Screen(file=calm, force_terminal=True, width=100, highlight=False)):
        pass
    # The live line is drawn by moving the cursor, which is rich's own; no other sequence is there.
    own = set(re.findall(r"\x1b\[[?0-9;]*[A-Za-z]", calm.getvalue()))
    rest = re.sub("|".join(map(re.escape, own | {"\x1b[1A"})), "", file.getvalue())
    assert MOVES.search(rest) is None
    assert "\x1b[31mred" in rest
    assert "\\x1b]0;owned\\x1b[2J\\x9b1A\\u202e" in rest


def test_into_a_pipe_everything_goes_as_it_is() -> None:
    file = io.StringIO()
    told_of_evil(Screen(file=file, width=100, highlight=False))
    assert f"[node 0] {EVIL}".replace("\x07", "") in file.getvalue().replace("\x07", "")
