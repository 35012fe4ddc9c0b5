"""Making the two models of a checkpoint, and what is told about them. Imports torch."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from litgpt.config import Config
from litgpt.utils import save_config
from torch import Tensor

from litgpt_demo.config import TrainingSpec
from litgpt_demo.data.batches import Windows, open_split
from litgpt_demo.data.dataset import DatasetManifest, open_dataset
from litgpt_demo.data.tokens import TOKENIZER_FILES
from litgpt_demo.documents import parse_json
from litgpt_demo.errors import DataError
from litgpt_demo.export import FinalManifest, HuggingFaceProof
from litgpt_demo.export.card import Facts, write_card
from litgpt_demo.export.cost import cost_of
from litgpt_demo.export.huggingface import HuggingFaceModel, huggingface_model
from litgpt_demo.export.proof import (
    Probe,
    largest_difference,
    opened_by_litgpt,
    opened_by_transformers,
    tolerance,
    trainer_logits,
)
from litgpt_demo.export.weights import Weights, write_litgpt, write_safetensors
from litgpt_demo.manifests import bring
from litgpt_demo.metrics import perplexity
from litgpt_demo.models.model import litgpt_config
from litgpt_demo.runs import CONFIG, FINAL, HUGGINGFACE, LITGPT
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training import checkpoints
from litgpt_demo.training.checkpoints import CheckpointManifest

# The trainer evaluates in its own precision, collection in float32. Further apart than this share, or this much where
# the loss is small, it is not the model that was trained.
LOSS_TOLERANCE = 0.05

_LATER = (
    "matplotlib.backends.backend_agg",
    "transformers.generation",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)


def load_libraries() -> None:
    """Import what is imported only when the models are proved."""
    for name in _LATER:
        import_module(name)


def make(
    spec: TrainingSpec, checkpoint: CheckpointManifest, shards: Path, scratch: Path, *, address: str
) -> FinalManifest:
    """Make and prove the models in `scratch`. Return the manifest, which does not list the files yet.

    Args:
        address: what errors call the checkpoint, of which `shards` may be a copy.

    Raises:
        DataError: the dataset is not what it was, or the model loaded back differs from the checkpoint.
    """
    data = held_out(spec, scratch)
    weights = Weights(shards, address)
    config = litgpt_config(spec.model, vocab_size=data.manifest.vocab_size)
    export_litgpt(weights, config, data.tokenizer, scratch / LITGPT)
    model = huggingface_model(config)
    if model is not None:
        export_huggingface(weights, model, data, scratch / HUGGINGFACE)
    probe = Probe.of(data.validation)
    own = trainer_logits(config, shards, probe)
    final = _proved(scratch / LITGPT, own, probe, data, spec, checkpoint)
    proof, finding = _proved_by_transformers(model, config, scratch / HUGGINGFACE, own, probe, data)
    return final.model_copy(
        update={
            "parameters": sum(form.numel() for form in weights.forms.values()),
            "huggingface": proof,
            "findings": (finding,) if finding else (),
        }
    )


def describe(
    made: FinalManifest, run: Storage, spec: TrainingSpec, checkpoint: CheckpointManifest, scratch: Path
) -> FinalManifest:
    """Write the card of the models in `scratch`. Return the manifest with what the run has cost."""
    final = made.model_copy(update={"cost": cost_of(run)})
    write_card(Facts.of(run, spec, checkpoint, open_dataset(spec.dataset), final), scratch / FINAL)
    return final


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The part of the dataset that collection needs: all but the training split."""

    manifest: DatasetManifest
    validation: Windows
    tokenizer: Path
    """Its folder."""


def held_out(spec: TrainingSpec, scratch: Path) -> HeldOut:
    """The validation split and the tokenizer, every byte verified.

    Raises:
        DataError: they are not what the dataset's manifest says, or it is another dataset.
    """
    manifest = open_dataset(spec.dataset)
    if manifest.key != spec.dataset_key:
        raise DataError(
            f"{spec.dataset} is the dataset {manifest.key}, this run was trained on {spec.dataset_key}; put that back"
        )
    files = manifest.validation.files + manifest.tokenizer
    folder = bring(open_storage(spec.dataset), files, lambda: scratch / "dataset")
    windows = open_split(folder, manifest, manifest.validation, length=spec.model.sequence_length)
    return HeldOut(manifest=manifest, validation=windows, tokenizer=folder / "tokenizer")


# --- writing ----------------------------------------------------------------------------------------------------------


def export_litgpt(weights: Weights, config: Config, tokenizer: Path, target: Path) -> None:
    """Write a LitGPT checkpoint directory: lit_model.pth, model_config.yaml and the tokenizer's files."""
    target.mkdir(parents=True)
    write_litgpt(weights, target / "lit_model.pth")
    save_config(config, target)
    # No other file that lies there: LitGPT executes a lit_model.pth, and imports what a prompt_style.yaml names.
    for path in (tokenizer / name for name in TOKENIZER_FILES):
        if path.is_file():
            shutil.copy(path, target)


def export_huggingface(weights: Weights, model: HuggingFaceModel, data: HeldOut, target: Path) -> None:
    """Write a Hugging Face model directory: safetensors, config.json, generation_config.json and the tokenizer."""
    target.mkdir(parents=True)
    write_safetensors(weights, model.rename, target)
    tokens = {"bos_token_id": data.manifest.end_of_text, "eos_token_id": data.manifest.end_of_text}
    (dtype,) = {str(form.dtype).removeprefix("torch.") for form in weights.forms.values()}
    _write_json(target / "config.json", model.fields | tokens | {"torch_dtype": dtype})
    _write_json(target / "generation_config.json", tokens)
    shutil.copy(data.tokenizer / "tokenizer.json", target)
    path = data.tokenizer / "tokenizer_config.json"
    fix = f"verify the dataset: train-litgpt verify {data.tokenizer.parent}"
    said = parse_json(path.read_bytes(), dict[str, Any], where=str(path), fix=fix)
    # This class takes tokenizer.json as it is; others build a tokenizer of their own from the vocabulary in it.
    fast = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": model.fields["max_position_embeddings"]}
    kept = {name: value for name, value in said.items() if name not in {"auto_map", "add_bos_token", "add_eos_token"}}
    _write_json(target / "tokenizer_config.json", kept | fast)
    if (special := data.tokenizer / "special_tokens_map.json").is_file():
        shutil.copy(special, target)


def _write_json(path: Path, document: dict[str, Any]) -> None:
    path.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


# --- proving ----------------------------------------------------------------------------------------------------------


def _proved(
    folder: Path, own: Tensor, probe: Probe, data: HeldOut, spec: TrainingSpec, checkpoint: CheckpointManifest
) -> FinalManifest:
    """Return the result of opening the folder with LitGPT.

    Raises:
        DataError: it is not the checkpoint's model.
    """
    with opened_by_litgpt(folder) as loaded:
        difference, allowed = largest_difference(own, loaded.logits(probe)), tolerance(own)
        if not difference <= allowed:
            raise DataError(
                f"the model loaded back from {LITGPT} differs by {difference:.2e} in a logit from the checkpoint, at "
                f"most {allowed:.0e} is rounding; do not use it, and report this with the run's {CONFIG}"
            )
        windows = loaded.affordable_windows(data.validation, most=spec.train.evaluation_windows)
        loss = loaded.validation_loss(data.validation, windows)
        require_same_loss(loss, checkpoint.validation_loss, same_samples=windows >= _trainers(spec, data))
        prompt, sample = loaded.writes(probe)
    return FinalManifest(
        run=spec.run,
        step=checkpoint.step,
        tokens=checkpoint.tokens,
        complete=checkpoints.reached_end(checkpoint, spec),
        parameters=0,
        dataset_key=checkpoint.dataset_key,
        validation_loss=loss,
        perplexity=perplexity(loss),
        validation_windows=windows,
        trainer_validation_loss=checkpoint.validation_loss,
        logits_difference=difference,
        logits_tolerance=allowed,
        huggingface=None,
        prompt=prompt,
        sample=sample,
        files=(),
    )


def _trainers(spec: TrainingSpec, data: HeldOut) -> int:
    """Return the number of samples that the trainer evaluates on."""
    return min(spec.train.evaluation_windows, len(data.validation))


def require_same_loss(loss: float, trainers: float | None, *, same_samples: bool) -> None:
    """The model that was loaded back has the loss that the trainer found at that step, on the same samples.

    Raises:
        DataError: it has another one.
    """
    if trainers is None or not same_samples:
        return
    if not abs(loss - trainers) <= LOSS_TOLERANCE * max(1.0, trainers):
        raise DataError(
            f"the model loaded back from {LITGPT} has a validation loss of {loss:.4f}, the trainer found "
            f"{trainers:.4f}; do not use it, and report this with the run's {CONFIG}"
        )


def _proved_by_transformers(
    model: HuggingFaceModel | None, config: Config, folder: Path, own: Tensor, probe: Probe, data: HeldOut
) -> tuple[HuggingFaceProof | None, str]:
    """Return the result of opening the folder with transformers; the folder goes if it is not the checkpoint's model.

    LitGPT's is proved by then, and a training is not lost because another library cannot say the same.
    """
    if model is None:
        return None, (
            f"there is no {HUGGINGFACE}: transformers has no architecture that computes what {config.name or 'this'} "
            f"with {config.norm_class_name} and {config.mlp_class_name} does; use {LITGPT}"
        )
    try:
        tokenizer = data.tokenizer / "tokenizer.json"
        difference, sample = opened_by_transformers(folder, own=own, probe=probe, tokenizer=tokenizer)
    except (DataError, OSError, ValueError, RuntimeError, KeyError, TypeError) as error:
        shutil.rmtree(folder)
        return None, (
            f"there is no {HUGGINGFACE}: as {model.architecture} it is not the checkpoint's model: {error}; use "
            f"{LITGPT}, and report this with the run's {CONFIG}"
        )
    return HuggingFaceProof(architecture=model.architecture, logits_difference=difference, sample=sample), ""
