"""Tokenizers: trained or found, checked, and the same ids as Hugging Face's tokenizers give."""

import json
import logging
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from corpora import POINTER, write
from hub_server import Hub, Repository, running_hub
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken
from tokenizers import Tokenizer as HfTokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import Metaspace

from litgpt_demo.config import HubTokenizer, LitgptTokenizer, TokenizerFile, TrainedTokenizer
from litgpt_demo.data.tokens import (
    END_OF_TEXT,
    Encoder,
    TokenizerFiles,
    assemble,
    bytes_of_tokens,
    load_tokenizer,
    train_tokenizer,
)
from litgpt_demo.errors import DataError, UserError

VOCABULARY = 400
TEXT = [Path(subprocess.__file__).read_text(), "Der schnelle braune Fuchs springt. Ça marche ! 你好，世界 🎉 " * 20]


@pytest.fixture(scope="module")
def tokenizer() -> TokenizerFiles:
    return train_tokenizer(TrainedTokenizer(kind="train", vocab_size=VOCABULARY), TEXT)


def definition_of(tokenizer: TokenizerFiles, **fields: object) -> dict[str, bytes]:
    """The tokenizer's definition with other fields."""
    definition = json.loads(tokenizer.files["tokenizer.json"])
    return {"tokenizer.json": json.dumps(definition | fields).encode()}


def hugging_face(files: Any) -> HfTokenizer:
    return HfTokenizer.from_str(files["tokenizer.json"].decode())


def with_added(tokenizer: TokenizerFiles, *tokens: AddedToken) -> dict[str, bytes]:
    definition = hugging_face(tokenizer.files)
    definition.add_tokens(list(tokens))
    return {"tokenizer.json": definition.to_str().encode()}


def texts_of(*documents: str | None) -> pa.LargeStringArray:
    return pa.array(documents, pa.large_string())


def test_tokenizer_loses_truncation_and_padding(tokenizer: TokenizerFiles) -> None:
    """The loader of LitGPT would cut and fill each text by them, and no text of the dataset is."""
    limited = hugging_face(tokenizer.files)
    limited.enable_truncation(4)
    limited.enable_padding(length=16, pad_id=1)
    made = assemble({"tokenizer.json": limited.to_str().encode()}, origin="a limited one")
    encoded = hugging_face(made.files).encode(TEXT[1]).ids
    assert (made.prefix, encoded) == ((), hugging_face(tokenizer.files).encode(TEXT[1]).ids)


def test_trained_tokenizer_has_the_set_number_of_ids(
    tokenizer: TokenizerFiles,
) -> None:
    """A sample with too little text is refused with the number that it gives."""
    found = hugging_face(tokenizer.files)
    assert tokenizer.vocab_size == found.get_vocab_size() == VOCABULARY
    assert found.token_to_id(END_OF_TEXT) == tokenizer.end_of_text
    assert json.loads(tokenizer.files["tokenizer_config.json"])["eos_token"] == END_OF_TEXT
    settings = TrainedTokenizer(kind="train", vocab_size=300, sample_bytes=10_000)
    assert train_tokenizer(settings, TEXT).hash == train_tokenizer(settings, [TEXT[0][:10_000]]).hash
    few = TrainedTokenizer(kind="train", vocab_size=5000)
    with pytest.raises(DataError, match=r"vocab_size=5000: .* only enough different text for \d+ .* with more text"):
        train_tokenizer(few, ["a few words"])
    with pytest.raises(DataError, match=r"the sample of 12 bytes .* raise data\.tokenizer\.sample_bytes=9"):
        train_tokenizer(few.model_copy(update={"sample_bytes": 9}), ["a few ", "words ", "more"])


PIECES = st.one_of(
    st.text(),
    st.sampled_from([END_OF_TEXT, "<|endoftext", "    ", "\n\n", "def __init__(self):", " 12345", "'ll", "你好", "🎉"]),
)
DOCUMENTS = st.lists(st.lists(PIECES, max_size=6).map("".join), min_size=1, max_size=5)


@settings(max_examples=80)
@given(documents=DOCUMENTS)
def test_ids_are_hugging_faces_and_no_text_forges_end_of_text(tokenizer: TokenizerFiles, documents: list[str]) -> None:
    plain = hugging_face(definition_of(tokenizer, added_tokens=[]))
    expected = [plain.encode(text, add_special_tokens=False).ids for text in documents]
    assert not any(tokenizer.end_of_text in document for document in expected)
    # What filters and batches hand on are slices: offsets that do not begin at 0, of arrays that may have had nulls.
    ids, lengths = Encoder(tokenizer).encode(texts_of(None, *documents, None).slice(1, len(documents)))
    assert ids.tolist() == [token for document in expected for token in [*document, tokenizer.end_of_text]]
    assert lengths.tolist() == [len(document) + 1 for document in expected]
    decoder = hugging_face(tokenizer.files)
    assert [decoder.decode(document, skip_special_tokens=False) for document in expected] == documents


def sentencepiece() -> HfTokenizer:
    """A tokenizer as Llama's: a space is U+2581, and a byte of a character that it has no id for is an id itself."""
    alphabet = {letter: number for number, letter in enumerate([*"abcdefgh", "\u2581", "ab", "ü"])}
    alphabet |= {f"<0x{byte:02X}>": len(alphabet) + byte for byte in range(256)}
    made = HfTokenizer(BPE(vocab=alphabet, merges=[("a", "b")], byte_fallback=True))
    made.pre_tokenizer = Metaspace(prepend_scheme="never")
    made.add_special_tokens([END_OF_TEXT])
    return made


@settings(max_examples=80)
@given(text=PIECES.filter(lambda text: "\u2581" not in text), kind=st.sampled_from(["byte-level", "sentencepiece"]))
def test_bytes_of_tokens_add_up_to_those_of_the_text(
    tokenizer: TokenizerFiles, tmp_path_factory: pytest.TempPathFactory, text: str, kind: str
) -> None:
    made = sentencepiece() if kind == "sentencepiece" else hugging_face(tokenizer.files)
    path = tmp_path_factory.getbasetemp() / f"{kind}.json"
    made.save(str(path))
    ids, sizes = made.encode(text, add_special_tokens=False).ids, bytes_of_tokens(path)
    assert sizes[ids].sum() == len(text.replace(END_OF_TEXT, "").encode())
    assert sizes[made.token_to_id(END_OF_TEXT)] == 0


def test_added_tokens_are_used_as_hugging_face_uses_them(tokenizer: TokenizerFiles) -> None:
    # GPT-NeoX's tokenizer, of the Pythia models, has its runs of spaces as such tokens.
    files = with_added(tokenizer, *(AddedToken(" " * width, normalized=True, special=False) for width in (4, 2)))
    spaced, text = assemble(files, origin="spaced"), "if x:\n        return  1"
    expected = hugging_face(files).encode(text, add_special_tokens=False).ids
    assert VOCABULARY in expected
    assert Encoder(spaced).encode(texts_of(text))[0].tolist() == [*expected, spaced.end_of_text]
    assert spaced.vocab_size == VOCABULARY + 2


def test_tokenizer_with_differing_ids_is_refused(
    tokenizer: TokenizerFiles,
) -> None:
    """Its definition or the first text shows it."""
    with pytest.raises(UserError, match=r"Unsupported .*; take another tokenizer, or train one"):
        Encoder(assemble(definition_of(tokenizer, pre_tokenizer={"type": "Whitespace"}), origin="odd"))
    # Hugging Face's finds a token of a whole word only where a word ends.
    files = with_added(tokenizer, AddedToken("<tab>", single_word=True))
    with pytest.raises(UserError, match="'<tab>' with single_word"):
        assemble(files, origin="odd")
    unchecked = Encoder(replace(tokenizer, files=files))
    unchecked.compare(texts_of("a <tab> b"))
    with pytest.raises(UserError, match="ids of 'a<tab>b' are not those of Hugging Face"):
        unchecked.compare(texts_of("a <tab> b", "a<tab>b"))
    unchecked.encode_some_checked(texts_of())  # nothing to compare: the next batch is compared instead
    with pytest.raises(UserError):
        unchecked.encode_some_checked(texts_of("a<tab>b"))


def test_tokenizer_of_a_file_or_checkpoint_is_used_as_it_is(tokenizer: TokenizerFiles, tmp_path: Path) -> None:
    """Its end of text is the one that is set, else its own."""
    folder = write(tmp_path, dict(tokenizer.files) | {"lit_model.pth": b"weights"})
    from_checkpoint = load_tokenizer(LitgptTokenizer(kind="litgpt", path=str(folder)))
    assert load_tokenizer(TokenizerFile(kind="file", path=f"{folder}/tokenizer.json")).hash == tokenizer.hash
    assert from_checkpoint.hash == tokenizer.hash
    assert set(from_checkpoint.files) == {"tokenizer.json", "tokenizer_config.json"}
    special = {"content": END_OF_TEXT, "special": True}
    for named, end_of_text in ((special, None), ("missing", END_OF_TEXT), ("", None)):
        config = json.dumps({"eos_token": named, "model_max_length": 512}).encode()
        write(tmp_path, {"bpe.json": tokenizer.files["tokenizer.json"], "tokenizer_config.json": config})
        found = load_tokenizer(TokenizerFile(kind="file", path=f"{tmp_path}/bpe.json", end_of_text=end_of_text))
        assert found.end_of_text == tokenizer.end_of_text
        completed = json.loads(found.files["tokenizer_config.json"])
        assert (completed["eos_token"], completed["model_max_length"]) == (END_OF_TEXT, 512)


def test_a_tokenizer_that_cannot_be_used_is_refused_by_its_path(tokenizer: TokenizerFiles, tmp_path: Path) -> None:
    definition = tokenizer.files["tokenizer.json"]
    without_end = definition.replace(END_OF_TEXT.encode(), b"the end")
    spoilt = definition_of(tokenizer, model={"type": "BPE", "vocab": {"a": "?"}})
    for number, (files, message) in enumerate(
        [
            ({}, "tokenizer.json is not a file; kind=file takes the path"),
            ({"tokenizer.json": definition[:-9]}, r"is cut off \(.*EOF while parsing"),
            ({"tokenizer.json": definition, "tokenizer_config.json": b'{"eos_token": "</s>"}'}, "has no token '</s>'"),
            ({"tokenizer.json": without_end}, r"names no end-of-text token.*\{kind: file, path: …, end_of_text: …\}"),
            (spoilt, r"not a tokenizer.*expected u32 at"),
            ({"tokenizer.json": POINTER}, "tokenizer.json of .* is a Git LFS pointer.*`git lfs pull`"),
            ({"tokenizer.json": definition, "tokenizer_config.json": POINTER}, "tokenizer_config.json of .* Git LFS"),
        ]
    ):
        folder = write(tmp_path / str(number), {"lit_model.pth": b""} | files)
        with pytest.raises(UserError, match=message):
            load_tokenizer(LitgptTokenizer(kind="litgpt", path=str(folder)))


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


def test_tokenizer_of_the_hub_is_used_or_refused_by_its_name(
    tokenizer: TokenizerFiles, hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("huggingface_hub"), "propagate", True)
    assert from_hub().files == tokenizer.files
    assert from_hub(revision=hub.repositories["owner/model"].commit).hash == tokenizer.hash
    with pytest.raises(UserError, match=r"(?s)owner/other at main: .*check the name"):
        from_hub("owner/other")
    hub.repositories["owner/model"].gated = True
    with pytest.raises(UserError, match="hf auth login"):
        from_hub()
    hub.repositories["owner/model"] = Repository({"README.md": b""})
    with pytest.raises(UserError, match=r"owner/model at main: .*it has no such file"):
        from_hub()
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(UserError, match=r"cannot be reached for owner/model \(.*Connection refused.*give their path"):
        from_hub()
    assert caplog.text == "", "its library retries without a word"
