"""What the tests of datasets prepare: small corpora, and the settings for them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as HfTokenizer
from tokenizers import decoders, models, pre_tokenizers

from litgpt_demo.config import DataConfig
from litgpt_demo.dataset import DatasetManifest, plan_dataset
from litgpt_demo.preparation import prepare
from litgpt_demo.storage import open_storage

SEPARATOR = "\n---\n"
TEXTS = [f"Document {number}: " + " ".join(str(number * other) for other in range(30)) + " ü" for number in range(21)]
TEXTS[4] = "A document that quotes <|endoftext|> is one document."


def corpus_in(folder: Path, texts: Sequence[str] = TEXTS) -> Path:
    """Two files of documents."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.txt").write_text(SEPARATOR.join(texts[:9]))
    (folder / "b.txt").write_text(SEPARATOR.join(texts[9:]))
    return folder


def settings_for(folder: Path, **fields: Any) -> DataConfig:
    return DataConfig.model_validate(
        {
            "corpus": {"kind": "files", "paths": [str(folder)], "separator": SEPARATOR},
            "tokenizer": {"kind": "train", "vocab_size": 300},
            "validation_fraction": 0.1,
        }
        | fields
    )


def prepared(folder: Path, root: Path, **fields: Any) -> tuple[DatasetManifest, Path]:
    """The dataset of a folder of texts, and where it lies."""
    planned = plan_dataset(settings_for(folder, **fields))
    return prepare(planned, open_storage(str(root))), root / planned.path


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below the folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def large_vocabulary(folder: Path, size: int) -> Path:
    """A byte-level tokenizer with one merge and ids up to `size`, most of them never met."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate(alphabet)}
    vocabulary |= {f"<unused {number}>": number for number in range(len(alphabet), size - 2)}
    vocabulary |= {"<|endoftext|>": size - 2, "Do": size - 1}
    tokenizer = HfTokenizer(models.BPE(vocab=vocabulary, merges=[("D", "o")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"
