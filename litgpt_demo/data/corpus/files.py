"""One file of a corpus: its name, what it is by its first bytes, and how documents lie in it."""

from __future__ import annotations

import bz2
import fnmatch
import io
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple

from litgpt_demo.config import Corpus, FileCorpus, OpenWebTextCorpus, StdlibCorpus
from litgpt_demo.errors import DataError
from litgpt_demo.storage.local import explaining

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

CHUNK = 1 << 18
"""Bytes read at a time: what fits a core's cache is copied several times as fast as what does not."""
MOST_RATIO = 1_000
SLACK = 1 << 30
"""Bytes that a parquet file may hold besides `MOST_RATIO` times its size, and so a compressed one. Both make text a few
times smaller; only a bomb is made thousands of times smaller."""

Format = Literal["text", "jsonl", "parquet"]
_FORMATS: dict[str, Format] = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"}

# Hidden files, and what Spark, Hive, Delta Lake and Databricks keep beside the data. Not every name that begins with an
# underscore, as in Hive: `__init__.py` is text that people train on.
_BESIDE = re.compile(r"\.|_(SUCCESS|(common_)?metadata|temporary|delta_log|spark_metadata|(started|committed)_.*)$")


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file of a corpus."""

    address: str
    """As shown: local path, `gs://bucket/object`, or `hf://datasets/owner/name@commit/path`."""
    name: str
    """The same wherever the corpus lies: the path below the library's folder, below the part of a pattern that has no
    wildcard, or in the repository. Part of the dataset's key."""
    size: int
    """Bytes as stored, compressed if the file is."""
    version: str
    """`crc32c:…`, `sha256:…` or `git:…` (a blob's id): differs when the content does. Part of the dataset's key."""
    file: Path | None = None
    """Where a local one is opened: what is no UTF-8 in its path is escaped (`\\xe9`) in address and name."""

    @property
    def is_remote(self) -> bool:
        return self.file is None


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How documents lie in the files of a corpus."""

    format: Literal["auto"] | Format
    column: str = "text"
    separator: str | None = None

    @classmethod
    def of(cls, corpus: Corpus) -> Layout:
        if isinstance(corpus, StdlibCorpus):
            return cls(format="text")
        given = corpus.as_hub() if isinstance(corpus, OpenWebTextCorpus) else corpus
        separator = given.separator if isinstance(given, FileCorpus) else None
        return cls(format=given.format, column=given.column, separator=separator)

    def format_of(self, name: str) -> Format:
        """Return the format that the user gave, else the one of the name."""
        return _FORMATS.get(ending_of(name), "text") if self.format == "auto" else self.format

    def separator_of(self, source: Source) -> bytes | None:
        """The bytes between two documents of a file in which any document can be found by them; else None."""
        form = self.format_of(source.name)
        if form == "text" and self.separator is not None:
            return self.separator.encode()
        return b"\n" if form == "jsonl" else None


def is_beside(name: str) -> bool:
    """Return True if a file or folder of this name is no data, but what a system or a writer keeps beside them."""
    return _BESIDE.match(name) is not None


def matches(name: str, pattern: str) -> bool:
    """Return True if a pattern selects the file called `name`, as Python's recursive glob would.

    `*`, `?` and `[…]` stay inside a component, the component `**` is any number of folders, and a name that begins with
    a dot is only matched by a component that does too; so it is with `_SUCCESS` and others that writers keep beside.
    """
    return _match(name.split("/"), pattern.split("/"))


def _match(parts: list[str], pattern: list[str]) -> bool:
    if not parts or not pattern:
        return not parts and not pattern
    visible, deeper = not is_beside(parts[0]), parts[1:]
    if pattern == ["**"]:
        return visible and (not deeper or _match(deeper, pattern))
    if pattern[0] == "**":
        return _match(parts, pattern[1:]) or (visible and _match(deeper, pattern))
    fits = fnmatch.fnmatchcase(parts[0], pattern[0]) and (visible or pattern[0].startswith(parts[0][0]))
    return fits and _match(deeper, pattern[1:])


# --- what a file is ---------------------------------------------------------------------------------------------------


def _zstd() -> Any:
    from zstandard import ZstdDecompressor

    # `zstd --long=31`, as text collections use it, needs windows of 2 GiB; the library's own limit is 128 MiB.
    return ZstdDecompressor(max_window_size=2**31).decompressobj(write_size=1 << 15)


class Compression(NamedTuple):
    """A way to compress a file as a whole."""

    name: str
    endings: tuple[str, ...]
    magic: bytes
    decoder: Callable[[], Any]
    """Of one member: has decompress, eof and unused_data."""
    piece: int
    """Compressed bytes that are decoded at a time."""
    bounded: bool = False
    """The decoder takes the most that may come out. Where none can be given, the piece is so small that little does:
    gzip makes at most 1,032 bytes of one, and zstd 128 KiB of four."""


_COMPRESSIONS = (
    # + 16: with gzip's header and trailer
    Compression("gzip", (".gz", ".gzip"), b"\x1f\x8b", lambda: zlib.decompressobj(wbits=zlib.MAX_WBITS + 16), 1 << 14),
    Compression("zstd", (".zst", ".zstd"), b"\x28\xb5\x2f\xfd", _zstd, 1 << 10),
    Compression("bzip2", (".bz2",), b"BZh", bz2.BZ2Decompressor, 1 << 16, bounded=True),
    Compression("xz", (".xz",), b"\xfd7zXZ\0", lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, 2**31), 1 << 16, True),
)
_BZIP2_BLOCKS = (b"1AY&SY", b"\x17\x72\x45\x38\x50\x90")  # behind `BZh` and a digit, which alone may be text

# First bytes, and what has them: https://en.wikipedia.org/wiki/List_of_file_signatures
_UTF16 = "written in UTF-16; convert it, for example with iconv -f utf-16 -t utf-8"
_FOREIGN = {
    b"PK\3\4": "a zip archive; unpack it",
    b"7z\xbc\xaf\x27\x1c": "a 7-Zip archive; unpack it",
    b"Rar!\x1a\7": "a RAR archive; unpack it",
    b"\4\x22\x4d\x18": "compressed by lz4; decompress it",
    b"%PDF-": "a PDF document; extract its text",
    b"PAR1\x15": "a parquet file; set data.corpus.format=parquet, or give it a name that ends in .parquet",
    b"\xff\xfe": _UTF16,
    b"\xfe\xff": _UTF16,
}
_TAR, _TAR_PLACE = b"ustar", 257
HEAD = 512
"""Bytes that `foreign` looks at."""


def ending_of(name: str) -> str:
    """The end of a file's name that says its format, before the one of its compression."""
    path = PurePosixPath(name.lower())
    return (path.with_suffix("") if any(path.suffix in one.endings for one in _COMPRESSIONS) else path).suffix


def compression_of(path: Path, source: Source) -> Compression | None:
    """Return the compression that the file's first bytes say; where they say none, the end of its name."""
    with path.open("rb") as file:
        head = file.read(10)
    for one in _COMPRESSIONS:
        if head.startswith(one.magic) and (one.name != "bzip2" or head[4:] in _BZIP2_BLOCKS):
            return one
    ending = PurePosixPath(source.name.lower()).suffix
    return next((one for one in _COMPRESSIONS if ending in one.endings), None)


def foreign(head: bytes) -> str | None:
    """What a file with these first bytes is instead of text, and what to do about it."""
    if head.startswith(_TAR, _TAR_PLACE):
        return "a tar archive; unpack it"
    halves = head[::2], head[1::2]  # of ASCII in UTF-16 without a mark, which is valid UTF-8
    if len(head) >= 8 and any(all(one) and not any(other) for one, other in (halves, halves[::-1])):
        return _UTF16
    return next((what for magic, what in _FOREIGN.items() if head.startswith(magic)), None)


@contextmanager
def opened(path: Path, source: Source) -> Iterator[io.BufferedReader]:
    """The file's content, decompressed if it is compressed."""
    compression = compression_of(path, source)
    with path.open("rb") as file:
        if compression is None:
            yield file
        else:
            yield io.BufferedReader(_Decompressed(file, compression, source.address), CHUNK)


@contextmanager
def seekable(path: Path, source: Source, scratch: Path) -> Iterator[Path]:
    """The file's content as a file: a parquet file is read from its end, which a compressed one cannot be."""
    if compression_of(path, source) is None:
        yield path
        return
    with explaining(str(scratch)):
        scratch.mkdir(parents=True, exist_ok=True)
        folder = TemporaryDirectory(prefix="corpus-", dir=scratch)
    with folder as name:  # more is needed than the size, but who knows how much
        plain, written, most = Path(name, "decompressed"), 0, SLACK + MOST_RATIO * path.stat().st_size
        with explaining(str(scratch), needed=source.size), opened(path, source) as stream, plain.open("wb") as file:
            while block := stream.read(CHUNK):
                written += len(block)
                if written > most:
                    raise DataError(
                        f"{source.address} holds more than {most:,} bytes decompressed, over {MOST_RATIO:,} times its "
                        "size: no parquet file is like that, and the disk is not filled with it. Remove it, or "
                        "decompress it yourself"
                    )
                file.write(block)
        yield plain


class _Decompressed(io.RawIOBase):
    """Yield what compressed data hold, member after member (`cat a.gz b.gz` makes two), of which the last must end.

    The libraries' own readers take data that were cut off (zstandard's) or go wrong (bz2's, lzma's) for data that end
    there."""

    def __init__(self, file: BinaryIO, compression: Compression, address: str) -> None:
        from zstandard import ZstdError

        super().__init__()
        self._file, self._compression, self._address = file, compression, address
        self._damages = zlib.error, lzma.LZMAError, OSError, ZstdError
        self._given = 0
        self._ready = memoryview(b"")
        self._decoder = compression.decoder()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        target = memoryview(buffer).cast("B")
        while not self._ready and (text := self._decoded()) is not None:
            self._ready = memoryview(text)
        size = min(len(target), len(self._ready))
        target[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        self._given += size
        return size

    def _decoded(self) -> bytes | None:
        """Decode the next bytes, few enough to bound what comes out; None when all is decoded."""
        decoder, piece = self._decoder, b""
        if decoder.eof or getattr(decoder, "needs_input", True):
            piece = decoder.unused_data if decoder.eof else b""
            piece = piece or self._file.read(self._compression.piece)
            if not piece and decoder.eof:
                return None
            if not piece:
                raise self._damage("the data end before their end mark; the file was cut off")
        if decoder.eof:
            decoder = self._decoder = self._compression.decoder()
        try:
            return bytes(decoder.decompress(piece, *([CHUNK] if self._compression.bounded else [])))
        except self._damages as error:
            raise self._damage(str(error)) from error

    def _damage(self, why: str) -> DataError:
        return DataError(
            f"{self._address} is damaged {self._compression.name} after byte {self._given} of the decompressed text: "
            f"{why}"
        )
