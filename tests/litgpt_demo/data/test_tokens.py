"""Tokenizers: trained or found, checked, and the same ids as Hugging Face's tokenizers give."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hub_server import Hub, Repository, running_hub
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer

from litgpt_demo.config import HubTokenizer, LitgptTokenizer, TokenizerFile, TrainedTokenizer
from litgpt_demo.data.tokens import (
    END_OF_TEXT,
    Encoder,
    TokenizerFiles,
    assemble,
    load_tokenizer,
    train_tokenizer,
)
from litgpt_demo.errors import DataError, UserError

VOCABULARY = 400
TEXT = [Path(subprocess.__file__).read_text(), "Der schnelle braune Fuchs springt. Ça marche ! 你好，世界 🎉 " * 20]


@pytest.fixture(scope="module")
def tokenizer() -> TokenizerFiles:
    return train_tokenizer(TrainedTokenizer(kind="train", vocab_size=VOCABULARY), TEXT)


def changed(tokenizer: TokenizerFiles, **fields: object) -> dict[str, bytes]:
    """The tokenizer's definition with other fields."""
    definition = json.loads(tokenizer.files["tokenizer.json"])
    return {"tokenizer.json": json.dumps(definition | fields).encode()}


def texts_of(documents: Sequence[str]) -> pa.LargeStringArray:
    return pa.array(documents, pa.large_string())


def ids_of(tokenizer: TokenizerFiles, *documents: str) -> list[int]:
    return [int(token) for token in Encoder(tokenizer).encode(texts_of(documents))[0]]


# --- training one -----------------------------------------------------------------------------------------------------


def test_a_trained_tokenizer_has_the_ids_asked_for_and_closes_documents(tokenizer: TokenizerFiles) -> None:
    found = HfTokenizer.from_str(tokenizer.files["tokenizer.json"].decode())
    assert tokenizer.vocab_size == found.get_vocab_size() == VOCABULARY
    assert found.token_to_id(END_OF_TEXT) == tokenizer.end_of_text
    assert json.loads(tokenizer.files["tokenizer_config.json"])["eos_token"] == END_OF_TEXT


def test_the_same_sample_trains_the_same_tokenizer_in_any_process(tokenizer: TokenizerFiles) -> None:
    """Of the documents beyond the sample, and of the rest of a long one, nothing is seen."""
    program = (
        "import sys\n"
        "from litgpt_demo.config import TrainedTokenizer\n"
        "from litgpt_demo.data.tokens import train_tokenizer\n"
        "asked = TrainedTokenizer.model_validate_json(sys.argv[1])\n"
        "print(train_tokenizer(asked, [sys.stdin.read()]).hash)"
    )
    asked = TrainedTokenizer(kind="train", vocab_size=300, sample_bytes=10_000)
    # Neither the number of threads nor Python's hashing may show.
    env = os.environ | {"TOKENIZERS_PARALLELISM": "false", "PYTHONHASHSEED": "7", "PYTHONIOENCODING": "utf-8"}
    command = [sys.executable, "-c", program, asked.model_dump_json()]
    other = subprocess.run(command, env=env, input=TEXT[0][:10_000], capture_output=True, text=True, check=True)
    assert other.stdout.strip() == train_tokenizer(asked, TEXT).hash


def test_a_vocabulary_larger_than_the_text_gives_is_refused_with_the_one_it_gives() -> None:
    with pytest.raises(DataError, match=r"vocab_size=5000: .* only enough different text for (\d+).*sample_bytes"):
        train_tokenizer(TrainedTokenizer(kind="train", vocab_size=5000), ["a few words"])


# --- encoding ---------------------------------------------------------------------------------------------------------

PIECES = st.one_of(
    st.text(),
    st.sampled_from([END_OF_TEXT, "<|endoftext", "    ", "\n\n", "def __init__(self):", " 12345", "'ll", "你好", "🎉"]),
)
DOCUMENTS = st.lists(st.lists(PIECES, max_size=6).map("".join), min_size=1, max_size=5)


@settings(max_examples=60)
@given(documents=DOCUMENTS)
def test_ids_are_hugging_faces_and_each_document_is_closed(tokenizer: TokenizerFiles, documents: list[str]) -> None:
    definition = json.loads(tokenizer.files["tokenizer.json"]) | {"added_tokens": []}
    plain = HfTokenizer.from_str(json.dumps(definition))
    expected = [[*plain.encode(text, add_special_tokens=False).ids, tokenizer.end_of_text] for text in documents]
    # What filters and batches hand on are slices: offsets that do not begin at 0.
    ids, lengths = Encoder(tokenizer).encode(texts_of(["left out", *documents, "left out"]).slice(1, len(documents)))
    assert lengths.tolist() == [len(document) for document in expected]
    assert ids.tolist() == [token for document in expected for token in document]


@settings(max_examples=60)
@given(documents=DOCUMENTS)
def test_text_never_forges_a_document_boundary(tokenizer: TokenizerFiles, documents: list[str]) -> None:
    ids, lengths = Encoder(tokenizer).encode(texts_of(documents))
    ends = np.flatnonzero(ids == tokenizer.end_of_text)
    assert ends.tolist() == (np.cumsum(lengths) - 1).tolist()
    decoder = HfTokenizer.from_str(tokenizer.files["tokenizer.json"].decode())
    pieces = np.split(ids, ends + 1)[:-1]
    assert [decoder.decode(piece[:-1].tolist(), skip_special_tokens=False) for piece in pieces] == documents


def test_added_tokens_that_are_not_special_are_used_as_hugging_face_uses_them(tokenizer: TokenizerFiles) -> None:
    # GPT-NeoX's tokenizer, of the Pythia models, has its runs of spaces as such tokens.
    hugging_face = HfTokenizer.from_str(tokenizer.files["tokenizer.json"].decode())
    hugging_face.add_tokens([AddedToken(" " * width, normalized=True, special=False) for width in (4, 2)])
    spaced = assemble({"tokenizer.json": hugging_face.to_str().encode()}, origin="spaced")
    text = "if x:\n        return  1"
    expected = hugging_face.encode(text, add_special_tokens=False).ids
    assert VOCABULARY in expected
    assert ids_of(spaced, text) == [*expected, spaced.end_of_text]
    assert spaced.vocab_size == VOCABULARY + 2


# --- finding one ------------------------------------------------------------------------------------------------------


def write(folder: Path, files: dict[str, bytes]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def test_a_tokenizer_found_in_a_file_or_a_litgpt_checkpoint_is_the_one_that_was_written(
    tokenizer: TokenizerFiles, tmp_path: Path
) -> None:
    folder = write(tmp_path / "checkpoint", dict(tokenizer.files) | {"lit_model.pth": b"weights"})
    from_file = load_tokenizer(TokenizerFile(kind="file", path=f"{folder}/tokenizer.json"))
    from_checkpoint = load_tokenizer(LitgptTokenizer(kind="litgpt", path=str(folder)))
    assert from_file.hash == from_checkpoint.hash == tokenizer.hash
    assert set(from_checkpoint.files) == {"tokenizer.json", "tokenizer_config.json"}


def test_the_end_of_text_token_is_the_settings_or_the_tokenizers_own(tokenizer: TokenizerFiles, tmp_path: Path) -> None:
    write(tmp_path, {"bpe.json": tokenizer.files["tokenizer.json"]})
    for named, end_of_text in (({"content": END_OF_TEXT, "special": True}, None), ("missing", END_OF_TEXT)):
        config = json.dumps({"eos_token": named, "model_max_length": 512}).encode()
        write(tmp_path, {"tokenizer_config.json": config})
        found = load_tokenizer(TokenizerFile(kind="file", path=f"{tmp_path}/bpe.json", end_of_text=end_of_text))
        assert found.end_of_text == tokenizer.end_of_text
        completed = json.loads(found.files["tokenizer_config.json"])
        assert (completed["eos_token"], completed["model_max_length"]) == (END_OF_TEXT, 512)


@pytest.mark.parametrize(
    ("files", "words"),
    [
        (lambda good: {}, "tokenizer.json is not there; give the folder"),
        (lambda good: {"tokenizer.json": good.files["tokenizer.json"][:-9]}, "is not JSON .* is it cut short"),
        (lambda good: dict(good.files) | {"tokenizer_config.json": b'{"eos_token": "</s>"}'}, "has no token '</s>'"),
        (
            lambda good: {"tokenizer.json": good.files["tokenizer.json"].replace(END_OF_TEXT.encode(), b"the end")},
            r"names no end-of-text token.*set data\.tokenizer\.end_of_text",
        ),
        (lambda good: changed(good, model={"type": "Unigram", "vocab": [["a", 0.0]]}), "unigram"),
        (lambda good: changed(good, model={"type": "BPE", "vocab": {"a": "first"}}), r"no tokenizer \(model\.vocab"),
    ],
)
def test_a_tokenizer_that_cannot_be_used_is_refused_by_its_path(
    tokenizer: TokenizerFiles, tmp_path: Path, files: Any, words: str
) -> None:
    folder = write(tmp_path / "checkpoint", files(tokenizer))
    with pytest.raises(UserError, match=words):
        load_tokenizer(LitgptTokenizer(kind="litgpt", path=str(folder)))


def test_a_tokenizer_that_cannot_be_encoded_with_exactly_is_refused(tokenizer: TokenizerFiles) -> None:
    odd = assemble(changed(tokenizer, pre_tokenizer={"type": "Whitespace"}), origin="odd")
    with pytest.raises(UserError, match=r"Unsupported .*; take another tokenizer, or train one"):
        Encoder(odd)


def test_a_tokenizer_whose_ids_would_differ_is_refused_by_its_definition_or_by_the_first_text(
    tokenizer: TokenizerFiles,
) -> None:
    """Hugging Face's finds a token of a whole word only where a word ends."""
    definition = HfTokenizer.from_str(tokenizer.files["tokenizer.json"].decode())
    definition.add_tokens([AddedToken("<tab>", single_word=True)])
    files = {"tokenizer.json": definition.to_str().encode()}
    with pytest.raises(UserError, match="'<tab>' with single_word"):
        assemble(files, origin="odd")
    unchecked = Encoder(replace(tokenizer, files=files))
    unchecked.compare(texts_of(["a <tab> b"]))
    with pytest.raises(UserError, match="ids of 'a<tab>b' are not those of Hugging Face"):
        unchecked.compare(texts_of(["a <tab> b", "a<tab>b"]))


# --- the Hub ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def hub(tokenizer: TokenizerFiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with one model repository, and an empty cache."""
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    with running_hub({"owner/model": Repository(dict(tokenizer.files), large={"tokenizer.json"})}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub


def from_hub(name: str = "owner/model", **fields: str) -> TokenizerFiles:
    return load_tokenizer(HubTokenizer(kind="hub", name=name, **fields))


def test_a_tokenizer_of_the_hub_is_the_one_that_lies_there(tokenizer: TokenizerFiles, hub: Hub) -> None:
    assert from_hub().files == tokenizer.files
    assert from_hub(revision=hub.repositories["owner/model"].commit).hash == tokenizer.hash


def test_what_the_hub_does_not_give_is_named_with_what_would_do(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=r"(?s)owner/other at main .*check the name"):
        from_hub("owner/other")
    hub.repositories["owner/model"].gated = True
    with pytest.raises(UserError, match="hf auth login"):
        from_hub()
    hub.repositories["owner/model"] = Repository({"README.md": b""})
    with pytest.raises(UserError, match=r"owner/model at main has no tokenizer\.json"):
        from_hub()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"the hub cannot be reached for owner/model.*kind: file"):
        from_hub()
