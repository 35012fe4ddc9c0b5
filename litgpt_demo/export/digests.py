"""The digests of a run that were computed again, as `recomputing` writes them. Without torch."""

from __future__ import annotations

from pydantic import Field

from litgpt_demo.config import Settings


class RecomputedDigests(Settings):
    """Digests by docs/reference/digests.md. `problems` has a sentence for each that is missing."""

    model: str | None = None
    """Of the weights in final/litgpt."""
    checkpoints: dict[int, str] = Field({})
    """Step to the digest of that checkpoint's weights."""
    batches: tuple[str, ...] = ()
    """The digest of each step's batch, from step 1 on."""
    problems: tuple[str, ...] = ()
