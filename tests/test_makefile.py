"""Each verb of the Makefile installs the packages that it needs: in every order, in every shell, after a broken try."""

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import audit
import pytest

CHECKOUT = Path(__file__).parents[1]
# Debian's sh and everybody else's: they do not agree about `test`.
SHELLS = [path for name in ("dash", "bash") if (path := shutil.which(name))]
# A verb of each extra, and the program that only this extra brings.
PROGRAM = {"train": "train-litgpt", "test": "pytest", "check": "mypy", "docs": "mkdocs", "bench-dataset": "litdata"}

# Stands for python3 and for .venv/bin/python: it makes the environment, and pip "installs" a program of each extra.
PYTHON = """#!/bin/sh
bin=${VENV:?}/bin
program() { for name; do printf '#!/bin/sh\\necho "ran %s $*"\\n' "$name" > "$bin/$name"; chmod +x "$bin/$name"; done; }
case "$*" in
"-m venv "*) mkdir -p "$bin"; cp "$0" "$bin/python" ;;
"-m pip "*)
  echo "$*" >> "$LOG"
  test "$(wc -l < "$LOG")" != "${BROKEN_CALL:-0}" || exit 1
  for last; do :; done
  case "$last" in .*) program train-litgpt ;; esac
  case "$last" in *dev*) program pytest ruff mypy ;; *docs*) program mkdocs ;; litdata) program litdata ;; esac ;;
"-m bench dataset"*) "$bin/litdata" ;;
esac
"""


class Clone:
    """A fresh clone without an environment, as far as make reads it."""

    def __init__(self, folder: Path, shell: str) -> None:
        self.folder, self.shell, self.log = folder, shell, folder / "pip.log"
        for name in ("Makefile", "pyproject.toml", "constraints.txt"):
            shutil.copy(CHECKOUT / name, folder)
        (folder / "python3").write_text(PYTHON)
        (folder / "python3").chmod(0o755)
        self.log.touch()

    def make(self, *goals: str, **env: str) -> subprocess.CompletedProcess[str]:
        # Not the flags and variables of the make that runs these tests.
        outside = {name: value for name, value in os.environ.items() if "MAKE" not in name and name != "VENV"}
        return subprocess.run(
            ["make", f"SHELL={self.shell}", "PYTHON=./python3", *goals],
            cwd=self.folder,
            env={**outside, "VENV": ".venv", "LOG": str(self.log), **env},
            capture_output=True,
            text=True,
        )

    def installed(self) -> list[str]:
        """What pip was asked for since the last call, without its own upgrade and torch."""
        requests = [re.findall(r"\.\[.*\]|\.$|litdata$", line) for line in self.log.read_text().splitlines()]
        self.log.write_text("")
        return [name for found in requests for name in found]


@pytest.fixture(params=SHELLS, ids=lambda path: Path(path).name)
def clone(request: pytest.FixtureRequest, tmp_path: Path) -> Clone:
    return Clone(tmp_path, request.param)


@pytest.mark.parametrize("goals", list(itertools.permutations(PROGRAM, 2)), ids=" then ".join)
def test_verb_finds_its_program_in_every_order(goals: tuple[str, str], clone: Clone) -> None:
    for goal in goals:
        made = clone.make(goal)
        assert made.returncode == 0, made.stdout + made.stderr
        assert f"ran {PROGRAM[goal]}" in made.stdout


@pytest.mark.parametrize("goals", [("train", "test", "check"), ("test", "train", "check")], ids=" then ".join)
def test_nothing_is_installed_twice(goals: tuple[str, ...], clone: Clone) -> None:
    for goal in goals:
        clone.make(goal)
    assert clone.installed() == ([".", ".[dev]"] if goals[0] == "train" else [".[dev]"])
    for goal in goals:
        clone.make(goal)
    assert clone.installed() == []


@pytest.mark.parametrize("before", [(), ("train",)], ids=["bare", "after train"])
@pytest.mark.parametrize("goal", [goal for goal in PROGRAM if goal != "train"])
def test_broken_installation_is_repeated(goal: str, before: tuple[str, ...], clone: Clone) -> None:
    """pip fails at its first call, the next make passes that and fails at its second, and so on until none is left."""
    for verb in before:
        clone.make(verb)
    for call in range(1, 10):  # no verb needs more than six calls of pip
        clone.installed()
        made = clone.make(goal, BROKEN_CALL=str(call))
        if made.returncode == 0:
            break
        assert len(clone.log.read_text().splitlines()) == call, "make failed, but not by pip: " + made.stderr
    assert call > 1
    assert f"ran {PROGRAM[goal]}" in made.stdout
    assert "ran train-litgpt" in clone.make("train").stdout


def test_changed_dependencies_are_installed_for_every_extra(clone: Clone) -> None:
    clone.make("test")
    clone.make("docs")
    assert clone.installed() == [".[dev]", ".[docs]"]
    os.utime(clone.folder / "constraints.txt")
    clone.make("train")
    assert clone.installed() == ["."]
    clone.make("test")
    clone.make("docs")
    assert clone.installed() == [".[dev]", ".[docs]"]


def test_extra_of_the_environment_is_not_installed(clone: Clone) -> None:
    """EXTRA is a common name; a variable of somebody's shell must not choose packages."""
    clone.make("train", EXTRA="float8")
    assert clone.installed() == ["."]


@pytest.mark.parametrize(
    ("answers", "line", "code"),
    [
        (["Traceback", [{"name": "a", "skip_reason": "?"}]], "could not be checked, neither osv nor pypi", 1),
        (["Traceback", [{"name": "a", "version": "1", "vulns": []}]], "1 packages checked, 0 with known vuln", 0),
        ([[{"name": "a", "version": "1", "vulns": [{"id": "X-1", "fix_versions": ["2"]}]}]], "X-1, fixed in 2", 1),
    ],
    ids=["nobody answers", "only an index", "a vulnerability"],
)
def test_audit_prints_the_vulnerabilities_it_finds(
    answers: list[Any], line: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = iter(json.dumps({"dependencies": answer}) if isinstance(answer, list) else answer for answer in answers)
    monkeypatch.setattr("subprocess.run", lambda *_, **__: SimpleNamespace(stdout=next(texts)))
    assert audit.main([Path("constraints.txt")]) == code
    printed = capsys.readouterr().out
    assert line in printed
    assert len(printed.splitlines()) <= 2


def test_ci_runs_the_commands_of_the_readme_in_their_order() -> None:
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    section = readme[readme.index("\n## Quick start") :]
    commands = [shlex.split(line, comments=True) for line in section.split("```")[1].splitlines()[1:]]
    parts = re.search(r"^for part in (.*); do$", (CHECKOUT / ".ci/run").read_text(encoding="utf-8"), re.MULTILINE)
    assert parts
    assert parts[1].split() == [*(verb for make, verb in commands if make == "make"), "check"]
