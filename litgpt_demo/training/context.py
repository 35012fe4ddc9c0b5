"""Context parallelism: neighbouring ranks divide each sample among them, and bring keys and values together.

As Llama 3 was trained (https://arxiv.org/abs/2407.21783, section 3.3.2): keys and values are gathered, which are small
where several queries share them, and each rank attends from two of twice as many pieces, one from the front and one
from the back, so that all have as much to do. torch's own ring attention knows the kernels of GPUs alone, and runs on
no CPU (torch 2.13, distributed/tensor/experimental/_context_parallel/_attention.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.bias import causal_lower_right

from litgpt_demo.training.tensor import gathered

Attention = Callable[..., Tensor]


@dataclass(frozen=True, kw_only=True)
class SamplePart:
    """The part of every sample that this rank has."""

    rank: int
    ranks: int
    mesh: DeviceMesh | None = None

    @classmethod
    def of(cls, mesh: DeviceMesh) -> SamplePart:
        """The part that belongs to this process among those of `mesh`."""
        return cls(rank=mesh.get_local_rank(), ranks=mesh.size(), mesh=mesh)

    @property
    def pieces(self) -> tuple[int, int]:
        """The numbers of its two pieces, of twice as many as there are ranks."""
        return self.rank, 2 * self.ranks - 1 - self.rank

    def own(self, samples: Tensor, dim: int) -> Tensor:
        """Return this rank's part of samples that lie along `dim`."""
        pieces = samples.chunk(2 * self.ranks, dim)
        return torch.cat([pieces[number] for number in self.pieces], dim)

    def whole(self, part: Tensor, dim: int) -> list[Tensor]:
        """Return all pieces of what each rank has a part of, in their order in the sample."""
        assert self.mesh is not None
        found = gathered(part, self.mesh, dim).chunk(2 * self.ranks, dim)
        first, last = found[0::2], found[1::2]
        return [*first, *reversed(last)]

    def attend(
        self, attention: Attention, shared: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None
    ) -> Tensor:
        """Return the attention of this rank's queries, each piece of them on all that comes before it.

        Args:
            attention: LitGPT's scaled_dot_product_attention of a layer, whose results lie along dimension 1.
            shared: the number of queries that share a key; LitGPT has repeated it for each, and one is sent.
        """
        assert mask is None, "a model with a mask of its own is refused"
        keys, values = self.whole(k[:, ::shared], 2), self.whole(v[:, ::shared], 2)
        outputs = []
        for queries, number in zip(q.chunk(2, 2), self.pieces, strict=True):
            seen, told = (
                torch.cat(pieces[: number + 1], 2).repeat_interleave(shared, dim=1) for pieces in (keys, values)
            )
            outputs.append(attention(queries, seen, told, None if number == 0 else _behind(queries, seen)))
        return torch.cat(outputs, 1)


def _behind(queries: Tensor, keys: Tensor) -> Any:
    """Return the causal mask by which the last query sees the last key; on a GPU one that its kernels know by name."""
    size = queries.size(2), keys.size(2)
    if queries.is_cuda:
        return causal_lower_right(*size)
    return torch.ones(size, dtype=torch.bool, device=queries.device).tril(size[1] - size[0])
