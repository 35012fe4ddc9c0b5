"""Tokens in folders of litdata and of MosaicML's streaming, read by their index.json and without either package.

Both keep shards of one layout, all numbers little-endian uint32: the number of samples, the place of each in the file
and the file's end, then the samples. Sources: litdata 0.2.59, streaming/writer.py (`_create_chunk`) and constants.py;
mosaicml-streaming 0.13.0, base/format/mds/reader.py and encodings.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field

from litgpt_demo.data.corpus import Source
from litgpt_demo.documents import parse_json
from litgpt_demo.errors import DataError, UserError

INDEX = "index.json"
Array: TypeAlias = npt.NDArray[np.integer[Any]]

# litdata writes a type as its place in one of two lists.
_LITDATA = MappingProxyType(
    {
        "no_header_tensor": {11: "u1", 12: "i1", 13: "i2", 14: "i2", 15: "i4", 16: "i4", 17: "i8", 18: "i8", 20: "u2"},
        "no_header_numpy": {0: "i1", 1: "i2", 2: "i4", 3: "i8", 4: "u1", 5: "u2", 6: "u4", 7: "u8"},
    }
)
_MDS = MappingProxyType(
    {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32", 64: "uint64", 65: "int64"}
)
_BYTES = "int64"  # LLM Foundry keeps tokens so in a column of plain bytes
_TOKENS = ("tokens", "input_ids")


class _Chunk(BaseModel):
    filename: str


class _LitdataConfig(BaseModel):
    data_format: tuple[str, ...]
    compression: str | None = None
    encryption: Any = None


class _LitdataIndex(BaseModel):
    chunks: tuple[_Chunk, ...]
    config: _LitdataConfig


class _File(BaseModel):
    basename: str


class _Shard(BaseModel):
    format: Literal["mds"]
    column_names: tuple[str, ...]
    column_encodings: tuple[str, ...]
    column_sizes: tuple[int | None, ...]
    compression: str | None = None
    raw_data: _File


class _MdsIndex(BaseModel):
    version: Literal[2]
    shards: tuple[_Shard, ...] = Field(min_length=1)


def folder_index(sources: Sequence[Source]) -> Source | None:
    """Return the index among a split's files; None where they are flat files of ids."""
    return next((source for source in sources if source.name.rpartition("/")[2] == INDEX), None)


def arrays(sources: Sequence[Source], read: Callable[[Source], bytes]) -> Iterator[tuple[Source, Array]]:
    """Yield the ids of each shard of a folder, in the order of its index.

    Args:
        read: returns the content of a file.

    Raises:
        DataError: a shard is not there, or not what the index says.
        UserError: the folder holds something else than tokens, or they are compressed.
    """
    index = folder_index(sources)
    assert index is not None
    there = {source.name.partition("/")[2]: source for source in sources}
    content, fix = read(index), "write that folder anew, or give flat files of ids"
    if b'"chunks"' in content:
        litdata = parse_json(content, _LitdataIndex, where=index.address, fix=fix)
        dtype = _litdata_type(litdata.config, index.address)
        for chunk in litdata.chunks:
            source = _found(chunk.filename, there, index)
            yield source, _ids(_samples(read(source), source)[1], dtype, source)
        return
    for shard in parse_json(content, _MdsIndex, where=index.address, fix=fix).shards:
        if shard.compression is not None:
            raise UserError(_compressed(index.address, shard.compression))
        source = _found(shard.raw_data.basename, there, index)
        yield source, _mds_ids(shard, source, read(source))


def _litdata_type(config: _LitdataConfig, where: str) -> str:
    if config.compression is not None or config.encryption is not None:
        raise UserError(_compressed(where, config.compression or "encryption"))
    kind, _, code = (config.data_format[0] if len(config.data_format) == 1 else "").partition(":")
    dtype = _LITDATA.get(kind, {}).get(int(code)) if code.isdecimal() else None
    if dtype is None:
        raise UserError(
            f"{where} says that its samples are {', '.join(config.data_format) or 'nothing'}, and tokens are one row "
            "of whole numbers each; write them with litdata's TokensLoader"
        )
    return f"<{dtype}"


def _compressed(where: str, how: str) -> str:
    return f"{where} says that its shards are kept by {how}; write them without, so that the ids can be read"


def _found(name: str, there: Mapping[str, Source], index: Source) -> Source:
    if name not in there:
        raise DataError(f"{index.address} names {name}, which is not there; copy the folder anew")
    return there[name]


def _samples(content: bytes, source: Source) -> tuple[npt.NDArray[np.uint32], bytes]:
    """Return where the samples of a shard begin and end, and their bytes, which follow one another.

    Raises:
        DataError: the shard is not so laid out.
    """
    count = int.from_bytes(content[:4], "little")
    head = 4 * (count + 2)
    if len(content) < head or len(content) < 8:
        raise DataError(f"{source.address} ends within its list of {count:,} samples; it is cut short or no shard")
    places = np.frombuffer(content, dtype="<u4", count=count + 1, offset=4)
    if places[-1] != len(content) or places[0] < head or (np.diff(places.astype(np.int64)) < 0).any():
        raise DataError(f"{source.address} has {len(content):,} bytes, and its samples lie elsewhere; copy it anew")
    return places, content[int(places[0]) :]


def _ids(content: bytes, dtype: str, source: Source) -> Array:
    if len(content) % np.dtype(dtype).itemsize:
        raise DataError(
            f"{source.address} has {len(content):,} bytes of {np.dtype(dtype).name}: no whole number of ids"
        )
    return np.frombuffer(content, dtype=dtype)


def _mds_ids(shard: _Shard, source: Source, content: bytes) -> Array:
    """Return the ids of a shard's column of tokens."""
    column = next((number for number, name in enumerate(shard.column_names) if name in _TOKENS), None)
    if column is None:
        raise UserError(
            f"{source.address} has the columns {', '.join(shard.column_names)}, and tokens are in one called "
            f"{' or '.join(_TOKENS)}; write them there"
        )
    places, _ = _samples(content, source)
    samples = [content[int(begin) : int(end)] for begin, end in pairwise(places)]
    values = [_value(sample, shard.column_sizes, column) for sample in samples]
    decoded = [_decoded(value, shard.column_encodings[column], source) for value in values]
    return np.concatenate(decoded) if decoded else np.empty(0, dtype=np.int64)


def _value(sample: bytes, sizes: Sequence[int | None], column: int) -> bytes:
    """Return one column of a sample: the sizes of those without a fixed one come first, then all values."""
    free = [number for number, size in enumerate(sizes) if not size]
    said = dict(zip(free, np.frombuffer(sample, dtype="<u4", count=len(free)).tolist(), strict=True))
    lengths = [size or said[number] for number, size in enumerate(sizes)]
    begin = 4 * len(free) + sum(lengths[:column])
    return sample[begin : begin + lengths[column]]


def _decoded(value: bytes, encoding: str, source: Source) -> Array:
    """Return the ids of one sample: plain bytes, or an array whose type and shape may be said before its values."""
    kind, *said = encoding.split(":")
    if kind not in {"bytes", "ndarray"} or (said and said[0] not in _MDS.values()):
        raise UserError(f"{source.address} keeps its tokens as {encoding}; write them as ndarray or bytes")
    if kind == "bytes":
        return _ids(value, _BYTES, source)
    dtype, at = (said[0], 0) if said else (_MDS.get(value[0], ""), 1)
    if not dtype:
        raise DataError(f"{source.address} has an array of an unknown type ({value[0]}), and ids are whole numbers")
    if len(said) < 2:  # the number of dimensions and the size of their numbers share a byte
        dimensions, size = value[at] >> 2, 1 << value[at] % 4
        shape = np.frombuffer(value, dtype=f"<u{size}", count=dimensions, offset=at + 1).tolist()
        at += 1 + dimensions * size
        if prod(shape) * np.dtype(dtype).itemsize != len(value) - at:
            raise DataError(f"{source.address} has an array of {shape} ids in {len(value) - at:,} bytes; copy it anew")
    return _ids(value[at:], dtype, source)
