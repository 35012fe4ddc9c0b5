"""Training some steps of a run again, from a checkpoint that it has kept, to see what they saw.

The batch, the learning rate and the random state are functions of the spec and the step, so a step is the same again:
on a CPU with the same number of ranks bit for bit. Nothing changes in the run but the file of the result.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from tokenizers import Tokenizer
from torch import Tensor
from torch.distributed.elastic.multiprocessing.errors import record

from litgpt_demo import timeouts
from litgpt_demo.data.batches import MixtureDataset, sample_ids_for_step
from litgpt_demo.data.dataset import TokenDataset, stage
from litgpt_demo.documents import with_checksum
from litgpt_demo.errors import UserError
from litgpt_demo.heartbeat import Heartbeat
from litgpt_demo.metrics import Row
from litgpt_demo.replays import DocumentPart, Replay, ReplayedSample, ReplayedStep, by_loss
from litgpt_demo.runs import ATTEMPTS, read_metrics, read_spec
from litgpt_demo.storage import open_storage
from litgpt_demo.storage.private import make_temporary
from litgpt_demo.training.reporting import warn
from litgpt_demo.training.resuming import load_checkpoint_before
from litgpt_demo.training.setup import Training, open_data, open_fabric, set_up
from litgpt_demo.training.starting import start_from
from litgpt_demo.training.step import MetricReducer, train_step

_WORST = 5
"""Samples whose text and documents are shown, and documents of each."""
_TEXT = 2_000  # characters of a sample that are kept
_BEGINNING = 24  # tokens of a document that name it
_BLOCK = 1 << 22  # tokens in which the beginning of a document is searched at a time


def replay(training: Training, first: int, last: int, *, from_start: bool = False) -> Replay | None:
    """Train the steps up to `last`, and return the figures from step `first` on: on rank 0, and None on the others.

    It begins at the newest checkpoint before `first` that verifies, or at the run's initial weights. It ends early at a
    step whose figures are not finite, if the run would have ended there. A UserError if there is no such checkpoint.
    """
    spec, heart, ranks = training.spec, training.heart, training.ranks
    heart.beat(0, "loading the checkpoint", max_silence=timeouts.STATE_TRANSFER)
    began_at = 0 if from_start else load_checkpoint_before(training, first, on_warning=warn)
    if not began_at:
        if not from_start:
            what = f"no checkpoint before step {first} verifies"
            raise UserError(what, fix=f"--from-start trains all {last} steps from the initial weights")
        if spec.origin is not None:
            start_from(training, spec.origin)
    recorded, steps, reducer = dict[int, Row](), list[ReplayedStep](), MetricReducer(training.fabric)
    if ranks.rank == 0:
        recorded = {row["step"]: row for row in read_metrics(training.run) if row["kind"] == "step"}
    training.model.train()
    for step in range(began_at, last):
        heart.beat(step, "replaying", max_silence=max(timeouts.FIRST_PASS, spec.train.hang_timeout))
        stats = train_step(training, step, keep_token_losses=step + 1 >= first)
        assert stats is not None
        reducer.submit(step + 1, stats, leave=False, time_up=False)
        result = reducer.collect(max_in_flight=0)
        assert result is not None
        if step + 1 < first:
            continue
        row = recorded.get(step + 1, {})
        steps.append(
            ReplayedStep(
                step=step + 1, recorded_loss=row.get("loss"), loss=result.loss, recorded_grad_norm=row.get("grad_norm"),
                grad_norm=result.grad_norm, recorded_batch_sha256=row.get("batch_sha256"),
                batch_sha256=result.batch_sha256,
            )
        )  # fmt: skip
        is_finite = math.isfinite(result.loss) and (training.scaler or math.isfinite(result.grad_norm))
        if not is_finite and spec.train.on_nonfinite == "stop":
            break
    assert stats is not None
    assert stats.token_losses is not None
    heart.beat(step + 1, "finding the worst samples", max_silence=timeouts.STATE_TRANSFER)
    samples = _samples_by_loss(training, step, stats.token_losses)
    if ranks.rank != 0:
        return None
    return Replay(
        run=spec.run, began_at=began_at, world_size=ranks.world_size, device=str(training.fabric.device),
        steps=tuple(steps), samples=samples,
    )  # fmt: skip


def _samples_by_loss(training: Training, step: int, token_losses: Tensor) -> tuple[ReplayedSample, ...]:
    """Return all samples of a step (from 0), the highest loss first; empty on the ranks after rank 0.

    `token_losses` are those of this rank's samples, of shape (samples, length).
    """
    ranks, windows, shown = training.ranks, training.data.train, token_losses.double()
    losses = ranks.gather_then_broadcast(lambda: shown.mean(1).tolist(), lambda parts: sum(parts, list[float]()))
    order, first = by_loss(losses), ranks.rank * len(shown)
    own = [place for place in order[:_WORST] if first <= place < first + len(shown)]
    details = ranks.gather_then_broadcast(
        lambda: {place: shown[place - first].tolist() for place in own},
        lambda parts: {place: values for part in parts for place, values in part.items()},
    )
    if ranks.rank != 0:
        return ()
    ids = sample_ids_for_step(training.spec, windows, step)
    tokenizer, end = Tokenizer.from_file(str(training.data.tokenizer)), training.data.manifest.end_of_text
    samples = list[ReplayedSample]()
    for place in order:
        part, number, source = windows, int(ids[place]), ""
        if isinstance(windows, MixtureDataset):
            index = int(windows.source_of(ids[[place]])[0])
            part, number, source = windows.parts[index], number - int(windows.starts[index]), windows.names[index]
        sample = ReplayedSample(id=int(ids[place]), loss=losses[place], source=source)
        if place in details:
            tokens = windows.read(ids[[place]])[0][0].tolist()
            text = tokenizer.decode(tokens, skip_special_tokens=False)[:_TEXT]
            documents = _documents_of(part, number, details[place], tokenizer, end)
            sample = sample.model_copy(update={"text": text, "documents": documents})
        samples.append(sample)
    return tuple(samples)


def _documents_of(
    split: TokenDataset, number: int, losses: Sequence[float], tokenizer: Tokenizer, end: int
) -> tuple[DocumentPart, ...]:
    """Return the documents of a sample with the highest losses. An end-of-text id belongs to the one that it ends."""
    first = number * split.length + 1
    targets = _tokens(split, first, first + split.length)
    parts, begin, position = list[DocumentPart](), 0, _beginning_before(split, first, end)
    for stop in dict.fromkeys([*(np.flatnonzero(targets == end) + 1).tolist(), len(targets)]):
        head = _tokens(split, position, position + _BEGINNING).tolist()
        if end in head:
            head = head[: head.index(end)]
        beginning, mean = tokenizer.decode(head), sum(losses[begin:stop]) / (stop - begin)
        parts.append(DocumentPart(position=position, beginning=beginning, tokens=stop - begin, loss=mean))
        begin, position = stop, first + stop
    return tuple(parts[place] for place in by_loss(part.loss for part in parts)[:_WORST])


def _beginning_before(split: TokenDataset, position: int, end: int) -> int:
    """Return the first token of the document that continues at a position."""
    for stop in range(position, 0, -_BLOCK):
        start = max(0, stop - _BLOCK)
        ends = np.flatnonzero(_tokens(split, start, stop) == end)
        if len(ends):
            return start + int(ends[-1]) + 1
    return 0


def _tokens(split: TokenDataset, start: int, stop: int) -> Any:
    parts, before = [], 0
    for file in split.files:
        parts.append(file[max(0, start - before) : max(0, stop - before)])
        before += len(file)
    return np.concatenate(parts)


@record
def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="litgpt_demo replay", description=__doc__)
    parser.add_argument("--run", required=True, help="address of the run's folder, with its config.json")
    parser.add_argument("--attempt", type=int, help="attempt whose config.json to read (default: the run's own)")
    parser.add_argument("--steps", required=True, help="the first and the last step, from 1: 400-412")
    parser.add_argument("--out", required=True, help="address of the JSON file for the result")
    parser.add_argument("--threads", type=int, help="threads of a rank (default: as many as a training would have)")
    parser.add_argument("--from-start", action="store_true", help="begin at the initial weights")
    args = parser.parse_args(argv)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    run, (first, _, last) = open_storage(args.run), args.steps.partition("-")
    recorded = read_spec(run if args.attempt is None else run.within(f"{ATTEMPTS}/{args.attempt}"))
    with Heartbeat(max_silence=recorded.train.hang_timeout) as heart:
        heart.beat(0, "meeting the other ranks", max_silence=timeouts.STATE_TRANSFER)
        fabric = open_fabric(recorded.train)
        spec = recorded.model_copy(update={"world_size": fabric.world_size})
        # The ranks of a node share a folder outside of the run, whose own scratch a live training may need.
        owner = os.getppid() if "LOCAL_RANK" in os.environ else os.getpid()
        scratch = make_temporary(f"replay-{owner}") / f"rank-{fabric.global_rank}"
        scratch.mkdir(exist_ok=True)
        try:
            heart.beat(0, "loading data and model", max_silence=timeouts.STATE_TRANSFER)
            folder = Path(os.environ.get("LITGPT_DATASET") or stage(spec.dataset, scratch))
            training = replace(set_up(spec, open_data(spec, folder), fabric, run, scratch), heart=heart)
            try:
                result = replay(training, int(first), int(last or first), from_start=args.from_start)
            finally:
                training.feed.close()
            if result is not None:
                place, _, name = args.out.rpartition("/")
                text = result.model_dump_json(indent=1).encode()
                open_storage(place).write(name, with_checksum(text, "record"))
            training.ranks.run_on_rank_zero(lambda: None)  # until then some rank may still read
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
            if fabric.local_rank == 0:
                shutil.rmtree(scratch.parent, ignore_errors=True)
        if dist.is_initialized():
            dist.destroy_process_group()
    return 0
