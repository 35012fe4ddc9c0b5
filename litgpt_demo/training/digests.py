"""Digests of what a training saw and made, the same for any number of ranks.

docs/reference/digests.md defines them, so that another program can compute them. Each is 64 hexadecimal digits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import NamedTuple

import torch
from torch import Tensor

from litgpt_demo.training.chain import hexadecimal

LIMBS, _LIMB_BITS = 16, 16  # float64 adds numbers of 16 bits exactly for up to 2^37 ranks
_LEAF_BYTES = 32


def batch_sum(inputs: Tensor, targets: Tensor) -> int:
    """Return the sum of the SHA-256 of each sample, modulo 2^256. Both tensors have the shape (samples, length).

    A sample's bytes are its length + 1 token ids, each of 4 bytes, little-endian.
    """
    tokens = torch.cat([inputs, targets[:, -1:]], dim=1).numpy().astype("<u4")
    return sum(int.from_bytes(sha256(row.tobytes()).digest(), "big") for row in tokens)


def to_limbs(number: int) -> list[float]:
    """Return a sum in parts that ranks can add in float64 without rounding."""
    return [float(number >> (_LIMB_BITS * place) & ((1 << _LIMB_BITS) - 1)) for place in range(LIMBS)]


def of_limbs(limbs: Sequence[float]) -> str:
    """Return the digest of a batch from the sums of all ranks' limbs."""
    return hexadecimal(sum(int(limb) << (_LIMB_BITS * place) for place, limb in enumerate(limbs)))


def row_leaves(tensor: Tensor) -> bytes:
    """Return the SHA-256 of each row of a tensor, one after another; rows of at most 32 bytes stand for themselves.

    Rows are along the first dimension, as FSDP divides a tensor, so ranks can make leaves of what they hold.
    """
    if not tensor.numel():
        return b""
    rows = tensor.detach().reshape(len(tensor) if tensor.dim() else 1, -1).contiguous().view(torch.uint8).numpy()
    if rows.shape[1] <= _LEAF_BYTES:
        return rows.tobytes()
    return b"".join(sha256(row).digest() for row in rows)


class Leaves(NamedTuple):
    """The leaves of consecutive rows of a tensor."""

    name: str
    first_row: int
    leaves: bytes


def weights_digest(parts: Iterable[Leaves], forms: Mapping[str, tuple[torch.dtype, torch.Size]]) -> str:
    """Return the digest of all weights: of a line for each name, in order, with type, shape and digest of its leaves.

    `forms` are the type and shape of each weight by name.
    """
    leaves: dict[str, list[bytes]] = {name: [] for name in forms}
    for part in sorted(parts, key=lambda part: part.first_row):
        leaves[part.name].append(part.leaves)
    lines = []
    for name, (dtype, shape) in sorted(forms.items()):
        digest = sha256(b"".join(leaves[name])).hexdigest()
        lines.append(f"{name} {str(dtype).removeprefix('torch.')} {'x'.join(map(str, shape))} {digest}\n")
    return sha256("".join(lines).encode()).hexdigest()
