"""The chain of a run's digests: each checkpoint has one link. Without torch.

docs/reference/digests.md defines the digests. Each is 64 hexadecimal digits.
"""

from __future__ import annotations

from hashlib import sha256

from litgpt_demo.config import Settings

NO_LINK = "0" * 64
"""The `previous` of a run's first link."""


def hexadecimal(number: int) -> str:
    """Return a sum of digests, modulo 2^256."""
    return f"{number % (1 << 256):064x}"


class Link(Settings):
    """The digests of a checkpoint, chained to those of the checkpoint before."""

    previous: str
    """The `chain` of the checkpoint before; NO_LINK for the first."""
    weights: str
    batches: str
    """The sum, modulo 2^256, of the SHA-256 of each step's number (8 bytes, big-endian) and its batch's digest."""
    since: int = 0
    """The step after which batches are in that sum: 0, or where an older version saved without digests."""
    chain: str
    """The SHA-256 of `previous`, `weights` and `batches`, as 96 bytes."""

    def columns(self) -> dict[str, str]:
        """Return its columns of a row of metrics."""
        return {
            "previous_chain": self.previous,
            "weights_sha256": self.weights,
            "batches_sha256": self.batches,
            "chain_sha256": self.chain,
        }

    @classmethod
    def of(cls, *, previous: str, weights: str, batches: str, since: int) -> Link:
        chain = sha256(bytes.fromhex(previous + weights + batches)).hexdigest()
        return cls(previous=previous, weights=weights, batches=batches, since=since, chain=chain)


class Chain:
    """Follows the steps of a training, and links its checkpoints."""

    def __init__(self) -> None:
        self.resumed: Link | None = None
        """The link of the checkpoint that the training continues from, if that has one."""
        self._previous, self._batches, self._since = NO_LINK, 0, 0

    def resume(self, step: int, link: Link | None) -> None:
        """Continue after the checkpoint of a step, which has no link if an older version saved it."""
        self.resumed = link
        if link is None:
            self._previous, self._batches, self._since = NO_LINK, 0, step
        else:
            self._previous, self._batches, self._since = link.chain, int(link.batches, 16), link.since

    def add(self, step: int, batch: str) -> None:
        """Add the digest of a step's batch."""
        self._batches += int.from_bytes(sha256(step.to_bytes(8, "big") + bytes.fromhex(batch)).digest(), "big")

    @property
    def batches(self) -> str:
        """The digest of all batches until now."""
        return hexadecimal(self._batches)

    def link(self, *, weights: str, batches: str) -> Link:
        """Return the link of a checkpoint whose `batches` were noted when its state was taken."""
        return Link.of(previous=self._previous, weights=weights, batches=batches, since=self._since)

    def committed(self, link: Link) -> None:
        """Chain the next checkpoint to this one."""
        self._previous = link.chain
