"""Makes the models of a checkpoint, proves them and publishes them in the run's folder. Imports torch.

Everything is made and proved in a scratch folder, and moved to its place afterwards; the manifest comes last.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias

from litgpt.utils import save_config
from tokenizers import Tokenizer as HfTokenizer

from litgpt_demo.config import TrainingSpec
from litgpt_demo.data.batches import open_samples
from litgpt_demo.data.dataset import open_dataset, stage
from litgpt_demo.data.tokens import TOKENIZER_FILES
from litgpt_demo.documents import FileRecord, differences, fetch_verified, parse_json, write_manifest
from litgpt_demo.errors import DataError, UserError
from litgpt_demo.export import FinalManifest, complete_final, summary_lines
from litgpt_demo.export.card import cost_of, write_card
from litgpt_demo.export.proof import Texts, opened_by_litgpt, opened_by_transformers, probe_batch, trainer_logits
from litgpt_demo.export.weights import Weights, write_litgpt, write_safetensors
from litgpt_demo.heartbeat import NODE_DIRECTORY
from litgpt_demo.imports import importing
from litgpt_demo.models.huggingface import HuggingFaceModel, huggingface_model
from litgpt_demo.models.model import litgpt_config
from litgpt_demo.parent import follow_parent, report_progress
from litgpt_demo.runs import CONFIG, FINAL, FINAL_AVERAGE, HUGGINGFACE, LITGPT, read_spec
from litgpt_demo.storage import Storage, open_storage, sha256_of
from litgpt_demo.storage.local import translate_os_errors
from litgpt_demo.training import checkpoints
from litgpt_demo.training.checkpoint_reader import AVERAGE, MODEL, files_of_weights
from litgpt_demo.training.checkpoints import CheckpointManifest

Report: TypeAlias = Callable[[str], None]
"""Gets the name of each phase when it begins."""


def export(
    run: Storage, *, step: int | None = None, newest: bool = False, average: bool = False,
    await_end: Callable[[], None] = lambda: None, report: Report = lambda what: None,
) -> FinalManifest:  # fmt: skip
    """Turn a checkpoint of the run into `final`, unless that is already done: the last one, of `step`, or the `newest`
    that verifies; with `average`, the moving average of its weights into `final-average`. `await_end` is called when
    the models are proved, and returns when the job has ended: the card describes all of it. A UserError if there is no
    such checkpoint; a DataError if it does not verify, or the model loaded back differs from it."""
    spec, place = read_spec(run), FINAL_AVERAGE if average else FINAL
    if average and spec.train.weight_average is None:
        fix = "set it for the next run, or collect the last weights"
        raise UserError(f"{run.address()} was trained without train.weight_average", fix=fix)
    with _workplace(run) as scratch:
        done = complete_final(run, place)
        if done is not None and step is None and not newest and done.complete and done.step >= _last_step(run):
            return _verify_existing(run, done, place)
        report("reading every byte of the checkpoint")
        kind = AVERAGE if average else MODEL
        chosen, shards = verified_checkpoint(run, spec, scratch, step=step, newest=newest, kind=kind)
        if done is not None and done.step == chosen.step:
            return _verify_existing(run, done, place)
        address = run.address(checkpoints.folder_of(chosen.step))
        made = make(spec, chosen, shards, scratch, address=address, kind=kind, report=report)
        report("waiting for the end of the job")
        await_end()
        report(f"writing {place}/")
        # In a bucket another collection may be at work: one whose lease was taken from it while it was paused.
        done = complete_final(run, place)
        if done is not None and done.step == chosen.step:
            return _verify_existing(run, done, place)
        made = made.model_copy(update={"cost": cost_of(run), "average": average})
        folder, final = scratch / FINAL, run.within(place)
        write_card(run, spec, chosen, made, folder)
        run.remove(place)
        files = []
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            digest = sha256_of(path)
            stored = final.upload(path, path.relative_to(folder).as_posix(), move=True)
            files.append(FileRecord.of(stored, sha256=digest))
        manifest = made.model_copy(update={"files": tuple(files), "chain": chosen.link and chosen.link.chain})
        write_manifest(final, manifest)
        return manifest


def _last_step(run: Storage) -> int:
    return max((manifest.step for manifest in checkpoints.list_complete(run)), default=0)


def _verify_existing(run: Storage, done: FinalManifest, place: str) -> FinalManifest:
    final = run.within(place)
    folder = final.local_path()
    if folder is not None:
        problems = differences(folder, done.files)
        if problems:
            what = f"{final.address()} is not what its manifest says: {'; '.join(problems)}"
            raise DataError(what, fix="remove that folder and collect again")
    return done


def verified_checkpoint(  # noqa: C901 - each way to choose a checkpoint has a refusal of its own
    run: Storage, spec: TrainingSpec, scratch: Path, *, step: int | None, newest: bool, kind: str = MODEL
) -> tuple[CheckpointManifest, Path]:
    """Return the requested checkpoint, and a local folder with the files of its weights, or of their averages; every
    byte is verified."""
    problems: list[str] = []
    candidates = checkpoints.list_complete(run, on_damaged=lambda folder, error: problems.append(str(error)))
    steps = ", ".join(str(candidate.step) for candidate in reversed(candidates)) or "none"
    if step is not None:
        candidates = [candidate for candidate in candidates if candidate.step == step]
        if not candidates:
            raise UserError(f"{run.address()} has no checkpoint of step {step}; choose one of: {steps}")
    elif newest:
        if not candidates:
            raise UserError(f"{run.address()} has no checkpoint yet; {'; '.join(problems) or 'wait for its first one'}")
    elif not candidates or not checkpoints.reached_end(candidates[0], spec):
        reached = candidates[0].step if candidates else 0
        fix = f"run it again to continue from there, or collect a saved step by --newest, or --step, one of {steps}"
        raise UserError(f"{run.address()} has reached step {reached} of {spec.steps}", fix=fix)
    if not newest:
        candidates = candidates[:1]
    shards = scratch / "shards"

    def fetch_if_valid(candidate: CheckpointManifest, names: set[str]) -> Path | None:
        path = checkpoints.folder_of(candidate.step)
        try:
            records = [file for file in candidate.files if file.path in names]
            return fetch_verified(run.within(path), records, lambda: shards)
        except DataError as error:
            problems.append(str(error))
            shutil.rmtree(shards, ignore_errors=True)
            if step is None and not newest:  # else the run would count as finished, and never train further
                address = checkpoints.quarantine(run, path, str(error))
                problems.append(f"it was moved to {address}; run it again, it trains on from the checkpoint before")
        return None

    for candidate in candidates:
        folder = fetch_if_valid(candidate, {checkpoints.INDEX})
        if folder is not None:
            address = run.address(checkpoints.folder_of(candidate.step))
            # Two thirds of a 7B model's 84 GB are the optimizer's: they are not fetched from a bucket.
            if fetch_if_valid(candidate, files_of_weights(folder, kind=kind, address=address)) is not None:
                return candidate, folder
    raise DataError("; ".join(problems))


@contextmanager
def _workplace(run: Storage) -> Iterator[Path]:
    # Of a local run on its own file system, so that finished files are moved. One collection works at a time.
    scratch = run.local_path(".scratch/collect")
    if scratch is None:
        # A node's own folder has room for a dataset; its system's temporary folder may be a few GB.
        with tempfile.TemporaryDirectory(prefix="litgpt-collect-", dir=os.environ.get(NODE_DIRECTORY)) as folder:
            yield Path(folder)
        return
    with translate_os_errors(run.root):
        lock = os.open(run.root, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        shutil.rmtree(scratch, ignore_errors=True)
        with translate_os_errors(str(scratch)):
            scratch.mkdir(parents=True)
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        with suppress(OSError):  # a training may use it
            scratch.parent.rmdir()
        os.close(lock)


def make(
    spec: TrainingSpec, checkpoint: CheckpointManifest, shards: Path, scratch: Path, *, address: str,
    kind: str = MODEL, report: Report = lambda what: None,
) -> FinalManifest:  # fmt: skip
    """Make and prove the models in `scratch`; return the manifest without files. `address` is the checkpoint's own."""
    if kind == AVERAGE:  # the trainer evaluated the weights
        checkpoint = checkpoint.model_copy(update={"validation_loss": None})
    dataset = open_dataset(spec.dataset)
    if dataset.content_hash != spec.dataset_hash:
        what = f"{spec.dataset} is the dataset {dataset.content_hash}, this run was trained on {spec.dataset_hash}"
        raise DataError(what, fix="put that back")
    folder = stage(spec.dataset, scratch / "dataset", train=False)
    dataset = open_dataset(str(folder))
    windows = open_samples(spec, folder, dataset, "validation")
    tokenizer, weights = folder / "tokenizer", Weights(shards, address, kind=kind)
    config = litgpt_config(spec.model, vocab_size=dataset.vocab_size)
    target = scratch / LITGPT
    target.mkdir(parents=True)
    report("writing the models for LitGPT and transformers")
    write_litgpt(weights, target / "lit_model.pth")
    save_config(config, target)
    # No other file of that folder: LitGPT executes a lit_model.pth, and imports the class named by prompt_style.yaml.
    for path in (tokenizer / name for name in TOKENIZER_FILES):
        if path.is_file():
            shutil.copy(path, target)
    model = huggingface_model(config)
    if model is not None:
        _write_huggingface(weights, model, tokenizer, dataset.end_of_text, scratch / HUGGINGFACE)
    report("comparing it in LitGPT with the checkpoint")
    inputs = probe_batch(windows, config.sliding_window_size)
    own = trainer_logits(config, shards, inputs, kind=kind)
    texts = Texts(tokenizer / "tokenizer.json", inputs)
    final: FinalManifest = opened_by_litgpt(
        target, own, texts, windows, spec, checkpoint, spec.train.attention_end(dataset.end_of_text)
    )
    proof, shortcoming, target = None, "", scratch / HUGGINGFACE
    if model is None:
        parts = f"{config.name or 'this'} with {config.norm_class_name} and {config.mlp_class_name}"
        shortcoming = f"transformers has no architecture that computes what {parts} does; use {LITGPT}"
    else:
        try:
            report("comparing it in transformers with the checkpoint")
            proof = opened_by_transformers(target, own=own, texts=texts)
        except (DataError, OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
            # LitGPT's model is proved already: a training is not lost because another library computes differently.
            shutil.rmtree(target)
            what = f"as {model.fields['architectures'][0]} it is not the checkpoint's model: {error}"
            shortcoming = f"{what}; use {LITGPT}, and report this with the run's {CONFIG}"
    findings = [f"there is no {HUGGINGFACE}: {shortcoming}"] if shortcoming else []
    return final.model_copy(update={"huggingface": proof, "findings": tuple(findings)})


def huggingface_of(run: Storage, step: int, scratch: Path) -> Path:
    """Write the checkpoint of a step as a folder for Hugging Face, without a proof, and return it."""
    spec = read_spec(run)
    _, shards = verified_checkpoint(run, spec, scratch, step=step, newest=False)
    folder = stage(spec.dataset, scratch / "dataset", train=False)
    dataset = open_dataset(str(folder))
    model = huggingface_model(litgpt_config(spec.model, vocab_size=dataset.vocab_size))
    if model is None:
        raise UserError("transformers has no architecture that computes what this model does", fix="remove evaluation")
    weights, target = Weights(shards, run.address(checkpoints.folder_of(step))), scratch / HUGGINGFACE
    _write_huggingface(weights, model, folder / "tokenizer", dataset.end_of_text, target)
    return target


def _write_huggingface(
    weights: Weights, model: HuggingFaceModel, tokenizer: Path, end_of_text: int, target: Path
) -> None:
    def write(name: str, document: dict[str, Any]) -> None:
        (target / name).write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    target.mkdir(parents=True)
    write_safetensors(weights, model.rename, target)
    begin = HfTokenizer.from_file(str(tokenizer / "tokenizer.json")).encode("").ids or [end_of_text]
    tokens = {"bos_token_id": begin[0], "eos_token_id": end_of_text}
    (dtype,) = {str(form.dtype).removeprefix("torch.") for form in weights.forms.values()}
    write("config.json", model.fields | tokens | {"torch_dtype": dtype})
    write("generation_config.json", tokens)
    shutil.copy(tokenizer / "tokenizer.json", target)
    path = tokenizer / "tokenizer_config.json"
    fix = f"verify the dataset: train-litgpt verify {tokenizer.parent}"
    stored = parse_json(path.read_bytes(), dict[str, Any], where=str(path), fix=fix)
    # This class uses tokenizer.json unchanged; others build a tokenizer of their own from the vocabulary in it.
    fast = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.fields["max_position_embeddings"]}
    dropped = {"auto_map", "add_bos_token", "add_eos_token"}
    kept = {name: value for name, value in stored.items() if name not in dropped}
    write("tokenizer_config.json", kept | fast)


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="litgpt_demo collect", description=__doc__)
    parser.add_argument("--run", required=True, help="address of the run's folder")
    parser.add_argument("--step", type=int, help="take the checkpoint of this step")
    parser.add_argument("--newest", action="store_true", help="take the newest checkpoint, wherever the run is")
    waits = "import what it takes; begin at a line on standard input, publish at another; end if that is closed"
    parser.add_argument("--on-word", action="store_true", help=waits)
    args = parser.parse_args(argv)

    lines = follow_parent() if args.on_word else None

    def await_word() -> None:
        if lines is not None:
            lines.get()

    if lines is not None:  # import already what the proof needs
        with importing():
            from matplotlib.backends import backend_agg  # noqa: F401
            from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel  # noqa: F401
    await_word()
    run = open_storage(args.run)
    report: Report = report_progress if args.on_word else lambda what: None
    final = export(run, step=args.step, newest=args.newest, await_end=await_word, report=report)
    for line in summary_lines(final):
        print(line)
    return 0
