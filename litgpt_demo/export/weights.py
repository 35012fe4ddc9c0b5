"""Weights on their way from a checkpoint's shards into other files, a transformer block at a time.

No more than one block is in memory, however large the model: what needs the whole model in memory is opening it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import BinaryIO, TypeAlias

import torch
from litgpt.utils import incremental_save
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from litgpt_demo.storage.local import explaining
from litgpt_demo.training.reading import load_weights, read_index

Tensors: TypeAlias = dict[str, Tensor]
Rename: TypeAlias = Callable[[Tensors], Tensors]
"""A function from tensors of one block, by LitGPT's names, to the same by another library's."""

# Hugging Face's own limit: a file of this size can be fetched again when a download is cut short.
SHARD_BYTES = 5_000_000_000

_PREFIX = "model."
_BLOCK = re.compile(r"transformer\.h\.\d+\.")
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class Weights:
    """The weights in a checkpoint's shards, whatever number of ranks wrote them."""

    def __init__(self, shards: Path, address: str = "") -> None:
        """Read the index of the shards; their values stay where they are.

        Args:
            address: what errors call the folder, where it is a copy.
        """
        self.shards, self._address = shards, address
        found = read_index(shards, address=address).state_dict_metadata.items()
        self.forms: Mapping[str, Tensor] = {
            name.removeprefix(_PREFIX): torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
            for name, stored in found
            if name.startswith(_PREFIX) and isinstance(stored, TensorStorageMetadata)
        }
        """Name to a tensor without content, of the right shape and precision."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(form.numel() * form.element_size() for form in self.forms.values())

    @property
    def blocks(self) -> list[list[str]]:
        """The names, those of one transformer block together."""

        def place(name: str) -> str:
            return found[0] if (found := _BLOCK.match(name)) else name

        return [list(names) for _, names in groupby(sorted(self.forms, key=place), place)]

    def forms_of(self, names: list[str]) -> Tensors:
        """These without their content."""
        return {name: self.forms[name] for name in names}

    def read(self, names: list[str]) -> Tensors:
        """These with their content."""
        tensors = {name: torch.empty_like(form, device="cpu") for name, form in self.forms_of(names).items()}
        load_weights(self.shards, tensors, address=self._address)
        return tensors


def write_litgpt(weights: Weights, path: Path) -> None:
    """Write what `torch.load` reads as a state dict."""
    with explaining(str(path), needed=weights.size), incremental_save(path) as saver:
        saver.save(
            {
                name: saver.store_early(tensor)
                for names in weights.blocks
                for name, tensor in weights.read(names).items()
            }
        )


def write_safetensors(weights: Weights, rename: Rename, folder: Path) -> None:
    """Write the weights under other names, in files of about SHARD_BYTES with an index where one does not suffice.

    The format is a header's length in 8 bytes, the header in JSON, and the tensors one after another
    (https://github.com/huggingface/safetensors#format). Its own library writes a file from tensors that are all there.
    """
    shards = list(_shards(weights, rename))
    where: dict[str, str] = {}
    for number, blocks in enumerate(shards, 1):
        name = "model.safetensors" if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        forms = {out: form for names in blocks for out, form in rename(weights.forms_of(names)).items()}
        where |= dict.fromkeys(forms, name)
        with explaining(str(folder / name), needed=sum(map(_size, forms.values()))), (folder / name).open("wb") as file:
            _write_header(file, forms)
            for names in blocks:
                for out, tensor in rename(weights.read(names)).items():
                    assert (tensor.shape, tensor.dtype) == (forms[out].shape, forms[out].dtype)
                    file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    if len(shards) > 1:
        index = {"metadata": {"total_size": weights.size}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def _shards(weights: Weights, rename: Rename) -> Iterator[list[list[str]]]:
    """The blocks of each file."""
    blocks: list[list[str]] = []
    size = 0
    for names in weights.blocks:
        more = sum(map(_size, rename(weights.forms_of(names)).values()))
        if blocks and size + more > SHARD_BYTES:
            yield blocks
            blocks, size = [], 0
        blocks.append(names)
        size += more
    yield blocks


def _write_header(file: BinaryIO, forms: Tensors) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, form in forms.items():
        header[name] = {
            "dtype": _DTYPES[form.dtype],
            "shape": list(form.shape),
            "data_offsets": [offset, offset + _size(form)],
        }
        offset += _size(form)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that what follows is aligned
    file.write(len(text).to_bytes(8, "little") + text)


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
