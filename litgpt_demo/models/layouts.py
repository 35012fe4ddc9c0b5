"""The division of a model and its batches among processes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """The division of a model and its batches among processes. Ranks that share more are closer neighbours."""

    replicas: int = 1
    """Copies of the whole state: processes of one copy hold a share of it each."""
    shards: int = 1
    """Processes that each gather what they need of a block's weights, `context` included."""
    tensor: int = 1
    """Processes that divide each product among them, and with it its weights."""
    context: int = 1
    """Processes that divide each sample among them."""

    @property
    def together(self) -> int:
        """The number of neighbours that read the same samples."""
        return self.tensor * self.context

    @property
    def holders(self) -> int:
        """The number of processes that one copy of the state is spread over."""
        return self.shards * self.tensor

    @property
    def readers(self) -> int:
        """The number of groups that read samples of their own."""
        return self.replicas * self.shards // self.context
