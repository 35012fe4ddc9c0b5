"""Documents out of a corpus: which files it has, and the text in them, in one order on every machine.

`sources` lists the files and gives each a name and a version that say nothing about where it lies; `corpus_identity` is
what the dataset's key takes of that list; `documents` reads it. A file whose content is no longer what was listed is an
error, because the dataset's key would then name a text that it does not hold.

    format     a document is                                  position in errors
    text       the file, or what stands between separators    byte of the (decompressed) text
    jsonl      the string in one field of each line           line
    parquet    a value of one column of strings               row group and row
"""

from __future__ import annotations

import fnmatch
import glob
import io
import json
import os
import re
import sysconfig
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha1, sha256
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from pydantic import JsonValue

from litgpt_demo.config import Corpus, FileCorpus, HubCorpus, OpenWebTextCorpus, StdlibCorpus
from litgpt_demo.faults import DataError, NetworkError, UserError
from litgpt_demo.storage import crc32c_of, open_storage, sha256_of

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

CHUNK = 1 << 20
"""Bytes read at a time."""
COMPRESSED_CHUNK = 1 << 16
"""Compressed bytes decoded at a time. The libraries put no bound on what comes out (4 bytes of zstd can hold 128 KiB),
so little goes in."""
ROWS = 256
"""Rows of a parquet file held as Arrow values at a time."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file of a corpus."""

    address: str
    """Local path, `gs://bucket/object`, or `hf://datasets/owner/name@commit/path`."""
    name: str
    """The same wherever the corpus lies: the path below the library's folder, below the part of a pattern that has no
    wildcard, or in the repository. Part of the dataset's key."""
    size: int
    """Bytes as stored, compressed if the file is."""
    version: str
    """`crc32c:…`, `sha256:…` or `git:…` (a blob's id): differs when the content does. Part of the dataset's key."""


def sources(corpus: Corpus) -> list[Source]:
    """The files of the corpus in their one order: by name, but the standard library's by the hash of the name.

    In alphabetical order the first megabytes of the standard library would be a package or two; by hash they are a
    sample of all of it. Local files are read through once for their checksum.

    Raises:
        UserError: nothing matches, a path does not exist, the repository cannot be had or the Hub not be reached.
        NetworkError: the Hub or the bucket is there and does not serve.
    """
    match corpus:
        case StdlibCorpus():
            return sorted(_stdlib_sources(), key=lambda source: sha256(source.name.encode()).digest())
        case FileCorpus():
            found = _file_sources(corpus.paths)
        case HubCorpus():
            found = _hub_sources(corpus)
        case OpenWebTextCorpus():
            found = _hub_sources(corpus.as_hub())
    # Two folders may hold files of one name: then the content decides, never the folder.
    return sorted(found, key=lambda source: (source.name, source.version, source.size))


def documents(corpus: Corpus, sources: Sequence[Source], *, scratch: Path) -> Iterator[str]:
    """Every document of `sources` in their order, empty ones left out, until one reaches the corpus's `max_bytes`.

    Memory is bounded by the largest document, not by the files. Remote files are fetched one at a time into a folder of
    their own under `scratch`, which is removed when the file is done or the iterator is closed.

    Raises:
        UserError: the column is not there or holds no text.
        DataError: a file is damaged, not UTF-8, or not what `sources` says it is.
        NetworkError: the Hub or the bucket went away while a file was fetched.
    """
    layout = _Layout.of(corpus)
    left = None if isinstance(corpus, OpenWebTextCorpus) else corpus.max_bytes
    for source in sources:
        with _local_copy(source, scratch) as path:
            for text in filter(None, _texts(path, source, layout, scratch)):
                yield text
                if left is not None:
                    left -= len(text.encode())
                    if left <= 0:
                        return


def corpus_identity(corpus: Corpus, sources: Sequence[Source]) -> JsonValue:
    """What the dataset's key hashes of a corpus: the settings that decide the text, and its files by name and content.

    Addresses are no part of it: the same files in another folder, or behind another branch, give the same key.
    """
    settings = corpus.as_hub() if isinstance(corpus, OpenWebTextCorpus) else corpus
    return {
        "settings": settings.model_dump(mode="json", include={"max_bytes", "format", "column", "separator"}),
        "files": [[source.name, source.size, source.version] for source in sources],
    }


# --- listing ----------------------------------------------------------------------------------------------------------


def _stored_source(address: str, name: str) -> Source:
    """The file at a local path or in a bucket; a local one is read for its checksum."""
    folder, _, last = address.rpartition("/")
    stored = open_storage(folder or "/").stat(last)
    return Source(address=address, name=name, size=stored.size, version=f"crc32c:{stored.crc32c}")


def _stdlib_sources() -> Iterator[Source]:
    """Python files of the standard library that decode as UTF-8; its test suite has a few that do not, on purpose."""
    library = Path(sysconfig.get_path("stdlib"))
    for folder, folders, files in os.walk(library):
        folders[:] = set(folders) - {"site-packages", "dist-packages", "__pycache__"}
        for path in (Path(folder, file) for file in files if file.endswith(".py")):
            if path.is_file() and _is_utf8(path.read_bytes()):
                yield _stored_source(str(path), path.relative_to(library).as_posix())


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _file_sources(paths: Sequence[str]) -> list[Source]:
    """The files that `paths` select, each once; a file that two paths name differently takes the smaller name."""
    places: dict[str, str] = {}
    for path in paths:
        for place, name in _places(path).items():
            places[place] = min(name, places.get(place, name))
    return [_stored_source(place, name) for place, name in places.items()]


def _places(path: str) -> dict[str, str]:
    """Where the files that `path` selects lie, and their names."""
    if not path.strip():
        raise UserError("data.corpus.paths has an empty path; `.` is the current folder")
    if path.startswith("gs://"):
        return _in_bucket(path)
    if _is_remote(path):
        raise UserError(
            f"data.corpus.paths has {path!r}: only local paths and gs:// addresses can be read; copy the files"
        )
    return _on_this_machine(path)


def _is_remote(address: str) -> bool:
    return "://" in address


def _on_this_machine(path: str) -> dict[str, str]:
    given = Path(path).expanduser()
    if given.is_file():
        return {_absolute(given): given.name}
    base, pattern = (str(given), "**") if given.is_dir() else _fixed_part(str(given))
    # glob rather than Path.glob, which in Python 3.11 takes hidden files too. What it takes for a folder ends in `/`.
    found = (name for name in glob.iglob(pattern, root_dir=base, recursive=True) if not name.endswith("/"))  # noqa: PTH207
    names = [name for name in found if Path(base, name).is_file()]
    if not names:
        raise UserError(_nothing_at(path, _absolute(base), pattern, there=Path(base).is_dir()))
    return {_absolute(Path(base, name)): name for name in names}


def _absolute(path: str | Path) -> str:
    return os.path.abspath(path)  # noqa: PTH100 (Path.resolve would follow symbolic links)


def _in_bucket(address: str) -> dict[str, str]:
    base, pattern = _fixed_part(address.rstrip("/"))
    parent, _, last = base.rpartition("/")
    if not pattern and parent != "gs:/" and open_storage(parent).exists(last):
        return {base: last}
    names = [name for name in open_storage(base).list() if matches(name, pattern or "**")]
    if not names:
        raise UserError(_nothing_at(address, base, pattern, there=True))
    return {f"{base}/{name}": name for name in names}


def _nothing_at(path: str, base: str, pattern: str, *, there: bool) -> str:
    if not pattern or not there:
        return f"data.corpus.paths has {path!r}, but {base} does not exist; give a file, a folder or a pattern"
    return (
        f"data.corpus.paths has {path!r}, but no file under {base} matches {pattern!r}; "
        "`*` stays inside a folder, `**/` goes through folders, names that begin with a dot are left out"
    )


def _fixed_part(path: str) -> tuple[str, str]:
    """`path` cut before the first component with a wildcard; the second half is empty where there is none."""
    parts = path.split("/")
    wild = next((i for i, part in enumerate(parts) if set(part) & set("*?[")), len(parts))
    return ("/".join(parts[:wild]) or "/") if wild else ".", "/".join(parts[wild:])


def matches(name: str, pattern: str) -> bool:
    """Whether a pattern selects the file called `name`: Python's recursive glob, for places that it cannot list.

    `*`, `?` and `[…]` stay inside a component, the component `**` is any number of folders, and a name that begins with
    a dot is only matched by a component that does too.
    """
    return _match(name.split("/"), pattern.split("/"))


def _match(parts: list[str], pattern: list[str]) -> bool:
    if not parts or not pattern:
        return not parts and not pattern
    visible, deeper = not parts[0].startswith("."), parts[1:]
    if pattern == ["**"]:
        return visible and (not deeper or _match(deeper, pattern))
    if pattern[0] == "**":
        return _match(parts, pattern[1:]) or (visible and _match(deeper, pattern))
    fits = fnmatch.fnmatchcase(parts[0], pattern[0]) and (visible or pattern[0].startswith("."))
    return fits and _match(deeper, pattern[1:])


# --- the Hugging Face Hub ---------------------------------------------------------------------------------------------

_HUB_ADDRESS = re.compile(r"hf://datasets/(?P<repository>[^/]+/[^/@]+)@(?P<commit>[^/]+)/(?P<path>.+)")
_HUB_TRIES = 3
"""A download goes on where it broke off, so a few tries get a large file through a bad line."""


def _hub_endpoint() -> str:
    """Read at each call: huggingface_hub keeps the value that HF_ENDPOINT had when it was imported."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def _hub_sources(corpus: HubCorpus) -> list[Source]:
    endpoint = _hub_endpoint()
    info = _hub_listing(corpus, endpoint)
    files = info.siblings or []
    chosen = [file for file in files if matches(file.rfilename, corpus.files)]
    if not chosen:
        some = ", ".join(sorted(file.rfilename for file in files)[:10]) or "nothing"
        raise UserError(
            f"data.corpus.files={corpus.files!r} matches no file of the dataset {corpus.name}; it has {some}"
        )
    return [_hub_source(f"hf://datasets/{corpus.name}@{info.sha}", file, endpoint) for file in chosen]


def _hub_listing(corpus: HubCorpus, endpoint: str) -> Any:
    import httpx
    from huggingface_hub import HfApi
    from huggingface_hub.errors import OfflineModeIsEnabled

    try:
        with _hub_refusals(corpus.name, corpus.revision, endpoint):
            return HfApi(endpoint=endpoint).dataset_info(
                corpus.name, revision=corpus.revision, files_metadata=True, timeout=60
            )
    except (httpx.TransportError, OfflineModeIsEnabled) as error:
        raise UserError(
            f"the Hub at {endpoint} cannot be reached for the dataset {corpus.name} ({error}); check the network, "
            "HF_HUB_OFFLINE and HF_ENDPOINT, or download the files and use data.corpus.kind=files"
        ) from error


def _hub_source(repository: str, file: Any, endpoint: str) -> Source:
    if file.size is None or file.blob_id is None:
        raise UserError(
            f"{endpoint} lists {file.rfilename} without size and blob id, so it cannot be pinned; unset HF_ENDPOINT"
        )
    return Source(
        address=f"{repository}/{file.rfilename}",
        name=file.rfilename,
        size=file.size,
        version=f"sha256:{file.lfs.sha256}" if file.lfs else f"git:{file.blob_id}",
    )


def _from_hub(source: Source, folder: Path) -> Path:
    import httpx
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    place = _HUB_ADDRESS.fullmatch(source.address)
    if place is None:
        raise UserError(f"{source.address!r} is no file of the Hub; it reads hf://datasets/owner/name@commit/path")
    endpoint = _hub_endpoint()
    lost: Exception | None = None
    for _ in range(_HUB_TRIES):
        try:
            with _hub_refusals(place["repository"], place["commit"], endpoint):
                return Path(
                    hf_hub_download(
                        place["repository"], place["path"], repo_type="dataset", revision=place["commit"],
                        local_dir=folder, endpoint=endpoint,
                    )
                )  # fmt: skip
        except (httpx.TransportError, LocalEntryNotFoundError) as error:
            lost = error
    raise NetworkError(f"{source.address} could not be fetched from {endpoint} in {_HUB_TRIES} tries: {lost}") from lost


@contextmanager
def _hub_refusals(repository: str, revision: str, endpoint: str) -> Iterator[None]:
    """Turn what the Hub refuses into what the user can do about it; the most special class comes first."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise UserError(
            f"the dataset {repository} is gated: accept its conditions on {endpoint}/datasets/{repository} "
            "and set HF_TOKEN to a token of that account"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UserError(
            f"{endpoint} has no dataset {repository}, or it is private; check data.corpus.name, "
            "and set HF_TOKEN to a token that may read it"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UserError(
            f"the dataset {repository} has no branch, tag or commit {revision!r}; set data.corpus.revision"
        ) from error
    except errors.HfHubHTTPError as error:
        raise _explained_answer(error.response.status_code, f"{endpoint}, dataset {repository}: {error}") from error


def _explained_answer(status: int, words: str) -> Exception:
    if status == 429 or status >= 500:
        return NetworkError(f"{words}; the Hub has too much to do, try again later")
    return UserError(f"{words}; is HF_TOKEN still valid, and is HF_ENDPOINT a Hugging Face Hub?")


# --- fetching ---------------------------------------------------------------------------------------------------------


@contextmanager
def _local_copy(source: Source, scratch: Path) -> Iterator[Path]:
    """The file on this machine, with the very content that was listed; what was fetched for it is removed again."""
    if not _is_remote(source.address):
        yield _verified(Path(source.address), source)
        return
    fetch = _from_bucket if source.address.startswith("gs://") else _from_hub
    scratch.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="corpus-", dir=scratch) as folder:
        yield _verified(fetch(source, Path(folder)), source)


def _from_bucket(source: Source, folder: Path) -> Path:
    parent, _, last = source.address.rpartition("/")
    try:
        open_storage(parent).download(last, folder / last)
    except FileNotFoundError as error:
        raise _gone(source) from error
    return folder / last


def _verified(path: Path, source: Source) -> Path:
    """`path` if it holds what `source` says. The Hub's client checks sizes only: here the bytes are checked."""
    if not path.is_file():
        raise _gone(source)
    algorithm, _, listed = source.version.partition(":")
    found = _CHECKSUMS[algorithm](path)
    if found != listed:
        raise DataError(
            f"{source.address} has {algorithm} {found} ({path.stat().st_size} bytes), listed was {listed} "
            f"({source.size} bytes): it changed meanwhile or came damaged; run again to list it anew"
        )
    return path


def _gone(source: Source) -> DataError:
    return DataError(f"{source.address} was there when the corpus was listed and is gone; run again to list it anew")


def _git_blob_of(path: Path) -> str:
    """The id that git gives a file: https://git-scm.com/book/en/v2/Git-Internals-Git-Objects, "Object Storage"."""
    blob = sha1(b"blob %d\0" % path.stat().st_size)
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            blob.update(chunk)
    return blob.hexdigest()


_CHECKSUMS: dict[str, Callable[[Path], str]] = {"crc32c": crc32c_of, "sha256": sha256_of, "git": _git_blob_of}


# --- reading ----------------------------------------------------------------------------------------------------------

Format = Literal["text", "jsonl", "parquet"]
Compression = Literal["gzip", "zstd"]

_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}
_FORMATS: dict[str, Format] = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl"}


@dataclass(frozen=True, kw_only=True)
class _Layout:
    """How documents lie in the files of a corpus."""

    format: Literal["auto"] | Format = "auto"
    column: str = "text"
    separator: str | None = None

    @classmethod
    def of(cls, corpus: Corpus) -> _Layout:
        match corpus:
            case StdlibCorpus():
                return cls(format="text")
            case FileCorpus():
                return cls(format=corpus.format, column=corpus.column, separator=corpus.separator)
            case HubCorpus():
                return cls(column=corpus.column)
            case OpenWebTextCorpus():
                return cls(column=corpus.as_hub().column)


def _compression_of(name: str) -> Compression | None:
    return _COMPRESSIONS.get(PurePosixPath(name.lower()).suffix)


def _format_of(name: str) -> Format:
    path = PurePosixPath(name.lower())
    return _FORMATS.get((path.with_suffix("") if path.suffix in _COMPRESSIONS else path).suffix, "text")


def _texts(path: Path, source: Source, layout: _Layout, scratch: Path) -> Iterator[str]:
    """The documents of one file, empty ones included."""
    form = _format_of(source.name) if layout.format == "auto" else layout.format
    if form == "parquet":
        with _seekable(path, source, scratch) as plain:
            yield from _parquet_texts(plain, source.address, layout.column)
        return
    with _opened(path, source) as stream:
        if form == "jsonl":
            yield from _json_texts(stream, source.address, layout.column)
        elif layout.separator is None:
            yield _decoded(stream.read(), source.address, 0)
        else:
            yield from _separated_texts(stream, source.address, layout.separator.encode())


@contextmanager
def _opened(path: Path, source: Source) -> Iterator[BinaryIO]:
    """The file's content, decompressed as its name says."""
    compression = _compression_of(source.name)
    with path.open("rb") as file:
        if compression is None:
            yield file
        else:
            yield io.BufferedReader(_Decompressed(file, compression, source.address), CHUNK)


@contextmanager
def _seekable(path: Path, source: Source, scratch: Path) -> Iterator[Path]:
    """The file's content as a file: a parquet file is read from its end, which a compressed one cannot be."""
    if _compression_of(source.name) is None:
        yield path
        return
    scratch.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="corpus-", dir=scratch) as folder, _opened(path, source) as stream:
        plain = Path(folder, "decompressed")
        with plain.open("wb") as file:
            while chunk := stream.read(CHUNK):
                file.write(chunk)
        yield plain


class _Decompressed(io.RawIOBase):
    """What gzip or zstd data hold, member after member (`cat a.gz b.gz` makes two), of which the last must end.

    zstandard's own reader takes data that were cut off for data that end there."""

    def __init__(self, file: BinaryIO, compression: Compression, address: str) -> None:
        super().__init__()
        self._file = file
        self._compression = compression
        self._address = address
        self._given = 0
        self._ready = memoryview(b"")
        self._decoder = _decoder(compression)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        target = memoryview(buffer).cast("B")
        while not self._ready and (data := self._next_piece()):
            self._ready = memoryview(self._decompress(data))
        size = min(len(target), len(self._ready))
        target[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        self._given += size
        return size

    def _next_piece(self) -> bytes:
        """Compressed bytes for the decoder, a fresh one after each member; empty when all of it is read."""
        if not self._decoder.eof:
            data = self._file.read(COMPRESSED_CHUNK)
            if not data:
                raise self._damage("the data end before their end mark; the file was cut off")
            return data
        data = bytes(self._decoder.unused_data) or self._file.read(COMPRESSED_CHUNK)
        if data:
            self._decoder = _decoder(self._compression)
        return data

    def _decompress(self, data: bytes) -> bytes:
        from zstandard import ZstdError

        try:
            return bytes(self._decoder.decompress(data))
        except (zlib.error, ZstdError) as error:
            raise self._damage(str(error)) from error

    def _damage(self, why: str) -> DataError:
        return DataError(
            f"{self._address} is damaged {self._compression} after byte {self._given} of the decompressed text: {why}"
        )


def _decoder(compression: Compression) -> Any:
    """zlib's and zstandard's decompression objects have one interface: decompress, eof, unused_data."""
    if compression == "gzip":
        return zlib.decompressobj(wbits=zlib.MAX_WBITS + 16)  # + 16: with gzip's header and trailer
    from zstandard import ZstdDecompressor

    # `zstd --long=31`, as text collections use it, needs windows of 2 GiB; the library's own limit is 128 MiB.
    return ZstdDecompressor(max_window_size=2**31).decompressobj()


def _decoded(data: bytes | bytearray, address: str, start: int) -> str:
    """`data`, which begin at byte `start` of the file's text, as a string."""
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{address} is not UTF-8 at byte {start + error.start} (0x{data[error.start]:02x}, {error.reason}); "
            "convert it, for example with iconv -f latin1 -t utf-8"
        ) from error


def _separated_texts(stream: BinaryIO, address: str, separator: bytes) -> Iterator[str]:
    """UTF-8 keeps characters apart, so the bytes of the separator occur only where the separator does."""
    start = 0
    for piece in _split(stream, separator):
        yield _decoded(piece, address, start)
        start += len(piece) + len(separator)


def _split(stream: BinaryIO, separator: bytes) -> Iterator[bytearray]:
    """bytes.split over a stream. Each byte is searched once, however many chunks a piece spans."""
    rest = bytearray()
    while chunk := stream.read(CHUNK):
        search = max(0, len(rest) - len(separator) + 1)
        rest += chunk
        begin = 0
        while (end := rest.find(separator, search)) >= 0:
            yield rest[begin:end]
            begin = search = end + len(separator)
        del rest[:begin]
    yield rest


def _json_texts(stream: BinaryIO, address: str, column: str) -> Iterator[str]:
    for number, line in enumerate(stream, start=1):
        if not line.isspace():
            yield _json_text(line, column, f"{address}, line {number}")


def _json_text(line: bytes, column: str, where: str) -> str:
    try:
        record = json.loads(_decoded(line, where, 0))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} is no JSON: {error}") from error
    if not isinstance(record, dict):
        raise DataError(f'{where} is no JSON object but {_shown(record)}; a line reads {{{json.dumps(column)}: "…"}}')
    if column not in record:
        raise UserError(f"{where} has no field {column!r}; it has {_listed(record)}. Set data.corpus.column")
    text = record[column]
    if not isinstance(text, str):
        raise DataError(
            f"{where} has {_shown(text)} as {column!r}, and a document is a string; repair or drop the line"
        )
    if b"\\u" in line and not _encodes(text):
        raise DataError(
            f"{where} has half a surrogate pair in {column!r}, which no UTF-8 text can hold; repair the line"
        )
    return text


def _encodes(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shown(value: object) -> str:
    return json.dumps(value)[:60]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


def _parquet_texts(path: Path, address: str, column: str) -> Iterator[str]:
    from pyarrow.parquet import ParquetFile

    with _parquet_damage(f"{address}, footer"):
        # Without a buffer size, the whole column of a row group is held, compressed.
        file = ParquetFile(path, buffer_size=CHUNK, page_checksum_verification=True)
    with file:
        _check_column(file.schema_arrow, column, address)
        for group in range(file.num_row_groups):
            yield from _row_group_texts(file, group, column, f"{address}, row group {group}")


def _check_column(schema: Any, column: str, address: str) -> None:
    import pyarrow as pa

    if column not in schema.names:
        raise UserError(f"{address} has no column {column!r}; it has {_listed(schema.names)}. Set data.corpus.column")
    kind = schema.field(column).type
    if not (pa.types.is_string(kind) or pa.types.is_large_string(kind)):
        raise UserError(f"{address} has {kind} in column {column!r}, and documents are strings; set data.corpus.column")


def _row_group_texts(file: Any, group: int, column: str, where: str) -> Iterator[str]:
    row = 0
    for batch in _batches(file, group, column, where):
        for value in batch.column(0):
            yield _parquet_text(value, f"{where}, row {row}", column)
            row += 1


def _batches(file: Any, group: int, column: str, where: str) -> Iterator[Any]:
    with _parquet_damage(where):
        yield from file.iter_batches(batch_size=ROWS, row_groups=[group], columns=[column])


def _parquet_text(value: Any, where: str, column: str) -> str:
    try:
        text = value.as_py()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where} is not UTF-8 in column {column!r} ({error}); write the file anew from valid text"
        ) from error
    if text is None:
        raise DataError(f"{where} has null in column {column!r}, and a document is a string; repair or drop the row")
    return str(text)


@contextmanager
def _parquet_damage(where: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (pa.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the machine's trouble; Arrow gives no errno where the data are at fault
        raise DataError(f"{where}: no readable parquet, damaged or cut off: {error}") from error
