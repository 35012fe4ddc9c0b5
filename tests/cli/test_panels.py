"""What the commands have in common: their help, completion, exit codes, and JSON for programs."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import typer.main
from terminal import Terminal

from cli import interrupts
from cli.main import PANELS, Verb, app
from cli.terminal import shown_as_text
from launcher.config import ScriptConfig
from launcher.runs.attempts import claim_of
from litgpt_demo.errors import EXIT_CODES

PAGE = Path(__file__).parents[2] / "docs" / "commands.md"
COMMANDS = typer.main.get_group(app).commands
VERBS = [verb for verbs in PANELS.values() for verb in verbs]


@pytest.mark.parametrize("verb", VERBS, ids=lambda verb: verb.name)
def test_the_example_at_the_end_of_a_commands_help_can_be_typed(verb: Verb) -> None:
    program, name, *words = shlex.split(verb.example)
    assert (program, name) == ("train-litgpt", verb.name)
    COMMANDS[name].make_context(name, words)  # refuses what the command does not take
    for word in words:
        assert not word.endswith(".yaml") or (PAGE.parents[1] / word).exists(), word


def test_every_command_stands_in_a_panel_of_the_help() -> None:
    panels = {name: getattr(command, "rich_help_panel", None) for name, command in COMMANDS.items()}
    assert set(panels.values()) <= set(PANELS)


def test_exit_codes_are_those_of_the_table() -> None:
    rows = re.findall(r"^\| (\d+) \| ([^|]+) \|", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    told = {int(code): name for code, name in rows}
    usage = {0: "success", typer.BadParameter.exit_code: "usage"}
    assert {code: told[code] for code in usage} == usage
    assert {code for code in told if code > 128} == {128 + number for number in interrupts.SIGNALS}
    mine = {code: name for code, name in told.items() if code not in usage and code < 128}
    assert mine == {code: str(fault) for fault, code in EXIT_CODES.items()}


def completed(words: str, *, where: Path) -> list[str]:
    """What bash would offer for the last of these words."""
    script = Path(sys.executable).with_name("train-litgpt")
    typed = words.split(" ")
    asked = {"_TRAIN_LITGPT_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(len(typed) - 1)}
    done = subprocess.run([script], env={**os.environ, **asked}, cwd=where, capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.long
def test_the_shell_completes_names_of_runs_from_the_index(tmp_path: Path) -> None:
    (tmp_path / "pi.py").touch()
    run = claim_of(ScriptConfig(name="pie", root=str(tmp_path / "mine"), script=str(tmp_path / "pi.py"))).take().run
    assert completed("train-litgpt logs --root mine pi", where=tmp_path) == [run]
    assert completed("train-litgpt status --root mine @", where=tmp_path) == ["@last"]
    assert completed("train-litgpt status --root nowhere p", where=tmp_path) == []
    assert not (tmp_path / "nowhere").exists(), "a key that was pressed creates nothing"


def test_colours_of_a_jobs_output_are_left_out_where_the_user_wants_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[31m" in shown_as_text("\x1b[31mred\x1b[0m")
    monkeypatch.setenv("NO_COLOR", "1")
    assert shown_as_text("\x1b[31mred\x1b[0m") == "red"


def test_without_colours_a_terminal_gets_none_from_us_either(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cli", "status", "nothing", "--root", str(tmp_path)]
    env = {**os.environ, "NO_COLOR": "1", "TERM": "xterm-256color"}
    with Terminal(command, env=env, cwd=Path.cwd()) as terminal:
        text = terminal.read_until("nothing has been started under", within=180)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", text), text
