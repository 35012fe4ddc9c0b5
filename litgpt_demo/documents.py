"""JSON that lies on a disk or in a bucket: written with a checksum of its own, and read in one way.

Whatever is read may have been cut short, changed by a failing disk, edited, or written by another version; `parse_json`
says so in words that name the place.
"""

from __future__ import annotations

import io
import re
from functools import cache
from typing import Any, Literal, TypeAlias, TypeVar, cast, get_args

from pydantic import TypeAdapter, ValidationError

from litgpt_demo.errors import DataError
from litgpt_demo.storage.checksums import copy_with_crc

T = TypeVar("T")


def parse_json(content: bytes, kind: type[T], *, where: str, fix: str) -> T:
    """Return the value of type `kind` that stored bytes hold, with their seal taken off if they have one.

    Args:
        kind: a pydantic model, a dataclass, or a type such as `dict[str, Any]`.
        where: the address of the bytes.
        fix: what a person is to do when they are damaged.

    Raises:
        DataError: they are not JSON, not of this kind, or not as they were written.
    """
    try:
        value: T = _adapter(cast(Any, kind)).validate_json(_unsealed(content))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"]))
        name = "JSON object" if kind.__module__ == "builtins" else kind.__name__
        raise DataError(
            f"{where} is not a valid {name} of this version ({error.error_count()} problems, first: {first['msg']}"
            f"{f' at {place}' if place else ''}); {fix}"
        ) from error
    except _BrokenSealError as error:
        raise DataError(f"{where} is not as it was written: {error}; {fix}") from error
    return value


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


Sealed: TypeAlias = Literal["manifest", "config", "skipped", "record"]

# The last line of a sealed document is the checksum of what is before it, because nothing else vouches for it.
_NAMES = "|".join(get_args(Sealed))
_SEAL = re.compile(rf'(?P<text>.*),\n "(?:{_NAMES})_crc32c": "(?P<crc32c>[0-9a-f]{{8}})"\n\}}'.encode(), re.DOTALL)


class _BrokenSealError(Exception):
    pass


def sealed(text: bytes, name: Sealed) -> bytes:
    """Return a JSON object, written with an indent of 1, with `<name>_crc32c` as its last member."""
    inside = text.removesuffix(b"\n}")
    return b'%s,\n "%s_crc32c": "%s"\n}' % (inside, name.encode(), _crc32c(inside))


def _unsealed(content: bytes) -> bytes:
    """The document without its last line. One of an older version has none, and one that lost it is no JSON."""
    if (seal := _SEAL.fullmatch(content)) is None:
        return content
    if (found := _crc32c(seal["text"])) != seal["crc32c"]:
        raise _BrokenSealError(f"it says that its crc32c is {seal['crc32c'].decode()}, and it is {found.decode()}")
    return seal["text"] + b"\n}"


def _crc32c(text: bytes) -> bytes:
    return copy_with_crc(io.BytesIO(text))[1].encode()
