"""Curation by datatrove: what it removes, that nothing but the input decides it, and what is refused beforehand."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import psutil
import pytest
from corpora import contents, cut_into, large_vocabulary
from tokenizers import Tokenizer as HfTokenizer
from waiting import until

from litgpt_demo.data.curation import curation_identity, curator, dismiss, near_duplicates
from litgpt_demo.data.dataset import DatasetManifest, plan_dataset
from litgpt_demo.data.preparation import in_threads, prepare
from litgpt_demo.data.settings import Curation, DataConfig
from litgpt_demo.errors import Unreachable, UserError
from litgpt_demo.storage import open_storage

WORDS = (
    *("the", "of", "and", "to", "in", "that", "have", "with", "be", "people", "water", "house", "river", "mountain"),
    *("garden", "letter", "window", "morning", "evening", "story", "table", "paper", "music", "animal", "colour"),
    *("winter", "summer", "bridge", "silver", "candle", "forest", "island", "market", "doctor", "village"),
)
MINHASH = Curation.model_validate({"near_duplicates": {}})


def prose(chance: Random, words: int = 120) -> str:
    """Distinct sentences, one a line, with enough stop words."""
    lines = [" ".join(chance.choices(WORDS, k=12)) + "." for _ in range(words // 12)]
    return "\n".join(lines)


def changed(text: str, chance: Random, count: int) -> str:
    """The text with some of its words replaced."""
    words = text.split(" ")
    for place in chance.sample(range(len(words)), count):
        words[place] = "replaced"
    return " ".join(words)


def config(folder: Path, texts: list[str], **curation: Any) -> DataConfig:
    """A corpus of two files of JSON lines."""
    (folder / "corpus").mkdir(parents=True, exist_ok=True)
    half = len(texts) // 2
    for name, part in (("a.jsonl", texts[:half]), ("b.jsonl", texts[half:])):
        (folder / "corpus" / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    return DataConfig.model_validate(
        {
            "corpus": {"kind": "files", "paths": [str(folder / "corpus")]},
            "tokenizer": {"kind": "file", "path": str(large_vocabulary(folder / "tokenizer", 300))},
            "validation_fraction": 0.0001,
            "curation": curation or None,
        }
    )


def made(data: DataConfig, root: Path, threads: int = 1) -> tuple[DatasetManifest, list[str]]:
    """The dataset and its documents, the one for validation first."""
    planned = plan_dataset(data)
    manifest = prepare(planned, open_storage(str(root)), each=in_threads(threads))
    decoder = HfTokenizer.from_file(str(root / planned.path / "tokenizer" / "tokenizer.json"))
    texts = []
    for name in ("val.bin", "train.bin"):
        ids = np.fromfile(root / planned.path / name, dtype=manifest.dtype)
        pieces = np.split(ids, np.flatnonzero(ids == manifest.end_of_text) + 1)[:-1]
        texts += [decoder.decode(piece[:-1].tolist()) for piece in pieces]
    return manifest, texts


@pytest.fixture(autouse=True, scope="module")
def _no_process_stays() -> Iterator[None]:
    yield
    dismiss()


# --- near-duplicates --------------------------------------------------------------------------------------------------


def staying(shards: list[list[str]], scratch: Path) -> set[str]:
    """The documents that MinHash leaves of some shards."""
    signatures = []
    with curator(MINHASH) as process:
        for number, texts in enumerate(shards):
            with process.shard(number, scratch) as shard:
                half = len(texts) // 2
                for batch in (texts[:half], texts[half:]):
                    assert shard.add(batch)[0] == [True] * len(batch)
                signatures.append(shard.signatures())
    counts = [len(texts) for texts in shards]
    kept = near_duplicates(MINHASH, range(len(shards)), counts, signatures.__getitem__, scratch)
    return {texts[place] for texts, places in zip(shards, kept, strict=True) for place in places}


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.long) for seed in (2, 3))])
def test_of_copies_and_documents_with_a_few_words_changed_one_stays_and_distinct_ones_all_do(
    tmp_path: Path, seed: int
) -> None:
    chance = Random(seed)
    groups = [[prose(chance, 300)] for _ in range(25)]
    for group in groups[:8]:
        group += [group[0]] * chance.randint(1, 3)
    for group in groups[5:14]:
        group += [changed(group[0], chance, 2) for _ in range(chance.randint(1, 2))]
    unlike = [changed(group[0], chance, 150) for group in groups[:5]]  # nearly every sequence of five words is another
    documents = [text for group in groups for text in group] + unlike + ["too short", "too short"]
    chance.shuffle(documents)
    cut = sorted(chance.sample(range(len(documents)), 2))
    for shards in ([documents], [documents[: cut[0]], documents[cut[0] : cut[1]], documents[cut[1] :], []]):
        left = staying(shards, tmp_path)
        assert [len(left & set(group)) for group in groups] == [1] * len(groups)
        assert left >= {*unlike, "too short"}


@pytest.mark.long
def test_a_process_that_ended_meanwhile_is_replaced(tmp_path: Path) -> None:
    text = prose(Random(4))
    staying([[text]], tmp_path)
    for child in psutil.Process().children():
        if "litgpt_demo.data.curation" in child.cmdline():
            child.kill()
            child.wait()
    assert staying([[text, text]], tmp_path) == {text}


# --- in a dataset -----------------------------------------------------------------------------------------------------


STEPS: dict[str, Any] = {
    "filters": [
        {"name": "GopherQualityFilter", "arguments": {"min_doc_words": 20}},
        {"name": "GopherRepetitionFilter", "arguments": {"top_n_grams": [], "dup_line_frac": 0.5}},
        {"name": "C4QualityFilter", "arguments": {"min_num_sentences": 3}},
    ],
    "near_duplicates": {},
}


def pages(count: int = 30) -> tuple[list[str], dict[str, list[str]]]:
    """Documents that stay, but for one of each two near-duplicates, and others by the step that removes them."""
    chance = Random(5)
    good = [prose(chance) for _ in range(count)]
    removed = {
        "GopherQualityFilter": ["short.", "1 2 3 4 5 6 7 8 9 " * 10],
        "GopherRepetitionFilter": ["the people have a house that is with the river.\n" * 9],
        "C4QualityFilter": [f"a page with {{braces}} of the people that have them.\n{good[0]}"],
        "near-duplicates": [good[1], changed(good[2], chance, 1)],
    }
    return good, removed


NAVIGATION = "Home | About | The people that have it\n"


def corpus(count: int = 30) -> list[str]:
    """All of them, one with a line that is cut out."""
    good, removed = pages(count)
    return [*good[:3], NAVIGATION + good[3], *good[4:], *(text for texts in removed.values() for text in texts)]


@pytest.mark.long
def test_the_dataset_has_what_the_steps_leave_and_its_manifest_says_what_each_removed(tmp_path: Path) -> None:
    good, removed = pages()
    with cut_into(5_000):
        manifest, texts = made(config(tmp_path, corpus(), **STEPS), tmp_path / "root")
    assert len(texts) == len(good)
    assert {*texts, good[2]} == {*good, *({removed["near-duplicates"][1]} & set(texts))}
    assert {step.step: step.documents for step in manifest.curated} == {
        step: len(texts) for step, texts in removed.items()
    }
    quality, _, c4, copies = manifest.curated
    assert quality.reasons == {"gopher_below_avg_threshold": 1, "gopher_short_doc": 1}
    assert set(quality.samples) == set(removed["GopherQualityFilter"])
    assert c4.text_bytes == len(removed["C4QualityFilter"][0]) + len(NAVIGATION)
    assert copies.text_bytes == pytest.approx(len(good[1]) + len(good[2]), abs=10)
    left = manifest.text_bytes + sum(step.text_bytes for step in manifest.curated)
    assert (manifest.documents, manifest.text_bytes, left) == (
        len(good),
        sum(map(len, texts)),
        sum(map(len, corpus())),
    )


@pytest.mark.long
def test_one_worker_and_three_make_the_same_bytes(tmp_path: Path) -> None:
    data = config(tmp_path, corpus(), **STEPS)
    with cut_into(2_000):
        made(data, tmp_path / "one", threads=1)
        made(data, tmp_path / "three", threads=3)
    assert contents(tmp_path / "one") == contents(tmp_path / "three")


@pytest.mark.long
def test_killed_while_it_surveys_it_goes_on_with_the_same_bytes_and_leaves_no_process(tmp_path: Path) -> None:
    data = config(tmp_path, corpus(120), **STEPS)
    planned = plan_dataset(data)
    program = (
        "import sys; from litgpt_demo.data.corpus import shards; shards._SMALLEST = shards._LARGEST = 10_000; "
        "from litgpt_demo.__main__ import main; sys.exit(main(['prepare', *sys.argv[1:]]))"
    )
    root = tmp_path / "killed"
    command = [sys.executable, "-c", program, "--root", str(root), "--data", data.model_dump_json()]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    ledger = root / planned.path / "shards"
    until(lambda: len(list(ledger.glob("*.survey.json"))) >= 2 or process.poll() is not None)
    children = psutil.Process(process.pid).children()
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert children
    until(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children))
    before = {path.name: path.stat().st_mtime_ns for path in ledger.glob("*.survey.json")}
    seen: dict[str, int] = {}

    def note(_: object) -> None:
        seen.update({name: (ledger / name).stat().st_mtime_ns for name in before if (ledger / name).exists()})

    with cut_into(10_000):
        prepare(planned, open_storage(str(root)), report=note)
        made(data, tmp_path / "undisturbed")
    assert seen == before
    assert contents(root) == contents(tmp_path / "undisturbed")


# --- languages --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that tells English from German."""
    folder, chance = tmp_path_factory.mktemp("languages"), Random(6)
    german = ("der", "die", "das", "und", "ist", "nicht", "mit", "haus", "wasser", "garten", "berg", "abend")
    lines = [
        f"__label__{label} {' '.join(chance.choices(words, k=12))}"
        for _ in range(400)
        for label, words in (("en", WORDS), ("de", german))
    ]
    (folder / "lines.txt").write_text("\n".join(lines))
    program = (
        "import sys, fasttext; shape = {'dim': 10, 'minn': 2, 'maxn': 4, 'bucket': 2000}\n"
        "trained = fasttext.train_supervised(sys.argv[1], epoch=10, thread=2, verbose=0, **shape)\n"
        "trained.save_model(sys.argv[2])"
    )
    # fasttext 0.9.2 trains on memory that it has not filled ("Encountered NaN"): let all of it come from the kernel.
    clean = os.environ | {"MALLOC_MMAP_THRESHOLD_": "4096"}
    command = [sys.executable, "-c", program, str(folder / "lines.txt"), str(folder / "model.bin")]
    subprocess.run(command, check=True, env=clean, timeout=120)
    return folder / "model.bin"


GERMAN = "der garten ist mit dem haus und das wasser nicht am berg, der abend und die geschichte"


def in_english(folder: Path, texts: list[str], model: Path) -> DataConfig:
    return config(folder, texts, languages={"keep": ["en"], "model": str(model)})


@pytest.mark.long
def test_documents_in_other_languages_are_removed(tmp_path: Path, model: Path) -> None:
    chance = Random(8)
    english = [prose(chance, 36) for _ in range(6)]
    manifest, texts = made(in_english(tmp_path, [*english[:3], GERMAN, *english[3:]], model), tmp_path / "root")
    assert sorted(texts) == sorted(english)
    [step] = manifest.curated
    assert (step.step, step.documents, step.samples) == ("LanguageFilter", 1, (GERMAN,))


@pytest.mark.long
def test_the_key_has_the_content_of_the_language_model_and_not_its_place(tmp_path: Path, model: Path) -> None:
    elsewhere, other = tmp_path / "elsewhere.bin", tmp_path / "other.bin"
    elsewhere.write_bytes(model.read_bytes())
    other.write_bytes(model.read_bytes() + b"more")
    keys = [plan_dataset(in_english(tmp_path, [GERMAN] * 4, path)).key for path in (model, elsewhere, other)]
    assert keys[0] == keys[1] != keys[2]


@pytest.mark.long
def test_a_language_that_the_model_does_not_know_is_refused_with_those_that_it_does(model: Path) -> None:
    with pytest.raises(UserError, match=r"keep has eng_Latn, which .* does not know; it has de, en"):
        curation_identity(Curation.model_validate({"languages": {"keep": ["eng_Latn"], "model": str(model)}}))


@pytest.mark.long
def test_a_model_that_cannot_be_fetched_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("HF_ASSETS_CACHE", str(tmp_path))
    with pytest.raises(Unreachable, match=r"glotlid: hf://.* cannot be fetched .* give its path on this machine"):
        curation_identity(Curation.model_validate({"languages": {"keep": ["eng_Latn"], "model": "glotlid"}}))


# --- refused beforehand -----------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.parametrize(
    ("curation", "words"),
    [
        (
            {"filters": [{"name": "GopherQualityFilter", "arguments": {"min_doc_words": "many"}}]},
            "GopherQualityFilter.min_doc_words: 'many' given",
        ),
        ({"filters": [{"name": "RegexFilter"}]}, "RegexFilter cannot be made"),
        ({"filters": [{"name": "FineWebQualityFilter", "arguments": {"stop_chars": 3}}]}, "cannot work as it is set"),
        ({"filters": [{"name": "GopherQualityFilter"}], "language": "tha"}, "pip install pythainlp"),
        ({"near_duplicates": {}, "language": "klingon"}, "'klingon' cannot work"),
        ({"languages": {"keep": ["en"], "model": "/no/such.bin"}}, "neither a file on this machine nor one of ft176"),
        ({"languages": {"keep": ["en"], "model": __file__}}, "is no model of fasttext"),
    ],
)
def test_a_step_that_cannot_work_is_refused_before_a_document_is_read(curation: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as refusal:
        curation_identity(Curation.model_validate(curation))
    assert words in str(refusal.value)


def test_where_datatrove_is_not_installed_the_way_to_install_it_is_named(tmp_path: Path) -> None:
    program = (
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "find = PathFinder.find_spec\n"
        "PathFinder.find_spec = lambda name, *more: None if name == 'datatrove' else find(name, *more)\n"
        "from litgpt_demo.__main__ import main\n"
        "sys.exit(main(['prepare', *sys.argv[1:]]))"
    )
    data = config(tmp_path, corpus(), near_duplicates={})
    command = [sys.executable, "-c", program, "--root", str(tmp_path / "root"), "--data", data.model_dump_json()]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert refused.returncode == 40
    said = " ".join(refused.stderr.split())
    assert "data.curation needs datatrove" in said
    assert "pip install 'train-litgpt[curation]' --constraint constraints.txt" in said
    assert not (tmp_path / "root").exists()
