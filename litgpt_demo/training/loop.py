"""The training loop: LitGPT's model on Lightning Fabric, one process per device, started by torchrun.

Everything that decides the outcome is a function of the spec and the step: the batch, the learning rate, the random
state. Resuming needs the weights, the optimizer's state and one integer. On a CPU it ends in the same bits; a GPU adds
sums by atomic operations, in a different order each time.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import TIMEOUT_MAX, Timer
from time import monotonic, time

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from litgpt_demo import timeouts
from litgpt_demo.config import content_hash
from litgpt_demo.data.batches import rank_slice, sample_ids_for_step
from litgpt_demo.data.dataset import stage
from litgpt_demo.documents import read_manifest
from litgpt_demo.errors import Preempted, TrainLitgptError, UserError
from litgpt_demo.heartbeat import Heartbeat
from litgpt_demo.metrics import perplexity
from litgpt_demo.models import estimates
from litgpt_demo.node.environment import GRACE, NodeTimer
from litgpt_demo.runs import ATTEMPTS, read_metrics, read_spec
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.storage.private import make_temporary
from litgpt_demo.training import checkpoints
from litgpt_demo.training.checkpoints import CheckpointManifest
from litgpt_demo.training.reporting import Profiler, Reporter, warn
from litgpt_demo.training.saving import Saved, Saver, resume
from litgpt_demo.training.setup import Training, open_data, open_fabric, set_up
from litgpt_demo.training.starting import start_from
from litgpt_demo.training.step import Exchange, StepResult, evaluate, train_step

_SPENT = 0  # no signal's number

# A batch or two may be bad; a training that makes no update in so many steps has another trouble.
_MOST_IN_A_ROW = 10


def fit(training: Training, *, seconds: float | None = None) -> None:
    """Train from the newest checkpoint to the end.

    After `seconds`, given to one rank at least, no money is left: all ranks save and leave, with a UserError, as for a
    loss that is not finite. Preempted is raised where it was asked to leave, and has saved before its end.
    """
    asked: list[int] = []
    timer = Timer(seconds or 0.0, asked.append, [_SPENT])
    timer.daemon = True
    if seconds is not None:
        timer.start()
    # By SIGTERM a machine that is taken away says so; it ends no process before that has saved.
    before = signal.signal(signal.SIGTERM, lambda number, _: asked.append(number))
    try:
        training.heart.beat(0, "loading the checkpoint", allow=timeouts.STATE_TRANSFER)
        resumed = resume(training, tell=warn)
        if not resumed and training.spec.origin is not None:
            training.heart.beat(0, "loading the weights that it starts from", allow=timeouts.STATE_TRANSFER)
            start_from(training, training.spec.origin)
        report, profiler = Reporter(training, resumed_from=resumed), Profiler(training, resumed_from=resumed)
        try:
            tell = partial(_report_save, report)
            with Saver(training, tell=tell, before_commit=report.publish_rows) as saver:
                loop = Loop(training, report, saver, profiler, asked)
                loop.run(resumed)
                training.heart.beat(loop.done, "saving", allow=timeouts.STATE_TRANSFER)
        except Exception:
            with suppress(TrainLitgptError):  # what ended the training is the error to tell
                report.close(step=resumed, ended_well=False)
            raise
        preempted = loop.why_left == "preempted"
        profiler.end(loop.done, keep=not preempted)  # who is asked to leave has little time
        report.close(step=loop.done, ended_well=not preempted)
        if preempted:
            # Who ends first has torchrun end the others, so all have to be through.
            if training.ranks.together(lambda: _SPENT in asked, any):
                what = f"the budget is spent, and step {loop.done} is saved"
                raise UserError(what, fix="raise start.max_usd and run again: the run goes on from it")
            raise Preempted(f"asked to leave; step {loop.done} is saved, and the next attempt goes on from it")
    finally:
        timer.cancel()
        training.feed.close()
        signal.signal(signal.SIGTERM, before)


class Loop:
    """The steps from a checkpoint to the end, the same on every rank."""

    def __init__(
        self, training: Training, report: Reporter, saver: Saver, profiler: Profiler, asked_to_leave: Sequence[int]
    ) -> None:
        self._training, self._report, self._saver, self._asked = training, report, saver, asked_to_leave
        self._profiler = profiler
        self._exchange, self._in_a_row = Exchange(training.fabric), 0
        self.done = 0
        self.why_left: str | None = None
        """Why it ended before the last step, if it did."""

    def run(self, first: int) -> None:
        """Train until the last step is saved, or there is a reason to leave and the step then done is."""
        training, report, spec, train = self._training, self._report, self._training.spec, self._training.spec.train
        profiler = self._profiler
        clock, most = training.clock, math.inf if train.max_time is None else train.max_time.total_seconds()
        self.done, allow = first, max(timeouts.FIRST_PASS, train.hang_after)
        self._evaluate_resumed()
        if clock.before >= most:
            return
        training.model.train()
        for step in range(first, spec.steps):
            if step == profiler.next:
                profiler.turn(step)
            training.heart.beat(self.done, "training", allow=allow)
            passed, late = train_step(training, step), clock.seconds >= most
            self._exchange.put(step + 1, passed, leave=bool(self._asked), time_up=late)
            self.done, last, allow = step + 1, step + 1 == spec.steps, train.hang_after
            evaluates, saves = self._evaluates, self.done % train.checkpoint_every == 0
            # What is saved is known to be numbers: others would be resumed from forever. So the newest step is waited
            # for too, and where one says to leave.
            why: str | None = None
            while (result := self._exchange.take(keep=0 if evaluates or saves or why else 1)) is not None:
                self._hear(result)
                why = result.why or why
            # A process that is asked to leave has little time: the next attempt evaluates.
            if why is not None and not last:
                self.why_left, evaluates = why, why == "max_time"
            validation_loss = self._evaluate() if evaluates else None
            if saves or last or self.why_left:
                training.heart.beat(self.done, "saving", allow=timeouts.STATE_TRANSFER)
                if self.why_left == "max_time":  # by another rank's clock, a moment ahead of this one
                    clock.before += max(0.0, most - clock.seconds)
                report.pause(self._saver.save(self.done, validation_loss))
            if self.why_left:
                report.row(kind="leave", step=self.done, why=self.why_left)
                return

    @property
    def _evaluates(self) -> bool:
        """True if the step then done is one to be evaluated."""
        spec = self._training.spec
        return self.done % spec.train.evaluate_every == 0 or self.done == spec.steps

    def _evaluate(self) -> float:
        """Evaluate the step then done, report it, and return the validation loss."""
        began = monotonic()
        validation_loss, by_source = evaluate(self._training, done=self.done)
        if not math.isfinite(validation_loss):  # it is of weights, not of a batch: no update can be left out
            raise UserError(f"the validation loss of step {self.done} is {validation_loss}. {self._advice()}")
        self._report.pause(seconds := monotonic() - began)
        figures = {"validation_loss": validation_loss, "perplexity": perplexity(validation_loss)}
        figures |= {f"validation_loss.{source}": loss for source, loss in by_source.items()}
        self._report.row(kind="evaluation", step=self.done, **figures, seconds=round(seconds, 2))
        return validation_loss

    def _evaluate_resumed(self) -> None:
        """Evaluate the step resumed from where the attempt that saved it had no time, and complete its checkpoint."""
        ranks, run, train = self._training.ranks, self._training.run, self._training.spec.train
        if self.done == 0 or not self._evaluates:
            return
        place = run.within(checkpoints.folder_of(self.done))
        manifest = ranks.first(lambda: read_manifest(place, CheckpointManifest))
        if manifest is None or manifest.validation_loss is not None:
            return
        evaluated = {"validation_loss": self._evaluate(), "evaluation_windows": train.evaluation_windows}

        def complete() -> None:
            self._report.publish_rows()  # once the manifest has the loss, no attempt would write the row again
            checkpoints.commit(run, manifest.model_copy(update=evaluated))
            checkpoints.retire(run, last=train.keep_last, best=train.keep_best, every=train.keep_every)

        ranks.first(complete)

    def _hear(self, result: StepResult) -> None:
        """Report a step; one that made no update is the end if it is to stop there, or is the last of too many."""
        training, spec = self._training, self._training.spec
        values = {"loss": result.loss}
        if training.scaler is None:  # it leaves out an update whose gradients overflowed
            values["gradient norm"] = result.grad_norm
        wrong = [f"the {name} of step {result.done} is {one}" for name, one in values.items() if not math.isfinite(one)]
        if not wrong:
            self._in_a_row = 0
            self._report.step(result)
            return
        self._in_a_row += 1

        def suspects(finite: list[bool]) -> list[int]:
            """The samples of the ranks whose own loss is not finite; of all ranks, where it is the gradient alone."""
            numbers, world = sample_ids_for_step(spec, training.data.train, result.done - 1), len(finite)
            shares = [rank_slice(numbers, rank=rank, world_size=world) for rank in range(world) if not finite[rank]]
            return [int(number) for share in shares or [numbers] for number in share]

        windows = training.ranks.together(lambda: math.isfinite(float(result.own.loss)), suspects)
        listed = ", ".join(map(str, windows[:64])) + (", …" if len(windows) > 64 else "")
        look = f"look at them with `python -m litgpt_demo windows --run {training.run.root} --step {result.done}`"
        told = f"{wrong[0]}; its samples are the windows {listed} of the training split; {look}. {self._advice()}"
        if spec.train.on_not_finite == "stop":
            raise UserError(f"{told}, and train.on_not_finite=skip leaves out the update of such a step")
        if self._in_a_row == _MOST_IN_A_ROW:
            raise UserError(f"{told}. It is step {_MOST_IN_A_ROW} in a row without an update, so it is not the data")
        self._report.row(kind="skip", step=result.done, why=wrong[0], windows=windows)

    def _advice(self) -> str:
        train = self._training.spec.train
        often = f"A lower train.learning_rate={train.learning_rate}, more train.warmup_steps={train.warmup_steps}"
        return f"{often} or train.precision=32-true usually fix it"


def grace_warning(save: float, step: float, environ: Mapping[str, str]) -> str | None:
    """Return the advice where a job that is asked to leave needs more seconds than its platform grants, else None.

    On a GPU the step that runs and the one launched behind it come to their end before the save begins.
    """
    grace, needed = environ.get(GRACE), save + 2 * step
    if grace is None or needed <= float(grace):
        return None
    return (
        f"two steps and a save took {needed:.3g} s ({step:.3g} s a step, {save:.3g} s the save), but the platform "
        f"waits {grace} s for a job that it takes away: its last steps would be lost. Set platform.grace to "
        f"{math.ceil(needed + save)} where it can wait (a Spot VM is gone after 30 s), or save more often with a "
        "smaller train.checkpoint_every"
    )


def _report_save(report: Reporter, saved: Saved) -> None:
    for text in filter(None, (saved.warning, grace_warning(saved.seconds, report.step_seconds, os.environ))):
        warn(text)
    if saved.failed is None:
        report.row(
            kind="checkpoint",
            step=saved.step,
            seconds=round(saved.stall, 4),
            save_seconds=round(saved.seconds, 2),
            bytes=saved.size,
            path=checkpoints.folder_of(saved.step),
            **report.elapsed("taken", saved.taken),
        )
        report.publish()


@record
def main(argv: Sequence[str] | None = None) -> int:
    """`-m litgpt_demo train --run ADDRESS`, in every rank."""
    parser = argparse.ArgumentParser(prog="litgpt_demo train", description=__doc__)
    parser.add_argument("--run", required=True, help="address of the run's folder, with its config.json")
    parser.add_argument("--attempt", type=int, help="the attempt whose config.json is read; that of the run without")
    parser.add_argument("--seconds", type=float, help="from the attempt's beginning until it has to save and leave")
    args = parser.parse_args(argv)
    run = open_storage(args.run)
    spec = read_spec(run if args.attempt is None else run.within(f"{ATTEMPTS}/{args.attempt}"))
    with Heartbeat(allow=spec.train.hang_after) as heart:
        heart.beat(0, "meeting the other ranks", allow=timeouts.STATE_TRANSFER)
        fabric = open_fabric(spec.train)
        if fabric.world_size != spec.world_size:
            what = f"this rank is one of {fabric.world_size}, the run was submitted for {spec.world_size}"
            raise UserError(what, fix="submit it again")
        scratch = scratch_of(run, fabric.global_rank)
        try:
            staged = os.environ.get("LITGPT_DATASET")
            heart.beat(0, "loading data and model", allow=timeouts.STATE_TRANSFER)
            folder = Path(staged) if staged else stage(spec.dataset, scratch)
            training = replace(set_up(spec, open_data(spec, folder), fabric, run, scratch), heart=heart)
            config, nodes = training.model.module.config, int(os.environ.get("GROUP_WORLD_SIZE", "1"))
            heart.sends = estimates.network_bytes_per_step(
                config, spec.train, world_size=fabric.world_size, nodes=nodes
            )
            limited = args.seconds is not None and fabric.is_global_zero
            fit(training, seconds=seconds_left(run, args.seconds) if limited else None)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            with suppress(OSError):  # the folders of other ranks are in it
                scratch.parent.rmdir()
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def seconds_left(run: Storage, seconds: float) -> float:
    """Return what is left of an attempt's seconds; where its platform has started it again, since its first life."""
    if (times := NodeTimer.from_environ()) is None:
        return seconds
    lives = [row["node_started"] for row in read_metrics(run) if row.get("attempt") == times.attempt]
    return min(seconds + min(lives, default=times.started) - time(), TIMEOUT_MAX)


def scratch_of(run: Storage, rank: int) -> Path:
    """An empty folder for this rank's unfinished files, freed of what a killed attempt left in it.

    On the run's own file system where it has one, so that finished shards move instead of being copied.
    """
    # Several buckets may have this run.
    parent = run.local_path(".scratch") or make_temporary(f"{run.root.rpartition('/')[2]}-{content_hash(run.root)}")
    folder = parent / f"rank-{rank}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
