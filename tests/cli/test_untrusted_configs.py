"""A config of somebody else's is looked at before it is run: looking runs nothing that it names, and always ends."""

import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from console_script import Cli

from litgpt_demo.errors import EXIT_CODES, FailureClass

LAUGHS = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.fixture
def console(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return cli


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """The file that is there once anything of the config's choice has run."""
    for name in ("evil", "runai"):
        (tmp_path / name).write_text(f"#!/bin/sh\ntouch {tmp_path}/ran\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path / "ran"


def written(folder: Path, **sections: Any) -> str:
    (folder / "theirs.yaml").write_text(yaml.safe_dump({"root": str(folder / "root"), **sections}))
    return str(folder / "theirs.yaml")


@pytest.mark.parametrize("name", ["{folder}/evil", "evil", "./runai", "sh"])
def test_no_program_runs_that_is_not_run_ais_on_path(name: str, console: Cli, marker: Path, tmp_path: Path) -> None:
    platform = {"kind": "runai", "project": "a", "cli": name.format(folder=tmp_path)}
    for verb in ("render", "plan"):
        result = console(verb, written(tmp_path, script="examples/pi.py", platform=platform))
        assert (result.code, "is not the name of a runai program on PATH" in result.err) == (
            EXIT_CODES[FailureClass.USER],
            True,
        )
    assert not marker.exists()


def test_no_program_runs_that_a_kubeconfig_names(console: Cli, marker: Path, tmp_path: Path) -> None:
    runs = {"apiVersion": "client.authentication.k8s.io/v1", "command": str(tmp_path / "evil")}
    (tmp_path / "kubeconfig").write_text(yaml.safe_dump({
        "clusters": [{"name": "a", "cluster": {"server": "https://127.0.0.1:9"}}],
        "users": [{"name": "a", "user": {"exec": {**runs, "interactiveMode": "Never"}}}],
        "contexts": [{"name": "a", "context": {"cluster": "a", "user": "a"}}], "current-context": "a",
    }))  # fmt: skip
    image = {"kind": "prebuilt", "reference": f"127.0.0.1:9/a@sha256:{64 * '0'}"}
    platform = {"kind": "kubernetes", "kubeconfig": "kubeconfig", "nodes": 1}
    config = written(tmp_path, script="/a.py", image=image, platform=platform)
    assert "export KUBECONFIG=" not in console("render", config).out
    assert "export KUBECONFIG=" in console("plan", config).out
    assert not marker.exists()


@pytest.mark.parametrize("path", ["/dev/zero", "pipe"])
def test_path_that_is_not_a_file_is_not_read(path: str, console: Cli, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    corpus, tokenizer = {"kind": "files", "paths": [path]}, {"kind": "file", "path": path}
    for data in ({"corpus": corpus}, {"corpus": {"kind": "stdlib", "max_bytes": 1000}, "tokenizer": tokenizer}):
        result = console("plan", written(tmp_path, data=data))
        assert (result.code != 0, path in result.out + result.err) == (True, True)
    assert "has more than 1,000,000 bytes, so it is not a config" in console("plan", "/dev/zero").err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (LAUGHS, "write the aliases out"),
        ("model: {config: &a {b: *a}}", "cannot be used"),
        ("a: " + "[" * 20_000, "nested too deep"),
        ("a: " + "9" * 5000, "cannot be read as YAML"),
        ("a: !!python/object/apply:os.system ['touch ran']", "could not determine a constructor"),
    ],
    ids=["laughs", "itself", "deep", "digits", "python"],
)
def test_yaml_that_grows_or_runs_is_refused(
    text: str, message: str, console: Cli, marker: Path, tmp_path: Path
) -> None:
    (tmp_path / "theirs.yaml").write_text(text)
    result = console("render", str(tmp_path / "theirs.yaml"))
    assert (result.code, message in result.err) == (EXIT_CODES[FailureClass.USER], True)
    assert not marker.exists()
