"""Making the two models of a checkpoint, and their proofs. Imports torch."""

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
from litgpt_demo.export.huggingface import HuggingFaceModel, huggingface_model
from litgpt_demo.export.proof import (
    LitgptModel,
    Probe,
    largest_difference,
    opened_by_transformers,
    tolerance,
    trainer_logits,
)
from litgpt_demo.export.weights import Weights, write_litgpt, write_safetensors
from litgpt_demo.manifests import bring
from litgpt_demo.metrics import perplexity
from litgpt_demo.models.model import litgpt_config
from litgpt_demo.runs import CONFIG, HUGGINGFACE, LITGPT
from litgpt_demo.storage import open_storage
from litgpt_demo.training import checkpoints
from litgpt_demo.training.checkpoints import CheckpointManifest

# The trainer evaluates in its own precision, collection in float32. Further apart than this share, or this much where
# the loss is small, it is not the model that was trained.
LOSS_TOLERANCE = 0.05


def load_libraries() -> None:
    """Import what is imported only when the models are proved."""
    import_module("matplotlib.backends.backend_agg")
    for name in ("generation", "models.auto.modeling_auto", "models.auto.tokenization_auto"):
        import_module(f"transformers.{name}")


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """The part of the dataset that collection needs: all but the training split."""

    manifest: DatasetManifest
    validation: Windows
    tokenizer: Path
    """Its folder."""


def make(
    spec: TrainingSpec, checkpoint: CheckpointManifest, shards: Path, scratch: Path, *, address: str
) -> FinalManifest:
    """Make and prove the models in `scratch`. Return the manifest, which does not list the files yet.

    Args:
        address: what errors call the checkpoint, of which `shards` may be a copy.

    Raises:
        DataError: the dataset is not what it was, or the model loaded back differs from the checkpoint.
    """
    manifest = open_dataset(spec.dataset)
    if manifest.key != spec.dataset_key:
        raise DataError(
            f"{spec.dataset} is the dataset {manifest.key}, this run was trained on {spec.dataset_key}; put that back"
        )
    files = manifest.validation.files + manifest.tokenizer
    folder = bring(open_storage(spec.dataset), files, lambda: scratch / "dataset")
    windows = open_split(folder, manifest, manifest.validation, length=spec.model.sequence_length)
    data = HeldOut(manifest=manifest, validation=windows, tokenizer=folder / "tokenizer")
    weights = Weights(shards, address)
    config = litgpt_config(spec.model, vocab_size=manifest.vocab_size)
    export_litgpt(weights, config, data.tokenizer, scratch / LITGPT)
    if (model := huggingface_model(config)) is not None:
        export_huggingface(weights, model, data, scratch / HUGGINGFACE)
    probe = Probe.of(windows)
    own = trainer_logits(config, shards, probe)
    final = _proved(scratch / LITGPT, own, probe, data, spec, checkpoint)
    if model is not None:
        proof, finding = _proved_by_transformers(model, scratch / HUGGINGFACE, own, probe, data)
    else:
        proof = None
        finding = (
            f"there is no {HUGGINGFACE}: transformers has no architecture that computes what {config.name or 'this'} "
            f"with {config.norm_class_name} and {config.mlp_class_name} does; use {LITGPT}"
        )
    return final.model_copy(
        update={
            "parameters": sum(form.numel() for form in weights.forms.values()),
            "huggingface": proof,
            "findings": (finding,) if finding else (),
        }
    )


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
    """Return the result of opening the folder with LitGPT, or raise DataError: it is not the checkpoint's model."""
    never = f"do not use it, and report this with the run's {CONFIG}"
    with LitgptModel(folder) as loaded:
        difference, allowed = largest_difference(own, loaded.logits(probe)), tolerance(own)
        if not difference <= allowed:
            raise DataError(
                f"the model loaded back from {LITGPT} differs by {difference:.2e} in a logit from the checkpoint, at "
                f"most {allowed:.0e} is rounding; {never}"
            )
        windows = loaded.affordable_windows(data.validation, most=spec.train.evaluation_windows)
        loss, trainers = loaded.validation_loss(data.validation, windows), checkpoint.validation_loss
        same_samples = windows >= min(spec.train.evaluation_windows, len(data.validation))
        if trainers is not None and same_samples and not abs(loss - trainers) <= LOSS_TOLERANCE * max(1.0, trainers):
            raise DataError(
                f"the model loaded back from {LITGPT} has a validation loss of {loss:.4f}, the trainer found "
                f"{trainers:.4f}; {never}"
            )
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
        trainer_validation_loss=trainers,
        logits_difference=difference,
        logits_tolerance=allowed,
        huggingface=None,
        prompt=prompt,
        sample=sample,
        files=(),
    )


def _proved_by_transformers(
    model: HuggingFaceModel, folder: Path, own: Tensor, probe: Probe, data: HeldOut
) -> tuple[HuggingFaceProof | None, str]:
    """Return the result of opening the folder with transformers; the folder goes if it is not the checkpoint's model.

    LitGPT's is proved by then, and a training is not lost because another library cannot say the same.
    """
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
