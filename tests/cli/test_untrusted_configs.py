"""A config of somebody else's is looked at before it is run: looking runs nothing that it names, and always ends."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from console_script import Cli
from strangers import evil_scheduler
from terminal import Terminal

from litgpt_demo.errors import EXIT_CODES, Fault

pytestmark = pytest.mark.timeout(60)

LAUGHS = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.fixture
def console(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return Cli(capsys, monkeypatch)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """The file that is there once anything of the config's choice has run."""
    return tmp_path / "ran"


def program(path: Path, marker: Path) -> str:
    path.write_text(f"#!/bin/sh\ntouch {marker}\n")
    path.chmod(0o755)
    return str(path)


def written(folder: Path, **sections: Any) -> str:
    (folder / "theirs.yaml").write_text(yaml.safe_dump({"root": str(folder / "root"), **sections}))
    return str(folder / "theirs.yaml")


@pytest.mark.parametrize("verb", ["render", "plan"])
@pytest.mark.parametrize("name", ["{folder}/evil", "./evil", "evil", "{folder}/runai", "./runai", "sh"])
def test_no_program_runs_that_is_not_run_ais_on_path(
    name: str, verb: str, console: Cli, marker: Path, tmp_path: Path
) -> None:
    program(tmp_path / "evil", marker)
    program(tmp_path / "runai", marker)
    platform = {"kind": "runai", "project": "a", "cli": name.format(folder=tmp_path)}
    said = console(verb, written(tmp_path, script="examples/pi.py", platform=platform))
    assert said.code == EXIT_CODES[Fault.USER]
    assert "is no name of a runai program on PATH; add its folder to PATH" in said.err
    assert not marker.exists()


@pytest.mark.parametrize("verb", ["render", "plan"])
def test_no_program_runs_that_a_kubeconfig_names(verb: str, console: Cli, marker: Path, tmp_path: Path) -> None:
    runs = {"apiVersion": "client.authentication.k8s.io/v1", "command": program(tmp_path / "evil", marker)}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump({
        "clusters": [{"name": "a", "cluster": {"server": "https://127.0.0.1:9"}}],
        "users": [{"name": "a", "user": {"exec": {**runs, "interactiveMode": "Never"}}}],
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}], "current-context": "a",
    }))  # fmt: skip
    image = {"kind": "prebuilt", "reference": f"127.0.0.1:9/a@sha256:{64 * '0'}"}
    platform = {"kind": "gke", "kubeconfig": "kubeconfig", "nodes": 1}
    said = console(verb, written(tmp_path, script="/a.py", image=image, platform=platform))
    assert ("export KUBECONFIG=" in said.out) is (verb == "plan")
    assert not marker.exists()


@pytest.mark.parametrize("verb", ["plan", "doctor"])
def test_nothing_runs_that_a_dask_scheduler_answers(verb: str, console: Cli, marker: Path, tmp_path: Path) -> None:
    with evil_scheduler(marker) as address:
        console(verb, written(tmp_path, workers={"kind": "dask", "scheduler": address}))
    assert not marker.exists()


def test_no_value_of_a_sweep_steers_the_terminal(tmp_path: Path) -> None:
    config = written(tmp_path, sweep={"grid": {"root": ["\x1b]0;owned\x07"]}})
    with Terminal([sys.executable, "-m", "cli", "render", config], env=os.environ, cwd=tmp_path) as terminal:
        text = terminal.read_until(r"--- # .*\n", within=50)
    assert "--- # root=\\x1b]0;owned\\x07\n" in text


@pytest.mark.parametrize("verb", ["render", "plan"])
@pytest.mark.parametrize("path", ["/dev/zero", "pipe"])
@pytest.mark.parametrize("what", ["corpus", "tokenizer"])
def test_what_is_no_file_is_not_read(what: str, path: str, verb: str, console: Cli, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    given = str(tmp_path / path)
    data = {
        "corpus": {"corpus": {"kind": "files", "paths": [given]}},
        "tokenizer": {"corpus": {"kind": "stdlib", "max_bytes": 1000}, "tokenizer": {"kind": "file", "path": given}},
    }[what]
    said = console(verb, written(tmp_path, data=data))
    assert said.code != 0
    assert path in said.out + said.err


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (LAUGHS, "write aliases out"),
        ("a: &a [*a]", "there is no such setting"),
        ("model: {config: &a {b: *a}}", "cannot be used"),
        ("a: " + "[" * 20_000, "nested too deep"),
        ("a: " + "[" * 100 + "]" * 100, "101 deep, which no config has"),
        ("a: " + "9" * 5000, "cannot be read as YAML"),
        ("when: 2020-99-99", "month must be in 1..12"),
        ("a: !!python/object/apply:os.system ['touch ran']", "could not determine a constructor"),
    ],
    ids=["laughs", "itself", "itself as values", "deep", "deep and whole", "digits", "date", "python"],
)
def test_yaml_that_grows_or_runs_is_refused(text: str, words: str, console: Cli, marker: Path, tmp_path: Path) -> None:
    (tmp_path / "theirs.yaml").write_text(text)
    said = console("render", str(tmp_path / "theirs.yaml"))
    assert said.code == EXIT_CODES[Fault.USER]
    assert words in said.err
    assert not marker.exists()


def test_a_config_that_never_ends_is_given_up(console: Cli) -> None:
    assert "has more than 1,000,000 bytes, which no config has" in console("plan", "/dev/zero").err


def test_a_config_may_come_through_a_pipe_and_use_aliases(console: Cli, tmp_path: Path) -> None:
    read, write = os.pipe()
    os.write(write, f"root: {tmp_path}/root\nscript: a.py\nargs: &a [x, y]\nenv: &b {{A: '1'}}\n".encode())
    os.close(write)
    try:
        said = console("render", f"/dev/fd/{read}")
    finally:
        os.close(read)
    assert said.code == 0, said.err
