"""Mixtures: exact shares, batches that depend only on hash, seed and step, and each source a dataset of its own."""

import re
import shutil
import signal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import TEXTS, corpus_in, large_vocabulary
from hypothesis import given, settings
from hypothesis import strategies as st
from test_own_tokens import IDS, put
from training_runs import TrainElsewhere, alike, rows, write_run

from launcher.provenance.statements import write_statements
from launcher.provenance.verification import verify
from litgpt_demo.config import (
    MIXTURE_CYCLE,
    DataConfig,
    InitialWeights,
    ModelConfig,
    TrainConfig,
    TrainingSpec,
    largest_remainder,
)
from litgpt_demo.data import dataset
from litgpt_demo.data.batches import (
    MixtureDataset,
    MixtureSchedule,
    feistel_permutation,
    sample_ids_at,
    sample_ids_for_step,
    samples_seen,
    validation_sources,
)
from litgpt_demo.data.dataset import TokenDataset, finished_dataset, open_dataset, plan_dataset, stage, verify_dataset
from litgpt_demo.data.preparation import prepare
from litgpt_demo.documents import write_manifest
from litgpt_demo.errors import DataError, UserError
from litgpt_demo.export.models import export
from litgpt_demo.replays import read_replay
from litgpt_demo.storage import open_storage

WEIGHTS = st.lists(st.integers(0, 10_000) | st.floats(0, 1e3), min_size=1, max_size=6).filter(any)


@given(WEIGHTS)
def test_shares_are_exact_to_one_sample_of_a_thousand(weights: list[float]) -> None:
    shares, total = largest_remainder(weights), sum(map(Fraction, weights))
    assert sum(shares) == MIXTURE_CYCLE
    assert all(
        abs(share - MIXTURE_CYCLE * Fraction(weight) / total) < 1 for share, weight in zip(shares, weights, strict=True)
    )
    assert largest_remainder([8 * weight for weight in weights]) == shares


SIZED = st.integers(1, 4).map(lambda size: st.tuples(*[st.integers(0, 99)] * size).filter(any))


@given(
    SIZED.flatmap(lambda weights: st.lists(weights, min_size=1, max_size=3)),
    st.lists(st.floats(0.01, 0.99), min_size=2, max_size=2, unique=True).map(sorted),
    st.integers(0, 9000),
    st.integers(0, 8000),
)
def test_any_thousand_samples_of_a_stage_have_its_shares(
    stages: list[tuple[int, ...]], afters: list[float], samples: int, first: int
) -> None:
    """No sample of a source is left out or seen twice."""
    starts = [0.0, *afters][: len(stages)]
    shares = [largest_remainder(weights) for weights in stages]
    schedule = MixtureSchedule(list(zip(starts, shares, strict=True)), samples=samples)
    sources, before = schedule.source_at(np.arange(samples, dtype=np.uint64))
    begins = [round(start * samples) for start in starts]
    for own, begin, end in zip(shares, begins, [*begins[1:], samples], strict=True):
        if begin <= first and first + MIXTURE_CYCLE <= end:
            assert np.bincount(sources[first : first + MIXTURE_CYCLE], minlength=len(own)).tolist() == list(own)
    for source in range(len(stages[0])):
        assert before[sources == source].tolist() == list(range(np.count_nonzero(sources == source)))
    some = min(first, samples)
    assert schedule.samples_seen(some).tolist() == np.bincount(sources[:some], minlength=len(stages[0])).tolist()
    part = schedule.source_at(np.arange(some // 3, some, dtype=np.uint64))
    assert [array.tolist() for array in part] == [sources[some // 3 : some].tolist(), before[some // 3 : some].tolist()]


def test_epoch_of_a_source_has_each_of_its_samples_once() -> None:
    tokens: list[Any] = [np.arange(start, start + size, dtype=np.uint16) for start, size in ((0, 41), (500, 13))]
    parts = [TokenDataset(files=[ids], length=4, content_hash=name) for ids, name in zip(tokens, "kl", strict=True)]
    schedule = MixtureSchedule([(0.0, largest_remainder([3, 1])), (0.5, largest_remainder([0, 1]))], samples=4000)
    mixed = MixtureDataset(names=["a", "b"], parts=parts, schedule=schedule, length=4)
    numbers = sample_ids_at(mixed, np.arange(4000, dtype=np.uint64), seed=1)
    inputs, targets = mixed.read(numbers)
    assert ((inputs[:, 0] >= 500) == (mixed.source_of(numbers) == 1)).all()
    assert (targets == inputs + 1).all()
    assert sorted(numbers[mixed.source_of(numbers) == 0][:10].tolist()) == list(range(10))
    assert sorted(numbers[mixed.source_of(numbers) == 1][3:6].tolist()) == [10, 11, 12]


LINK = st.tuples(
    st.integers(1, 30), st.integers(1, 9), st.lists(st.integers(0, 99), min_size=2, max_size=4).filter(any)
)


@settings(max_examples=30)
@given(st.lists(LINK, max_size=4), st.lists(st.integers(1, 40), min_size=4, max_size=4))
def test_each_source_continues_where_the_runs_before_stood(
    runs: list[tuple[int, int, list[int]]], sizes: list[int]
) -> None:
    """Each run of a chain has its own steps, batch and weights of the sources."""
    origin, seen = None, [list[int]() for _ in sizes]
    for steps, batch, weights in runs:
        train = TrainConfig(global_batch=batch, micro_batch=1, seed=3)
        model = ModelConfig(sequence_length=2)
        spec = TrainingSpec.model_construct(train=train, model=model, steps=steps, origin=origin)
        parts = [
            TokenDataset(files=[np.empty(2 * size + 1)], length=2, content_hash=f"k{size}-{source}",
                         first=spec.first_sample(f"k{size}-{source}"))
            for source, size in enumerate(sizes[: len(weights)])
        ]  # fmt: skip
        schedule = MixtureSchedule([(0.0, largest_remainder(weights))], samples=spec.samples_after(steps))
        mixed = MixtureDataset(names=[*"abcd"[: len(weights)]], parts=parts, schedule=schedule, length=2)
        for step in range(steps):
            numbers = sample_ids_for_step(spec, mixed, step)
            sources = mixed.source_of(numbers)
            for source in range(len(weights)):
                seen[source] += (numbers[sources == source] - mixed.starts[source]).tolist()
        trained_on = samples_seen(spec, mixed, steps)
        origin = InitialWeights(kind="checkpoint", name="", address="", files={}, optimizer=True, trained_on=trained_on)
    for source, size in enumerate(sizes):
        part = TokenDataset(files=[np.empty(2 * size + 1)], length=2, content_hash=f"k{size}-{source}")
        assert seen[source] == sample_ids_at(part, np.arange(len(seen[source]), dtype=np.uint64), seed=3).tolist()


@given(st.lists(st.integers(1, 3000), min_size=2, max_size=4), st.integers(1, 300), st.integers(1, 998))
def test_an_evaluation_draws_equally_many_samples_of_each_source(sizes: list[int], most: int, share: int) -> None:
    names, length = list("abcd"[: len(sizes)]), 3
    parts = [TokenDataset(files=[np.empty(length * size + 1, dtype=np.uint16)], length=length) for size in sizes]
    first, last = [0] * len(sizes), [0] * len(sizes)
    first[0], last[0], last[-1] = MIXTURE_CYCLE, share, MIXTURE_CYCLE - share
    schedule = MixtureSchedule([(0.0, first), (0.25, last)], samples=40)
    mixed = MixtureDataset(names=names, parts=parts, schedule=schedule, length=length)
    sources, start = validation_sources(mixed, most), 0
    assert [source.name for source in sources] == names
    assert sum(source.share for source in sources) == pytest.approx(1)
    assert sources[0].share == pytest.approx(0.25 + 0.75 * share / MIXTURE_CYCLE)
    for source, part, size in zip(sources, parts, sizes, strict=True):
        drawn = (source.sample_ids - np.uint64(start)).tolist()
        assert len(set(drawn)) == len(drawn) == min(most, size)
        assert drawn == feistel_permutation(np.arange(len(drawn), dtype=np.uint64), size, "validation").tolist()
        (alone,) = validation_sources(part, most)
        assert (alone.name, alone.share, alone.sample_ids.tolist()) == ("", 1.0, drawn)
        start += size


def mixture(folder: Path, place: str, **fields: Any) -> DataConfig:
    tokenizer = {"kind": "file", "path": str(large_vocabulary(folder / "tokenizer"))}
    texts = {"kind": "files", "paths": [str(corpus_in(folder / "texts", TEXTS * 4))], "separator": "\n---\n"}
    sources = [
        {"corpus": {"kind": "tokens", "path": place}, "weight": 3},
        {"corpus": texts, "weight": 1, "name": "prose", "validation_fraction": 0.2},
    ]
    return DataConfig.model_validate({"mixture": sources, "tokenizer": tokenizer, **fields})


STAGES = [{"after": 0.5, "weights": [1, 4]}]


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished mixture of ids and of texts; read only."""
    folder = tmp_path_factory.mktemp("mixed")
    data = mixture(folder, put(str(folder / "ids"), {"train.bin": IDS[:3000], "val.bin": IDS[3000:]}), stages=STAGES)
    planned = plan_dataset(data)
    prepare(planned, open_storage(str(folder / "root")))
    return folder / "root" / planned.path


def test_mixture_trains_alike_on_any_ranks_and_after_a_kill(
    mixed: Path, tmp_path: Path, train_elsewhere: TrainElsewhere
) -> None:
    """The metrics have a loss for each source."""
    ranks = {"whole": 1, "killed": 1, "two": 2, "four": 4}
    runs = {
        name: write_run(
            tmp_path / name, mixed, world_size=count, strategy="fsdp" if count == 4 else "auto", attention="documents"
        )
        for name, count in ranks.items()
    }
    codes = train_elsewhere(*((run, ranks[name], 8 * (name == "killed")) for name, run in runs.items()))
    assert codes == [[0], [-signal.SIGKILL], [0] * 2, [0] * 4]
    assert train_elsewhere((runs["killed"], 1, 0)) == [[0]]
    alike(runs["two"], runs["whole"])
    alike(runs["four"], runs["whole"])
    by_source = [f"{name}.{source}" for name in ("tokens", "loss", "validation_loss") for source in ("ids", "prose")]
    metrics = {
        name: [{key: row.get(key) for key in ("step", "loss", *by_source)} for row in rows(run, "step", "evaluation")]
        for name, run in runs.items()
    }
    assert metrics["killed"] == metrics["whole"]
    last, evaluated = rows(runs["whole"], "step")[-1], rows(runs["whole"], "evaluation")[-1]
    # 96 samples of 32 tokens: three of four in the first half are ids, and one of five in the second half.
    assert (last["tokens.ids"], last["tokens.prose"]) == (32 * (36 + 10), 32 * (12 + 38))
    seen = {"ids": 0, "prose": 0}
    for row in rows(runs["four"], "step"):
        parts = [(row[f"tokens.{source}"] - before, row.get(f"loss.{source}", 0.0)) for source, before in seen.items()]
        mean = sum(part * loss for part, loss in parts) / sum(part for part, _ in parts)
        assert mean == pytest.approx(row["loss"], rel=1e-5)
        seen = {source: row[f"tokens.{source}"] for source in seen}
    # Of the run's samples 75 % and then 20 % are ids.
    mean = 0.475 * evaluated["validation_loss.ids"] + 0.525 * evaluated["validation_loss.prose"]
    assert evaluated["validation_loss"] == pytest.approx(mean, rel=1e-6)
    # Bytes per token are weighted as the losses are.
    sizes = [evaluated[f"validation_loss.{name}"] / evaluated[f"bits_per_byte.{name}"] for name in ("ids", "prose")]
    bits = mean / (0.475 * sizes[0] + 0.525 * sizes[1])
    assert evaluated["bits_per_byte"] == pytest.approx(bits, rel=1e-6)
    assert train_elsewhere((runs["whole"], 1, 0), (runs["four"], 2, 0), replays="11-12") == [[0], [0, 0]]
    again, by_two = (read_replay(open_storage(str(runs[name])), "replays/11-12.json") for name in ("whole", "four"))
    assert (again.largest_difference, again.began_at, by_two.world_size) == (0, 8, 2)
    assert by_two.largest_difference == pytest.approx(0, abs=1e-4)
    assert {sample.source for sample in again.samples} == {"ids", "prose"}
    prose = next(sample for sample in again.samples if sample.source == "prose" and sample.documents)
    assert prose.documents[0].beginning[:8] in {text[:8] for text in TEXTS}
    final = export(open_storage(str(runs["four"])))  # one process suffices
    assert final.validation_windows == 2 * 7
    assert (final.logits_difference, final.huggingface is not None) == (0, True)
    assert final.validation_loss == pytest.approx(evaluated["validation_loss"], rel=1e-4)
    write_statements(open_storage(str(runs["four"])))
    verified = verify(open_storage(str(runs["four"])))  # with the process that computes digests
    assert verified.problems == []
    assert {check.name: check.count for check in verified.checks}["BATCHES"] == 15, "12 steps and 3 checkpoints"


def test_sources_of_a_mixture_are_datasets_staged_with_it(root: str, tmp_path: Path) -> None:
    storage, place = open_storage(root), put(f"{root}/ids", {"train.bin": IDS[:3000], "val.bin": IDS[3000:]})
    data = mixture(tmp_path, place)
    planned = plan_dataset(data)
    for part in planned.parts:
        assert plan_dataset(part.data).content_hash == part.content_hash
    alone = prepare(planned.parts[1], storage)
    manifest = prepare(planned, storage)
    assert finished_dataset(storage, planned) == manifest == verify_dataset(storage.address(planned.path))
    assert manifest.mixture is not None
    assert [source.name for source in manifest.mixture.sources] == ["ids", "prose"]
    assert [source.documents for source in manifest.mixture.sources] == [30, alone.train.documents]
    assert planned.sample_hashes == manifest.sample_hashes == {part.content_hash for part in planned.parts}
    assert alone.sample_hashes == planned.parts[1].sample_hashes == {alone.content_hash}
    assert manifest.train.tokens == 3000 + alone.train.tokens
    folder = stage(storage.address(planned.path), tmp_path / "scratch")
    for address in open_dataset(str(folder)).ingredients(str(folder)):
        assert open_dataset(address).external_root in {None, f"{root}/ids"}
    same, changed = (
        plan_dataset(data.model_copy(update={"mixture": tuple(
            source.model_copy(update={"weight": weight}) for source, weight in zip(data.mixture, weights, strict=True)
        )})).content_hash
        for weights in ((6, 2), (2, 6))
    )  # fmt: skip
    assert (same == planned.content_hash, changed == planned.content_hash) == (True, False)
    assert plan_dataset(mixture(tmp_path, place, stages=STAGES)).content_hash != planned.content_hash
    storage.remove(planned.parts[1].path)
    with pytest.raises(DataError, match=r"mixes .*texts-\w+, which is gone"):
        finished_dataset(storage, planned)
    twice = data.model_copy(update={"mixture": (data.mixture[0], data.mixture[0])})
    with pytest.raises(UserError, match="two sources that are the same dataset"):
        plan_dataset(twice)


@pytest.mark.parametrize("name", ["../../other/datasets/a-0123456789", "a/b-0123456789", "..", "", "ITSELF"])
def test_manifest_that_mixes_other_datasets_is_refused(mixed: Path, tmp_path: Path, name: str) -> None:
    """It may name itself, or a folder outside its root."""
    folder = Path(shutil.copytree(mixed, tmp_path / "datasets" / mixed.name))
    storage, manifest = open_storage(str(folder)), open_dataset(str(mixed))
    assert manifest.mixture is not None
    first = manifest.mixture.sources[0].model_copy(update={"dataset": name.replace("ITSELF", folder.name)})
    forged = manifest.mixture.model_copy(update={"sources": (first, *manifest.mixture.sources[1:])})
    write_manifest(storage, manifest.model_copy(update={"mixture": forged}))
    for read in (verify_dataset, lambda address: stage(address, tmp_path / "scratch")):
        with pytest.raises(DataError, match=rf"{folder} mixes .*{re.escape(first.dataset)}.*prepare it again"):
            read(str(folder))
    label, _, hashed = folder.name.rpartition("-")
    planned = dataset.PlannedDataset(data=DataConfig(), sources=(), tokenizer=None, name=label, content_hash=hashed)
    with pytest.raises(DataError, match=re.escape(first.dataset)):
        finished_dataset(open_storage(str(tmp_path)), planned)


SOURCE: dict[str, Any] = {"corpus": {"kind": "files", "paths": ["a"]}, "weight": 1}
OTHER: dict[str, Any] = SOURCE | {"name": "other"}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"stages": STAGES}, "data.stages need data.mixture"),
        ({"mixture": [SOURCE], "corpus": SOURCE["corpus"]}, "data.corpus and data.mixture are both given"),
        ({"mixture": [SOURCE, OTHER], "tokenizer": {"kind": "train"}}, "a mixture cannot train its tokenizer"),
        ({"mixture": [SOURCE, SOURCE]}, r"two sources with one name \(a, a\)"),
        ({"mixture": [SOURCE, OTHER], "stages": [{"after": 0.9, "weights": [1]}]}, "one for each of a, other"),
        ({"mixture": [SOURCE, OTHER], "stages": [*STAGES, *STAGES]}, r"begin after \[0.5, 0.5\]"),
        ({"mixture": [SOURCE, OTHER | {"weight": 1e-4}]}, "other has less than 1 of 1000 samples"),
        ({"mixture": [SOURCE | {"weight": 0}]}, "at least one of them above 0"),
    ],
)
def test_impossible_mixture_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataConfig.model_validate({"tokenizer": {"kind": "hub"}, **fields})
