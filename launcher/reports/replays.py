"""The page of a replay, and its table for the terminal."""

from __future__ import annotations

from launcher.formatting import loss_text, shown
from launcher.reports.report import template
from litgpt_demo.replays import Replay, ReplayedSample


def table(replay: Replay) -> list[dict[str, str]]:
    """Return a row for each step: the recorded figures, the replayed ones and their relative differences."""
    rows = []
    for step in replay.steps:
        loss, norm = (shown(_difference, value) for value in step.differences)
        rows.append(
            {
                "step": f"{step.step:,}",
                "recorded loss": shown(_figure, step.recorded_loss, "not recorded"),
                "replayed loss": _figure(step.loss),
                "loss differs by": loss,
                "recorded gradient norm": shown(_figure, step.recorded_grad_norm, "not recorded"),
                "replayed gradient norm": _figure(step.grad_norm),
                "norm differs by": norm,
            }
        )
    return rows


def _figure(value: float) -> str:
    return f"{value:.7g}"


def _difference(value: float) -> str:
    return f"{value:.1e}" if value else "0"


def is_equal(replay: Replay, tolerance: float) -> bool:
    """Return whether no recorded figure differs by more than the tolerance."""
    return (replay.largest_difference or 0.0) <= tolerance


def verdict(replay: Replay, tolerance: float) -> str:
    largest = replay.largest_difference
    if largest is None:
        return "The run's metrics have none of these steps, so nothing was compared"
    if not largest:
        return "The steps are equal bit for bit"
    relation = "equal within" if is_equal(replay, tolerance) else "different beyond"
    return f"The steps are {relation} the tolerance of {tolerance:.1e}: a figure differs by {largest:.1e} of its value"


def origin(replay: Replay) -> str:
    """Return where the replay began, and on which ranks."""
    where = f"the checkpoint of step {replay.began_at:,}" if replay.began_at else "the initial weights"
    return f"from {where}, {replay.world_size} ranks on {replay.device}"


def documents(sample: ReplayedSample) -> list[str]:
    """Return a line for each document of a sample that is shown."""
    lines = []
    for part in sample.documents:
        name = f"document {shown('{:,}'.format, part.number, 'at')}, from token {part.position:,} of the split"
        lines.append(f"{name}: loss {loss_text(part.loss)} on {part.tokens:,} tokens: {part.beginning}")
    return lines


def heading(sample: ReplayedSample) -> str:
    source = f" of {sample.source}" if sample.source else ""
    return f"sample {sample.id}{source}: loss {loss_text(sample.loss)}"


def html(replay: Replay, tolerance: float) -> str:
    """Return one page that needs nothing but itself."""
    worst = [sample for sample in replay.samples if sample.documents]
    return template("replay.html").render(
        title=replay.run,
        equal=is_equal(replay, tolerance),
        verdict=verdict(replay, tolerance),
        lead=f"Steps {replay.steps[0].step:,} to {replay.steps[-1].step:,}, {origin(replay)}.",
        rows=table(replay),
        last=f"{replay.steps[-1].step:,}",
        count=len(replay.samples),
        worst=[(heading(sample), documents(sample), sample.text) for sample in worst],
    )
