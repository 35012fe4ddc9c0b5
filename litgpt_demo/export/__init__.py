"""Collection: a run's checkpoint becomes models that LitGPT and Hugging Face open, proved to be what was trained.

final/   litgpt/  huggingface/  MODEL_CARD.md  loss.png  lineage.json  manifest.json

Everything is made and proved aside, and moved to its place when it holds; the manifest comes last.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel, FiniteFloat

from litgpt_demo.config import Settings, TrainingSpec
from litgpt_demo.documents import Unreadable, parse_json
from litgpt_demo.errors import DataError, UserError
from litgpt_demo.manifests import FileRecord, differences, read_manifest, write_manifest
from litgpt_demo.runs import (
    ATTEMPTS,
    FINAL,
    HUGGINGFACE,
    LITGPT,
    MOST_NODE_REPORT,
    NODE_REPORT,
    RecordedPrice,
    read_document,
    read_spec,
)
from litgpt_demo.storage import Storage, bucket_path, open_storage
from litgpt_demo.storage.local import explaining
from litgpt_demo.training import checkpoints
from litgpt_demo.training.checkpoints import CheckpointManifest

# What a node leaves at its end, in an attempt's folder; a life that its platform started again was moved one deeper.
_NODE_REPORT = re.compile(rf"[0-9]+/(restart-[0-9]+/)?{NODE_REPORT}")


class Cost(Settings):
    """The cost of all attempts of a run, as far as its nodes reported their ends; one that was killed did not."""

    hours: float
    """Hours of one machine."""
    price: RecordedPrice
    unreadable: int = 0
    """The number of reports that are damaged or forged; their nodes' hours are left out."""

    @property
    def usd(self) -> float:
        """The cost at list price, in dollars."""
        return self.hours * self.price.usd

    def __str__(self) -> str:
        price = self.price
        left_out = f"; reports of nodes that could not be read, and are left out: {self.unreadable}"
        return (
            f"${self.usd:,.2f} or more: {self.hours:,.2f} hours of {price.machine} at ${price.usd:,.2f}, "
            f"list price on demand in {price.region} of {price.date}"
            f"{left_out if self.unreadable else ''}"
        )


class HuggingFaceProof(Settings):
    """The result of opening final/huggingface."""

    architecture: str
    """Class in transformers."""
    logits_difference: float
    """Largest difference between the checkpoint's logits and this model's, both in float32."""
    sample: str
    """The text that it wrote after the prompt, always taking the likeliest token."""


class FinalManifest(Settings):
    """The manifest of a collected model, with what was checked of it."""

    run: str
    step: int
    tokens: int
    complete: bool = True
    """True if the run ends with this step; a model may be collected on the way."""
    parameters: int
    dataset_key: str
    validation_loss: float
    """Nats per token, of the model loaded back from final/litgpt, in float32."""
    perplexity: float
    validation_windows: int
    """The number of samples of that loss, from the start of the validation split."""
    trainer_validation_loss: float | None = None
    """The trainer's own loss at that step, if it evaluated there, in its own precision."""
    logits_difference: float
    """Largest difference between the checkpoint's logits and those of final/litgpt, both in float32."""
    logits_tolerance: float
    """The largest difference that is accepted, for final/huggingface too."""
    huggingface: HuggingFaceProof | None
    """None where there is no final/huggingface; `findings` says why."""
    findings: tuple[str, ...] = ()
    """Shortcomings, each with what to do."""
    cost: Cost | None = None
    """None where the machines have no list price, as on this machine."""
    prompt: str
    """Opening of a validation document."""
    sample: str
    """The text that the collected model wrote after the prompt."""
    files: tuple[FileRecord, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(record.size for record in self.files)


def exported(run: Storage) -> FinalManifest | None:
    """The collected model of the run's newest checkpoint, if there is one and nobody has removed a file of it."""
    manifest = _final(run)
    gone_further = manifest and any(found.step > manifest.step for found in checkpoints.committed(run)[:1])
    return None if gone_further else manifest


def _final(run: Storage) -> FinalManifest | None:
    """The manifest of whatever was collected last, if all of it is there."""
    final = run.within(FINAL)
    manifest = read_manifest(final, FinalManifest)
    whole = manifest is not None and {record.path for record in manifest.files} <= set(final.list())
    return manifest if whole else None


class _NodeLife(BaseModel):
    """The times in a node's report of its end, in seconds since the epoch; the rest of it is not needed here."""

    started: FiniteFloat
    ended: FiniteFloat


def cost_of(run: Storage) -> Cost | None:
    """Return what the run's attempts have cost; None where its machines have no list price or no node reported."""
    if (price := read_document(run).price) is None:
        return None
    attempts, bad, seconds = run.within(ATTEMPTS), Unreadable("nodes' reports"), 0.0
    for path in attempts.list():
        if _NODE_REPORT.fullmatch(path):
            try:
                content = attempts.read(path, most=MOST_NODE_REPORT)
                life = parse_json(content, _NodeLife, where=attempts.address(path), fix="it is left out")
                seconds += max(0.0, life.ended - life.started)
            except DataError as error:
                bad.add(str(error))
    return Cost(hours=seconds / 3600, price=price, unreadable=bad.count) if seconds else None


def export(
    run: Storage, *, step: int | None = None, newest: bool = False, await_end: Callable[[], None] = lambda: None
) -> FinalManifest:
    """Turn a checkpoint of the run into `final`, or find it done: its last one, unless another is asked for.

    Args:
        await_end: called when the models are proved; returns when the job has ended, so that the card tells all of it.
        step: take the checkpoint of this step.
        newest: take the newest checkpoint that verifies, though the run has not reached its end.

    Raises:
        UserError: there is no such checkpoint, or the run has not reached its end.
        DataError: the checkpoint does not verify, or the model loaded back differs from it.
    """
    spec = read_spec(run)
    with _workplace(run) as scratch:
        done = _final(run)
        if done is not None and step is None and not newest and done.complete and exported(run) is not None:
            return _unspoilt(run, done)
        chosen, shards = _checkpoint(run, spec, scratch, step=step, newest=newest)
        if done is not None and done.step == chosen.step:
            return _unspoilt(run, done)
        from litgpt_demo.export.card import write_card
        from litgpt_demo.export.models import make

        made = make(spec, chosen, shards, scratch, address=run.address(checkpoints.folder_of(chosen.step)))
        await_end()
        # In a bucket another collection may be at work: one whose lease was taken from it while it was paused.
        if (done := _final(run)) is not None and done.step == chosen.step:
            return _unspoilt(run, done)
        made = made.model_copy(update={"cost": cost_of(run)})
        folder, final = scratch / FINAL, run.within(FINAL)
        write_card(run, spec, chosen, made, folder)
        run.remove(FINAL)
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        files = [final.upload(path, path.relative_to(folder).as_posix(), move=True) for path in paths]
        manifest = made.model_copy(update={"files": tuple(FileRecord.of(stored) for stored in files)})
        write_manifest(final, manifest)
        return manifest


def _unspoilt(run: Storage, done: FinalManifest) -> FinalManifest:
    """Return the model that is found done, every byte of it read again where that costs no download."""
    final = run.within(FINAL)
    folder = final.local_path()
    if folder is not None and (wrong := differences(folder, done.files)):
        raise DataError(
            f"{final.address()} is not what its manifest says: {'; '.join(wrong)}. Remove that folder and collect again"
        )
    return done


def _checkpoint(
    run: Storage, spec: TrainingSpec, scratch: Path, *, step: int | None, newest: bool
) -> tuple[CheckpointManifest, Path]:
    """The checkpoint that is asked for, and a local folder with the files of its weights, every byte verified."""
    damaged: list[str] = []
    there = checkpoints.committed(run, damaged=lambda folder, error: damaged.append(str(error)))
    steps = ", ".join(str(found.step) for found in reversed(there)) or "none"
    if step is not None and not (there := [found for found in there if found.step == step]):
        raise UserError(
            f"{run.address()} has no checkpoint of step {step}; there are: {steps}. Retention keeps the last "
            "train.keep_last, the best train.keep_best and every train.keep_every"
        )
    if not there and newest:
        raise UserError(f"{run.address()} has no checkpoint yet; {'; '.join(damaged) or 'wait for its first one'}")
    if step is None and not newest and not (there and checkpoints.reached_end(there[0], spec)):
        raise UserError(
            f"{run.address()} has reached step {there[0].step if there else 0} of {spec.steps}; run it again, it goes "
            f"on from there, or collect what is there: --newest, or --step with one of its checkpoints ({steps})"
        )
    from litgpt_demo.training.reading import files_of_weights

    def sound(found: CheckpointManifest, names: set[str]) -> Path | None:
        try:
            return checkpoints.open_checkpoint(run, found, lambda: scratch / "shards", only=names)
        except DataError as error:
            damaged.append(str(error))
            shutil.rmtree(scratch / "shards", ignore_errors=True)
            if step is None and not newest:  # else the run would count as finished, and never train on
                where = checkpoints.set_aside(run, checkpoints.folder_of(found.step), str(error))
                damaged.append(f"it was moved to {where}; run it again, it trains on from the checkpoint before")
        return None

    for found in there if newest else there[:1]:
        address = run.address(checkpoints.folder_of(found.step))
        # Of a 7B model's 84 GB in a bucket two thirds are the optimizer's: they are not fetched.
        if (folder := sound(found, {checkpoints.INDEX})) and sound(found, files_of_weights(folder, address=address)):
            return found, folder
    raise DataError("; ".join(damaged))


@contextmanager
def _workplace(run: Storage) -> Iterator[Path]:
    """An empty folder to make the model in, for one collection of the run at a time.

    On the run's own file system where it has one, so that finished files move instead of being copied; what a killed
    collection left there goes.
    """
    if (scratch := run.local_path(".scratch/collect")) is None:
        with tempfile.TemporaryDirectory(prefix="litgpt-collect-") as folder:
            yield Path(folder)
        return
    with explaining(run.root):
        lock = os.open(run.root, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(scratch, ignore_errors=True)
        with explaining(str(scratch)):
            scratch.mkdir(parents=True)
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        with suppress(OSError):  # a training may be at work in it
            scratch.parent.rmdir()
        os.close(lock)


def summary_lines(final: FinalManifest) -> Iterator[str]:
    """Yield what was collected and proved, a line each."""
    yield f"step {final.step}, {final.tokens:,} tokens, {final.parameters:,} parameters, {len(final.files)} files"
    yield (
        f"validation loss {final.validation_loss:.4f}, perplexity {final.perplexity:.2f}, "
        f"over {final.validation_windows} samples"
    )
    yield f"LitGPT: opens, logits differ by {final.logits_difference:.1e}"
    if final.huggingface is not None:
        yield f"{final.huggingface.architecture}: opens, logits differ by {final.huggingface.logits_difference:.1e}"
    yield from (f"warning: {finding}" for finding in final.findings)


def usage(run: str, *, huggingface: bool) -> str:
    """Return Python that lets the models of the run at this address write, from whatever folder it is run in.

    No library opens a model in a bucket: there it begins with how to bring it here.
    """
    remote = bucket_path(run) is not None
    # Into a folder that is there, so that the copy has the same name whatever was copied before.
    lines = [f"# first, in a shell: gcloud storage cp --recursive {run}/{FINAL} ."] if remote else []
    folder = "" if remote else f"{run}/"
    lines += ["from litgpt import LLM", f'print(LLM.load({f"{folder}{LITGPT}"!r}).generate("Once upon a time"))']
    if huggingface:
        where = repr(f"{folder}{HUGGINGFACE}")
        lines += [
            "",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            f"tokenizer = AutoTokenizer.from_pretrained({where})",
            f"model = AutoModelForCausalLM.from_pretrained({where})",
            'ids = tokenizer("Once upon a time", return_tensors="pt").input_ids',
            "print(tokenizer.decode(model.generate(ids, max_new_tokens=50)[0]))",
        ]
    return "\n".join(lines)


def use_of(folder: str, name: str) -> tuple[str, ...]:
    """Return shell commands that let the LitGPT model in `folder` write, which first copy it here from a bucket.

    Args:
        name: the run's, which the copy is called after.
    """
    copy: tuple[str, ...] = ()
    if bucket_path(folder) is not None:
        copy, folder = (shlex.join(["gcloud", "storage", "cp", "-r", folder, name]),), name
    # JSON's strings are Python's, and their quotes need no escape within the shell's.
    program = f'from litgpt import LLM; print(LLM.load({json.dumps(folder)}).generate("Once upon a time"))'
    return (*copy, shlex.join(["python", "-c", program]))


def main(argv: Sequence[str]) -> int:
    """`python -m litgpt_demo collect --run ADDRESS`."""
    parser = argparse.ArgumentParser(prog="litgpt_demo collect", description=__doc__)
    parser.add_argument("--run", required=True, help="address of the run's folder")
    parser.add_argument("--step", type=int, help="take the checkpoint of this step")
    parser.add_argument("--newest", action="store_true", help="take the newest checkpoint, wherever the run is")
    waits = (
        "import what it takes; begin when there is a line on standard input, and publish when there is another; "
        "end if that is closed"
    )
    parser.add_argument("--on-word", action="store_true", help=waits)
    args = parser.parse_args(argv)

    def await_word() -> None:
        if args.on_word and not sys.stdin.readline():
            sys.exit(0)  # it was closed: nothing is published

    if args.on_word:
        from litgpt_demo.export import models

        models.load_libraries()
    await_word()
    for line in summary_lines(export(open_storage(args.run), step=args.step, newest=args.newest, await_end=await_word)):
        print(line)
    return 0
