"""Starting from trained weights: they are compared with the model, and read into it on every rank."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import torch
import yaml
from litgpt.config import Config
from litgpt.model import GPT
from safetensors import safe_open
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor, distribute_tensor

from litgpt_demo.catalogue import OF_WEIGHTS
from litgpt_demo.config import InitialWeights, ModelConfig, Settings
from litgpt_demo.documents import fetch_verified, read_manifest
from litgpt_demo.errors import DataError, UserError
from litgpt_demo.models.huggingface import HuggingFaceModel, Tensors, huggingface_model
from litgpt_demo.models.model import unchecked_config
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training import checkpoint_reader
from litgpt_demo.training.checkpoint_reader import AVERAGE, OPTIMIZER, WEIGHTS, explain_unpickling_errors
from litgpt_demo.training.checkpoints import CheckpointManifest
from litgpt_demo.training.origins import CONFIGS, optimizer_problem, position_problem, records_of
from litgpt_demo.training.setup import Training

# Fields of LitGPT's Config that do not change what a model computes: names, and room for more.
_FREE_FIELDS = {"name", "hf_config", "block_size", "vocab_size", "padding_multiple"}
# Fields of transformers' configs that do not. Files on the Hub have several fields of rotary embeddings, which
# transformers 5 reads and writes only as `rope_parameters`.
_FREE_TRANSFORMERS_FIELDS = {
    "_attn_implementation", "architectures", "max_position_embeddings", "tie_word_embeddings", "use_cache",
    "rope_theta", "rope_scaling", "rope_local_base_freq", "rotary_emb_base", "rotary_pct", "partial_rotary_factor",
}  # fmt: skip
_LITGPT_NAMES = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "head_dim": "head_size",
    "num_key_value_heads": "n_query_groups", "num_kv_heads": "n_query_groups", "vocab_size": "padded_vocab_size",
}  # fmt: skip
_FIX = "make model.name and model.config those of the weights"
_MOST_NAMED = 3  # tensors that do not fit


def start_from(training: Training, origin: InitialWeights) -> None:
    """Read the weights into the model on every rank, and the optimizer's state if it is wanted."""
    seed, length = training.spec.train.seed, training.spec.model.sequence_length
    problem = optimizer_problem(origin, training.spec.train.optimizer)
    if problem is None:
        problem = position_problem(origin, training.data.manifest.sample_hashes, seed=seed, length=length)
    if problem is not None:
        raise UserError(problem[0], fix=problem[1])
    ranks, local_rank, storage = training.ranks, training.fabric.local_rank, open_storage(origin.address)
    local = storage.local_path()
    # Nodes share no folder, though they may share a machine.
    folder = local or training.scratch.parent / f"origin-{ranks.rank - local_rank}"
    files = [record for record in records_of(origin) if not record.path.startswith(AVERAGE)]
    files = [record for record in files if origin.optimizer or not record.path.startswith(OPTIMIZER)]
    # All ranks see a local folder, and each verifies a part of it. From a bucket, each node fetches all files.
    part = files[ranks.rank :: ranks.world_size]
    if local is None:
        part = files[local_rank :: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))]
    fix = "the weights have changed since the run was submitted: put them back, or submit it again"
    ranks.gather_then_broadcast(lambda: fetch_verified(storage, part, lambda: folder, fix), lambda _: None)
    # Making an optimizer's state may be collective, so no rank begins to read before all can.
    ranks.gather_then_broadcast(lambda: _require_tensors(training, origin, folder), lambda _: None)
    ranks.gather_then_broadcast(lambda: _read_weights(training, origin, folder), lambda _: None)
    if training.average is not None:
        training.average.restart()
    if local is None and local_rank == 0:  # until all have read
        shutil.rmtree(folder, ignore_errors=True)


def _require_tensors(training: Training, origin: InitialWeights, folder: Path) -> None:
    problems = tensor_problems(training.model.module.config, origin, folder)
    if problems:
        raise DataError("; ".join(problems), fix=_FIX)


@torch.no_grad()
def _read_weights(training: Training, origin: InitialWeights, folder: Path) -> None:
    model, optimizer = training.model.module, training.optimizer.optimizer
    state: dict[str, Any] = get_model_state_dict(model)
    if origin.optimizer:
        precision = training.fabric.strategy.precision
        checkpoint_reader.load_checkpoint(model, optimizer, folder, precision=precision, address=origin.address)
    elif origin.kind == "checkpoint":
        checkpoint_reader.load_weights(folder, state, address=origin.address)
    else:
        for part in _iter_weights(model.config, origin, folder):
            for name, tensor in part.items():
                _copy(tensor, state[name])
    if origin.kind == "litgpt" and training.ranks.rank == 0:
        wrappers = _read_litgpt(origin, folder)[1]
        if wrappers:
            print(f"model.init_from: {', '.join(sorted(wrappers))} was removed from names of weights", flush=True)


def _copy(tensor: torch.Tensor, target: torch.Tensor) -> None:
    value = tensor.to(target.device, target.dtype)
    if isinstance(target, DTensor):  # every rank has read the same tensor, and takes its part without communication
        value = distribute_tensor(value, target.device_mesh, target.placements, src_data_rank=None)
    target.copy_(value)


def tensor_problems(config: Config, origin: InitialWeights, folder: Path) -> list[str]:
    """Return a sentence for each of the first tensors in a local folder whose name or shape is not the model's."""
    if origin.kind == "checkpoint":
        stored = checkpoint_reader.read_index(folder, address=origin.address).state_dict_metadata.items()
        found = {name.removeprefix(WEIGHTS): entry.size for name, entry in stored if name.startswith(WEIGHTS)}  # type: ignore[union-attr]
    else:
        found = {}
        for part in _iter_weights(config, origin, folder, meta=True):
            found |= {name: tensor.shape for name, tensor in part.items()}
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in GPT(config).state_dict().items()}
    wrong = [name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name)]

    def shape(shapes: dict[str, torch.Size], name: str) -> str:
        return str(list(shapes[name])) if name in shapes else "no such tensor"

    return [
        f"{name}: {shape(found, name)} in {origin.name}, {shape(expected, name)} in the model"
        for name in wrong[:_MOST_NAMED]
    ]


def _iter_weights(config: Config, origin: InitialWeights, folder: Path, *, meta: bool = False) -> Iterator[Tensors]:
    """Yield the weights by LitGPT's names, those of transformers block by block; with `meta`, only their shapes."""
    if origin.kind == "litgpt":
        yield _read_litgpt(origin, folder)[0]
        return
    tied = _transformers_config(folder).tie_word_embeddings
    model = huggingface_model(config)
    with ExitStack() as stack:
        files: dict[str, Any] = {}  # by the name of each tensor
        for path in origin.files:
            if path not in CONFIGS.values():
                file = stack.enter_context(safe_open(folder / path, "pt"))
                files |= dict.fromkeys(file.keys(), file)

        def read(name: str) -> torch.Tensor:
            if meta:
                return torch.empty(files[name].get_slice(name).get_shape(), device="meta")
            tensor: torch.Tensor = files[name].get_tensor(name)
            return tensor

        for _, names in groupby(sorted(files, key=_block_of), _block_of):
            part: Tensors = {}
            if model is not None:
                try:
                    part = model.rename_back({name: read(name) for name in names})
                except KeyError as error:
                    problem = f"{origin.name} has a tensor {error}, but this model has none"
                    raise DataError(problem, fix=_FIX) from error
            if tied and "transformer.wte.weight" in part:
                part.setdefault("lm_head.weight", part["transformer.wte.weight"])
            yield part


def _block_of(name: str) -> str:
    numbered = re.match(r".*?\.\d+\.", name)
    return "" if numbered is None else numbered[0]


# The parts that torch.compile, DDP, Fabric, FSDP and activation checkpointing add to the names of weights.
_WRAPPER = re.compile(r"\b(_orig_mod|module|_forward_module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def _read_litgpt(origin: InitialWeights, folder: Path) -> tuple[Tensors, set[str]]:
    with explain_unpickling_errors(origin.name):
        state = torch.load(folder / "lit_model.pth", map_location="cpu", mmap=True, weights_only=True)
    if isinstance(state, dict):  # `litgpt pretrain` and Lightning save more than weights
        for key in ("model", "state_dict"):
            if isinstance(state.get(key), dict):
                state = state[key]
                break
    entries = state if isinstance(state, dict) else {"": state}
    for name, entry in entries.items():
        if not (name and torch.is_tensor(entry)):
            kind = type(entry).__name__
            if name:
                kind += f" by the name {name!r}"
            problem = f"lit_model.pth of {origin.name} holds a {kind}, not weights"
            raise DataError(problem, fix="save only the dict of names and tensors by torch.save")
    return {_WRAPPER.sub("", name): entry for name, entry in entries.items()}, {*_WRAPPER.findall(" ".join(entries))}


def _transformers_config(folder: Path) -> Any:
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


Problem: TypeAlias = tuple[str, str]
"""A difference between the weights and the model, and its fix."""


class CompatibilityRequest(Settings):
    model: ModelConfig
    vocab_size: int
    origin: InitialWeights

    def check(self) -> list[Problem]:
        """Compare the weights with the model: by their settings, then in a local folder by tensors."""
        origin, storage = self.origin, open_storage(self.origin.address)
        config = unchecked_config(self.model, vocab_size=self.vocab_size)
        if origin.kind == "huggingface":
            exported = huggingface_model(config)
            with TemporaryDirectory() as scratch:
                storage.download("config.json", Path(scratch, "config.json"))
                stored = _transformers_config(Path(scratch))
            if exported is None or exported.fields["model_type"] != stored.model_type:
                kind = "something else" if exported is None else exported.fields["model_type"]
                return [(f"{origin.name} is a {stored.model_type}, but the model is a {kind} to transformers", _FIX)]
            expected, found = _comparable_fields(exported, stored)
        else:
            expected = {name: value for name, value in vars(config).items() if name not in _FREE_FIELDS}
            found = self._litgpt_fields(storage)
        rows = found["padded_vocab_size"]
        if rows < self.vocab_size:
            problem = f"the tokenizer has {self.vocab_size} ids, but the weights of {origin.name} {rows} embeddings"
            return [(problem, OF_WEIGHTS)]
        problems = []
        for name, value in expected.items():
            stored_value = found.get(name)
            if stored_value == value:
                continue
            fix = f"set model.config.{name}={stored_value}, or {_FIX}" if name in vars(config) else _FIX
            problem = f"the model has {name} {value}, but the weights of {origin.name} have {stored_value}"
            problems.append((problem, fix))
        folder = storage.local_path()
        if not problems and folder is not None and (folder / next(iter(origin.files))).exists():
            problems = [(problem, _FIX) for problem in tensor_problems(config, origin, folder)]
        return problems

    def _litgpt_fields(self, storage: Storage) -> dict[str, Any]:
        if self.origin.kind == "litgpt":
            config = Config(**yaml.safe_load(storage.read(CONFIGS["litgpt"])))
        else:
            manifest = read_manifest(storage, CheckpointManifest)
            model = self.model
            if manifest is not None and manifest.config:
                model = ModelConfig.model_validate(manifest.config["model"])
            config = unchecked_config(model, vocab_size=self.vocab_size)
        return dict(vars(config))


def _comparable_fields(exported: HuggingFaceModel, stored: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of both configs that decide what a model computes, by LitGPT's names where it has them."""
    from transformers import AutoConfig

    # No model reads a field that transformers' class does not keep.
    names = {name for name in (*exported.fields, "rope_parameters") if hasattr(stored, name)}
    names -= _FREE_TRANSFORMERS_FIELDS
    if "hidden_activation" in names:  # it takes precedence
        names.discard("hidden_act")

    def fields(config: Any) -> dict[str, Any]:
        values = {_LITGPT_NAMES.get(name, name): getattr(config, name) for name in sorted(names)}
        values["head_size"] = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return values

    return fields(AutoConfig.for_model(**exported.fields)), fields(stored)


def main(argv: Sequence[str]) -> int:
    print(json.dumps(CompatibilityRequest.model_validate_json(sys.stdin.read()).check()))
    return 0
