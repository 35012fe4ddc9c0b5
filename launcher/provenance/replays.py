"""Steps of a run that a verifier draws at random and trains again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from random import Random

from launcher.provenance.verification import Verification
from launcher.replay import ReplayPlan, plan_replay, replay_here
from litgpt_demo.errors import UserError
from litgpt_demo.runs import CONFIG, METRICS, read_metrics
from litgpt_demo.storage import Storage
from litgpt_demo.training.checkpoints import list_complete


def draw_replays(run: Storage, count: int, results: Storage, *, seed: int) -> tuple[list[int], list[ReplayPlan]]:
    """Return `count` of the recorded steps after the first kept checkpoint, or all if there are fewer, and a replay for
    all that follow the same checkpoint.

    A UserError if there is no such step, or if this machine cannot replay them.
    """
    if not run.exists(CONFIG):
        what = f"{run.address()} has a model and not the run, so no step can be trained again"
        raise UserError(what, fix="give the folder of the run, or leave out --replay")
    kept = [manifest.step for manifest in list_complete(run)]
    steps = [row["step"] for row in read_metrics(run) if row["kind"] == "step"]
    steps = [step for step in steps if kept and step > min(kept)]
    if not steps:
        what = f"{run.address()} has no recorded step after a kept checkpoint, so none can be replayed"
        raise UserError(what, fix="leave out --replay; in later runs, train.keep_every keeps more checkpoints")
    drawn = sorted(Random(seed).sample(steps, min(count, len(steps))))  # noqa: S311 - the seed is printed
    spans = defaultdict[int, list[int]](list)
    for step in drawn:
        spans[max(start for start in kept if start < step)].append(step)
    return drawn, [plan_replay(run, f"{span[0]}-{span[-1]}", results=results) for span in spans.values()]


def check_replays(
    verification: Verification, plans: list[ReplayPlan], drawn: list[int], *, on_warning: Callable[[str], object]
) -> None:
    """Replay, and compare the loss and the gradient norm of each step with the recorded ones. Each of the drawn steps
    needs both."""
    check, equal, missing = verification.begin("REPLAY", ""), 0, {*drawn}
    for plan in plans:
        with check.reading():
            for step in replay_here(plan, on_warning=on_warning).steps:
                if None not in step.differences:
                    missing.discard(step.step)
                difference = step.largest_difference
                if difference is None:  # between the steps that were drawn: one without an update has no row
                    continue
                equal += not difference
                figures = f"a loss of {step.loss} and a gradient norm of {step.grad_norm}"
                recorded = f"{step.recorded_loss} and {step.recorded_grad_norm} are recorded"
                problem = f"{METRICS}: step {step.step} has {figures} if it is trained again, but {recorded}"
                check.require(difference <= plan.tolerance, problem)
    for number in sorted(missing):
        problem = f"{METRICS}: step {number} was drawn, and its loss and gradient norm could not be compared"
        check.require(False, problem)
    check.what = f"steps trained again, {equal} of them equal bit for bit"
