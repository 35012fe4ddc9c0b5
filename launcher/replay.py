"""A replay of some steps of a run: whether it is possible, with how many ranks, and one on this machine."""

from __future__ import annotations

import asyncio
import os
import re
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from tempfile import TemporaryDirectory
from typing import Any

from launcher.checks.arithmetic import gpu_names
from launcher.config import RunConfig, ScriptConfig, validated
from launcher.errors import JobFailed
from launcher.job import JobState, LogLine
from launcher.platforms import default_settings
from launcher.runs import waiting
from launcher.runs.diagnosis import diagnose
from launcher.runs.run import plan_script
from litgpt_demo.errors import UserError
from litgpt_demo.node.checks import usable_cores
from litgpt_demo.replays import Replay, read_replay
from litgpt_demo.runs import ATTEMPTS, CONFIG, REPLAYS, dataset_address, node_reports, read_document, read_metrics
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training.checkpoints import list_complete

_WARNING = "warning: "  # begins a line for a person (litgpt_demo.training.reporting)
# With one rank instead of two, 40 steps on a CPU differed by 3e-6 in 32 bits, and by 8e-3 (a gradient norm) and 4e-4
# (a loss) in bfloat16. Those of another batch differ by more than 0.1.
_TOLERANCE, _TOLERANCE_16_BIT = 1e-4, 2e-2


@dataclass(frozen=True, kw_only=True)
class ReplayPlan:
    """A replay that is possible, as far as the run's records show."""

    results: Storage
    """The folder with its result: the run's, unless nothing may be written there."""
    path: str
    """The file of its result, below that folder."""
    tolerance: float
    """The largest relative difference of a figure that rounding explains, by the precision of the training."""
    script: ScriptConfig
    """Its job."""

    def read(self) -> Replay:
        return read_replay(self.results, self.path)


def plan_replay(
    run: Storage, steps: str, *, from_start: bool = False, processes: int | None = None, on_own_platform: bool = False,
    results: Storage | None = None,
) -> ReplayPlan:  # fmt: skip
    """Return the replay of these steps, such as 400-412, on this machine or on the run's own platform.

    On this machine it has `processes` ranks, by default as many as trained the last step. Raises UserError for steps
    that the run does not have, that no kept checkpoint precedes, or for ranks that do not fit.
    """
    document, rows, results = read_document(run), read_metrics(run), results or run
    spec = document.training
    first, last = _numbers(steps)
    starts = [row for row in rows if row["kind"] == "start" and row["step"] < last]
    # Steps without a row may follow the last one: those between two rows, and the one that ended the run.
    newest = min(spec.steps, max((row["step"] for row in rows), default=0) + spec.train.log_every)
    if not starts:
        raise UserError(f"{run.address()} has no metrics of a training to step {last}", fix="train it first")
    if last > newest:
        raise UserError(f"{run.address()} has no step {last}, only steps up to {newest}", fix="give one of those")
    start = starts[-1]  # a resume removes the rows of the steps that it repeats
    kept = sorted(manifest.step for manifest in list_complete(run))
    if first > 1 and not from_start and not any(step < first for step in kept):
        steps_kept = ", ".join(map(str, kept)) or "none"
        what = f"{run.address()} has no checkpoint before step {first} (steps of its checkpoints: {steps_kept})"
        fix = f"--from-start trains all {last} steps from the initial weights; for later runs, train.keep_every=N"
        raise UserError(what, fix=f"{fix} keeps the checkpoint of every N-th step")
    folder = results.local_path()
    if folder is not None and not os.access(folder, os.W_OK):
        fix = "copy the root to a folder of your own, and replay there"
        raise UserError(f"{results.address()} cannot be written, so the result would be lost", fix=fix)
    path, attempt = f"{REPLAYS}/{first}-{last}.json", start.get("attempt")
    program = ["replay", "--run", run.address(), "--steps", f"{first}-{last}", "--out", results.address(path)]
    if attempt is not None and run.exists(f"{ATTEMPTS}/{attempt}/{CONFIG}"):  # settings that other attempts changed
        program += ["--attempt", str(attempt)]
    if "threads" in start:
        program += ["--threads", str(start["threads"])]
    if from_start or first == 1:
        program.append("--from-start")
    place: dict[str, Any]
    if on_own_platform:
        config = validated(RunConfig, document.run, where=run.address(CONFIG))
        ranks, place = config.world_size, {"image": config.image, "platform": config.platform}
    else:
        ranks = processes or _ranks_here(start.get("world_size", spec.world_size), last)
        size = {"nodes": 1, "processes_per_node": ranks}
        place = {"platform": default_settings().model_copy(update=size)}
    try:
        spec.train.gradient_accumulation_steps(ranks)
    except ValueError as error:
        raise UserError(str(error), fix="give another number as --processes") from error
    tolerance = _TOLERANCE_16_BIT
    if spec.train.precision == "32-true":
        tolerance = _TOLERANCE
    job = ScriptConfig(
        name="replay", script="-m litgpt_demo", args=tuple(program), datasets=(dataset_address(run, spec.dataset),),
        root=run.address().rpartition("/runs/")[0] or run.address(), **place,
    )  # fmt: skip
    return ReplayPlan(results=results, path=path, tolerance=tolerance, script=job)


def _numbers(steps: str) -> tuple[int, int]:
    match = re.fullmatch(r"([1-9]\d{0,8})(?:-([1-9]\d{0,8}))?", steps)
    if match is None:
        raise UserError(f"--steps={steps} is not a step or two", fix="give the first and the last one, as 400-412")
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last:
        raise UserError(f"--steps={steps} ends before it begins", fix=f"give --steps={last}-{first}")
    return first, last


def _ranks_here(recorded: int, last: int) -> int:
    room = len(gpu_names()) or usable_cores()
    if recorded > room:
        what = f"step {last} was trained by {recorded} ranks, but this machine has {room} cores or GPUs for them"
        fix = f"--processes={room} replays it by {room}, equal but for rounding; --platform on the run's own platform"
        raise UserError(what, fix=fix)
    return recorded


def replay_here(plan: ReplayPlan, *, on_warning: Callable[[str], object]) -> Replay:
    """Replay on this machine and return the result. Raises JobFailed with the root cause if it fails."""
    platform, tail = plan.script.platform.open(), deque[LogLine](maxlen=200)

    def receive(lines: Iterable[LogLine]) -> None:
        tail.extend(lines)
        for line in lines:
            _, mark, warning = line.text.partition(_WARNING)
            if mark:
                on_warning(warning)

    with TemporaryDirectory(prefix="train-litgpt-replay-") as folder:
        job = replace(plan_script(plan.script).job(attempt=1, image=None), directory=folder, root="")
        job_id = platform.submit(platform.render(job))
        try:
            followed = waiting.follow(platform, job_id, on_lines=receive, poll=platform.poll_seconds)
            status = asyncio.run(followed)
        finally:
            platform.cancel(job_id)  # after Ctrl-C
        if status.state is not JobState.SUCCEEDED:
            diagnosis = diagnose(status, node_reports(open_storage(folder)), tail, logs=folder, nodes=1)
            raise JobFailed(str(diagnosis), fault=diagnosis.fault)
    return plan.read()
