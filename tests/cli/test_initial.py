from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import yaml
from console_script import Cli
from terminal import Terminal

from cli.arguments import config_at
from cli.initial import commented, new_config
from launcher.config import RunConfig, overrides_of
from launcher.errors import ConfigProblem
from launcher.platforms import PLATFORMS, settings_classes
from litgpt_demo.errors import EXIT_CODES, Fault

ANSWERS = {
    "local": [],
    "gke": ["root=gs://acme/llm", "image.repository=europe-west4-docker.pkg.dev/acme/llm/train"],
    "runai": ["root=gs://acme/llm", "image.repository=ghcr.io/acme/llm", "platform.project=team"],
    "batch": ["root=gs://acme/llm", "image.repository=us-docker.pkg.dev/acme/llm/train", "platform.project=acme-llm"],
    "slurm": ["root=/shared/llm", "platform.environment={kind: venv, path: /shared/venv}"],
}
SECTIONS = dict(zip(PLATFORMS, settings_classes(), strict=True))


@pytest.mark.parametrize("kind", PLATFORMS)
@pytest.mark.long
def test_a_config_for_each_platform_can_be_used_and_says_what_its_settings_mean(kind: str, tmp_path: Path) -> None:
    document = new_config(kind, SECTIONS[kind], overrides_of(ANSWERS[kind]), ask=None)
    text = commented(document)
    assert yaml.safe_load(text) == document
    (tmp_path / "config.yaml").write_text(text)
    config = config_at(tmp_path / "config.yaml", None)
    assert isinstance(config, RunConfig)
    assert config.platform.kind == kind
    assert "# A folder, or gs://bucket/prefix, that everything is written under" in text
    assert max(map(len, text.splitlines())) <= 120


def test_the_global_batch_splits_over_the_ranks_unless_it_is_given() -> None:
    given = overrides_of([*ANSWERS["slurm"], "platform.nodes=3"])
    assert new_config("slurm", SECTIONS["slurm"], given, ask=None)["train"]["global_batch"] == 576  # 3 × 8 × 8 × 3
    with pytest.raises(ConfigProblem, match="does not split over 24 processes"):
        new_config("slurm", SECTIONS["slurm"], {**given, "train.global_batch": 500}, ask=None)


def test_only_what_is_not_given_is_asked_for() -> None:
    asked = []

    def ask(name: str, meaning: str, suggestion: str) -> str:
        asked.append((name, suggestion))
        assert meaning
        return {"root": "/shared/llm", "platform.gpus": "4"}.get(name, suggestion)

    given = overrides_of(["platform.environment.kind=venv", "platform.environment.path=/shared/venv", "name=mine"])
    made = new_config("slurm", SECTIONS["slurm"], given, ask=ask)
    assert (made["name"], made["root"], made["platform"]["gpus"]) == ("mine", "/shared/llm", 4)
    assert ("root", "") in asked
    assert {"name", "platform.environment"}.isdisjoint(name for name, _ in asked)


def test_without_a_terminal_what_only_the_user_knows_is_named(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "new.yaml"
    said = cli("init", "gke", "root=gs://acme/llm", "--file", str(file))
    assert said.code == EXIT_CODES[Fault.USER]
    assert "image.repository=…  The repository of the image" in said.err
    assert "root=…" not in said.err
    assert "there are local, gke, runai, batch, slurm" in cli("init", "gkee", "--file", str(file)).err
    assert not file.exists()


def test_a_config_that_is_there_is_never_written_over(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    assert cli("init", "local", "--file", str(file)).code == 0
    written = file.read_text()
    said = cli("init", "local", "name=other", "--file", str(file))
    assert (said.code, file.read_text()) == (EXIT_CODES[Fault.USER], written)


@pytest.mark.long
def test_on_a_terminal_it_asks_and_suggests(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "cli", "init", "--file", str(tmp_path / "asked.yaml")]
    with Terminal(command, env=os.environ, cwd=Path.cwd()) as terminal:
        for question, answer in (
            (r"platform \(", ""),
            (r"name \[", "asked"),
            (r"root \[", ""),
            (r"platform.nodes \[", "1"),
        ):
            terminal.read_until(question, within=180)
            terminal.type(f"{answer}\n")
        terminal.read_until("train-litgpt run", within=180)
    document = yaml.safe_load((tmp_path / "asked.yaml").read_text())
    assert (document["name"], document["platform"]) == ("asked", {"kind": "local", "nodes": 1})
