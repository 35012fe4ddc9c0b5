"""The state that a preparation's workers share: the dataset's place, and the ledger of what is done."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from litgpt_demo.config import DataConfig, OpenWebTextCorpus, Settings, key_of
from litgpt_demo.data.corpus import Shard
from litgpt_demo.documents import parse_json
from litgpt_demo.errors import DataError, UserError
from litgpt_demo.manifests import FileRecord
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.storage.private import make_temporary, own_temporary

SHARDS = "shards"
"""The folder, below the dataset's, of what workers make."""

Record = TypeVar("Record", "Survey", "Encoded")


@dataclass(frozen=True, kw_only=True)
class Work:
    """The knowledge of every worker of a preparation. It travels to other processes and machines."""

    data: DataConfig
    root: str
    path: str
    handover: Path | None = None
    """The folder where workers leave the pieces that they put in a bucket, to be hashed; on a worker of another machine
    there is no such folder. None for a local root, where the pieces themselves can be read."""

    @property
    def storage(self) -> Storage:
        """The folder of the dataset."""
        return open_storage(self.root).within(self.path)

    @property
    def ledger(self) -> Storage:
        """The folder of the pieces and their records, whose checksums are compared before they are believed."""
        return replace(self.storage.within(SHARDS), durable=False)

    @property
    def max_bytes(self) -> int | None:
        """The UTF-8 bytes of text after which the corpus ends."""
        return None if isinstance(self.data.corpus, OpenWebTextCorpus) else self.data.corpus.max_bytes

    @property
    def scratch(self) -> Path:
        """The folder for unfinished work, which the next run finds; on a local root's file system: moves are free."""
        name = self.path.rpartition("/")[2]
        if (local := open_storage(self.root).local_path(f".scratch/{name}")) is not None:
            return local
        # Several buckets may have this dataset.
        return own_temporary() / f"{name}-{key_of(self.root)}"

    def make_scratch(self) -> Path:
        """See that the folder for unfinished work is there, and that no other user of this machine could change it."""
        if self.scratch.parent == own_temporary():
            return make_temporary(self.scratch.name)
        try:
            self.scratch.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(
                f"{self.scratch} cannot be written ({error.strerror}); choose another root, or TMPDIR"
            ) from error
        return self.scratch


class ShardRecord(Settings):
    """An entry of the ledger: what was made of a shard. Written when all of it is there."""

    number: int
    shard: str
    """The shard that it belongs to, limit included: a record of another one counts for nothing."""
    documents: int
    text_bytes: int
    """UTF-8 bytes of those documents."""


class Survey(ShardRecord):
    """The content of a shard: `documents` are those that pass the filters."""

    read: bool = True
    """False: not a document was read, the files' footers say how many there are. An empty one would belie them, and
    then `text_bytes` is only about right."""
    kept: FileRecord | None = None
    """The documents that stay, a bit for each that was read; None where all do."""
    digests: FileRecord | None = None
    """filters.DIGEST_BYTES of each that stays; None where duplicates stay too."""
    read_documents: int
    read_bytes: int
    """The same before filtering, with empty and bad ones."""
    dropped: dict[str, int]
    bad: int = 0
    bad_places: tuple[str, ...] = ()


class TokenPiece(Settings):
    """A shard's documents of one split."""

    documents: int
    tokens: int
    file: FileRecord | None
    """None where there are none."""


class Encoded(ShardRecord):
    """A shard's tokens."""

    assignment: str
    """The documents that were to be encoded, and the split of each."""
    train: TokenPiece
    validation: TokenPiece
    lengths: tuple[int, ...]
    """The lengths, as in DatasetManifest.document_lengths."""


class TokenizerRecord(Settings):
    """The ledger's entry for the tokenizer."""

    files: tuple[FileRecord, ...]
    end_of_text: int
    vocab_size: int
    hash: str
    """The hash, as in DatasetManifest.tokenizer_hash."""
    dtype: str


def digest_of(shard: Shard) -> str:
    """Tells a shard from any other, by its files' names and versions, their parts, and the limit."""
    parts = [key_of(part.source.name, part.source.version, part.start, part.end) for part in shard.parts]
    return key_of(shard.number, shard.limit, *parts)


def file_name(number: int, suffix: str) -> str:
    """The name of what was made of the shard with this number, below SHARDS."""
    return f"{number:05d}.{suffix}"


def recorded(work: Work, name: str, kind: type[Record], shard: Shard) -> Record | None:
    """Return what was noted of this shard, if every file that belongs to it is as it was then."""
    ledger = work.ledger
    try:
        record = parse_json(ledger.read(name), kind, where=ledger.address(name), fix="it is made anew")
        if isinstance(record, Survey):
            files = (record.kept, record.digests)
        else:
            files = (record.train.file, record.validation.file)
        intact = all(file is None or FileRecord.of(ledger.stat(file.path)) == file for file in files)
    except (FileNotFoundError, DataError):  # DataError: cut short, or of another version of this code
        return None
    return record if intact and record.shard == digest_of(shard) else None


def write_record(work: Work, name: str, record: Settings) -> None:
    """Note something as done: whatever it names must be there already."""
    content = record.model_dump_json().encode()
    if not work.ledger.create(name, content):  # the usual case, and in a bucket one request where `write` makes two
        work.ledger.write(name, content)
