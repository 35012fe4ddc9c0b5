"""Starting from weights that were trained before: compared with the model, and read into it on every rank."""

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
from typing import Any

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
from litgpt_demo.models.huggingface import Tensors, huggingface_model
from litgpt_demo.models.model import litgpt_config, unchecked_config
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoint_reader import (
    OPTIMIZER,
    WEIGHTS,
    explain_unpickling_errors,
    load_checkpoint,
    load_weights,
    read_index,
)
from litgpt_demo.training.checkpoints import CheckpointManifest
from litgpt_demo.training.origins import CONFIGS, records_of, replay_problem
from litgpt_demo.training.setup import Training

# Names of a model and room for it, which change nothing in what it computes.
_FREE = {"name", "hf_config", "block_size", "vocab_size", "padding_multiple"}
_FREE_THERE = {"_attn_implementation", "architectures", "max_position_embeddings", "tie_word_embeddings", "use_cache"}
# What files on the Hub say of rotary embeddings: transformers 5 makes `rope_parameters` of it, and writes those alone.
_FREE_THERE |= {"rope_theta", "rope_scaling", "rope_local_base_freq", "rotary_emb_base", "rotary_pct"}
_FREE_THERE |= {"partial_rotary_factor"}
# Settings of transformers that are one of LitGPT's.
_LITGPTS = {
    "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head", "head_dim": "head_size",
    "num_key_value_heads": "n_query_groups", "num_kv_heads": "n_query_groups", "vocab_size": "padded_vocab_size",
}  # fmt: skip
_FIX = "make model.name and model.config those of the weights"
_TOLD = 3  # tensors that do not fit; the others fit as little


def start_from(training: Training, origin: InitialWeights) -> None:
    """Read the weights into the model on every rank, and the optimizer's state where it is wanted.

    A DataError where they are not what was found, or not one tensor for each of the model's; a UserError where the
    run's samples are those that the optimizer's state was made of.
    """
    if problem := replay_problem(origin, training.data.manifest.sample_keys, training.spec.train.seed):
        raise UserError(problem[0], fix=problem[1])
    ranks, local_rank, place = training.ranks, training.fabric.local_rank, open_storage(origin.address)
    processes, local = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), place.local_path()
    # Nodes share no folder, though they may share a machine.
    folder = local or training.scratch.parent / f"origin-{ranks.rank - local_rank}"
    files = [one for one in records_of(origin) if origin.optimizer or not one.path.startswith(OPTIMIZER)]
    # All ranks see all of a local folder, and verify a share of it each; of a bucket, of what their node fetches.
    share = files[local_rank::processes] if local is None else files[ranks.rank :: ranks.world_size]
    fix = "the weights have changed since the run was submitted: put them back, or submit it again"
    ranks.gather_then_broadcast(lambda: fetch_verified(place, share, lambda: folder, fix), lambda _: None)

    @torch.no_grad()
    def read() -> None:
        model, optimizer = training.model.module, training.optimizer.optimizer
        config = litgpt_config(training.spec.model, vocab_size=training.data.manifest.vocab_size)
        if problems := tensor_problems(config, origin, folder):
            raise DataError("; ".join(problems), fix=_FIX)
        state: dict[str, Any] = get_model_state_dict(model)
        if origin.optimizer:
            precision = training.fabric.strategy.precision
            if saved := load_checkpoint(
                model, optimizer, folder, precision=precision.state_dict(), address=origin.address
            ):
                precision.load_state_dict(saved)
        elif origin.kind == "checkpoint":
            load_weights(folder, state, address=origin.address)
        else:
            for name, tensor in (item for part in _parts(config, origin, folder) for item in part.items()):
                into, value = state[name], tensor.to(state[name].device, state[name].dtype)
                if isinstance(into, DTensor):  # every rank has read the same, and takes its part without communication
                    value = distribute_tensor(value, into.device_mesh, into.placements, src_data_rank=None)
                into.copy_(value)
        if origin.kind == "litgpt" and ranks.rank == 0 and (wrappers := _of_litgpt(origin, folder)[1]):
            print(f"model.from: {', '.join(sorted(wrappers))} was taken off the names of the weights", flush=True)

    ranks.gather_then_broadcast(read, lambda _: None)
    if local is None and local_rank == 0:  # until all have read
        shutil.rmtree(folder, ignore_errors=True)


def tensor_problems(config: Config, origin: InitialWeights, folder: Path) -> list[str]:
    """Return which tensors of the weights in a local folder, by name and shape, are not those of the model."""
    if origin.kind == "checkpoint":
        stored = read_index(folder, address=origin.address).state_dict_metadata.items()
        found = {name.removeprefix(WEIGHTS): entry.size for name, entry in stored if name.startswith(WEIGHTS)}  # type: ignore[union-attr]
    else:
        parts = _parts(config, origin, folder, forms=True)
        found = {name: tensor.shape for part in parts for name, tensor in part.items()}
    with torch.device("meta"):
        expected = {name: tensor.shape for name, tensor in GPT(config).state_dict().items()}
    wrong = [name for name in sorted({*expected, *found}) if expected.get(name) != found.get(name)][:_TOLD]

    def shape(shapes: dict[str, torch.Size], name: str) -> str:
        return str(list(shapes[name])) if name in shapes else "no such tensor"

    return [f"{name}: {shape(found, name)} in {origin.name}, {shape(expected, name)} in the model" for name in wrong]


def _parts(config: Config, origin: InitialWeights, folder: Path, *, forms: bool = False) -> Iterator[Tensors]:
    """Yield the weights of a folder by LitGPT's names, those of transformers a block at a time; of them only `forms`,
    where no content is needed."""
    if origin.kind == "litgpt":
        yield _of_litgpt(origin, folder)[0]
        return
    tied, found = _theirs(folder).tie_word_embeddings, huggingface_model(config)
    with ExitStack() as stack:
        paths = [folder / one for one in origin.files if one not in CONFIGS.values()]
        files = [stack.enter_context(safe_open(path, "pt")) for path in paths]
        where = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (a file is no mapping)

        def read(name: str) -> torch.Tensor:
            shape = where[name].get_slice(name).get_shape()
            return torch.empty(shape, device="meta") if forms else where[name].get_tensor(name)

        def block(name: str) -> str:
            return numbered[0] if (numbered := re.match(r".*?\.\d+\.", name)) else ""

        for _, names in groupby(sorted(where, key=block), block):
            try:
                part = {} if found is None else found.rename_back({name: read(name) for name in names})
            except KeyError as error:
                raise DataError(f"{origin.name} has a tensor {error}, and this model has none", fix=_FIX) from error
            if tied and "transformer.wte.weight" in part:
                part.setdefault("lm_head.weight", part["transformer.wte.weight"])
            yield part


# What torch.compile, DDP, Fabric, FSDP and activation checkpointing put into the names of the weights they wrap.
_WRAPPER = re.compile(r"\b(_orig_mod|module|_forward_module|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")


def _of_litgpt(origin: InitialWeights, folder: Path) -> tuple[Tensors, set[str]]:
    """Return the weights of a lit_model.pth, and what was taken off their names."""
    with explain_unpickling_errors(origin.name):
        state = torch.load(folder / "lit_model.pth", map_location="cpu", mmap=True, weights_only=True)
    if isinstance(state, dict):  # `litgpt pretrain` and Lightning have more in it
        state = next((state[key] for key in ("model", "state_dict") if isinstance(state.get(key), dict)), state)
    entries = state if isinstance(state, dict) else {"": state}
    for name, entry in entries.items():
        if not (name and torch.is_tensor(entry)):
            kind = type(entry).__name__ + (f" by the name {name!r}" if name else "")
            what = f"lit_model.pth of {origin.name} holds a {kind}, and no weights"
            raise DataError(what, fix="save the dict of names and tensors alone by torch.save")
    return {_WRAPPER.sub("", name): entry for name, entry in entries.items()}, {*_WRAPPER.findall(" ".join(entries))}


def _theirs(folder: Path) -> Any:
    """The settings of a model of transformers, with its defaults for what is not written."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


class CompatibilityRequest(Settings):
    """The input of `python -m litgpt_demo compare`."""

    model: ModelConfig
    vocab_size: int
    origin: InitialWeights

    def answer(self) -> list[tuple[str, str]]:
        """Return what is wrong, and what would do, where the weights are not of the model: by the settings that lie
        beside them, and in a local folder by the names and shapes of tensors."""
        origin, place = self.origin, open_storage(self.origin.address)
        config = unchecked_config(self.model, vocab_size=(vocab_size := self.vocab_size))
        ours: dict[str, Any] = {name: value for name, value in vars(config).items() if name not in _FREE}
        if origin.kind == "huggingface":
            from transformers import AutoConfig

            with TemporaryDirectory() as folder:
                place.download("config.json", Path(folder, "config.json"))
                there = _theirs(Path(folder))
            found = huggingface_model(config)
            if found is None or found.fields["model_type"] != there.model_type:
                kind = found.fields["model_type"] if found else "something else"
                return [(f"{origin.name} is a {there.model_type}, and the model is a {kind} to transformers", _FIX)]
            # What transformers' class does not keep, no model reads.
            names = {name for name in (*found.fields, "rope_parameters") if hasattr(there, name)} - _FREE_THERE
            names -= {"hidden_act"} if "hidden_activation" in names else set()  # which goes before it
            same: Any = AutoConfig.for_model(**found.fields)
            ours, theirs = (
                {_LITGPTS.get(name, name): getattr(model, name) for name in sorted(names)}
                | {"head_size": getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads}
                for model in (same, there)
            )
        elif origin.kind == "litgpt":
            theirs = vars(Config(**yaml.safe_load(place.read(CONFIGS["litgpt"]))))
        else:
            manifest = read_manifest(place, CheckpointManifest)
            stored = manifest.config["model"] if manifest and manifest.config else self.model
            theirs = vars(unchecked_config(ModelConfig.model_validate(stored), vocab_size=vocab_size))
        if (rows := theirs["padded_vocab_size"]) < vocab_size:
            what = f"the tokenizer has {vocab_size} ids, and the weights of {origin.name} {rows} embeddings"
            return [(what, OF_WEIGHTS)]
        wrong = {name: theirs.get(name) for name in ours if ours[name] != theirs.get(name)}
        what = "the model has {} {}, and the weights of {} have {}"
        own = {name: f"set model.config.{name}={value}, or " for name, value in wrong.items() if name in vars(config)}
        problems = [
            (what.format(name, ours[name], origin.name, value), own.get(name, "") + _FIX)
            for name, value in wrong.items()
        ]
        if not problems and (here := place.local_path()) is not None and (here / next(iter(origin.files))).exists():
            problems = [(problem, _FIX) for problem in tensor_problems(config, origin, here)]
        return problems


def main(argv: Sequence[str]) -> int:
    """`-m litgpt_demo compare`: a question in JSON comes on stdin, its answer goes to stdout."""
    print(json.dumps(CompatibilityRequest.model_validate_json(sys.stdin.read()).answer()))
    return 0
