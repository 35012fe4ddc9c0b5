"""Tokenizers: loading and training them, and encoding text by gigatoken."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from pydantic import TypeAdapter, ValidationError
from pydantic_core import from_json, to_json

from litgpt_demo.config import HubTokenizer, LitgptTokenizer, Tokenizer, TokenizerFile, TrainedTokenizer
from litgpt_demo.data.hub import hub_endpoint, translate_hub_errors
from litgpt_demo.data.readers import refuse_lfs_pointer, text_array, text_edges
from litgpt_demo.documents import first_problem
from litgpt_demo.errors import DataError, UserError
from litgpt_demo.storage import open_storage

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

END_OF_TEXT = "<|endoftext|>"
IdType: TypeAlias = Literal["<u2", "<u4"]  # as numpy names it, little-endian

# Files that LitGPT's and transformers' loaders read besides tokenizer.json, where they exist.
_SPECIAL = "special_tokens_map.json"
_COMPANIONS = ("tokenizer_config.json", _SPECIAL, "generation_config.json", "tokenizer.model")
TOKENIZER_FILES = ("tokenizer.json", *(name for name in _COMPANIONS if name != _SPECIAL))

# Bytes of an unbroken word (letters, digits, signs or white space of one kind) that training takes at once: its time
# grows with the square of a word's length. The longest word of Python's standard library has 201 bytes.
_LONGEST_WORD = 1000
_CONFIG = TypeAdapter(dict[str, Any])
# The beginnings of some documents of a batch, which `tokenizers` encodes too, a hundred times as slowly. The next
# comparison comes after this many bytes of text.
_COMPARED_DOCUMENTS, _COMPARED_CHARACTERS, _COMPARED_EVERY = 32, 1000, 256_000_000


@dataclass(frozen=True, kw_only=True)
class TokenizerFiles:
    """The files of a tokenizer, ready to be written next to a dataset or a checkpoint."""

    files: Mapping[str, bytes]
    """File name to content; `tokenizer.json` and `tokenizer_config.json` always exist."""
    end_of_text: int
    """The id that closes every document."""
    vocab_size: int
    """One more than the largest id, added tokens included."""
    prefix: tuple[int, ...] = ()
    """The ids, such as a BOS, that the original tokenizer puts before a text. These files put nothing there, as a
    dataset of text has nothing there: the model would begin with ids that it never saw."""

    def with_prefix(self) -> TokenizerFiles:
        """Return the tokenizer that puts the prefix before a text, for ids that another program made with it."""
        from tokenizers import Tokenizer as HfTokenizer
        from tokenizers.processors import TemplateProcessing

        tokenizer = HfTokenizer.from_buffer(self.files["tokenizer.json"])
        names = [tokenizer.id_to_token(number) for number in self.prefix]
        pairs = list(zip(names, self.prefix, strict=True))
        tokenizer.post_processor = TemplateProcessing([*names, "$A"], [*names, "$A", "$B"], pairs)
        definition = {"tokenizer.json": tokenizer.to_str(pretty=True).encode()}
        config = json.loads(self.files["tokenizer_config.json"]) | {"bos_token": names[0], "add_bos_token": True}
        return replace(self, files={**self.files, **definition, "tokenizer_config.json": _as_json(config)})

    @property
    def dtype(self) -> IdType:
        return "<u2" if self.vocab_size <= 65_536 else "<u4"

    @property
    def hash(self) -> str:
        """sha256 of everything that decides the ids."""
        return sha256(self.files["tokenizer.json"] + self.end_of_text.to_bytes(4, "little")).hexdigest()


def load_tokenizer(settings: TokenizerFile | LitgptTokenizer | HubTokenizer) -> TokenizerFiles:
    """Return a tokenizer that exists; a UserError if it does not, or names no end-of-text token."""
    if isinstance(settings, HubTokenizer):
        return assemble(_from_hub(settings), origin=settings.name)
    path, end_of_text = f"{settings.path.rstrip('/')}/tokenizer.json", None
    if isinstance(settings, TokenizerFile):
        path, end_of_text = settings.path, settings.end_of_text
    folder, _, name = path.rpartition("/")
    storage = open_storage(folder or ".")
    try:
        files = {"tokenizer.json": storage.read(name)}
    except FileNotFoundError as error:
        raise UserError(
            f"data.tokenizer: {storage.address(name)} is not a file; "
            "kind=file takes the path of a tokenizer.json, kind=litgpt its folder "
            "(convert a folder with only SentencePiece's tokenizer.model first, with transformers' fast tokenizers)"
        ) from error
    files |= {name: storage.read(name) for name in _COMPANIONS if storage.exists(name)}
    return assemble(files, origin=settings.path, end_of_text=end_of_text)


def bytes_of_tokens(path: Path) -> npt.NDArray[np.int32]:
    """Return the bytes of text that each id of a tokenizer.json stands for.

    A special token stands for none, and a piece of a character, such as one byte of an emoji, for its own bytes.
    """
    import numpy as np
    from tokenizers import Tokenizer as HfTokenizer

    definition = json.loads(path.read_text("utf-8"))
    added = {token["id"]: token["special"] for token in definition.get("added_tokens", [])}
    # A byte-level tokenizer writes each byte as one character; others write a space as U+2581, and a byte as <0xE2>.
    by_bytes = '"ByteLevel"' in json.dumps([definition.get("pre_tokenizer"), definition.get("decoder")])
    vocabulary = HfTokenizer.from_file(str(path)).get_vocab(with_added_tokens=True)
    sizes = np.zeros(1 + max(vocabulary.values()), dtype=np.int32)
    for text, number in vocabulary.items():
        if added.get(number):
            continue
        if by_bytes and number not in added:
            sizes[number] = len(text)
        elif re.fullmatch("<0x[0-9A-F]{2}>", text):
            sizes[number] = 1
        else:
            sizes[number] = len(text.replace("\u2581", " ").encode())
    return sizes


def _from_hub(settings: HubTokenizer) -> dict[str, bytes]:
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError

    def fetch(name: str) -> bytes:
        path = hf_hub_download(settings.name, name, revision=settings.revision, endpoint=hub_endpoint())
        return Path(path).read_bytes()

    with translate_hub_errors(settings.name, settings.revision):
        files = {"tokenizer.json": fetch("tokenizer.json")}
        for name in _COMPANIONS[:3]:
            with suppress(EntryNotFoundError):
                files[name] = fetch(name)
    return files


def assemble(files: Mapping[str, bytes], *, origin: str, end_of_text: str | None = None) -> TokenizerFiles:
    """Check a tokenizer's files and complete what LitGPT's loader needs."""
    from tokenizers import Tokenizer as HfTokenizer

    for name, content in files.items():
        refuse_lfs_pointer(content, f"data.tokenizer: {name} of {origin}")
    try:
        tokenizer = HfTokenizer.from_buffer(files["tokenizer.json"])
        special, config = (_CONFIG.validate_json(files.get(name, b"{}")) for name in (_SPECIAL, _COMPANIONS[0]))
    except ValueError as error:
        reason = first_problem(error) if isinstance(error, ValidationError) else error
        raise UserError(
            f"data.tokenizer: {origin} is not a tokenizer, or is cut off ({reason}); give the tokenizer.json that "
            "transformers' save_pretrained writes for a fast tokenizer, or {kind: hub, name: openai-community/gpt2}"
        ) from error
    kind = type(tokenizer.model).__name__
    if kind != "BPE":
        raise UserError(f"data.tokenizer: only BPE tokenizers are supported, but {origin} is a {kind} model")
    # gigatoken 0.10 finds such a token in the middle of a word too; special ones are never registered (Encoder).
    for added in tokenizer.get_added_tokens_decoder().values():
        if added.single_word and not added.special:
            raise UserError(
                f"data.tokenizer: {origin} has the added token {added.content!r} with single_word, whose ids would not "
                "be Hugging Face's; take another tokenizer, or train one on the corpus"
            )
    ids, config = tokenizer.get_vocab(with_added_tokens=True), special | config
    token = end_of_text or config.get("eos_token")
    if isinstance(token, dict):
        token = token.get("content")
    if not isinstance(token, str) or not token:
        token = END_OF_TEXT if END_OF_TEXT in ids else ""
    if token not in ids:
        problem = f"has no token {token!r}" if token else "names no end-of-text token"
        raise UserError(
            f"data.tokenizer: {origin} {problem} to close documents with; "
            "give it as {kind: file, path: …, end_of_text: …}, or set eos_token in its tokenizer_config.json"
        )
    # LitGPT puts a BOS before a text by these settings, and lm-evaluation-harness one by its name.
    no_prefix = {"eos_token": token, "bos_token": token, "add_bos_token": False, "add_eos_token": False}
    config = {"tokenizer_class": "PreTrainedTokenizerFast"} | config | no_prefix
    complete = {name: content for name, content in files.items() if name in TOKENIZER_FILES}
    complete["tokenizer_config.json"] = _as_json(config)
    # transformers saves both with a tokenizer that it has used with them, and LitGPT's loader would apply them.
    is_cut_or_padded = tokenizer.truncation is not None or tokenizer.padding is not None
    tokenizer.no_truncation()
    tokenizer.no_padding()
    framed, text = (tokenizer.encode("a", add_special_tokens=added).ids for added in (True, False))
    starts = [start for start in range(len(framed)) if framed[start : start + len(text)] == text]
    prefix = framed[: starts[0]] if starts else []
    if framed != text:
        tokenizer.post_processor = None
    if framed != text or is_cut_or_padded:
        complete["tokenizer.json"] = tokenizer.to_str(pretty=True).encode()
    size = max(ids.values()) + 1
    return TokenizerFiles(files=complete, end_of_text=ids[token], vocab_size=size, prefix=tuple(prefix))


def _as_json(config: Mapping[str, Any]) -> bytes:
    return json.dumps(config, indent=1).encode()


def train_tokenizer(
    settings: TrainedTokenizer,
    documents: Iterable[str],
    report: Callable[[int, int], None] = lambda documents, size: None,
) -> TokenizerFiles:
    """Train a byte-level BPE tokenizer on the first `sample_bytes` of the documents; the same one for the same text."""
    from tokenizers import Tokenizer as HfTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    sample, seen = list[str](), 0
    for document in documents:
        sample.append(document[: settings.sample_bytes])  # no more than twice that in all, however long one is
        seen += len(sample[-1].encode())
        if seen >= settings.sample_bytes:
            break
    report(len(sample), seen)
    if not sample:
        raise DataError("data.corpus holds no text: every file of it is empty; give files with text")
    tokenizer, byte_level = HfTokenizer(models.BPE()), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([byte_level, pre_tokenizers.FixedLength(_LONGEST_WORD)])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=settings.vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(sample, trainer)
    tokenizer.pre_tokenizer = byte_level  # encoding takes a word of any length in linear time, and as GPT-2 does
    size = tokenizer.get_vocab_size()
    if size < settings.vocab_size:
        more = f"raise data.tokenizer.sample_bytes={settings.sample_bytes}"
        if seen < settings.sample_bytes:
            more = "take a corpus with more text"
        raise DataError(
            f"data.tokenizer.vocab_size={settings.vocab_size}: the sample of {seen:,} bytes has only enough different "
            f"text for {size} tokens; lower it to {size}, or {more}"
        )
    return assemble({"tokenizer.json": tokenizer.to_str(pretty=True).encode()}, origin="the trained tokenizer")


class Encoder:
    """Encodes documents to ids, each closed by end-of-text.

    No special token is registered, so a literal `<|endoftext|>` inside a document is encoded as ordinary
    characters instead of forging a document boundary. Added tokens that are not special stay: GPT-NeoX's are its runs
    of spaces.
    """

    def __init__(self, tokenizer: TokenizerFiles) -> None:
        from gigatoken import Tokenizer as GigaToken

        definition = from_json(tokenizer.files["tokenizer.json"])
        definition["added_tokens"] = [
            token
            for token in definition.get("added_tokens", [])
            if not token.get("special") and token["id"] != tokenizer.end_of_text
        ]
        self._definition = to_json(definition)
        try:
            self._encoder = GigaToken.from_json(self._definition)
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise UserError(f"data.tokenizer: {reason}; take another tokenizer, or train one on the corpus") from error
        self._bytes_to_comparison = 0
        self._end_of_text = tokenizer.end_of_text
        self.dtype = tokenizer.dtype

    @cached_property
    def _hugging_face(self) -> Any:
        from tokenizers import Tokenizer as HfTokenizer

        return HfTokenizer.from_buffer(self._definition)

    def encode_some_checked(self, texts: Any) -> tuple[npt.NDArray[np.unsignedinteger[Any]], npt.NDArray[np.int64]]:
        """Do the same as encode, and compare now and then, the first time at once."""
        encoded = self.encode(texts)  # first: the tokenizer makes room for as much as the first call has
        if self._bytes_to_comparison <= 0 and len(texts):  # all of a batch may have been dropped
            self._bytes_to_comparison = _COMPARED_EVERY
            self.compare(texts)
        self._bytes_to_comparison -= texts.nbytes
        return encoded

    def encode(
        self, texts: Any, *, parallel: bool | None = None
    ) -> tuple[npt.NDArray[np.unsignedinteger[Any]], npt.NDArray[np.int64]]:
        """Return the ids of all texts of a LargeStringArray, and each one's number of ids, its end-of-text included."""
        import awkward
        import numpy as np

        # Not by awkward.from_arrow: of a slice of an array that had nulls it takes texts for nulls (2.14).
        content = texts.buffers()[2]
        characters = np.frombuffer(content if content is not None else b"", dtype=np.uint8)
        strings = awkward.contents.ListOffsetArray(
            awkward.index.Index64(text_edges(texts)),
            awkward.contents.NumpyArray(characters, parameters={"__array__": "char"}),
            parameters={"__array__": "string"},
        )
        encoded = self._encoder.encode_batch(awkward.Array(strings), parallel=parallel)
        lengths = np.asarray(awkward.num(encoded), dtype=np.int64) + 1
        ids = np.full(int(lengths.sum()), self._end_of_text, dtype=self.dtype)
        text = np.ones(len(ids), dtype=bool)
        text[np.cumsum(lengths) - 1] = False
        ids[text] = np.asarray(awkward.flatten(encoded))
        return ids, lengths

    def compare(self, texts: Any) -> None:
        """Compare the ids of some documents' beginnings with those that Hugging Face's tokenizers gives."""
        beginnings = [text.as_py()[:_COMPARED_CHARACTERS] for text in texts[:: len(texts) // _COMPARED_DOCUMENTS or 1]]
        # Not in parallel: this thread would wait, at full load, for one of the tokenizer's own to pause.
        ids, lengths = self.encode(text_array([text.encode() for text in beginnings]), parallel=False)
        start = 0
        for text, length in zip(beginnings, lengths.tolist(), strict=True):
            expected = self._hugging_face.encode(text, add_special_tokens=False).ids
            if ids[start : start + length - 1].tolist() != expected:
                raise UserError(
                    f"data.tokenizer: the ids of {text[:80]!r} are not those of Hugging Face's tokenizers; "
                    "take another tokenizer, or train one on the corpus"
                )
            start += length


def tokenizer_identity(settings: Tokenizer) -> tuple[dict[str, Any], TokenizerFiles | None]:
    """Return the tokenizer's part in a dataset's content hash, and the tokenizer itself unless it must be trained."""
    if isinstance(settings, TrainedTokenizer):
        return settings.model_dump(mode="json") | {"longest_word": _LONGEST_WORD}, None
    tokenizer = load_tokenizer(settings)
    return {"sha256": tokenizer.hash}, tokenizer
