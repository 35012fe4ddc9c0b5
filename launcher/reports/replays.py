"""The page of a replay, and its table for the terminal."""

from __future__ import annotations

from launcher.formatting import loss_text, shown
from launcher.reports.report import template
from litgpt_demo.replays import Replay, ReplayedStep

_FIGURE, _DIFFERENCE = "{:.7g}".format, "{:.2g}".format


def table(replay: Replay) -> list[dict[str, str]]:
    """Return a row for each step: the recorded figures, the replayed ones and their relative differences."""
    return [
        {
            "step": f"{step.step:,}",
            "samples": _samples(step),
            "recorded loss": shown(_FIGURE, step.recorded_loss, "not recorded"),
            "replayed loss": _FIGURE(step.loss),
            "loss differs by": shown(_DIFFERENCE, step.differences[0]),
            "recorded gradient norm": shown(_FIGURE, step.recorded_grad_norm, "not recorded"),
            "replayed gradient norm": _FIGURE(step.grad_norm),
            "norm differs by": shown(_DIFFERENCE, step.differences[1]),
        }
        for step in replay.steps
    ]


def _samples(step: ReplayedStep) -> str:
    if step.has_other_batch:
        return "different"
    return shown(lambda _: "same", step.recorded_batch_sha256, "not recorded")


def is_equal(replay: Replay, tolerance: float) -> bool:
    """Return whether no recorded figure differs by more than the tolerance."""
    return (replay.largest_difference or 0.0) <= tolerance


def verdict(replay: Replay, tolerance: float) -> str:
    """Return whether the steps are equal, where the replay began and on which ranks."""
    where, largest = "the initial weights", replay.largest_difference
    if replay.began_at:
        where = f"the checkpoint of step {replay.began_at:,}"
    result = f"Different beyond the tolerance {tolerance:g}: a figure differs by {largest or 0.0:.1e} of its value"
    if largest is None:
        result = "Not compared, because the run's metrics lack these steps"
    elif not largest:
        result = "Equal bit for bit"
    elif is_equal(replay, tolerance):
        result = result.replace("Different beyond", "Equal within")
    return f"{result}; replayed from {where}, ranks: {replay.world_size}, device: {replay.device}"


def worst_samples(replay: Replay) -> list[tuple[str, list[str], str]]:
    """Return a heading, a line for each document, and the text of the samples that are shown."""
    worst = []
    for sample in replay.samples:
        lines = []
        for part in sample.documents:
            about = f"loss {loss_text(part.loss)} on {part.tokens:,} tokens: {part.beginning}"
            lines.append(f"document from token {part.position:,}: {about}")
        if lines:
            name = " of ".join(filter(None, (f"sample {sample.id}", sample.source)))
            worst.append((f"{name}: loss {loss_text(sample.loss)}", lines, sample.text))
    return worst


def html(replay: Replay, tolerance: float) -> str:
    """Return one page that needs nothing but itself."""
    return template("replay.html").render(
        title=replay.run,
        equal=replay.largest_difference is not None and is_equal(replay, tolerance),
        verdict=verdict(replay, tolerance),
        rows=table(replay),
        last=f"{replay.steps[-1].step:,}",
        count=len(replay.samples),
        worst=worst_samples(replay),
    )
