"""Steps of a run that a verifier draws at random and trains again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from random import Random

from launcher.provenance.verification import Verification
from launcher.replay import ReplayPlan, plan_replay, replay_here
from litgpt_demo.errors import UserError
from litgpt_demo.runs import METRICS, read_metrics
from litgpt_demo.storage import Storage
from litgpt_demo.training.checkpoints import list_complete


def draw_steps(run: Storage, count: int, *, seed: int) -> list[int]:
    """Return `count` of the recorded steps after the first kept checkpoint, or all if there are fewer.

    A UserError if no step can be replayed from a checkpoint.
    """
    first = min((manifest.step for manifest in list_complete(run)), default=None)
    steps = [row["step"] for row in read_metrics(run) if row["kind"] == "step"]
    steps = [step for step in steps if first is not None and step > first]
    if not steps:
        what = f"{run.address()} has no recorded step after a kept checkpoint, so none can be replayed"
        raise UserError(what, fix="leave out --replay; in later runs, train.keep_every keeps more checkpoints")
    return sorted(Random(seed).sample(steps, min(count, len(steps))))  # noqa: S311 - the seed is printed


def plan_replays(run: Storage, steps: list[int], results: Storage) -> list[ReplayPlan]:
    """Return a replay for all steps that follow the same checkpoint. A UserError if this machine cannot replay them."""
    kept, spans = [manifest.step for manifest in list_complete(run)], defaultdict[int, list[int]](list)
    for step in steps:
        spans[max(start for start in kept if start < step)].append(step)
    return [plan_replay(run, f"{min(span)}-{max(span)}", results=results) for span in spans.values()]


def check_replays(
    verification: Verification, plans: list[ReplayPlan], drawn: list[int], *, on_warning: Callable[[str], object]
) -> None:
    """Replay, and compare the loss and the gradient norm of each step with the recorded ones. Each of the drawn steps
    needs both."""
    if not plans:
        return
    check, equal, missing = verification.begin("REPLAY", ""), 0, {*drawn}
    for plan in plans:
        with check.reading():
            for step in replay_here(plan, on_warning=on_warning).steps:
                known = [difference for difference in step.differences if difference is not None]
                if len(known) == len(step.differences):
                    missing.discard(step.step)
                if not known:  # between the steps that were drawn: one without an update has no row
                    continue
                equal += not any(known) and not step.has_other_batch
                problem = None
                if step.has_other_batch or max(known) > plan.tolerance:
                    figures = f"a loss of {step.loss} and a gradient norm of {step.grad_norm}"
                    recorded = f"{step.recorded_loss} and {step.recorded_grad_norm} are recorded"
                    problem = f"{METRICS}: step {step.step} has {figures} if it is trained again, but {recorded}"
                check.add(problem)
    for number in sorted(missing):
        check.add(f"{METRICS}: step {number} was drawn, and its loss and gradient norm could not be compared")
    check.what = f"steps trained again, {equal} of them equal bit for bit"
