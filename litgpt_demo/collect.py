"""Collection: the finished run's last checkpoint becomes a LitGPT checkpoint directory that is proved to open."""

from __future__ import annotations

import argparse
import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from litgpt_demo import checkpoints
from litgpt_demo.checkpoints import CheckpointManifest
from litgpt_demo.config import Settings, TrainingSpec
from litgpt_demo.dataset import DatasetManifest, open_dataset, stage
from litgpt_demo.faults import DataError, UserError
from litgpt_demo.manifests import FileRecord, read_manifest, write_manifest
from litgpt_demo.runs import FINAL, read_spec
from litgpt_demo.storage import Storage, open_storage

if TYPE_CHECKING:
    import torch
    from litgpt.model import GPT

# Between the trainer's weights and the same weights loaded back by LitGPT, both in float32 on the CPU.
LOGITS_TOLERANCE = 1e-4

_PROMPT_TOKENS, _NEW_TOKENS = 16, 96


class FinalManifest(Settings):
    """What a collected model is, and what was checked of it."""

    run: str
    step: int
    tokens: int
    parameters: int
    dataset_key: str
    validation_loss: float | None
    """Nats per token."""
    perplexity: float | None
    logits_difference: float
    """Largest difference between the checkpoint's logits and the loaded model's; at most LOGITS_TOLERANCE."""
    prompt: str
    """Opening of a validation document."""
    sample: str
    """What the collected model wrote after it."""
    files: tuple[FileRecord, ...]


def collected(run: Storage) -> FinalManifest | None:
    """The manifest of the collected model, if the run has one and nobody has removed a file of it."""
    final = run.within(FINAL)
    manifest = read_manifest(final, FinalManifest)
    if manifest is None or {record.path for record in manifest.files} - set(final.list()):
        return None
    return manifest


def collect(run: Storage) -> FinalManifest:
    """Turn the run's last checkpoint into `final/litgpt`, or find it done.

    Raises:
        UserError: the run has not reached its last step.
        DataError: the checkpoint does not verify, or the model loaded back differs from it.
    """
    if (done := collected(run)) is not None:
        return done
    spec = read_spec(run)
    manifest = last_checkpoint(run, spec)
    with tempfile.TemporaryDirectory(prefix="litgpt-collect-") as temporary:
        scratch = Path(temporary)
        shards = checkpoints.open_checkpoint(run, manifest, lambda: scratch / "shards")
        dataset = open_dataset(spec.dataset)
        folder = stage(spec.dataset, scratch / "dataset")
        model = export(spec, dataset, shards, folder / "tokenizer", scratch / "litgpt")
        prompt, sample, difference = prove(model, scratch / "litgpt", opening_of(dataset, folder))
        final = run.within(FINAL)
        final.remove("")
        files = [FileRecord.of(final.upload(path, path.name)) for path in sorted((scratch / "litgpt").iterdir())]
    result = FinalManifest(
        run=spec.run,
        step=manifest.step,
        tokens=manifest.tokens,
        parameters=sum(weight.numel() for weight in model.parameters()),
        dataset_key=manifest.dataset_key,
        validation_loss=manifest.validation_loss,
        perplexity=None if manifest.validation_loss is None else math.exp(min(manifest.validation_loss, 700.0)),
        logits_difference=difference,
        prompt=prompt,
        sample=sample,
        files=tuple(files),
    )
    write_manifest(final, result)
    return result


def last_checkpoint(run: Storage, spec: TrainingSpec) -> CheckpointManifest:
    """The checkpoint of the run's last step.

    Raises:
        UserError: there is none yet.
    """
    there = checkpoints.committed(run)
    if not there or there[0].step < spec.steps:
        reached = there[0].step if there else 0
        raise UserError(
            f"{run.address()} has reached step {reached} of {spec.steps}; run it again, it goes on from there"
        )
    return there[0]


def export(spec: TrainingSpec, dataset: DatasetManifest, shards: Path, tokenizer: Path, target: Path) -> GPT:
    """Write a LitGPT checkpoint directory: lit_model.pth, model_config.yaml, tokenizer files. Returns the model."""
    import torch
    from litgpt.model import GPT
    from litgpt.utils import save_config

    from litgpt_demo.model import litgpt_config

    target.mkdir()
    model = GPT(litgpt_config(spec.model, vocab_size=dataset.vocab_size))
    checkpoints.load_weights(shards, model.state_dict())
    torch.save(model.state_dict(), target / "lit_model.pth")
    save_config(model.config, target)
    for path in tokenizer.iterdir():
        shutil.copy(path, target)
    return model


def opening_of(dataset: DatasetManifest, folder: Path) -> list[int]:
    """The first ids of the validation split: a prompt that the model has not seen."""
    import numpy as np

    first = folder / dataset.validation.files[0].path  # has a whole document, whatever follows in other files
    ids = np.memmap(first, dtype=dataset.dtype, mode="r")[:_PROMPT_TOKENS]
    return [int(token) for token in ids]


def prove(model: GPT, folder: Path, opening: list[int]) -> tuple[str, str, float]:
    """Load the directory back as a user would, compare logits with `model`'s, and let it write.

    Returns:
        The prompt, the text written after it, and the largest difference of a logit.
    """
    import torch
    from litgpt import LLM

    llm = LLM.load(str(folder), distribute=None)
    llm.distribute(accelerator="cpu", devices=1, precision="32-true")
    # A prompt cut inside a character comes back as U+FFFD, three bytes and at worst three tokens, from the tokenizer.
    opening = opening[: max(1, llm.config.block_size // 4)]
    room = max(1, llm.config.block_size - 3 * len(opening))
    prompt = llm.preprocessor.tokenizer.decode(torch.tensor(opening))
    difference = largest_difference(model, llm.model, opening)
    if difference > LOGITS_TOLERANCE:
        raise DataError(
            f"the model loaded back from final/litgpt differs by {difference:.2e} in a logit from the checkpoint, at "
            f"most {LOGITS_TOLERANCE:.0e} is rounding; do not use it, and report this with the run's config.json"
        )
    torch.manual_seed(0)
    sample = llm.generate(prompt, max_new_tokens=min(_NEW_TOKENS, room), temperature=0.8, top_k=50)
    return prompt, str(sample), difference


def largest_difference(model: GPT, loaded: torch.nn.Module, ids: list[int]) -> float:
    """The largest absolute difference of two models' logits on the same ids, in float32."""
    import torch

    inputs = torch.tensor([ids])
    with torch.no_grad():
        own = model.eval()(inputs).float()
        back = loaded(inputs).float()
    return float((own - back).abs().max())


def main(argv: Sequence[str]) -> int:
    """`python -m litgpt_demo collect --run ADDRESS`."""
    parser = argparse.ArgumentParser(prog="litgpt_demo collect", description=__doc__)
    parser.add_argument("--run", required=True, help="address of the run's folder")
    final = collect(open_storage(parser.parse_args(argv).run))
    print(f"step {final.step}, validation loss {final.validation_loss}, {len(final.files)} files in {FINAL}")
    return 0
