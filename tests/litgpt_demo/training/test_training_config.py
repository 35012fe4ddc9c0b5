"""What a user writes: what is accepted, what is refused and in which words, and what decides a content hash."""

import math
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from launcher.config import RunConfig
from litgpt_demo.config import ModelConfig, RunIdRole, TrainConfig, content_hash, slug


def train(**fields: Any) -> TrainConfig:
    return TrainConfig.model_validate(fields)


@given(st.integers(1, 2**53))
def test_a_count_means_the_same_as_number_float_and_text(count: int) -> None:
    for written in (count, float(count), str(count), f"{count}.0"):
        assert train(max_tokens=written).max_tokens == count


@pytest.mark.parametrize("written", [20.5, "many", ".inf", -1, 0])
def test_invalid_counts_are_refused(written: object) -> None:
    with pytest.raises(ValidationError, match="max_tokens"):
        train(max_tokens=written)


@pytest.mark.parametrize(
    ("kind", "written", "message"),
    [
        (TrainConfig, {"max_steps": 10, "max_tokens": 1e6, "warmup_steps": 1}, "both given.*keep one"),
        (TrainConfig, {"global_batch": 8, "micro_batch": 512}, "global_batch=8.*micro_batch=512"),
        (TrainConfig, {"global_batch": [{"batch": 4}, {"batch": 16, "after": 0.1}]}, "global_batch=4 .*micro_batch=8"),
        (TrainConfig, {"global_batch": [{"batch": 16}, {"batch": 8, "after": 0.1}]}, "larger than the one before"),
        (
            TrainConfig,
            {"global_batch": [{"batch": 8}, {"batch": 16}]},
            r"after \[0, 0\]; leave out `after` of the first",
        ),
        (
            TrainConfig,
            {"global_batch": [{"batch": 8}, {"batch": 16, "after": 0.2}, {"batch": 32, "after": 3}]},
            "all in steps or as shares",
        ),
        (
            TrainConfig,
            {"global_batch": [{"batch": 8}, {"batch": 16, "after": 200}], "max_steps": 200},
            "one has no step of train.max_steps=200; lower `after`",
        ),
        (
            RunConfig,
            {
                "train": {"global_batch": [{"batch": 8}, {"batch": 16, "after": 9}]},
                "platform": {"kind": "local", "nodes": 2},
            },
            "global_batch=8 does not split over 2 processes",
        ),
        (TrainConfig, {"learning_rate": 1e-4, "min_learning_rate": 1e-3}, r"min_learning_rate=0\.001 is above"),
        (TrainConfig, {"max_steps": 60}, "warmup_steps=100 leaves no step of train.max_steps=60"),
        (TrainConfig, {"warmup_steps": 1.5}, "neither a share of the run, which is below 1, nor whole steps"),
        (TrainConfig, {"schedule": "wsd", "warmup_steps": 0.5, "decay_steps": 4, "max_steps": 8}, "steps=4 leaves"),
        (TrainConfig, {"decay_steps": 0.1}, "schedule=cosine does not use train.decay_steps=0.1; .*=wsd"),
        (TrainConfig, {"decay_shape": "sqrt"}, "schedule=cosine does not use train.decay_shape=sqrt; .*=wsd"),
        (
            TrainConfig,
            {"schedule": "constant", "min_learning_rate": 0},
            "constant does not use train.min_learning_rate=0",
        ),
        (
            TrainConfig,
            {"muon_learning_rate": 0.01},
            "optimizer=adamw does not use .*_rate=0.01; .*train.optimizer=muon",
        ),
        (TrainConfig, {"sample_prompts": ["def "]}, "sample_prompts is not used without train.sample_every"),
        (TrainConfig, {"sample_tokens": 8}, "sample_tokens is not used without train.sample_every"),
        (TrainConfig, {"sample_every": 5, "sample_prompts": []}, "at least 1 item"),
        (TrainConfig, {"sample_every": 5, "sample_prompts": ["a", ""]}, "at least 1 character"),
        (TrainConfig, {"sample_every": 5, "sample_prompts": ["a"] * 9}, "at most 8 items"),
        (
            RunConfig,
            {"model": {"sequence_length": 16}, "train": {"sample_every": 5}},
            "a prompt of 16 bytes, which may be as many tokens, but model.sequence_length=16",
        ),
        (TrainConfig, {"profiler": {"steps": "25-20"}}, "steps=25-20 must be 1 to 100 steps"),
        (TrainConfig, {"profiler": {"steps": 300}, "max_steps": 200}, "steps=300 begin after train.max_steps=200"),
        (
            RunConfig,
            {"train": {"profiler": {"ranks": [0, 2]}}},
            "ranks that do not exist; list ranks from 0 to 0",
        ),
        (TrainConfig, {"strategy": "fsdp", "precision": "16-mixed"}, "take bf16-mixed"),
        (TrainConfig, {"strategy": "hybrid", "compile": "model"}, "with train.strategy=hybrid; take .*=blocks"),
        (RunConfig, {"train": {"strategy": "hybrid"}}, "nodes=1 with .*_per_node=1 each; set train.strategy=fsdp, or"),
        (TrainConfig, {"float8": True, "compile": "blocks", "precision": "32-true"}, "but train.precision=32-true"),
        (ModelConfig, {"name": "pythia-14m", "sequence_length": 1024}, "longer than the block_size of pythia-14m, 512"),
        (ModelConfig, {"name": None}, "at least n_layer, n_embd and n_head"),
        (ModelConfig, {"name": None, "config": {"n_layer": 2, "n_embd": 33, "n_head": 2}}, "multiple of n_head"),
        (ModelConfig, {"config": {"n_layer": -1}}, "n_layer=-1 is too small; give at least 1"),
        (ModelConfig, {"name": "pythia-160"}, "'pythia-160' is not a LitGPT model; did you mean .*pythia-160m"),
        (ModelConfig, {"config": {"n_heads": 4}}, "did you mean n_head"),
        (ModelConfig, {"config": {"n_head": 3}}, "on pythia-14m is not a valid LitGPT Config"),
    ],
)
def test_contradicting_fields_are_refused_with_a_fix(
    kind: type[TrainConfig | ModelConfig | RunConfig], written: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValidationError, match=message):
        kind.model_validate(written)


@given(
    processes=st.integers(1, 64), micro_batch=st.integers(1, 64), passes=st.integers(1, 16), rest=st.integers(1, 4095)
)
def test_a_global_batch_splits_or_one_that_does_is_named(
    processes: int, micro_batch: int, passes: int, rest: int
) -> None:
    share = processes * micro_batch
    assert train(global_batch=share * passes, micro_batch=micro_batch).gradient_accumulation_steps(processes) == passes
    if rest % share:
        crooked = train(global_batch=share * passes + rest, micro_batch=micro_batch)
        with pytest.raises(ValueError, match=f"for example {share * (passes + rest // share + 1)}"):
            crooked.gradient_accumulation_steps(processes)


@given(tokens=st.integers(1, 10**12), batch=st.integers(1, 4096), length=st.integers(1, 8192))
def test_steps_cover_max_tokens_or_all_data_once(tokens: int, batch: int, length: int) -> None:
    def steps(parameters: int = 9, split: int = 7, **length_of_run: float) -> int:
        settings = train(global_batch=batch, micro_batch=1, **length_of_run)
        return settings.steps(tokens=split, sequence_length=length, parameters=parameters)

    assert 0 <= steps(max_tokens=tokens) * batch * length - tokens < batch * length
    assert steps(tokens_per_parameter=2.5, parameters=2 * tokens) == steps(max_tokens=5 * tokens)
    assert steps(split=tokens) == max(1, math.floor(tokens / (batch * length)))


@given(
    tokens=st.integers(1, 10**7),
    sizes=st.lists(st.integers(1, 99), min_size=2, max_size=3, unique=True).map(sorted),
    afters=st.sampled_from([(0.1, 0.5), (0.005, 0.99), (3, 700)]),
    length=st.integers(1, 99),
)
def test_steps_with_growing_batches_cover_the_same_tokens(
    tokens: int, sizes: list[int], afters: tuple[float, float], length: int
) -> None:
    starts = (0, *afters)
    stages = [{"batch": size, "after": start} for size, start in zip(sizes, starts, strict=False)]

    def seen(steps: int) -> int:
        return limited.samples_after(steps, steps=steps) * length

    limited = train(max_tokens=tokens, global_batch=stages, micro_batch=1)
    steps = limited.steps(tokens=7, sequence_length=length, parameters=0)
    assert seen(steps - 1) < tokens <= seen(steps)
    steps = train(global_batch=stages, micro_batch=1).steps(tokens=tokens, sequence_length=length, parameters=0)
    assert steps == 1 or seen(steps) <= tokens
    assert tokens < seen(steps + 1)


def test_content_hash_is_the_same_in_every_version() -> None:
    # Written down: a hash that drifts orphans every dataset and run that exists.
    assert content_hash(1, {"a": [1, "ü"], "b": None}) == "97c1fb1a05"


def fields_with(role: RunIdRole) -> dict[str, Any]:
    """Fields of `train` with this role in run ids, and their defaults."""
    return {name: field.default for name, field in TrainConfig.model_fields.items() if role in field.metadata}


def test_every_training_field_has_one_role_in_run_ids() -> None:
    roles = {name: [role for role in RunIdRole if name in fields_with(role)] for name in TrainConfig.model_fields}
    unclear = [name for name, found in roles.items() if len(found) != 1]
    assert not unclear, f"write the types of {unclear} as ShapesModel[…] or TunesRun[…]; RunIdRole says which to take"


# A field that is left out has the same part in a run id whatever its default is.
DEFAULTS = {
    "global_batch": 512, "max_steps": None, "max_tokens": None, "tokens_per_parameter": None, "learning_rate": 6e-4,
    "min_learning_rate": None, "schedule": "cosine", "warmup_steps": 100, "decay_steps": 0.2, "decay_shape": "linear",
    "weight_decay": 0.1, "betas": (0.9, 0.95), "clip_norm": 1.0, "precision": "bf16-mixed", "float8": False,
    "seed": 1337, "z_loss": 0.0, "weight_average": None, "attention": "causal", "optimizer": "adamw",
    "muon_learning_rate": None,
}  # fmt: skip


def test_changed_defaults_come_with_new_run_ids() -> None:
    found = fields_with(RunIdRole.SHAPES_MODEL)
    new = found.keys() - DEFAULTS.keys()
    assert not new, f"add {sorted(new)} to DEFAULTS: a later change of their defaults has to be noticed"
    assert found == DEFAULTS, "a default changed: raise FORMAT in launcher/runs/run.py, then change DEFAULTS"


def test_run_id_holds_the_changed_shaping_settings() -> None:
    assert train().run_id_settings() == {}
    assert train(seed=1337, micro_batch=1).run_id_settings() == {}
    assert train(seed=1, schedule="linear", micro_batch=1).run_id_settings() == {"seed": 1, "schedule": "linear"}
    assert train(seed=1).shaping_settings().keys() == DEFAULTS.keys()


def test_docs_list_the_settings_that_a_run_may_change() -> None:
    page = (Path(__file__).parents[3] / "docs/howto/resume.md").read_text()
    table = page.partition("| You change in `train` |")[2].partition("\n\n")[0]
    rows = [row for row in table.splitlines() if "| yes |" in row]
    names = {name for row in rows for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert names == fields_with(RunIdRole.TUNES_RUN).keys(), "change that page"


@given(st.text())
def test_a_slug_is_fit_for_paths_and_job_names(text: str) -> None:
    made = slug(text)
    assert len(made) <= 40
    assert not made or re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", made)
    assert slug(made) == made
