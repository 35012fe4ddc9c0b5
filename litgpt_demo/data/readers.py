"""One file of a corpus: its format, by its name and its first bytes, and its documents, in batches.

format     a document is                                  position in errors
text       the file, or what stands between separators    byte of the (decompressed) text
jsonl      the string in one field of each line           line
parquet    a value of one column of strings               row group and row
"""

from __future__ import annotations

import bz2
import io
import json
import lzma
import math
import os
import re
import zlib
from codecs import BOM_UTF8, getincrementaldecoder
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, BinaryIO, Literal, NamedTuple

import psutil

from litgpt_demo.config import Corpus
from litgpt_demo.errors import DataError, TrainLitgptError, UserError
from litgpt_demo.storage.local import translate_os_errors

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    import pyarrow as pa
    from _typeshed import WriteableBuffer
    from pyarrow.parquet import ParquetFile

CHUNK = 1 << 18
"""Bytes read at a time: what fits a core's cache is copied several times as fast as what does not."""
MOST_RATIO = 1_000
SLACK = 1 << 30
"""Bytes that a parquet file may hold besides `MOST_RATIO` times its size, and so a compressed one. Both make text a few
times smaller; only a bomb is made thousands of times smaller."""

Format = Literal["text", "jsonl", "parquet"]
_FORMATS: dict[str, Format] = {".parquet": "parquet", ".jsonl": "jsonl", ".ndjson": "jsonl", ".json": "jsonl"}


@dataclass(frozen=True, kw_only=True)
class Source:
    address: str
    """As shown: local path, `gs://bucket/object`, or `hf://datasets/owner/name@commit/path`."""
    name: str
    """The same wherever the corpus is: the path below the library's folder, below the part of a pattern that has no
    wildcard, or in the repository. Part of the dataset's content hash."""
    size: int
    """Bytes as stored, compressed if the file is."""
    version: str
    """`crc32c:…`, `sha256:…` or `git:…` (a blob's id): differs when the content does. Part of the content hash."""
    file: Path | None = None
    """The path of a local one. Bytes of it that are not UTF-8 are escaped (`\\xe9`) in address and name."""


class FileFormat(NamedTuple):
    """The settings that say where documents are in the files of a corpus."""

    format: Literal["auto"] | Format = "auto"
    column: str = "text"
    separator: str | None = None

    @classmethod
    def of(cls, corpus: Corpus) -> FileFormat:
        return cls(**corpus.model_dump(include={*cls._fields}))

    def format_of(self, name: str) -> Format:
        """Return the format of a file: the one that is set, else that of the name."""
        if self.format != "auto":
            return self.format
        path = PurePosixPath(name.lower())
        if any(path.suffix in compression.endings for compression in _COMPRESSIONS):
            path = path.with_suffix("")
        return _FORMATS.get(path.suffix, "text")

    def separator_of(self, name: str) -> bytes | None:
        """Return the bytes between two documents of a file; None where documents are not found by them."""
        form = self.format_of(name)
        if form == "jsonl":
            return b"\n"
        if form == "text" and self.separator is not None:
            return self.separator.encode()
        return None


@dataclass(frozen=True, kw_only=True)
class BadDocument:
    index: int
    """Its number in its batch, bad and empty ones too."""
    place: str
    """The file's name and the position in it, the same wherever the corpus is stored: `part-1.jsonl, line 3`."""
    reason: str
    error: TrainLitgptError
    """To raise where bad documents are not skipped; it names the file's address."""


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Consecutive documents of a file; a bad one is an empty text."""

    texts: pa.LargeStringArray
    """Valid UTF-8 without nulls. May be a slice of a longer array: mind its offset."""
    bad: tuple[BadDocument, ...] = ()

    def slice(self, start: int, end: int) -> Batch:
        bad = tuple(replace(bad, index=bad.index - start) for bad in self.bad if start <= bad.index < end)
        return Batch(texts=self.texts.slice(start, end - start), bad=bad)


def read(
    path: Path, source: Source, layout: FileFormat, start: int = 0, end: int | None = None, *, scratch: Path, most: int
) -> Iterator[Batch]:
    """Yield the documents of a file, or of the piece [start, end) of it: row groups of parquet, bytes of others."""
    form, separator = layout.format_of(source.name), layout.separator_of(source.name)
    if form == "parquet":
        with seekable(path, source, scratch) as plain:
            yield from _parquet_texts(plain, source, layout.column, start, end, most)
        return
    with opened(path, source) as stream:
        position = start
        if start:
            stream.seek(start)
        else:
            wrong_format = detect_wrong_format(stream.peek(HEAD))
            if wrong_format:
                yield _only(_bad(source, 0, "byte 0", DataError(f"is {wrong_format}")))
                return
            position = _skip_mark(stream)
        if form == "jsonl":
            yield from _json_lines(stream, source, layout.column, start, position, end, most)
            return
        if separator is None:
            batches = _whole_text(stream, source, position, most)
        else:
            batches = _separated_texts(stream, source, separator, position, end, most)
        for number, batch in enumerate(batches):
            if layout.format == "auto" and start == number == 0:
                _require_text(batch.texts, source)
            yield batch


def count_documents(
    path: Path, source: Source, layout: FileFormat, start: int = 0, end: int | None = None, *, most: int
) -> tuple[int, int] | None:
    """Return the documents of a file or a piece of it, and about their bytes, by its footer, lines or separators.

    None if it must be read because documents may be empty, null or too long, or because there is one. Empty ones that
    the footer or the line does not show are counted too.
    """
    form, separator = layout.format_of(source.name), layout.separator_of(source.name)
    if form == "parquet":
        return _count_by_footer(path, source, layout.column, start, end)
    if separator is None:
        return None
    # As json.dumps writes a document without text, and as it does with separators=(",", ":").
    without_text = [json.dumps(layout.column).encode() + ending for ending in (b': ""', b':""')]
    documents = size = 0
    with opened(path, source) as stream:
        if start:
            stream.seek(start)
        position = start or _skip_mark(stream)
        for _, records in _iter_records(stream, separator, position, end, most):
            if records is None:
                return None
            if form == "jsonl":
                records = [line for line in records if line and not line.isspace()]
                if any(ending in line for line in records for ending in without_text):
                    return None
            if not all(records):
                return None
            documents += len(records)
            size += sum(map(len, records))
    return documents, size


def _skip_mark(stream: io.BufferedReader) -> int:
    # The mark of UTF-8 is not text. Returns its bytes, 0 if there is none.
    is_marked = stream.peek(len(BOM_UTF8)).startswith(BOM_UTF8)
    return len(stream.read(len(BOM_UTF8))) if is_marked else 0


def _count_by_footer(path: Path, source: Source, column: str, start: int, end: int | None) -> tuple[int, int] | None:
    if compression_of(path, source) is not None:
        return None
    with row_groups(path, source, column) as (_, groups):
        chosen = groups[start:end]
        if any(group.statistics is None or group.statistics.null_count != 0 for group in chosen):
            return None
        # Bytes as they are encoded.
        return sum(group.num_values for group in chosen), sum(group.total_uncompressed_size for group in chosen)


def split_points(path: Path, source: Source, layout: FileFormat, target: int) -> Iterator[tuple[int, int]]:
    """Yield where to cut a file, about every `target` stored bytes: a row group or byte, and the bytes before it."""
    if compression_of(path, source) is not None:
        return
    if layout.format_of(source.name) == "parquet":
        begin = total = 0
        with row_groups(path, source, layout.column) as (_, groups):
            for number, group in enumerate(groups):
                if total > begin and total + group.total_compressed_size - begin > target:
                    yield number, total
                    begin = total
                total += group.total_compressed_size
        return
    separator = layout.separator_of(source.name)
    if separator is None:
        return
    with path.open("rb") as file:
        if detect_wrong_format(file.read(HEAD)):
            return
        position = target
        while position < source.size:
            base = file.seek(max(0, position - len(separator) + 1))
            found = _find_apart(file.read(CHUNK + 2 * len(separator)), separator, position - base)
            if found < 0:
                position += CHUNK
                continue
            cut = base + found + len(separator)
            if cut < source.size:
                yield cut, cut
            position = cut + target


def _find_apart(text: bytes, separator: bytes, start: int) -> int:
    # A scan from the file's start is sure to find a separator that none before it overlaps: of `a\n\n\n\n` it finds the
    # first `\n\n` and the third. One that began at the second would find others.
    found = text.find(separator, start)
    while found >= 0 and text.rfind(separator, max(0, found - len(separator) + 1), found + len(separator) - 1) >= 0:
        found = text.find(separator, found + 1)
    return found


def _zstd() -> Any:
    from zstandard import ZstdDecompressor

    # `zstd --long=31`, as text collections use it, needs windows of 2 GiB; the library's own limit is 128 MiB.
    return ZstdDecompressor(max_window_size=2**31).decompressobj(write_size=1 << 15)


class Compression(NamedTuple):
    name: str
    endings: tuple[str, ...]
    magic: bytes
    """A pattern of its first bytes."""
    decoder: Callable[[], Any]
    """Of one member: has decompress, eof and unused_data."""
    piece: int
    """Compressed bytes that are decoded at a time."""
    bounded: bool = False
    """The decoder takes the most that may come out. Where none can be given, the piece is so small that little does:
    gzip makes at most 1,032 bytes of one, and zstd 128 KiB of four."""


_COMPRESSIONS = (
    # 31: the largest window, with gzip's header and trailer
    Compression("gzip", (".gz", ".gzip"), rb"\x1f\x8b\x08", lambda: zlib.decompressobj(wbits=31), 1 << 14),
    Compression("zstd", (".zst", ".zstd"), rb"\x28\xb5\x2f\xfd", _zstd, 1 << 10),
    # A block's first bytes, or the end's, are needed too: text may begin with `BZh` and a digit.
    Compression("bzip2", (".bz2",), rb"(?s)BZh.(1AY&SY|\x17rE8P\x90)", bz2.BZ2Decompressor, 1 << 16, bounded=True),
    Compression("xz", (".xz",), rb"\xfd7zXZ\0", lambda: lzma.LZMADecompressor(lzma.FORMAT_XZ, 2**31), 1 << 16, True),
)

# First bytes, and what has them: https://en.wikipedia.org/wiki/List_of_file_signatures
_UTF16 = "written in UTF-16; convert it, for example with iconv -f utf-16 -t utf-8"
_WRONG_FORMATS = {
    b"PK\3\4": "a zip archive; unpack it",
    b"7z\xbc\xaf\x27\x1c": "a 7-Zip archive; unpack it",
    b"Rar!\x1a\7": "a RAR archive; unpack it",
    b"\4\x22\x4d\x18": "compressed by lz4; decompress it",
    b"%PDF-": "a PDF document; extract its text",
    b"PAR1\x15": "a parquet file; set data.corpus.format=parquet, or give it a name that ends in .parquet",
    b"\x93NUMPY": "an array of numpy.save; write token ids as flat files, and set data.corpus.kind=tokens",
    b"\xff\xfe": _UTF16,
    b"\xfe\xff": _UTF16,
}
HEAD = 512
"""Bytes that `detect_wrong_format` looks at."""

# The same for files of ids, which have no header. llm.c and modded-nanogpt: dev/data/data_common.py of karpathy/llm.c.
_WITH_HEADER = {
    b"LITPKDS": "a file of LitGPT's packed dataset, which has a header",
    **{number.to_bytes(4, "little"): "a file of llm.c, which has a header" for number in (20240520, 20240801)},
    b"\x93NUMPY": "a file of numpy.save, which has a header; write it by "
    "numpy.load(FILE).astype('<u2').tofile(TRAIN_BIN), with '<u4' for a tokenizer of more than 65,536 ids",
    b"MMIDIDX\0\0": "a file of Megatron's index; the ids are in the .bin next to it",
    b"ARROW1\0\0": "a file of Arrow",
}

MOST_POINTER = 1024
"""More bytes than a pointer of Git LFS has: https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md"""


def refuse_lfs_pointer(head: bytes, address: str) -> None:
    """Raise UserError if a file with these first bytes is a pointer: a clone without Git LFS has it for the file."""
    is_pointer = head.startswith(b"version https://git-lfs.github.com/spec/") and b"\noid sha256:" in head
    if is_pointer and len(head) < MOST_POINTER:
        what = f"{address} is a Git LFS pointer: the file itself was not downloaded"
        raise UserError(what, fix="run `git lfs pull` where it was cloned")


def compression_of(path: Path, source: Source) -> Compression | None:
    """Return the compression that the file's first bytes show, else the one of its name."""
    with path.open("rb") as file:
        head = file.read(10)
    ending = PurePosixPath(source.name.lower()).suffix
    shown = [compression for compression in _COMPRESSIONS if re.match(compression.magic, head)]
    named = [compression for compression in _COMPRESSIONS if ending in compression.endings]
    return next(iter(shown + named), None)


def detect_wrong_format(head: bytes) -> str | None:
    """Return what a file with these first bytes is if it is not text, and what to do about it."""
    if head.startswith(b"ustar", 257):
        return "a tar archive; unpack it"
    # ASCII in UTF-16 without a mark is valid UTF-8.
    even, odd = head[::2], head[1::2]
    if len(head) >= 8 and ((all(even) and not any(odd)) or (all(odd) and not any(even))):
        return _UTF16
    return _known_format(head, _WRONG_FORMATS)


def _known_format(head: bytes, formats: Mapping[bytes, str]) -> str | None:
    return next((name for magic, name in formats.items() if head.startswith(magic)), None)


def detect_wrong_ids(head: bytes, size: int) -> str | None:
    """Return what a file of `size` bytes with these first ones is if it is not flat token ids."""
    name = _known_format(head, _WITH_HEADER) or _known_format(head, _WRONG_FORMATS)
    if name and name != _UTF16:  # whose two bytes may be an id
        return name
    for compression in _COMPRESSIONS:
        if re.match(compression.magic, head):
            return f"compressed by {compression.name}; decompress it"
    if len(head) < 16:
        return None
    if head[8:10] == b'{"' and int.from_bytes(head[:8], "little") < size:
        return "a file of safetensors"
    # The number of samples, and where each begins and the last one ends: Streaming's encode_joint_shard, and litdata.
    count, *offsets = [int.from_bytes(head[at : at + 4], "little") for at in range(0, len(head) - 3, 4)]
    offsets = offsets[: count + 1]
    ascend = count > 0 and 4 * (count + 2) <= offsets[0] <= size and sorted({*offsets}) == offsets
    if ascend and (len(offsets) <= count or offsets[-1] == size):
        return "a shard of Streaming (MDS) or litdata, which holds samples"
    with suppress(UnicodeDecodeError):
        text = getincrementaldecoder("utf-8")().decode(head)  # the last character may be cut
        if re.match(r"\s*<(!doctype|html)", text, re.IGNORECASE):
            return "an HTML page"
        if re.search("[\0-\x08\x0e-\x1f]", text) is None:
            return "text"
    return None


@contextmanager
def opened(path: Path, source: Source) -> Iterator[io.BufferedReader]:
    """The file's content, decompressed if it is compressed."""
    compression = compression_of(path, source)
    with path.open("rb") as file:
        if compression is None:
            yield file
        else:
            yield io.BufferedReader(_Pieces(_decompressed(file, compression, source.address)), CHUNK)


@contextmanager
def seekable(path: Path, source: Source, scratch: Path) -> Iterator[Path]:
    """The file's content as a file: a parquet file is read from its end, which a compressed one cannot be."""
    if compression_of(path, source) is None:
        yield path
        return
    with translate_os_errors(str(scratch)):
        scratch.mkdir(parents=True, exist_ok=True)
        folder = TemporaryDirectory(prefix="corpus-", dir=scratch)
    with folder as name:  # more is needed than the size, and it is unknown how much
        plain, written, most = Path(name, "decompressed"), 0, SLACK + MOST_RATIO * path.stat().st_size
        with (
            translate_os_errors(str(scratch), needed=source.size),
            opened(path, source) as stream,
            plain.open("wb") as file,
        ):
            while block := stream.read(CHUNK):
                written += len(block)
                if written > most:
                    raise DataError(
                        f"{source.address} holds more than {most:,} bytes decompressed, over {MOST_RATIO:,} times its "
                        "size, as no parquet file does; remove it, or decompress it yourself"
                    )
                file.write(block)
        yield plain


class _Pieces(io.RawIOBase):
    def __init__(self, pieces: Iterator[bytes]) -> None:
        super().__init__()
        self._pieces, self._ready = pieces, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        target = memoryview(buffer).cast("B")
        while not self._ready and (piece := next(self._pieces, None)) is not None:
            self._ready = memoryview(piece)
        size = min(len(target), len(self._ready))
        target[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        return size


def _decompressed(file: BinaryIO, compression: Compression, address: str) -> Iterator[bytes]:
    # The libraries' own readers take data that were cut off (zstandard's) or go wrong (bz2's, lzma's) for data that end
    # there. The last member must end.
    from zstandard import ZstdError

    decoder, position = compression.decoder(), 0
    while True:
        needs_input = decoder.eof or getattr(decoder, "needs_input", True)
        piece = decoder.unused_data if decoder.eof else b""
        if needs_input and not piece:
            piece = file.read(compression.piece)
            if not piece and decoder.eof:
                return
        try:
            if needs_input and not piece:
                raise EOFError("the data end before their end mark; the file was cut off")
            if decoder.eof:
                decoder = compression.decoder()
            text = decoder.decompress(piece, CHUNK) if compression.bounded else decoder.decompress(piece)
        except (EOFError, zlib.error, lzma.LZMAError, OSError, ZstdError) as error:
            raise DataError(
                f"{address} is damaged {compression.name} after byte {position} of the decompressed text: {error}"
            ) from error
        position += len(text)
        yield bytes(text)


def _only(bad: BadDocument) -> Batch:
    return Batch(texts=text_array([b""]), bad=(bad,))


def _bad(source: Source, index: int, place: str, problem: TrainLitgptError) -> BadDocument:
    fix = problem.fix
    if source.name.endswith(".bin"):
        fix += "; if it holds token ids, as nanoGPT's train.bin, set data.corpus.kind=tokens"
    error = type(problem)(f"{source.address}, {place}: {problem.what}", fix=fix)
    return BadDocument(index=index, place=f"{source.name}, {place}", reason=problem.what, error=error)


def _too_long(most: int) -> DataError:
    return DataError(
        f"has more than {most:,} bytes",
        fix="check that it is not damaged, and set data.corpus.separator if it holds several documents, or raise "
        f"data.max_document_bytes (tokenizing takes {_MEMORY_OF_A_BYTE} times as much memory)",
    )


def _not_utf8(error: UnicodeDecodeError) -> DataError:
    byte = f"0x{error.object[error.start]:02x}, {error.reason}"
    return DataError(f"is not UTF-8 from its byte {error.start} on ({byte})", fix=_CONVERT)


def text_array(texts: Sequence[bytes]) -> pa.LargeStringArray:
    """Return texts as an array, unchecked. `pyarrow.array` takes longer, and imports pandas if that is installed."""
    import numpy as np
    import pyarrow as pa

    edges = np.zeros(len(texts) + 1, dtype="<i8")
    np.cumsum(np.fromiter(map(len, texts), dtype=np.int64, count=len(texts)), out=edges[1:])
    return pa.LargeStringArray.from_buffers(len(texts), pa.py_buffer(edges), pa.py_buffer(b"".join(texts)))


def text_edges(texts: pa.LargeStringArray) -> npt.NDArray[np.int64]:
    """Return where each text begins in the array's content, and where the last one ends, in bytes; a view."""
    import numpy as np

    return np.frombuffer(texts.buffers()[1] or bytes(8), dtype="<i8")[texts.offset : texts.offset + len(texts) + 1]


def _batch_of(texts: pa.LargeStringArray, most: int, source: Source, place: Callable[[int, int], str]) -> Batch:
    import pyarrow as pa
    import pyarrow.compute as pc

    if not texts.null_count and (texts.nbytes <= most or pc.max(pc.binary_length(texts)).as_py() <= most):
        with suppress(pa.ArrowInvalid):
            texts.validate(full=True)
            return Batch(texts=texts)
    good, bad = list[bytes](), list[BadDocument]()
    for index, value in enumerate(texts.view(pa.large_binary()).to_pylist()):
        byte, problem = 0, None
        if value is None:
            problem = DataError("is null", fix="a document is a string: repair or drop the row")
        elif len(value) > most:
            problem = _too_long(most)
        else:
            try:
                value.decode()
            except UnicodeDecodeError as error:
                byte, problem = error.start, _not_utf8(error)
        if problem is None:
            good.append(value)
        else:
            good.append(b"")
            bad.append(_bad(source, index, place(index, byte), problem))
    return Batch(texts=text_array(good), bad=tuple(bad))


# The text, its copy as an Arrow array, and what gigatoken 0.10 and numpy take to encode it: measured 5.7 bytes a byte.
_MEMORY_OF_A_BYTE = 8

# Documents and characters at the beginning of a text file that show whether it is one.
_LOOKED_AT, _LOOKED_AT_CHARACTERS = 20, 1 << 16
_CONVERT = "convert it, for example with iconv -f latin1 -t utf-8"


def _whole_text(stream: io.BufferedReader, source: Source, start: int, most: int) -> Iterator[Batch]:
    # Without the memory for it, the tokenizer or the system would end the process without a word.
    limit = min(most, psutil.virtual_memory().available // _MEMORY_OF_A_BYTE)
    # A compressed file does not say how long its text is.
    if source.size <= limit and len(text := stream.read(limit + 1)) <= limit:
        yield _text_batch([text], start, 0, source, most)
    elif limit == most:
        yield _only(_bad(source, 0, "byte 0", _too_long(most)))
    else:
        raise DataError(
            f"{source.address} is one document of more than {limit:,} bytes, but tokenizing it takes "
            f"{_MEMORY_OF_A_BYTE} times as much memory, and that is not free",
            fix="set data.corpus.separator to the text between its documents, or split the file",
        )


def _require_text(texts: pa.LargeStringArray, source: Source) -> None:
    # Where the lines that it begins with are JSON objects, a model would be trained on braces and field names.
    text = "\n".join(texts.slice(0, _LOOKED_AT).to_pylist())
    head = text[:_LOOKED_AT_CHARACTERS]
    lines = (head.rpartition("\n")[0] if len(head) < len(text) else head).splitlines()
    try:
        records = [json.loads(line) for line in lines if line.strip()]
    except (ValueError, RecursionError):
        return
    if records and records[0] and all(isinstance(record, dict) for record in records):
        fields = list(records[0])
        column = "text" if "text" in fields else fields[0]
        raise UserError(
            f"{source.address} would be read as text, but its lines are JSON objects with the fields {_quoted(fields)}",
            fix=f"set data.corpus.format=jsonl and data.corpus.column={column}, or "
            "data.corpus.format=text to train on the lines as they are",
        )


def _separated_texts(
    stream: io.BufferedReader, source: Source, separator: bytes, start: int, end: int | None, most: int
) -> Iterator[Batch]:
    # UTF-8 keeps characters apart, so the bytes of the separator occur only where the separator does.
    for byte, texts in _iter_records(stream, separator, start, end, most):
        if texts is None:
            yield _only(_bad(source, 0, f"byte {byte}", _too_long(most)))
        else:
            yield _text_batch(texts, byte, len(separator), source, most)


def _iter_records(
    stream: io.BufferedReader, separator: bytes, start: int, end: int | None, most: int
) -> Iterator[tuple[int, list[bytes] | None]]:
    # An `end` is behind a separator, and no record follows it. Yields None for a record of more than `most` bytes and a
    # chunk, as soon as that many were read; it is never held in memory.
    remaining = math.inf if end is None else end - start
    tail, is_too_long = b"", False
    unsure = len(separator) - 1  # bytes at the end of the tail that may be the beginning of a separator
    # At least as much again as was in vain: so the work stays linear, however many chunks a record spans.
    while chunk := stream.read(int(min(remaining, max(CHUNK, min(len(tail), most + unsure + 1 - len(tail)))))):
        remaining -= len(chunk)
        *records, tail = (tail + chunk).split(separator)
        if is_too_long and records:  # the first is the end of that one
            start += len(records.pop(0)) + len(separator)
            is_too_long = False
        if records:
            yield start, records
            start += sum(map(len, records)) + len(separator) * len(records)
        if not is_too_long and len(tail) > most + unsure:
            yield start, None
            is_too_long = True
        if is_too_long:
            dropped = max(0, len(tail) - unsure)
            start, tail = start + dropped, tail[dropped:]
    if not is_too_long and (end is None or tail):
        yield start, [tail]


def _text_batch(texts: list[bytes], start: int, between: int, source: Source, most: int) -> Batch:
    def place(index: int, byte: int) -> str:
        return f"byte {start + sum(len(text) + between for text in texts[:index]) + byte}"

    return _batch_of(text_array(texts), most, source, place)


def _json_lines(
    stream: io.BufferedReader, source: Source, column: str, start: int, position: int, end: int | None, most: int
) -> Iterator[Batch]:
    import pyarrow as pa
    from pydantic_core import from_json  # two to three times as fast as json, and as strict

    line_number = 0  # the last line that was read, from 1 at `start`

    lines_before = cache(partial(_lines_before, stream, start))  # counted only where a line has to be named

    def place(number: int) -> str:
        return f"line {lines_before() + number}"

    for _, lines in _iter_records(stream, b"\n", position, end, most):
        if lines is None:
            line_number += 1
            yield _only(_bad(source, 0, place(line_number), _too_long(most)))
            continue
        first, line_number = line_number + 1, line_number + len(lines)
        with suppress(ValueError, LookupError, TypeError, pa.ArrowException):  # one of them is bad: which?
            values = [from_json(line, cache_strings=False)[column] for line in lines if line and not line.isspace()]
            quick = pa.array(values, pa.large_string())
            if not quick.null_count and max(map(len, lines)) <= most:
                yield Batch(texts=quick)
                continue
        texts, bad = list[str](), list[BadDocument]()
        for number, line in enumerate(lines, first):
            if len(line) > most or (line and not line.isspace()):
                try:
                    texts.append(_json_text(line, column, most))
                except TrainLitgptError as error:
                    bad.append(_bad(source, len(texts), place(number), error))
                    texts.append("")
        yield Batch(texts=pa.array(texts, pa.large_string()), bad=tuple(bad))


def _lines_before(stream: io.BufferedReader, byte: int) -> int:
    if not byte:
        return 0  # a compressed stream, which is never cut, cannot be rewound
    position = stream.tell()
    stream.seek(0)
    count = sum(stream.read(min(CHUNK, byte - start)).count(b"\n") for start in range(0, byte, CHUNK))
    stream.seek(position)
    return count


def _json_text(line: bytes, column: str, most: int) -> str:
    from pydantic_core import from_json

    if len(line) > most:
        raise _too_long(most)
    try:
        try:
            record = from_json(line, cache_strings=False)  # as in the quick way: it means the same in any company
        except ValueError:
            # It explains, in a few more: half surrogates in other fields, and nesting beyond 200.
            record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise _not_utf8(error) from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"is not JSON: {error}") from error
    if not isinstance(record, dict):
        fix = f'write each line as {{{json.dumps(column)}: "…"}}'
        raise DataError(f"is not a JSON object but {json.dumps(record)[:60]}", fix=fix)
    if column not in record:
        raise UserError(f"has no field {column!r}; it has {_quoted(record)}", fix="set data.corpus.column")
    text = record[column]
    if not isinstance(text, str):
        reason = f"has {json.dumps(text)[:60]} as {column!r}"
        raise DataError(reason, fix="a document is a string: repair or drop the line")
    if b"\\u" in line and re.search("[\ud800-\udfff]", text):
        raise DataError(f"has half a surrogate pair in {column!r}", fix="no UTF-8 text can hold it: repair the line")
    return text


def first_few(sentences: Sequence[str], separator: str = "; ") -> str:
    """Return the first three, and whether there are more."""
    return separator.join([*sentences[:3], "…"] if len(sentences) > 3 else sentences)


def _quoted(names: Iterable[str]) -> str:
    return ", ".join(map(repr, names)) or "none"


_BUFFER = 1 << 20
_PIECE_BYTES = 6_000_000
"""Text held as one Arrow array, about: rows are counted, and taken to be of the row group's average size. Less than a
batch, so that most make one by themselves and need no copying."""
_MAX_ROWS = 4096
"""Rows of one array at most, so that a run of long ones among many short ones stays small."""


@contextmanager
def row_groups(path: Path, source: Source, column: str) -> Iterator[tuple[ParquetFile, list[Any]]]:
    """An open parquet file, and its footer's facts about the column in each row group."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    where = f"{source.address}, footer"
    with _damage(where):
        # Without a buffer size, the whole column of a row group is held, compressed.
        content = pa.OSFile(os.fsencode(path))  # which takes only text of UTF-8
        file = ParquetFile(content, buffer_size=_BUFFER, pre_buffer=False, page_checksum_verification=True)
        schema, names = file.schema_arrow, _quoted(file.schema_arrow.names)  # names that are not text fail here
    if column not in schema.names:
        raise UserError(f"{source.address} has no column {column!r}; it has {names}", fix="set data.corpus.column")
    kind = schema.field(column).type
    text = kind.value_type if isinstance(kind, pa.DictionaryType) else kind  # what pandas writes for categories
    if text not in (pa.string(), pa.large_string(), pa.string_view()):
        what = f"{source.address} has {kind} in column {column!r}, but documents are strings"
        raise UserError(what, fix="set data.corpus.column")
    with _damage(where):
        # The columns there are the leaves of nested ones too.
        leaf = [file.schema.column(leaf).path for leaf in range(len(file.schema))].index(column)
        chunks = [file.metadata.row_group(group).column(leaf) for group in range(file.num_row_groups)]
    sizes, most = [chunk.total_compressed_size for chunk in chunks], path.stat().st_size
    if min(sizes, default=0) < 0 or sum(sizes) > most:  # some would be read again and again
        raise _damaged(where, f"column {column!r} takes {sum(sizes):,} of the file's {most:,} bytes")
    with file:
        yield file, chunks


def _parquet_texts(path: Path, source: Source, column: str, start: int, end: int | None, most: int) -> Iterator[Batch]:
    def place(index: int, _byte: int) -> str:
        return f"row group {group}, row {row + index}"

    with row_groups(path, source, column) as (file, chunks):
        for group in range(start, len(chunks) if end is None else end):
            row, text, where = 0, 0, f"{source.address}, row group {group}"
            rows, size = file.metadata.row_group(group).num_rows, chunks[group].total_uncompressed_size
            bound = MOST_RATIO * chunks[group].total_compressed_size + SLACK // len(chunks)
            _require_bounded(size, bound, where)

            with _damage(where):
                # The workers are parallel themselves: no threads.
                piece = max(1, min(_MAX_ROWS, rows * _PIECE_BYTES // max(1, size)))
                for found in file.iter_batches(piece, row_groups=[group], columns=[column], use_threads=False):
                    texts = found.column(0).cast("large_string")
                    text += texts.nbytes  # empty ones too: their places in it
                    _require_bounded(text, bound, where)
                    yield _batch_of(texts, most, source, place)  # Arrow holds all of a page, and so what is too long
                    row += len(texts)
            if row != rows:
                raise _damaged(where, f"it has {row:,} rows, but the footer says {rows:,}")


def _require_bounded(size: int, bound: int, where: str) -> None:
    if size > bound:
        raise DataError(
            f"{where} holds {size:,} bytes of text or more, but at most {bound:,} are expanded, over {MOST_RATIO:,} "
            "times its size; remove it, or rewrite it without dictionary and compression"
        )


@contextmanager
def _damage(where: str) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (MemoryError, pa.ArrowException, OSError, UnicodeDecodeError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the machine's trouble; Arrow gives no errno where the data are at fault
        raise _damaged(where, error) from error


def _damaged(where: str, why: object) -> DataError:
    fix = "rewrite it or fetch it again, with smaller row groups if its pages take all memory"
    return DataError(f"{where}: not readable parquet, damaged or cut off: {why}", fix=fix)
