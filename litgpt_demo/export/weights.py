"""Weights on their way from a checkpoint's shards into other files, a transformer block at a time.

No more than one block is in memory, however large the model: what needs the whole model in memory is opening it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import torch
from litgpt.utils import incremental_save
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from litgpt_demo.models.huggingface import Rename, Tensors
from litgpt_demo.storage.local import translate_os_errors
from litgpt_demo.training.checkpoint_reader import WEIGHTS, load_weights, read_index

# Hugging Face's own limit: a file of this size can be fetched again when a download is cut short.
SHARD_BYTES = 5_000_000_000

_BLOCK = re.compile(r"transformer\.h\.\d+\.")
_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


class Weights:
    """The weights in a checkpoint's shards, whatever number of ranks wrote them; errors name them by `address`."""

    def __init__(self, shards: Path, address: str = "") -> None:
        self.shards, self._address = shards, address
        found = read_index(shards, address=address).state_dict_metadata.items()
        self.forms: Mapping[str, Tensor] = {
            name.removeprefix(WEIGHTS): torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
            for name, stored in found
            if name.startswith(WEIGHTS) and isinstance(stored, TensorStorageMetadata)
        }
        """Name to a tensor without content, of the right shape and precision."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(form.nbytes for form in self.forms.values())

    @property
    def blocks(self) -> list[list[str]]:
        """The names, those of one transformer block together."""
        places = {name: found[0] if (found := _BLOCK.match(name)) else name for name in self.forms}
        return [list(names) for _, names in groupby(sorted(self.forms, key=places.__getitem__), places.__getitem__)]

    def read(self, names: list[str]) -> Tensors:
        """These with their content."""
        tensors = {name: torch.empty_like(self.forms[name], device="cpu") for name in names}
        load_weights(self.shards, tensors, address=self._address)
        return tensors


def write_litgpt(weights: Weights, path: Path) -> None:
    """Write what `torch.load` reads as a state dict."""
    with translate_os_errors(str(path), needed=weights.size), incremental_save(path) as saver:
        tensors = (named for names in weights.blocks for named in weights.read(names).items())
        saver.save({name: saver.store_early(tensor) for name, tensor in tensors})


def write_safetensors(weights: Weights, rename: Rename, folder: Path) -> None:
    """Write the weights under other names, in files of about SHARD_BYTES with an index where one does not suffice.

    The format is a header's length in 8 bytes, the header in JSON, and the tensors one after another
    (https://github.com/huggingface/safetensors#format). Its own library writes a file from tensors that are all there.
    """
    files: list[list[tuple[list[str], Tensors]]] = []  # the blocks of each, with the forms of what they become
    size = SHARD_BYTES
    for names in weights.blocks:
        forms = rename({name: weights.forms[name] for name in names})
        more = sum(form.nbytes for form in forms.values())
        if size + more > SHARD_BYTES:
            files.append([])
            size = 0
        files[-1].append((names, forms))
        size += more
    where: dict[str, str] = {}
    for number, blocks in enumerate(files, 1):
        name = "model.safetensors" if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for out, form in (item for _, forms in blocks for item in forms.items()):
            start, end, where[out] = end, end + form.nbytes, name
            header[out] = {"dtype": _DTYPES[form.dtype], "shape": list(form.shape), "data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)  # so that what follows is aligned
        with translate_os_errors(str(folder / name), needed=end), (folder / name).open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            for names, forms in blocks:
                for out, tensor in rename(weights.read(names)).items():
                    assert (tensor.shape, tensor.dtype) == (forms[out].shape, forms[out].dtype)
                    file.write(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)
    if len(files) > 1:
        index = {"metadata": {"total_size": weights.size}, "weight_map": where}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
