"""Copies the weights of a checkpoint's shards into other files, a transformer block at a time.

At most one file of SHARD_BYTES and one block are in memory, however large the model. Only opening it needs all of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path

import torch
from huggingface_hub import split_torch_state_dict_into_shards
from litgpt.utils import incremental_save
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from litgpt_demo.models.huggingface import Rename, Tensors
from litgpt_demo.storage.local import translate_os_errors
from litgpt_demo.training.checkpoint_reader import MODEL, load_weights, read_index
from litgpt_demo.training.digests import Leaves, row_leaves, weights_digest

SHARD_BYTES = 5_000_000_000
"""Hugging Face's own limit: a file of this size can be fetched again when a download is cut short."""

_BLOCK = re.compile(r"transformer\.h\.\d+\.")


class Weights:
    """The weights in a checkpoint's shards, whatever number of ranks wrote them; errors name them by `address`."""

    def __init__(self, shards: Path, address: str = "", *, kind: str = MODEL) -> None:
        """`kind` is AVERAGE for the moving averages of the weights, by the same names."""
        self.shards, self._address, self._kind = shards, address, kind
        found = read_index(shards, address=address).state_dict_metadata.items()
        self.forms: Mapping[str, Tensor] = {
            name.removeprefix(f"{kind}."): torch.empty(stored.size, dtype=stored.properties.dtype, device="meta")
            for name, stored in found
            if name.startswith(f"{kind}.") and isinstance(stored, TensorStorageMetadata)
        }
        """Name to a tensor without content, of the right shape and precision."""

    @property
    def blocks(self) -> list[list[str]]:
        """The names of each transformer block, and of each other weight."""

        def block_of(name: str) -> str:
            match = _BLOCK.match(name)
            return match[0] if match else name

        return [list(names) for _, names in groupby(sorted(self.forms, key=block_of), block_of)]

    def read(self, names: list[str]) -> Tensors:
        tensors = {name: torch.empty_like(self.forms[name], device="cpu") for name in names}
        load_weights(self.shards, tensors, kind=self._kind, address=self._address)
        return tensors

    def digest(self) -> str:
        """Return the digest that the training recorded of them (docs/reference/digests.md)."""
        tensors = (named for names in self.blocks for named in self.read(names).items())
        parts = (Leaves(name, 0, row_leaves(tensor)) for name, tensor in tensors)
        return weights_digest(parts, {name: (form.dtype, form.shape) for name, form in self.forms.items()})


def write_litgpt(weights: Weights, path: Path) -> None:
    needed = sum(form.nbytes for form in weights.forms.values())
    with translate_os_errors(str(path), needed=needed), incremental_save(path) as saver:
        tensors = (named for names in weights.blocks for named in weights.read(names).items())
        saver.save({name: saver.store_early(tensor) for name, tensor in tensors})


def write_safetensors(weights: Weights, rename: Rename, folder: Path) -> None:
    """Write the weights under other names, in files of at most SHARD_BYTES, with an index if there are several."""
    blocks = [(names, rename({name: weights.forms[name] for name in names})) for names in weights.blocks]
    # The parts of a split tensor are views, of which each would count as the whole tensor.
    forms = {name: torch.empty_like(form, device="meta") for _, renamed in blocks for name, form in renamed.items()}
    split = split_torch_state_dict_into_shards(forms, max_shard_size=SHARD_BYTES)
    for file, names in split.filename_to_tensors.items():
        tensors: Tensors = {}
        for block, renamed in blocks:
            if not renamed.keys().isdisjoint(names):
                tensors |= rename(weights.read(block))
        content = {name: tensors[name].contiguous() for name in names}
        with translate_os_errors(str(folder / file), needed=sum(tensor.nbytes for tensor in content.values())):
            save_file(content, folder / file, metadata={"format": "pt"})
    if split.is_sharded:
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
