"""Staging: weights to start from, copied under the root in the form of a checkpoint, every tensor compared.

    weights/<name>-<key>/   .metadata  __0_0.distcp  manifest.json

One transformer block is in memory at a time. The manifest comes last; the bytes depend on the inputs alone, so that two
that stage the same weights do not disturb each other.
"""

from __future__ import annotations

import argparse
import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from litgpt.config import Config
from litgpt.model import GPT
from safetensors import safe_open
from torch import Tensor

from litgpt_demo.config import ModelConfig
from litgpt_demo.data.corpus.fetching import local_copy
from litgpt_demo.errors import UserError
from litgpt_demo.export.huggingface import HuggingFaceModel, huggingface_model
from litgpt_demo.export.weights import Tensors
from litgpt_demo.manifests import FileRecord, write_manifest
from litgpt_demo.models import catalogue
from litgpt_demo.pretrained import (
    WEIGHTS_FORMAT,
    Pretrained,
    Problem,
    WeightsManifest,
    finished_weights,
    look_at_weights,
    problems,
    require_fitting,
    tokenizer_at,
    tokenizer_problem,
    weights_model,
)
from litgpt_demo.settings import key_of
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.storage.private import make_temporary
from litgpt_demo.training.reading import refusing
from litgpt_demo.training.shards import write_weights

_TABLES = ("transformer.wte.weight", "lm_head.weight", "lm_head.bias")
"""The tensors with a row for each id."""
_BLOCK = re.compile(r"transformer\.h\.\d+\.")
# Tables of numbers that early versions of transformers saved beside the weights.
_NO_WEIGHTS = re.compile(r"\.(rotary_emb\.inv_freq|attention\.(masked_)?bias)$")


def stage_weights(asked: ModelConfig, root: Storage, dataset: Storage) -> WeightsManifest:
    """Put the weights that `asked` names under the root, or find them there.

    Raises:
        UserError: they are not of that model, or the dataset's tokenizer is not theirs.
        DataError: a file of theirs is damaged.
    """
    assert asked.pretrained is not None
    scratch = make_temporary(f"weights-{key_of(asked, root.root)}")
    weights = look_at_weights(asked.pretrained, scratch)
    model = weights_model(asked, weights)
    require_fitting(
        [*problems(asked, model, weights), *filter(None, [tokenizer_problem(weights, tokenizer_at(dataset))])]
    )
    place = root.within(weights.path(model))
    with _alone(scratch):  # trials of a sweep stage the same weights at the same time
        if (done := finished_weights(place)) is None:
            done = _staged(weights, model, place, scratch)
            shutil.rmtree(scratch, ignore_errors=True)
    return done


@contextmanager
def _alone(scratch: Path) -> Iterator[None]:
    """One process of this machine at a time; one that dies lets go of the lock."""
    lock = os.open(scratch, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _staged(weights: Pretrained, model: ModelConfig, place: Storage, scratch: Path) -> WeightsManifest:
    folder = scratch / "shards"
    shutil.rmtree(folder, ignore_errors=True)
    with _opened(weights, model, scratch) as tensors:
        write_weights(tensors.forms, tensors.read, folder)
        parameters = sum(form.numel() for form in tensors.forms.values())
    files = [FileRecord.of(place.upload(path, path.name, move=True)) for path in sorted(folder.iterdir())]
    manifest = WeightsManifest(
        format=WEIGHTS_FORMAT,
        address=weights.address,
        kind=weights.kind,
        sources=weights.files,
        rows=weights.rows,
        model=model,
        parameters=parameters,
        files=tuple(files),
    )
    write_manifest(place, manifest)
    return manifest


# --- tensors, whichever library wrote them ----------------------------------------------------------------------------


class Opened(Protocol):
    """The tensors of weights, by LitGPT's names."""

    @property
    def forms(self) -> Mapping[str, Tensor]:
        """Return each name with a tensor without content."""

    def read(self, name: str) -> Tensor:
        """Return a tensor with its content."""


class _OfLitgpt:
    """The tensors of a lit_model.pth, mapped into memory."""

    def __init__(self, path: Path, address: str) -> None:
        with refusing(address):
            state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        self._state: Tensors = state.get("model", state)  # `litgpt pretrain` saves its own checkpoints so
        self.forms = {name: _form(tensor.shape, tensor.dtype) for name, tensor in self._state.items()}

    def read(self, name: str) -> Tensor:
        return self._state[name]


class _OfHuggingFace:
    """The tensors of safetensors files: those of a transformer block are read together, and each once."""

    def __init__(self, files: Sequence[Any], model: HuggingFaceModel, expected: Tensors, *, tied: bool) -> None:
        self._model, self._expected = model, expected
        self._where = {name: file for file in files for name in file.keys()}  # noqa: SIM118 (no mapping)
        self._read: Tensors = {}
        head, table = (next(iter(model.rename({name: expected[name]}))) for name in ("lm_head.weight", _TABLES[0]))
        self._instead = {head: table} if tied and head not in self._where else {}
        self.forms = dict(self._forms())

    def _forms(self) -> Iterator[tuple[str, Tensor]]:
        """Yield what the files hold, in LitGPT's names where those are known."""
        known: set[str] = set()
        for names in _blocks(self._expected):
            theirs = self._model.rename({name: self._expected[name] for name in names})
            known |= set(theirs)
            there = {name: self._form_of(self._instead.get(name, name)) for name in theirs}
            if not any(form is None for form in there.values()):
                yield from self._model.read({name: form for name, form in there.items() if form is not None}).items()
        yield from (
            (name, _form((), torch.float32)) for name in set(self._where) - known if not _NO_WEIGHTS.search(name)
        )

    def _form_of(self, name: str) -> Tensor | None:
        if name not in self._where:
            return None
        part = self._where[name].get_slice(name)
        if (dtype := _DTYPES.get(part.get_dtype())) is None:
            raise UserError(
                f"model.from: {name} is stored as {part.get_dtype()}; take weights in float32, float16 or bfloat16"
            )
        return _form(part.get_shape(), dtype)

    def read(self, name: str) -> Tensor:
        if name not in self._read:
            names = next(names for names in _blocks(self._expected) if name in names)
            theirs = self._model.rename({each: self._expected[each] for each in names})
            sources = {each: self._instead.get(each, each) for each in theirs}
            self._read = self._model.read({each: self._where[at].get_tensor(at) for each, at in sources.items()})
        return self._read[name]


_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _form(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    return torch.empty(tuple(shape), dtype=dtype, device="meta")


def _blocks(names: Mapping[str, Any]) -> list[list[str]]:
    """The names, those of one transformer block together."""
    blocks: dict[str, list[str]] = {}
    for name in names:
        blocks.setdefault(found[0] if (found := _BLOCK.match(name)) else name, []).append(name)
    return list(blocks.values())


class _Widened:
    """Tensors whose tables get rows for new ids; each new row is the mean of those that are there.

    A mean gives a new id about the probability of an average one, where random rows can outdo all others
    (https://nlp.stanford.edu/~johnhew/vocab-expansion.html).
    """

    def __init__(self, opened: Opened, rows: int) -> None:
        self._opened, self._rows = opened, rows
        self.forms = {
            name: _form((rows, *form.shape[1:]), form.dtype) if name in _TABLES else form
            for name, form in opened.forms.items()
        }

    def read(self, name: str) -> Tensor:
        tensor = self._opened.read(name)
        if name not in _TABLES or (more := self._rows - len(tensor)) == 0:
            return tensor
        mean = tensor.float().mean(0, keepdim=True).to(tensor.dtype)
        return torch.cat([tensor, mean.expand(more, *mean.shape[1:])])


@contextmanager
def _opened(weights: Pretrained, model: ModelConfig, scratch: Path) -> Iterator[Opened]:
    """The tensors for the model, all of the right shape.

    Raises:
        UserError: names the tensors that are missing, too many, or of another shape.
        DataError: a file is not what was listed.
    """
    config = Config(**catalogue.settings(model.name, model.config))
    rows = int(config.padded_vocab_size)
    config.padded_vocab_size = weights.rows
    with torch.device("meta"):
        expected: Tensors = GPT(config).state_dict()
    with ExitStack() as stack:
        paths = {file.name: stack.enter_context(local_copy(file, scratch)) for file in weights.files}
        opened: Opened
        if weights.kind == "litgpt":
            opened = _OfLitgpt(paths["lit_model.pth"], weights.address)
        else:
            from litgpt_demo.pretrained.huggingface import ties

            theirs = huggingface_model(config)
            assert theirs is not None  # `problems` has compared the two
            files = [
                stack.enter_context(safe_open(path, "pt")) for name, path in paths.items() if name != "config.json"
            ]
            opened = _OfHuggingFace(files, theirs, expected, tied=ties(weights.fields))
        require_fitting(list(_other_tensors(weights, expected, opened.forms)))
        yield _Widened(opened, rows)


def _other_tensors(weights: Pretrained, expected: Tensors, found: Mapping[str, Tensor]) -> Iterator[Problem]:
    """Yield how tensors differ: a reader that fills in what is missing would train on random numbers."""
    fix = "take the whole checkpoint of this model, or name the model that it is of"
    where = f"model.from={weights.address}"
    if missing := [name for name in expected if name not in found]:
        yield f"{where} lacks {len(missing)} tensors of the model: {_some(missing)}", fix
    if strange := [name for name in found if name not in expected]:
        yield f"{where} has {len(strange)} tensors that the model does not: {_some(strange)}", fix
    for name in expected.keys() & found.keys():
        if (theirs := tuple(found[name].shape)) != (ours := tuple(expected[name].shape)):
            yield f"{where} has {name} of shape {theirs}, and the model {ours}", fix


def _some(names: Sequence[str]) -> str:
    return ", ".join(sorted(names)[:3]) + (", …" if len(names) > 3 else "")


# --- the command ------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str]) -> int:
    """`python -m litgpt_demo weights --root ADDRESS --dataset ADDRESS --model JSON`."""
    parser = argparse.ArgumentParser(prog="litgpt_demo weights", description="Stage weights to start from.")
    parser.add_argument("--root", required=True, help="folder or gs:// address to put them under")
    parser.add_argument("--dataset", required=True, help="address of the dataset to train on")
    parser.add_argument("--model", required=True, help="the model settings as JSON, with `from`")
    args = parser.parse_args(argv)
    asked = ModelConfig.model_validate_json(args.model)
    manifest = stage_weights(asked, open_storage(args.root), open_storage(args.dataset))
    print(f"{manifest.parameters:,} parameters of {manifest.address}")
    return 0
