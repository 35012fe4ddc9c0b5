import math
from datetime import timedelta
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launcher.config import (
    RunConfig,
    ScriptConfig,
    SweepSettings,
    config_document,
    deep_merge,
    overridden,
    overrides_of,
    validated,
)
from launcher.errors import ConfigProblem
from launcher.yaml_files import load_yaml, read_yaml
from litgpt_demo.config import FileCorpus

NAMES = st.sampled_from(["name", "train", "data", "corpus", "max_steps"])
VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
DOCUMENTS = st.dictionaries(
    NAMES, st.recursive(VALUES, lambda inner: st.dictionaries(NAMES, inner, max_size=3), max_leaves=8), max_size=4
)


def problems(document: dict[Any, Any]) -> list[str]:
    with pytest.raises(ConfigProblem) as caught:
        validated(RunConfig, document, where="mine.yaml")
    heading, *lines = str(caught.value).splitlines()
    assert heading == "mine.yaml cannot be used:"
    return [line.strip() for line in lines]


@given(DOCUMENTS, st.lists(NAMES, min_size=1, max_size=4), VALUES, VALUES)
def test_last_override_of_a_setting_wins(document: dict[str, Any], path: list[str], first: Any, last: Any) -> None:
    """Other sections stay."""
    name = ".".join(path)
    assert overridden(document, {}) == deep_merge(document, {}) == deep_merge(document, document) == document
    spoken = overridden(overridden(document, {name: first}), {name: last})
    assert reduce(getitem, path, spoken) == last
    assert spoken == overridden(document, {name: last})
    for key in document.keys() - {path[0]}:
        assert spoken[key] == document[key]


HUB = {"data": {"corpus": {"kind": "hub", "name": "a/b", "revision": "v1"}, "split_seed": 7}}


def test_another_kind_drops_the_settings_of_the_old_kind() -> None:
    """The same kind keeps them."""
    for files in (
        {"data.corpus.kind": "files", "data.corpus.paths": ["x.txt"]},
        {"data": {"corpus": {"kind": "files", "paths": ["x.txt"]}}},
    ):
        config = validated(RunConfig, overridden(HUB, files), where="test")
        assert config.data.corpus == FileCorpus(kind="files", paths=("x.txt",))
        assert config.data.split_seed == 7
    again = overridden(HUB, {"data": {"corpus": {"kind": "hub", "revision": "v2"}}})
    assert again["data"]["corpus"] == {"kind": "hub", "name": "a/b", "revision": "v2"}


@pytest.mark.parametrize(
    ("change", "config", "grid"),
    [
        ("sweep.grid={train.seed: [3]}", {"n_layer": 4, "n_head": 2}, {"train.seed": [3]}),
        ("model.config={n_layer: 2}", {"n_layer": 2}, {"train.seed": [1], "train.beta": [2]}),
        ("sweep={grid: {train.seed: [3]}}", {"n_layer": 4, "n_head": 2}, {"train.seed": [3]}),
        ("model.config.n_layer=2", {"n_layer": 2, "n_head": 2}, {"train.seed": [1], "train.beta": [2]}),
    ],
)
def test_override_replaces_a_mapping_of_own_names(change: str, config: dict[str, Any], grid: dict[str, Any]) -> None:
    """A section is no such mapping: its settings that are not named stay."""
    sweep = {"grid": {"train.seed": [1], "train.beta": [2]}, "sampler": "grid"}
    base = {"model": {"config": {"n_layer": 4, "n_head": 2}, "sequence_length": 8}, "sweep": sweep}
    expected = {"model": {"config": config, "sequence_length": 8}, "sweep": {"grid": grid, "sampler": "grid"}}
    assert overridden(base, overrides_of([change])) == expected


def test_overrides_turn_a_corpus_into_a_mixture() -> None:
    changes = ["data.mixture=[{corpus: {kind: stdlib}, weight: 1}]", "data.tokenizer={kind: hub}"]
    with pytest.raises(ConfigProblem, match=r"make the corpus a source of the mixture, and set data\.corpus=null"):
        validated(RunConfig, overridden(HUB, overrides_of(changes)), where="test")
    made = validated(RunConfig, overridden(HUB, overrides_of([*changes, "data.corpus=null"])), where="test")
    assert made.data.label == "stdlib"


@pytest.mark.parametrize(
    ("assignment", "name", "value"),
    [
        ("train.learning_rate=3e-4", "learning_rate", 3e-4),
        ("train.max_tokens=20e9", "max_tokens", 20_000_000_000),
        (" train.betas = [0.8, 0.99]", "betas", (0.8, 0.99)),
        ("train.max_steps=01000", "max_steps", 1000),
        ("train.max_time=8:00", "max_time", timedelta(hours=8)),
    ],
)
def test_values_are_yaml_with_numbers_as_people_write_them(assignment: str, name: str, value: Any) -> None:
    config = validated(RunConfig, overridden({}, overrides_of([assignment])), where="test")
    assert getattr(config.train, name) == value


def test_a_word_that_is_no_assignment_is_refused() -> None:
    assert overrides_of(["env.FLAGS=--a=1 --b=2"]) == {"env.FLAGS": "--a=1 --b=2"}
    for word in ("train.learning_rate", "train..seed=3", "name=["):
        with pytest.raises(ConfigProblem, match=r"is not an override|the value is not YAML"):
            overrides_of([word])


@pytest.mark.parametrize("content", [None, b"name: [", b"\xff\xfe\x00", b"- a\n- b\n", b"# name: gpt\n"])
def test_a_file_that_holds_no_settings_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "mine.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigProblem, match=str(path)):
        read_yaml(path)


@pytest.mark.parametrize(
    "text", ["train:\n  max_steps:\u00a0100\n  seed: 1", "train:\n\u00a0 max_steps: 100", "a: 1\nmax_steps: 100\u200b"]
)
def test_odd_blank_is_named_by_its_code_point(text: str) -> None:
    with pytest.raises(yaml.YAMLError, match=r"line 2 has U\+(00A0|200B) \(.*type a space"):
        load_yaml(text)
    assert load_yaml("\ufeff# where\u00a0?\na: 'b\u00a0c'") == {"a": "b\u00a0c"}
    with pytest.raises(yaml.YAMLError, match="found character '@' that cannot start any token"):
        load_yaml("# where\u00a0?\na: @b")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train:\n\tmax_steps: 5", "line 2 has a tab, but YAML needs spaces"),
        ("train:\n  max_steps: 5\n   seed: 3", "line 3 cannot be a setting.* line above it is indented"),
        ("train:\n  max_steps: 5\n seed: 3", "line 3 is not indented like the other settings of its section"),
    ],
)
def test_a_slip_of_indentation_is_told_in_the_words_of_settings(text: str, message: str) -> None:
    with pytest.raises(yaml.YAMLError, match=message) as raised:
        load_yaml(text)
    assert "unicode string" not in str(raised.value)


def test_repeated_key_is_named_with_both_lines() -> None:
    """A merged key may repeat another."""
    with pytest.raises(yaml.YAMLError, match="d is given in line 3 and again in line 4"):
        load_yaml("a: {b: 1}\nc:\n  d: 1\n  'd': 1\n")
    assert load_yaml("one: &one {seed: 1, steps: 2}\nmine: {<<: *one, seed: 4}\n")["mine"] == {"seed": 4, "steps": 2}
    document = load_yaml("&all [*all]")
    assert document[0] is document, "a node that contains itself ends too"


def test_platform_file_replaces_sections_of_the_config(tmp_path: Path) -> None:
    """Overrides win over both."""
    config, platform_file = tmp_path / "mine.yaml", tmp_path / "platform.yaml"
    config.write_text(
        "name: mine\nroot: here\ntrain: {max_steps: 9}\nplatform: {kind: local, nodes: 4, grace_period: 5}\n"
    )
    platform_file.write_text("platform: {kind: local, processes_per_node: 2}\n")
    assert config_document(config, ["platform.nodes=3", "train.seed=1"], platform_file=platform_file) == {
        "name": "mine",
        "root": "here",
        "train": {"max_steps": 9, "seed": 1},
        "platform": {
            "kind": "local",
            "processes_per_node": 2,
            "nodes": 3,
        },  # nothing of the config's grace and nodes is left
    }
    for more_or_less in ("platform: {kind: local}\nmodel: {}\n", "root: there\n"):
        platform_file.write_text(more_or_less)
        with pytest.raises(ConfigProblem, match=r"platform\.yaml"):
            config_document(config, platform_file=platform_file)


def test_all_problems_are_reported_by_the_users_names() -> None:
    document = {
        "nme": "gpt",
        "data": {"corpus": {"kind": "files", "pths": ["a"]}, "tokenizer": {"kind": "trian"}},
        "train": {"learning_rate": "fast", "max_steps": -1},
        "image": {"reference": "x"},
        1: 2,
    }
    assert {line.partition(": ")[0] for line in problems(document)} == {
        "nme", "data.corpus.paths", "data.corpus.pths", "data.tokenizer.kind", "train.learning_rate",
        "train.max_steps", "image.kind", "1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"train": None}, "train: None given; settings belong here"),
        ({"name": "x" * 33}, "given; a name has lower-case letters"),
        ({"max_steps": 30}, "max_steps: unknown setting; did you mean train.max_steps?"),
        (
            {"data": {"mixture": [{"corpus": {"kind": "stdlib"}, "weight": 1}]}},
            "a mixture cannot train its tokenizer",
        ),
        ({"train": {"betas": 0.9}}, "train.betas: 0.9 given; input should be a list, as [0.9]"),
        ({"train": {"seed": 2**64}}, "train.seed: 18446744073709551616 given; input should be less than"),
        ({"train": {"learning_rate": math.inf}}, "train.learning_rate: inf given; input should be a finite number"),
        ({"train": {"hang_timeout": math.inf}}, "train.hang_timeout: inf given; input should be a finite number"),
        (
            {"platform": {"kind": "slurm", "usd_per_hour": math.inf}},
            "usd_per_hour: inf given; input should be a finite",
        ),
        ({"budget": {"max_usd": math.inf}}, "budget.max_usd: inf given; input should be a finite number"),
        ({"train": {"global_batch": 20}, "platform": {"kind": "local", "nodes": 2}}, "must be a multiple of 16, for"),
        (
            {"budget": {"max_usd": 5}},
            "budget.max_usd needs a price, but the list price of local is not known here; give",
        ),
    ],
)
def test_message_has_the_value_the_reason_the_choices(document: dict[Any, Any], expected: str) -> None:
    (message,) = problems(document)
    assert expected in message


@pytest.mark.parametrize("value", [2**64, 10**20, -(2**63) - 1, 10**4000], ids=range(4))
@pytest.mark.parametrize(
    "setting", ["data.split_seed", "data.corpus.max_bytes", "train.max_steps", "platform.nodes", "model.config.n_layer"]
)
def test_integer_of_more_than_64_bits_is_refused(setting: str, value: int) -> None:
    """Prefect's server could store one, and not list the flow runs that have it any more."""
    known = {"data": {"corpus": {"kind": "stdlib"}}, "platform": {"kind": "local"}}
    (line,) = problems(overridden(known, {setting: value}))
    assert line.startswith(setting)
    for name, values in (("grid", [1, value]), ("space", {"kind": "choice", "values": [value]})):
        with pytest.raises(ConfigProblem, match=rf"{name}\.{setting}.*"):
            validated(SweepSettings, {name: {setting: values}}, where="sweep")


def test_a_script_is_found_from_the_folder_one_starts_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = ScriptConfig(script="jobs/pi.py", args=("--steps", "a b"))
    assert config.program == (str(tmp_path / "jobs" / "pi.py"), "--steps", "a b")
    assert ScriptConfig(script="-m  mine.train", args=("-m",)).program == ("-m", "mine.train", "-m")
