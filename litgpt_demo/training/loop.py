"""The training loop: LitGPT's model on Lightning Fabric, one process per device, started by torchrun.

The batch, the learning rate and the random state are functions of the spec and the step. Resuming needs only the
weights, the optimizer's state and one integer. On a CPU the result has the same bits. A GPU adds by atomic operations,
in a different order each time.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import shutil
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import TIMEOUT_MAX, Timer
from time import monotonic, time

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from litgpt_demo import timeouts
from litgpt_demo.config import TrainingSpec, content_hash
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
from litgpt_demo.training.resuming import resume
from litgpt_demo.training.sampling import Sampler
from litgpt_demo.training.saving import Saver, SaveResult
from litgpt_demo.training.setup import Training, open_data, open_fabric, set_up
from litgpt_demo.training.starting import start_from
from litgpt_demo.training.step import MetricReducer, StepResult, StopVote, evaluate, train_step

_STEPS_BETWEEN_COLLECTIONS = 50
"""Steps after which each rank collects Python's garbage, all in the same step. By itself Python would do so in another
step on each rank, and the others would wait each time."""
_BUDGET_EXCEEDED = 0
"""Marks the end of the budget in the list of received signals, because no signal has this number."""
_MOST_SKIPS_IN_A_ROW = 10
"""A batch or two may be bad. If this many steps in a row make no update, the data is not the cause."""


def fit(training: Training, *, seconds: float | None = None) -> None:
    """Train from the newest checkpoint to the end.

    `seconds` is the remaining budget of the attempt. Pass it to at least one rank: when it runs out, all ranks save and
    raise a UserError. They also raise one for a loss that is not finite, and Preempted after a SIGTERM before the end.
    """
    signals: list[int] = []
    budget = Timer(seconds or 0.0, signals.append, [_BUDGET_EXCEEDED])
    budget.daemon = True
    if seconds is not None:
        budget.start()
    # A machine that is taken away sends SIGTERM first. The process saves before it ends.
    previous_handler = signal.signal(signal.SIGTERM, lambda number, _: signals.append(number))
    try:
        training.heart.beat(0, "loading the checkpoint", max_silence=timeouts.STATE_TRANSFER)
        resumed = resume(training, on_warning=warn)
        if not resumed and training.spec.origin is not None:
            training.heart.beat(0, "loading the weights that it starts from", max_silence=timeouts.STATE_TRANSFER)
            start_from(training, training.spec.origin)
        report, profiler = Reporter(training, resumed_from=resumed), Profiler(training, resumed_from=resumed)
        try:
            on_result = partial(_report_save, report, training.spec)
            with Saver(training, on_result=on_result, before_commit=report.publish_rows) as saver, _no_collections():
                loop = Loop(training, report, saver, profiler, signals)
                loop.run(resumed)
                training.heart.beat(loop.done, "saving", max_silence=timeouts.STATE_TRANSFER)
        except Exception:
            with suppress(TrainLitgptError):  # the error that ended the training is the one to report
                report.close(step=resumed, ended_well=False)
            raise
        preempted = loop.stop_reason == "preempted"
        profiler.end(loop.done, keep=not preempted)  # a preempted process has little time
        report.close(step=loop.done, ended_well=not preempted)
        if preempted:
            # torchrun ends all ranks as soon as one has ended, so all must have come this far.
            saved, continues = f"step {loop.done} is saved", "continues from it"
            if loop.done == 0:
                saved, continues = "no step had ended", "begins with the first one"
            if training.ranks.gather_then_broadcast(lambda: _BUDGET_EXCEEDED in signals, any):
                what = f"the budget is spent, and {saved}"
                raise UserError(what, fix=f"raise budget.max_usd and run again: the run {continues}")
            raise Preempted(f"training was stopped; {saved}, and the next attempt {continues}")
    finally:
        budget.cancel()
        training.feed.close()
        signal.signal(signal.SIGTERM, previous_handler)


@contextmanager
def _no_collections() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Loop:
    """The steps from a checkpoint to the end, the same on every rank."""

    def __init__(
        self, training: Training, report: Reporter, saver: Saver, profiler: Profiler, signals: Sequence[int]
    ) -> None:
        self._training, self._report, self._saver, self._profiler = training, report, saver, profiler
        self._signals, self._vote = signals, StopVote(training, signals)
        self._reducer = MetricReducer(training.fabric)
        self._sampler: Sampler | None = None
        if training.spec.train.sample_every is not None:
            self._sampler = Sampler(training)
        self._skips_in_a_row = 0
        self.done = 0
        self._validation_loss: float | None = None  # of the step `done`, if it was evaluated
        self.stop_reason: str | None = None
        """The reason why it ended before the last step, if it did."""

    def run(self, first: int) -> None:
        """Train until the last step is saved, or until the step at which there was a reason to stop is saved."""
        training, spec, train = self._training, self._training.spec, self._training.spec.train
        timer, limit = training.timer, math.inf
        if train.max_time is not None:
            limit = train.max_time.total_seconds()
        self.done = first
        self._evaluate_resumed()
        self._sample_resumed()
        if timer.previous >= limit:
            return
        training.model.train()
        max_silence = max(timeouts.FIRST_PASS, train.hang_timeout)
        for step in range(first, spec.steps):
            if step % _STEPS_BETWEEN_COLLECTIONS == 0:
                gc.collect(1)
            if self.done % train.checkpoint_every == 0:  # what is older: a save stops the training anyway
                gc.collect()
            if step == self._profiler.next:
                self._profiler.turn(step)
            training.heart.beat(self.done, "training", max_silence=max_silence)
            max_silence = train.hang_timeout
            stats = train_step(training, step, self._vote.result)
            if stats is None:
                self._stop_within_a_step(first)
                return
            time_up = timer.seconds >= limit
            self._reducer.submit(step + 1, stats, leave=bool(self._signals), time_up=time_up)
            self.done = step + 1
            is_last, should_evaluate = self.done == spec.steps, self._is_due(train.evaluate_every)
            should_sample = self._is_due(train.sample_every)
            should_save = self.done % train.checkpoint_every == 0
            stop_reason = self._collect(wait=should_evaluate or should_save or should_sample)
            if stop_reason is not None and not is_last:
                self.stop_reason = stop_reason
                # A preempted process has little time: the next attempt evaluates.
                should_evaluate = stop_reason == "max_time"
                should_sample = should_evaluate
            self._validation_loss = self._observe(should_evaluate=should_evaluate, should_sample=should_sample)
            if should_save or is_last or self.stop_reason:
                training.heart.beat(self.done, "saving", max_silence=timeouts.STATE_TRANSFER)
                if self.stop_reason == "max_time":  # the clock of another rank reached the limit a moment earlier
                    timer.previous += max(0.0, limit - timer.seconds)
                self._report.pause(self._saver.save(self.done, self._validation_loss))
            if self.stop_reason:
                self._report.row(kind="leave", step=self.done, why=self.stop_reason)
                return

    def _observe(self, *, should_evaluate: bool, should_sample: bool) -> float | None:
        """Evaluate and write texts, before a save: a resumed run repeats no row of a saved step."""
        validation_loss = None
        if should_evaluate:
            validation_loss = self._evaluate()
        if should_sample:
            self._sample()
        return validation_loss

    def _stop_within_a_step(self, first: int) -> None:
        self._collect(wait=True)
        self.stop_reason = "preempted"
        if self.done > first and self.done % self._training.spec.train.checkpoint_every != 0:  # else it is saved
            self._training.heart.beat(self.done, "saving", max_silence=timeouts.STATE_TRANSFER)
            self._report.pause(self._saver.save(self.done, self._validation_loss))
        self._report.row(kind="leave", step=self.done, why=self.stop_reason)

    def _collect(self, *, wait: bool) -> str | None:
        # With `wait`, or a reason to stop, wait for the newest step too: a state that is not finite must not be saved,
        # because every later attempt would resume from it.
        in_flight, stop_reason = 0 if wait else 1, None
        while (result := self._reducer.collect(max_in_flight=in_flight)) is not None:
            self._training.chain.add(result.done, result.batch_sha256)
            self._handle_step(result)
            self._vote.adapt(result.seconds, micro_batches_of(self._training.spec, result.done))
            if result.stop_reason is not None:
                in_flight, stop_reason = 0, result.stop_reason
        return stop_reason

    def _is_due(self, every: int | None) -> bool:
        return every is not None and (self.done % every == 0 or self.done == self._training.spec.steps)

    def _evaluate(self) -> float:
        began = monotonic()
        mean, by_source = evaluate(self._training, done=self.done)
        validation_loss = mean.loss
        if not math.isfinite(validation_loss):  # it is of weights, not of a batch: no update can be left out
            raise UserError(f"the validation loss of step {self.done} is {validation_loss}. {self._advice()}")
        seconds = monotonic() - began
        self._report.pause(seconds)
        figures = {"validation_loss": validation_loss, "perplexity": perplexity(validation_loss)}
        figures["bits_per_byte"] = mean.bits_per_byte
        for source, split in by_source.items():
            figures |= {f"validation_loss.{source}": split.loss, f"bits_per_byte.{source}": split.bits_per_byte}
        self._report.row(kind="evaluation", step=self.done, **figures, seconds=round(seconds, 2))
        return validation_loss

    def _evaluate_resumed(self) -> None:
        """Evaluate the step resumed from if the attempt that saved it had no time, and complete its checkpoint."""
        ranks, run, train = self._training.ranks, self._training.run, self._training.spec.train
        if self.done == 0 or not self._is_due(train.evaluate_every):
            return
        folder = run.within(checkpoints.folder_of(self.done))
        manifest = ranks.run_on_rank_zero(lambda: read_manifest(folder, CheckpointManifest))
        if manifest is None or manifest.validation_loss is not None:
            return
        evaluated = {"validation_loss": self._evaluate(), "evaluation_samples": train.evaluation_samples}

        def complete() -> None:
            self._report.publish_rows()  # once the manifest has the loss, no attempt would write the row again
            checkpoints.commit(run, manifest.model_copy(update=evaluated))
            checkpoints.prune(run, last=train.keep_last, best=train.keep_best, every=train.keep_every)

        ranks.run_on_rank_zero(complete)

    def _sample(self) -> None:
        if self._sampler is None:
            return
        began = monotonic()
        texts = zip(self._training.spec.train.sample_prompts, self._sampler.texts(self.done), strict=True)
        seconds = monotonic() - began
        self._report.pause(seconds)
        rows: list[dict[str, str | float]] = [{"prompt": prompt, "text": text} for prompt, text in texts]
        rows[-1]["seconds"] = round(seconds, 2)
        for row in rows:
            self._report.row(kind="sample", step=self.done, **row)

    def _sample_resumed(self) -> None:
        """Sample the step resumed from if the attempt that saved it had no time."""
        run, done, every = self._training.run, self.done, self._training.spec.train.sample_every

        def is_sampled() -> bool:
            return any(row["kind"] == "sample" and row["step"] == done for row in read_metrics(run))

        if done > 0 and self._is_due(every) and not self._training.ranks.run_on_rank_zero(is_sampled):
            self._sample()

    def _handle_step(self, result: StepResult) -> None:
        problem = self._problem_of(result)
        if problem is None:
            self._skips_in_a_row = 0
            self._report.step(result)
            return
        self._skips_in_a_row += 1
        training, spec = self._training, self._training.spec

        def suspects(finite: list[bool]) -> list[int]:
            """Return the samples of the ranks whose own loss is not finite; all, if only the gradient is not."""
            numbers, world_size = sample_ids_for_step(spec, training.data.train, result.done - 1), len(finite)
            bad_ranks = [rank for rank in range(world_size) if not finite[rank]]
            shares = [rank_slice(numbers, rank=rank, world_size=world_size) for rank in bad_ranks] or [numbers]
            return [int(number) for share in shares for number in share]

        windows = training.ranks.gather_then_broadcast(lambda: math.isfinite(float(result.local.loss)), suspects)
        listed = ", ".join(map(str, windows[:64]))
        if len(windows) > 64:
            listed += ", …"
        look = f"`python -m litgpt_demo windows --run {training.run.root} --step {result.done}` prints them"
        message = f"{problem}; its samples have the ids {listed} in the training split. {look}. {self._advice()}"
        if spec.train.on_nonfinite == "stop":
            raise UserError(f"{message}. train.on_nonfinite=skip leaves out the update of such a step")
        if self._skips_in_a_row == _MOST_SKIPS_IN_A_ROW:
            many = f"It is step {_MOST_SKIPS_IN_A_ROW} in a row without an update, so it is not the data"
            raise UserError(f"{message}. {many}")
        self._report.row(kind="skip", step=result.done, why=problem, windows=windows)

    def _problem_of(self, result: StepResult) -> str | None:
        if not math.isfinite(result.loss):
            return f"the loss of step {result.done} is {result.loss}"
        # A scaler leaves out an update whose gradients overflowed.
        if self._training.scaler is None and not math.isfinite(result.grad_norm):
            return f"the gradient norm of step {result.done} is {result.grad_norm}"
        return None

    def _advice(self) -> str:
        train = self._training.spec.train
        often = f"A lower train.learning_rate={train.learning_rate}, more train.warmup_steps={train.warmup_steps}"
        return f"{often} or train.precision=32-true usually fix it"


def micro_batches_of(spec: TrainingSpec, step: int) -> int:
    """Return the micro-batches of each rank in a step; steps count from 1."""
    batch = spec.samples_after(step) - spec.samples_after(step - 1)
    return batch // (spec.world_size * spec.train.micro_batch)


def grace_warning(save: float, step: float, micro_batches: int, environ: Mapping[str, str]) -> str | None:
    """Return the advice for a platform that would not wait for the save of a preempted training."""
    # The running step ends, and on a GPU the one launched behind it. A step of several micro-batches may be given up:
    # after the running one, the one in which all ranks vote, and the one launched behind that.
    grace = environ.get(GRACE)
    rest = min(2 * step, max(3 * step / micro_batches, 3 * StopVote.SECONDS))
    needed = save + rest
    if grace is None or needed <= float(grace):
        return None
    return (
        f"the end of the running step and a save took {needed:.3g} s ({rest:.3g} s and {save:.3g} s), but the platform "
        f"waits {grace} s for a job that it preempts, so its last steps would be lost. Set platform.grace_period to "
        f"{math.ceil(needed + save)} where it can wait (a Spot VM ends after 30 s), or save more often with a "
        "smaller train.checkpoint_every"
    )


def _report_save(report: Reporter, spec: TrainingSpec, saved: SaveResult) -> None:
    micro_batches = micro_batches_of(spec, saved.step)
    grace = grace_warning(saved.seconds, report.step_seconds, micro_batches, os.environ)
    for text in (saved.warning, grace):
        if text is not None:
            warn(text)
    if saved.error is None:
        report.row(
            kind="checkpoint",
            step=saved.step,
            seconds=round(saved.stall, 4),
            save_seconds=round(saved.seconds, 2),
            bytes=saved.size,
            path=checkpoints.folder_of(saved.step),
            **(saved.link.columns() if saved.link else {}),
            **report.elapsed("taken", saved.taken),
        )
        report.publish()


@record
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="litgpt_demo train", description=__doc__)
    parser.add_argument("--run", required=True, help="address of the run's folder, with its config.json")
    parser.add_argument("--attempt", type=int, help="attempt whose config.json to read (default: the run's own)")
    parser.add_argument("--seconds", type=float, help="save and stop this many seconds after the attempt's beginning")
    args = parser.parse_args(argv)
    run = open_storage(args.run)
    if args.attempt is None:
        spec = read_spec(run)
    else:
        spec = read_spec(run.within(f"{ATTEMPTS}/{args.attempt}"))
    with Heartbeat(max_silence=spec.train.hang_timeout) as heart:
        heart.beat(0, "meeting the other ranks", max_silence=timeouts.STATE_TRANSFER)
        fabric = open_fabric(spec.train)
        if fabric.world_size != spec.world_size:
            what = f"this rank is one of {fabric.world_size}, but the run was submitted for {spec.world_size}"
            raise UserError(what, fix="submit it again")
        scratch = scratch_of(run, fabric.global_rank)
        try:
            staged = os.environ.get("LITGPT_DATASET")
            heart.beat(0, "loading data and model", max_silence=timeouts.STATE_TRANSFER)
            folder = Path(staged) if staged else stage(spec.dataset, scratch)
            training = replace(set_up(spec, open_data(spec, folder), fabric, run, scratch), heart=heart)
            config, nodes = training.model.module.config, int(os.environ.get("GROUP_WORLD_SIZE", "1"))
            heart.sends = estimates.network_bytes_per_step(
                config, spec.train, world_size=fabric.world_size, nodes=nodes
            )
            if args.seconds is not None and fabric.is_global_zero:
                fit(training, seconds=seconds_left(run, args.seconds))
            else:
                fit(training)
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            with suppress(OSError):  # the folders of other ranks are in it
                scratch.parent.rmdir()
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0


def seconds_left(run: Storage, seconds: float) -> float:
    """Return the remaining seconds of an attempt, counted from its first start if its platform has restarted it."""
    times = NodeTimer.from_environ()
    if times is None:
        return seconds
    starts = [row["node_started"] for row in read_metrics(run) if row.get("attempt") == times.attempt]
    return min(seconds + min(starts, default=times.started_at) - time(), TIMEOUT_MAX)


def scratch_of(run: Storage, rank: int) -> Path:
    # On the run's own file system if that is local, so that finished shards are moved instead of copied.
    # The same run may exist in several buckets.
    parent = run.local_path(".scratch") or make_temporary(f"{run.root.rpartition('/')[2]}-{content_hash(run.root)}")
    folder = parent / f"rank-{rank}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    return folder
