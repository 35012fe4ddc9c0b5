"""The output of the readers of all formats: neighbouring documents, and what is wrong with some of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from litgpt_demo.data.corpus.source import Source
from litgpt_demo.errors import DataError, TrainLitgptError

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class Flaw:
    """The reason why a document cannot be read."""

    row: int
    """Its number in its piece."""
    place: str
    """The file's name and the position in it, the same wherever the corpus lies."""
    reason: str
    error: TrainLitgptError
    """Return the error to raise where bad documents are not skipped; it names the file's address."""


@dataclass(frozen=True, kw_only=True)
class DocumentPiece:
    """Documents that follow each other; a bad one stands as an empty text."""

    texts: pa.LargeStringArray
    flaws: tuple[Flaw, ...] = ()

    def slice(self, start: int, end: int) -> DocumentPiece:
        """The documents [start, end)."""
        if start == 0 and end == len(self.texts):
            return self
        flaws = tuple(replace(flaw, row=flaw.row - start) for flaw in self.flaws if start <= flaw.row < end)
        return DocumentPiece(texts=self.texts.slice(start, end - start), flaws=flaws)


def too_long(row: int, source: Source, place: str, most: int) -> Flaw:
    """Return the flaw of a document with more than `most` bytes."""
    reason = f"has more than {most:,} bytes"
    advice = (
        "data.max_document_bytes lets in no more. Is it damaged, or is there a data.corpus.separator that cuts it? "
        "Else raise that setting: making its tokens takes 8 times as much memory"
    )
    return Flaw(
        row=row,
        place=f"{source.name}, {place}",
        reason=reason,
        error=DataError(f"{source.address}: the document at {place} {reason}, and {advice}"),
    )


def piece_of(
    values: Sequence[bytes | None], flaw_of: Callable[[int, UnicodeDecodeError | None], Flaw]
) -> DocumentPiece:
    """The piece of these UTF-8 texts. `flaw_of` describes the one at an index that is not UTF-8, or None at all."""
    import pyarrow as pa

    texts = pa.array(values, pa.large_binary()).view(pa.large_string())
    if is_sound(texts):
        return DocumentPiece(texts=texts)
    good: list[bytes] = []
    flaws = []
    for row, value in enumerate(values):
        flaw = flaw_of(row, None) if value is None else None
        try:
            (value or b"").decode()
        except UnicodeDecodeError as error:
            flaw = flaw_of(row, error)
        good.append(b"" if flaw or value is None else value)
        flaws += [flaw] if flaw else []
    return DocumentPiece(texts=pa.array(good, pa.large_binary()).view(pa.large_string()), flaws=tuple(flaws))


def is_sound(texts: pa.LargeStringArray) -> bool:
    """Return True if every text is there and is UTF-8."""
    import pyarrow as pa

    if texts.null_count:
        return False
    try:
        texts.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True
