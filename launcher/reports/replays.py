"""The page of a replay, and its table for the terminal."""

from __future__ import annotations

from launcher.formatting import loss_text, shown
from launcher.reports.report import template
from litgpt_demo.replays import Replay, ReplayedStep


def table(replay: Replay) -> list[dict[str, str]]:
    """Return a row for each step: the recorded figures, the replayed ones and their relative differences."""
    rows = []
    for step in replay.steps:
        loss, norm = (shown(_difference, value) for value in step.differences)
        rows.append(
            {
                "step": f"{step.step:,}",
                "samples": _samples(step),
                "recorded loss": shown(_figure, step.recorded_loss, "not recorded"),
                "replayed loss": _figure(step.loss),
                "loss differs by": loss,
                "recorded gradient norm": shown(_figure, step.recorded_grad_norm, "not recorded"),
                "replayed gradient norm": _figure(step.grad_norm),
                "norm differs by": norm,
            }
        )
    return rows


def _samples(step: ReplayedStep) -> str:
    if step.has_other_batch:
        return "different"
    return shown(lambda _: "same", step.recorded_batch_sha256, "not recorded")


def _figure(value: float) -> str:
    return f"{value:.7g}"


def _difference(value: float) -> str:
    return f"{value:.1e}".replace("0.0e+00", "0")


def is_equal(replay: Replay, tolerance: float) -> bool:
    """Return whether no recorded figure differs by more than the tolerance."""
    return (replay.largest_difference or 0.0) <= tolerance


def verdict(replay: Replay, tolerance: float) -> str:
    """Return whether the steps are equal, where the replay began and on which ranks."""
    where = "the initial weights"
    if replay.began_at:
        where = f"the checkpoint of step {replay.began_at:,}"
    how = f"replayed from {where}, ranks: {replay.world_size}, device: {replay.device}"
    largest = replay.largest_difference
    if largest is None:
        return f"Not compared, because the run's metrics lack these steps; {how}"
    if not largest:
        return f"Equal bit for bit; {how}"
    relation = "Different beyond"
    if is_equal(replay, tolerance):
        relation = "Equal within"
    return f"{relation} the tolerance {tolerance:g}: a figure differs by {largest:.1e} of its value; {how}"


def worst_samples(replay: Replay) -> list[tuple[str, list[str], str]]:
    """Return a heading, a line for each document, and the text of the samples that are shown."""
    shown_samples = []
    for sample in replay.samples:
        lines = []
        for part in sample.documents:
            name = f"document {shown('{:,}'.format, part.number)}, from token {part.position:,}"
            lines.append(f"{name}: loss {loss_text(part.loss)} on {part.tokens:,} tokens: {part.beginning}")
        if lines:
            name = " of ".join(filter(None, (f"sample {sample.id}", sample.source)))
            shown_samples.append((f"{name}: loss {loss_text(sample.loss)}", lines, sample.text))
    return shown_samples


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
