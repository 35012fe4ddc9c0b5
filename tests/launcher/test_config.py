from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from launcher.config import (
    DaskWorkers,
    DuplicateKeys,
    ProcessWorkers,
    RunConfig,
    ScriptConfig,
    SweepConfig,
    ThreadWorkers,
    Workers,
    config_document,
    load,
    load_yaml,
    merged,
    overridden,
    overrides_of,
    read_yaml,
    validated,
)
from launcher.errors import ConfigProblem
from litgpt_demo.config import FileCorpus, HubTokenizer, StdlibCorpus

NAMES = st.sampled_from(["name", "train", "data", "corpus", "kind", "max_steps"])
VALUES = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.lists(st.integers(), max_size=2)
DOCUMENTS = st.dictionaries(
    NAMES, st.recursive(VALUES, lambda inner: st.dictionaries(NAMES, inner, max_size=3), max_leaves=8), max_size=4
)
PATHS = st.lists(NAMES.filter(lambda name: name != "kind"), min_size=1, max_size=4).map(".".join)


def at(document: Any, path: str) -> Any:
    for part in path.split("."):
        document = document[part]
    return document


def problems(document: dict[Any, Any], kind: type[RunConfig] | type[ScriptConfig] = RunConfig) -> list[str]:
    with pytest.raises(ConfigProblem) as caught:
        validated(kind, document, where="mine.yaml")
    heading, *lines = str(caught.value).splitlines()
    assert heading == "mine.yaml cannot be used:"
    return [line.strip() for line in lines]


# --- merging ----------------------------------------------------------------------------------------------------------


@given(DOCUMENTS)
def test_overriding_with_nothing_changes_nothing(document: dict[str, Any]) -> None:
    assert overridden(document, {}) == document
    assert merged(document, {}) == document
    assert merged(document, document) == document


@given(DOCUMENTS, PATHS, VALUES, VALUES)
def test_the_last_word_on_a_setting_wins(document: dict[str, Any], path: str, first: Any, last: Any) -> None:
    spoken = overridden(overridden(document, {path: first}), {path: last})
    assert at(spoken, path) == last
    assert spoken == overridden(document, {path: last})


@given(DOCUMENTS, PATHS, VALUES)
def test_sections_that_are_not_named_stay(document: dict[str, Any], path: str, value: Any) -> None:
    before = yaml.safe_dump(document)
    after = overridden(document, {path: value})
    top = path.split(".")[0]
    assert {name: section for name, section in after.items() if name != top} == {
        name: section for name, section in document.items() if name != top
    }
    assert yaml.safe_dump(document) == before  # and the document itself is left alone


def test_sections_are_merged_setting_by_setting_and_lists_are_replaced() -> None:
    document = {"train": {"betas": [0.9, 0.95], "seed": 1}, "name": "a"}
    changes = {"train": {"betas": [0.8, 0.9], "max_steps": 3}}
    assert merged(document, changes) == {"train": {"betas": [0.8, 0.9], "seed": 1, "max_steps": 3}, "name": "a"}


HUB = {"data": {"corpus": {"kind": "hub", "name": "a/b", "revision": "v1"}, "split_seed": 7}}


@pytest.mark.parametrize(
    "overrides",
    [
        {"data.corpus.kind": "files", "data.corpus.paths": ["x.txt"]},
        {"data.corpus": {"kind": "files", "paths": ["x.txt"]}},
        {"data": {"corpus": {"kind": "files", "paths": ["x.txt"]}}},
    ],
)
def test_another_kind_drops_what_belonged_to_the_old_one(overrides: dict[str, Any]) -> None:
    config = validated(RunConfig, overridden(HUB, overrides), where="test")
    assert config.data.corpus == FileCorpus(kind="files", paths=("x.txt",))
    assert config.data.split_seed == 7


@pytest.mark.parametrize(
    "overrides",
    [
        {"data.corpus.revision": "v2"},
        {"data.corpus.kind": "hub", "data.corpus.revision": "v2"},
        {"data.corpus": {"revision": "v2"}},
        {"data": {"corpus": {"kind": "hub", "revision": "v2"}}},
    ],
)
def test_the_same_kind_keeps_the_rest(overrides: dict[str, Any]) -> None:
    assert overridden(HUB, overrides)["data"]["corpus"] == {"kind": "hub", "name": "a/b", "revision": "v2"}


def test_a_kind_may_be_given_after_its_settings() -> None:
    document = overridden({}, overrides_of(["data.corpus.max_bytes=5e6", "data.corpus.kind=stdlib"]))
    config = validated(RunConfig, document, where="test")
    assert config.data.corpus == StdlibCorpus(kind="stdlib", max_bytes=5_000_000)


# --- what stands in a file or on the command line ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("assignment", "name", "value"),
    [
        ("train.learning_rate=3e-4", "learning_rate", 3e-4),
        ("train.learning_rate=0.0003", "learning_rate", 3e-4),
        ("train.max_tokens=20e9", "max_tokens", 20_000_000_000),
        ("train.max_steps=1_000", "max_steps", 1000),
        ("train.clip_norm=null", "clip_norm", None),
        ("train.clip_norm=", "clip_norm", None),
        ("train.betas=[0.8, 0.99]", "betas", (0.8, 0.99)),
        ("train.compile=true", "compile", "model"),
        (" train.seed = 7", "seed", 7),
    ],
)
def test_values_are_read_as_yaml_and_numbers_as_people_write_them(assignment: str, name: str, value: Any) -> None:
    config = validated(RunConfig, overridden({}, overrides_of([assignment])), where="test")
    assert getattr(config.train, name) == value


def test_a_value_may_hold_equals_signs_and_whole_sections() -> None:
    assert overrides_of(["env.FLAGS=--a=1 --b=2", "model.config={n_layer: 2}"]) == {
        "env.FLAGS": "--a=1 --b=2",
        "model.config": {"n_layer": 2},
    }


@pytest.mark.parametrize("word", ["train.learning_rate", "--lr", "=3", ".seed=3", "train.=3", "train..seed=3"])
def test_a_word_that_is_no_assignment_is_refused(word: str) -> None:
    with pytest.raises(ConfigProblem, match=r"is not an override; write section\.setting=value"):
        overrides_of([word])


def test_a_value_that_is_no_yaml_is_refused() -> None:
    with pytest.raises(ConfigProblem, match=r"(?s)'name=\[': the value is not YAML .*quote it"):
        overrides_of(["name=["])


def test_a_file_with_overrides_becomes_settings(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\ntrain: {global_batch: 16, micro_batch: 4, learning_rate: 1e-3}\n")
    config = load(RunConfig, path, ["train.learning_rate=3e-4", "data.tokenizer.kind=hub"])
    assert (config.name, config.train.global_batch, config.train.learning_rate) == ("mine", 16, 3e-4)
    assert config.data.tokenizer == HubTokenizer(kind="hub")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, r"is not there; the shipped ones are deployments/configs"),
        (b"name: [", "cannot be read as YAML"),
        (b"\xff\xfe\x00", "cannot be read as YAML"),
        (b"- a\n- b\n", "holds a list, and settings belong there"),
        (b"42\n", "holds a single value, and settings belong there"),
        (b"# name: gpt\n", "mine.yaml is empty, and settings belong there"),
        (b"", "mine.yaml is empty, and settings belong there"),
    ],
)
def test_a_file_that_holds_no_settings_is_named(tmp_path: Path, content: bytes | None, words: str) -> None:
    path = tmp_path / "mine.yaml"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigProblem, match=words) as caught:
        read_yaml(path)
    assert str(path) in str(caught.value)


# --- profiles ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def written(tmp_path: Path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\nroot: here\ntrain: {max_steps: 9}\nplatform: {kind: local, nodes: 4, grace: 5}\n")
    return path


def profile(folder: Path, text: str) -> Path:
    path = folder / "profile.yaml"
    path.write_text(text)
    return path


def test_a_profiles_sections_take_the_place_of_the_configs_and_overrides_win_over_both(
    tmp_path: Path, written: Path
) -> None:
    there = profile(tmp_path, "root: there\nplatform: {kind: local, processes: 2}\n")
    document = config_document(written, ["platform.nodes=3", "train.seed=1"], profile=there)
    assert document == {
        "name": "mine",
        "root": "there",
        "train": {"max_steps": 9, "seed": 1},
        "platform": {"kind": "local", "processes": 2, "nodes": 3},  # nothing of the config's grace and nodes is left
    }


def test_what_a_profile_leaves_out_stays_as_the_config_has_it(tmp_path: Path, written: Path) -> None:
    assert config_document(written, profile=profile(tmp_path, "platform: {kind: local}"))["root"] == "here"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("platform: {kind: local}\ndata: {}\nmodel: {}\n", r"has data, model: a profile says where a config runs, by"),
        ("platform: {kind: local}\ntrain.seed: 3\n", r"has train\.seed: a profile says"),
        ("root: there\n", "has no platform section"),
        ("", "is empty, and settings belong there"),
    ],
)
def test_a_profile_that_says_more_than_where_or_not_even_that_is_refused_by_name(
    tmp_path: Path, written: Path, text: str, words: str
) -> None:
    with pytest.raises(ConfigProblem, match=words) as caught:
        config_document(written, profile=profile(tmp_path, text))
    assert "profile.yaml" in str(caught.value)


# --- what cannot be used ----------------------------------------------------------------------------------------------


def test_every_problem_is_reported_at_once_under_the_name_the_user_wrote() -> None:
    document = {
        "nme": "gpt",
        "data": {"corpus": {"kind": "files", "pths": ["a"]}, "tokenizer": {"kind": "trian"}},
        "train": {"learning_rate": "fast", "max_steps": -1, "lr": 1},
        "model": {"name": "pythia-14"},
        "platform": {"kind": "slurm", "node": 2},
        "image": {"nme": "x"},
    }
    assert {line.partition(": ")[0] for line in problems(document)} == {
        "nme",
        "data.corpus.paths",
        "data.corpus.pths",
        "data.tokenizer.kind",
        "train.learning_rate",
        "train.max_steps",
        "train.lr",
        "model",
        "platform.kind",
        "image.kind",
    }


@pytest.mark.parametrize(
    ("document", "line"),
    [
        ({"nme": "x"}, "nme: there is no such setting; did you mean name?"),
        ({"data": {"corpus": {"kind": "hub", "name": "a/b", "fils": "*"}}}, "data.corpus.fils: .*did you mean files?"),
        ({"platform": {"kind": "local", "gpus": 2}}, "platform.gpus: .*there are kind, nodes, processes, port"),
        ({"platform": {"kind": "slurm"}}, "platform.kind: 'slurm' given; there are 'local', 'gke'"),
        ({"platform": {"nodes": 2}}, "platform.kind: is not given; it says which kind"),
        ({"workers": {"count": 0}}, "workers.count: 0 given; input should be greater than 0"),
        ({"workers": {"cuont": 2}}, "workers.cuont: there is no such setting; did you mean count?"),
        ({"workers": {"scheduler": "10.0.0.2"}}, "workers.scheduler: '10.0.0.2' given; string should match"),
        ({"workers": {"kind": "processes", "count": 0}}, "workers.count: 0 given; input should be greater than 0"),
        ({"image": {"kind": "podman"}}, "image.kind: 'podman' given; there are 'none', 'prebuilt', 'docker'"),
        ({"image": {"reference": "a"}}, "image.kind: is not given; it says which kind"),
        ({"image": {"kind": "docker", "repository": "a/b:c"}}, "image.repository: .*has a tag.*write a/b"),
        ({"train": {"learning_rate": 0}}, "train.learning_rate: 0 given; input should be greater than 0"),
        ({"train": None}, "train: None given; settings belong here.*or leave the whole section out"),
        (
            {"model": {"name": "pythia-14"}},
            "model: model.name='pythia-14' is not a LitGPT.*did you mean pythia-14m",
        ),
        ({"model": {"config": {"n_layers": 2}}}, "model: .*unknown fields.*did you mean n_layer"),
        ({"train": {"max_steps": 9, "max_tokens": 9}}, "train: train.max_steps=9 and train.max_tokens=9.*keep one"),
        ({"train": {"max_steps": 9, "warmup_steps": 9}}, "train: train.warmup_steps=9 leaves nothing of .*a tenth"),
        ({"name": "My Run"}, "name: 'My Run' given; string should match"),
        ({1: 2}, "1: 1 given; keys should be strings"),
    ],
)
def test_a_message_says_what_was_given_why_it_cannot_be_and_what_would_do(document: dict[Any, Any], line: str) -> None:
    said = problems(document)
    assert any(re.match(line.replace("?", r"\?"), one) for one in said), said


@pytest.mark.parametrize(
    ("file", "override", "workers"),
    [
        ({}, "workers.count=1", ThreadWorkers(kind="threads", count=1)),
        ({"workers": {"kind": "processes"}}, "workers.count=1", ProcessWorkers(kind="processes", count=1)),
        ({}, "workers.scheduler=tcp://10.0.0.2:8786", DaskWorkers(kind="dask", scheduler="tcp://10.0.0.2:8786")),
    ],
)
def test_workers_need_no_kind_where_the_other_settings_tell_it(
    file: dict[str, Any], override: str, workers: Workers
) -> None:
    document = overridden(file, overrides_of([override]))
    assert validated(RunConfig, document, where="test").workers == workers


def test_a_batch_that_does_not_split_over_the_processes_is_refused_with_one_that_does() -> None:
    document = {
        "train": {"global_batch": 20, "micro_batch": 4},
        "platform": {"kind": "local", "nodes": 2, "processes": 2},
    }
    (line,) = problems(document)
    assert "train.global_batch=20 does not split over 4 processes" in line
    assert line.endswith("it must be a multiple of 16, for example 32")
    assert validated(RunConfig, overridden(document, {"train.global_batch": 32}), where="test").world_size == 4


@pytest.mark.parametrize("name", ["a", "gpt-2", "x" * 32])
def test_names_that_fit_a_job_are_taken(name: str) -> None:
    assert RunConfig(name=name).name == name


@pytest.mark.parametrize("name", ["", "2gpt", "gpt-", "GPT", "a_b", "x" * 33])
def test_names_that_do_not_fit_a_job_are_refused(name: str) -> None:
    assert problems({"name": name})


def test_a_grid_without_values_is_refused() -> None:
    with pytest.raises(ConfigProblem, match=r"sweep\.grid has no values for train\.seed; give each setting a list"):
        validated(SweepConfig, {"sweep": {"grid": {"train.seed": [], "train.learning_rate": [1]}}}, where="test")


# --- scripts ----------------------------------------------------------------------------------------------------------


def test_a_script_is_found_from_the_folder_one_starts_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = ScriptConfig(script="jobs/pi.py", args=("--steps", "a b"))
    assert config.program == (str(tmp_path / "jobs" / "pi.py"), "--steps", "a b")


def test_a_module_is_passed_on_as_one() -> None:
    assert ScriptConfig(script="-m  mine.train", args=("-m",)).program == ("-m", "mine.train", "-m")


def test_a_script_has_to_be_named() -> None:
    assert problems({}, ScriptConfig) == ["script: is not given, and has no default"]


# --- YAML as people write it ------------------------------------------------------------------------------------------

SCALARS = st.none() | st.booleans() | st.integers() | st.text(max_size=8)
ANY_DOCUMENTS = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
)


@given(ANY_DOCUMENTS)
def test_what_is_given_once_is_read_as_it_was_written(document: Any) -> None:
    assert load_yaml(yaml.safe_dump(document)) == document


@pytest.mark.parametrize("text", ["", "# a comment\n", "---\n"])
def test_an_empty_text_is_nothing(text: str) -> None:
    assert load_yaml(text) is None


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("seed: 1\nseed: 2\n", ["seed is given in line 1 and again in line 2"]),
        ("a: {b: 1}\nc:\n  d: 1\n  'd': 1\n", ["c.d is given in line 3 and again in line 4"]),
        ("{a: 1, a: 1}", ["a is given in line 1 and again in line 1"]),
        ("- a: 1\n- b: {c: 1,\n c: 2}\n", ["[1].b.c is given in line 2 and again in line 3"]),
        (
            "a: 1\nb: 1\na: 2\nb: 2\na: 3\n",
            ["a is given in line 1 and again in line 3", "line 5", "b is given in line 2"],
        ),
    ],
)
def test_every_key_that_is_given_twice_is_named_with_both_lines(text: str, told: list[str]) -> None:
    with pytest.raises(DuplicateKeys, match=re.escape(told[0])) as refused:
        load_yaml(text)
    assert all(words in str(refused.value) for words in told)
    assert str(refused.value).endswith("keep one of them")


def test_keys_of_a_merged_mapping_may_be_given_again() -> None:
    text = "one: &one {seed: 1, steps: 2}\nmore: &more {lr: 3}\nmine:\n  <<: *one\n  <<: *more\n  seed: 4\nsame: *one\n"
    assert load_yaml(text)["mine"] == {"seed": 4, "steps": 2, "lr": 3}


def test_a_node_that_contains_itself_ends_too() -> None:
    document = load_yaml("&all [*all]")
    assert document[0] is document


# --- elastic nodes ----------------------------------------------------------------------------------------------------


def elastic(nodes: object, *, batch: int = 24, **platform: object) -> RunConfig:
    section = {"kind": "local", "nodes": nodes, **platform}
    return validated(RunConfig, {"platform": section, "train": {"global_batch": batch, "micro_batch": 2}}, where="here")


def test_elastic_nodes_train_on_the_numbers_of_nodes_that_the_batch_splits_over() -> None:
    assert elastic({"min": 2, "max": 4}).node_counts == (2, 3, 4)
    config = elastic({"min": 2, "max": 4}, batch=16)
    assert (config.node_counts, config.world_size, config.least_ranks) == ((2, 4), 4, 2)
    assert RunConfig.model_validate(config.model_dump(mode="json")) == config
    assert (elastic(3).node_counts, elastic(3).least_ranks) == ((3,), 3)


@pytest.mark.parametrize(
    ("nodes", "kind", "said"),
    [
        ({"min": 5, "max": 4}, "local", r"nodes\.min=5 is above the 4 nodes"),
        ({"min": 0, "max": 4}, "local", r"min_nodes: 0 given"),
        ({"min": 2}, "local", r"platform\.nodes=\{'min': 2\} is neither a number nor"),
        ({"min": 3, "max": 4}, "local", r"nodes\.min=3: train\.global_batch=16 does not split .* take 4"),
        ({"min": 2, "max": 4}, "gke", r"nodes: .* the nodes of a job on gke start and end together"),
        ({"min": 2, "max": 4}, "batch", r"nodes: .* on batch start and end together"),
        ({"min": 2, "max": 4}, "runai", r"nodes: .* on runai start and end together"),
    ],
)
def test_elastic_nodes_that_cannot_be_are_refused_with_the_reason(nodes: dict[str, int], kind: str, said: str) -> None:
    with pytest.raises(ConfigProblem, match=said):
        elastic(nodes, batch=16, kind=kind)
