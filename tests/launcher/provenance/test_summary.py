"""The summary of training content: the sections of the AI Office's template, with facts of manifests only."""

import json
from pathlib import Path
from typing import Any, TypeAlias

from console_script import Cli
from training_runs import NewRun

from launcher.provenance.summary import summary_of
from litgpt_demo.data.dataset import open_dataset
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training.origins import find_initial_weights

Mixed: TypeAlias = tuple[dict[str, Any], Path]


def with_data(folder: Path, data: dict[str, Any]) -> Storage:
    document = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(document | {"run": {"data": data}}))
    return open_storage(str(folder))


def test_summary_has_the_sections_of_the_template(finished: Path) -> None:
    text = summary_of(open_storage(str(finished)))
    titles = [line.partition(" ")[2] for line in text.splitlines() if line.startswith("##")]
    assert [title.split()[0] for title in titles] == [
        "1.", "1.1", "1.2", "1.3", "2.", "2.1", "2.2", "2.3", "2.4", "2.5", "2.6", "3.", "3.1", "3.2", "3.3"
    ]  # fmt: skip


def test_summary_leaves_open_what_only_a_person_knows(finished: Path) -> None:
    lines = summary_of(open_storage(str(finished))).splitlines()
    for title in ("2.4 User data", "2.5 Synthetic data", "3.2 Removal of illegal content"):
        assert lines[lines.index(f"### {title}") + 2].startswith("[to be filled in by the provider: ")


def test_summary_names_public_data_by_its_repository(new_run: NewRun) -> None:
    text = summary_of(with_data(new_run("hub"), {"corpus": {"kind": "hub", "name": "ada/poems"}}))
    assert "- https://huggingface.co/datasets/ada/poems [to be filled in" in text
    assert "less than 1 billion tokens (" in text


def test_summary_has_each_source_of_a_mixture(new_run: NewRun, mixed: Mixed, tmp_path: Path) -> None:
    data, dataset = mixed
    text = summary_of(with_data(new_run("mixed", dataset=dataset), data))
    rows = [line for line in text.splitlines() if line.startswith("| ") and "| mixed |" in line]
    assert [row.split(" | ")[1:3] for row in rows] == [
        [f"files {tmp_path}/first/*.txt", "9"], [f"files {tmp_path}/second/*.txt", "9"]
    ]  # fmt: skip


def test_summary_has_the_data_of_all_runs_before(new_run: NewRun, finished: Path, tiny_dataset: Path) -> None:
    """The summary covers all stages of training."""
    child = new_run("child", origin=find_initial_weights(str(finished), optimizer=False, root="none"))
    text, manifest = summary_of(open_storage(str(child))), open_dataset(str(tiny_dataset))
    assert f"Model dependencies: {finished}/checkpoints/step-00000012" in text
    rows = [line for line in text.splitlines() if f"`{manifest.content_hash}`" in line]
    assert [row.split("|")[-2].strip() for row in rows] == ["child", "finished"]
    assert f"({manifest.train.tokens:,} tokens" in text, "the same tokens count once"


def test_summary_is_printed(cli: Cli, finished: Path) -> None:
    answer = cli("summary", str(finished))
    assert (answer.code, "## 1. General information" in answer.out) == (0, True)
