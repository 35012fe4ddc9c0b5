"""Files that are compressed as a whole: gzip and zstd."""

from __future__ import annotations

import io
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePosixPath
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, BinaryIO, Literal

from litgpt_demo.data.corpus.source import Source
from litgpt_demo.errors import DataError
from litgpt_demo.storage.local import explaining

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

CHUNK = 1 << 18
"""Bytes read at a time: what fits a core's cache is copied several times as fast as what does not."""
COMPRESSED_CHUNK = 1 << 16
"""Compressed bytes read at a time."""
_ZSTD_PIECE = 1 << 10
"""Compressed bytes that zstd decodes at a time. The library puts no bound on what comes out, and 4 bytes can hold
128 KiB: so 32 MiB do at most. Text is decoded as fast as in larger pieces."""
MOST_RATIO = 1_000
SLACK = 1 << 30
"""Bytes that a parquet file may hold besides `MOST_RATIO` times its size, and so a compressed one. Both make text a few
times smaller; only a bomb is made thousands of times smaller."""

Compression = Literal["gzip", "zstd"]
_COMPRESSIONS: dict[str, Compression] = {".gz": "gzip", ".zst": "zstd"}


def compression_of(name: str) -> Compression | None:
    """Return the compression that the end of the file's name says."""
    return _COMPRESSIONS.get(PurePosixPath(name.lower()).suffix)


@contextmanager
def opened(path: Path, source: Source) -> Iterator[io.BufferedReader]:
    """The file's content, decompressed as its name says."""
    compression = compression_of(source.name)
    with path.open("rb") as file:
        if compression is None:
            yield file
        else:
            yield io.BufferedReader(_Decompressed(file, compression, source.address), CHUNK)


@contextmanager
def seekable(path: Path, source: Source, scratch: Path) -> Iterator[Path]:
    """The file's content as a file: a parquet file is read from its end, which a compressed one cannot be."""
    if compression_of(source.name) is None:
        yield path
        return
    with ExitStack() as stack:
        with explaining(str(scratch), needed=source.size):  # and more, but who knows how much
            scratch.mkdir(parents=True, exist_ok=True)
            folder = stack.enter_context(TemporaryDirectory(prefix="corpus-", dir=scratch))
            plain = Path(folder, "decompressed")
            with opened(path, source) as stream, plain.open("wb") as file:
                _copy(stream, file, SLACK + MOST_RATIO * path.stat().st_size, source.address)
        yield plain


def _copy(stream: BinaryIO, file: BinaryIO, most: int, address: str) -> None:
    written = 0
    while block := stream.read(CHUNK):
        written += len(block)
        if written > most:
            raise DataError(
                f"{address} holds more than {most:,} bytes decompressed, over {MOST_RATIO:,} times its size: no "
                "parquet file is like that, and the disk is not filled with it. Remove it, or decompress it yourself"
            )
        file.write(block)


class _Decompressed(io.RawIOBase):
    """Yield what gzip or zstd data hold, member after member (`cat a.gz b.gz` makes two), of which the last must end.

    zstandard's own reader takes data that were cut off for data that end there."""

    def __init__(self, file: BinaryIO, compression: Compression, address: str) -> None:
        super().__init__()
        self._file = file
        self._compression = compression
        self._address = address
        self._given = 0
        self._ready = memoryview(b"")
        self._decoder = _decoder(compression)
        self._waiting = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: WriteableBuffer, /) -> int:
        target = memoryview(buffer).cast("B")
        while not self._ready and self._has_more():
            self._ready = memoryview(self._decode())
        size = min(len(target), len(self._ready))
        target[:size] = self._ready[:size]
        self._ready = self._ready[size:]
        self._given += size
        return size

    def _has_more(self) -> bool:
        """Read compressed bytes if none wait; a fresh decoder for each member. False when all of it is decoded."""
        if not self._waiting:
            self._waiting = memoryview(self._file.read(COMPRESSED_CHUNK))
        if self._decoder.eof and self._waiting:
            self._decoder = _decoder(self._compression)
        return not self._decoder.eof

    def _decode(self) -> bytes:
        """Decode a few of the waiting bytes, so that what comes out is bounded."""
        from zstandard import ZstdError

        decoder, waiting = self._decoder, self._waiting
        try:
            if self._compression == "gzip":
                text = decoder.decompress(waiting, CHUNK)
                left = len(decoder.unused_data if decoder.eof else decoder.unconsumed_tail)
            else:
                text = decoder.decompress(waiting[:_ZSTD_PIECE])
                left = max(0, len(waiting) - _ZSTD_PIECE) + len(decoder.unused_data)
        except (zlib.error, ZstdError) as error:
            raise self._damage(str(error)) from error
        # zlib may hold back some text after the last bytes went in: it comes when nothing does.
        if not waiting and not text and not decoder.eof:
            raise self._damage("the data end before their end mark; the file was cut off")
        self._waiting = waiting[len(waiting) - left :]
        return bytes(text)

    def _damage(self, why: str) -> DataError:
        return DataError(
            f"{self._address} is damaged {self._compression} after byte {self._given} of the decompressed text: {why}"
        )


def _decoder(compression: Compression) -> Any:
    """zlib's and zstandard's decompression objects both have decompress, eof and unused_data."""
    if compression == "gzip":
        return zlib.decompressobj(wbits=zlib.MAX_WBITS + 16)  # + 16: with gzip's header and trailer
    from zstandard import ZstdDecompressor

    # `zstd --long=31`, as text collections use it, needs windows of 2 GiB; the library's own limit is 128 MiB.
    return ZstdDecompressor(max_window_size=2**31).decompressobj(write_size=1 << 15)
