"""The chain of a run's digests: each checkpoint has one link. Without torch.

docs/reference/digests.md defines the digests. Each is 64 hexadecimal digits.
"""

from __future__ import annotations

from hashlib import sha256
from typing import Annotated

from pydantic import Field

from litgpt_demo.config import Settings

Digest = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
NO_LINK = "0" * 64
"""The `previous` of a run's first link."""


def hexadecimal(number: int) -> str:
    """Return a sum of digests, modulo 2^256."""
    return f"{number % (1 << 256):064x}"


class Link(Settings):
    """The digests of a checkpoint, chained to those of the checkpoint before."""

    previous: Digest
    """The `chain` of the checkpoint before; NO_LINK for the first."""
    weights: Digest
    batches: Digest
    """The sum, modulo 2^256, of the SHA-256 of each step's number (8 bytes, big-endian) and its batch's digest."""

    @property
    def chain(self) -> str:
        """The SHA-256 of `previous`, `weights` and `batches`, as 96 bytes."""
        return sha256(bytes.fromhex(self.previous + self.weights + self.batches)).hexdigest()

    def columns(self) -> dict[str, str]:
        """Return its columns of a row of metrics."""
        return {
            "previous_chain": self.previous,
            "weights_sha256": self.weights,
            "batches_sha256": self.batches,
            "chain_sha256": self.chain,
        }


class Chain:
    """Follows the steps of a training, and links its checkpoints."""

    def __init__(self) -> None:
        self.resumed: Link | None = None
        """The link of the checkpoint that the training continues from."""
        self._previous, self._batches = NO_LINK, 0

    def resume(self, link: Link | None) -> None:
        """Continue after the checkpoint of this link. Without one, a new chain begins."""
        self.resumed = link
        if link is not None:
            self._previous, self._batches = link.chain, int(link.batches, 16)

    def add(self, step: int, batch: str) -> None:
        """Add the digest of a step's batch."""
        self._batches += int.from_bytes(sha256(step.to_bytes(8, "big") + bytes.fromhex(batch)).digest(), "big")

    @property
    def batches(self) -> str:
        """The digest of all batches until now."""
        return hexadecimal(self._batches)

    def link(self, *, weights: str, batches: str) -> Link:
        """Return the link of a checkpoint whose `batches` were noted when its state was taken."""
        return Link(previous=self._previous, weights=weights, batches=batches)

    def committed(self, link: Link) -> None:
        """Chain the next checkpoint to this one."""
        self._previous = link.chain
