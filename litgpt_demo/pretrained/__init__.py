"""Weights that a training starts from: what lies at `model.from`, known before any of it is loaded. Imports no torch.

    a run of ours       final/manifest.json                  its final/litgpt
    a LitGPT folder     lit_model.pth, model_config.yaml     as `litgpt download` and `litgpt finetune` leave it
    Hugging Face        config.json, *.safetensors           a folder, or a repository of the Hub

They are staged under the root (litgpt_demo.pretrained.staging) in the form of a checkpoint, so that every layout of
ranks reads them as it reads its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import yaml
from pydantic import JsonValue, ValidationError

from litgpt_demo.config import ModelConfig
from litgpt_demo.data.corpus import Source
from litgpt_demo.data.corpus.fetching import local_copy
from litgpt_demo.data.corpus.hub import Repository, hub_files
from litgpt_demo.data.settings import HubTokenizer, LitgptTokenizer, TokenizerFile
from litgpt_demo.data.tokens import TokenizerFiles, load_tokenizer
from litgpt_demo.documents import parse_json
from litgpt_demo.errors import DataError, Unreachable, UserError
from litgpt_demo.export import FinalManifest
from litgpt_demo.manifests import FileRecord, read_manifest
from litgpt_demo.models import catalogue
from litgpt_demo.runs import CONFIG, FINAL, LITGPT
from litgpt_demo.settings import Settings, key_of, slug
from litgpt_demo.storage import Storage, is_remote, open_storage

WEIGHTS_FORMAT = 1
"""Part of the key of staged weights: raise it when the same files mean other ones."""

Problem: TypeAlias = tuple[str, str]
"""A problem: what is wrong, and what would do."""

_HUB_NAME = re.compile(r"(?P<name>[\w.-]+/[\w.-]+?)(@(?P<revision>[\w./-]+))?")
_INDEX = "model.safetensors.index.json"

# Fields of LitGPT's Config that neither shapes nor the function of the weights depend on, and those of positions, which
# somebody who extends a context changes on purpose.
_FREE = frozenset(
    {"name", "hf_config", "vocab_size", "padded_vocab_size", "padding_multiple", "block_size"}
    | {"rope_base", "rope_condense_ratio", "rope_adjustments", "rope_local_base_freq"}
)


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """The weights at one place."""

    address: str
    """The value of model.from."""
    kind: Literal["litgpt", "huggingface"]
    fields: Mapping[str, Any]
    """LitGPT's Config fields of a LitGPT folder; the content of Hugging Face's config.json."""
    files: tuple[Source, ...]
    """The files that decide the weights: the model's config, and the weights themselves."""
    tokenizer: TokenizerFiles | None
    """None where there is none that we can read."""
    use_tokenizer: str
    """The setting that trains with their tokenizer."""

    @property
    def rows(self) -> int:
        """Return the ids that they have embeddings for."""
        return int(self.fields["vocab_size" if self.kind == "huggingface" else "padded_vocab_size"])

    def key(self, model: ModelConfig) -> str:
        """Return the key of these weights for this model: the same content, wherever it lies, has the same."""
        identity: JsonValue = [[file.name, file.size, file.version] for file in self.files]
        return key_of(WEIGHTS_FORMAT, self.kind, identity, catalogue.padded_vocabulary(model.name, model.config))

    def path(self, model: ModelConfig) -> str:
        """Return where the weights are staged, below the root."""
        label = slug(self.address.rstrip("/").removesuffix(f"/{FINAL}").rpartition("/")[2]) or "model"
        return f"weights/{label}-{self.key(model)}"


class WeightsManifest(Settings):
    """The manifest of staged weights. Written last; without it the folder holds none."""

    format: int
    address: str
    """The value of model.from, from which they were taken."""
    kind: str
    sources: tuple[Source, ...]
    """The files that they were made from, with their checksums."""
    rows: int
    """The ids that the source had embeddings for."""
    model: ModelConfig
    parameters: int
    files: tuple[FileRecord, ...]


def finished_weights(place: Storage) -> WeightsManifest | None:
    """Return the manifest of staged weights, if all of their files are there."""
    manifest = read_manifest(place, WeightsManifest)
    if manifest is None or {record.path for record in manifest.files} - set(place.list()):
        return None
    return manifest


# --- what is there ----------------------------------------------------------------------------------------------------


def look_at_weights(address: str, scratch: Path) -> Pretrained:
    """Return what lies at `address`. Local weights are read for their checksums; of others the services tell them.

    Args:
        scratch: for a small file of the Hub.

    Raises:
        UserError: there are no weights that we can read.
        NetworkError: the Hub or the bucket is there and does not serve.
    """
    if is_remote(address) or Path(address).expanduser().is_dir():
        return _in_folder(address, open_storage(address))
    named = _HUB_NAME.fullmatch(address)
    if named is None or address.startswith((".", "~")):
        raise UserError(
            f"model.from={address!r} is neither a run under the root nor a folder on this machine; give a run's name "
            "or folder, a LitGPT or Hugging Face folder, here or in a bucket (gs://…), or owner/name of a model on the "
            "Hugging Face Hub"
        )
    return _on_the_hub(address, named["name"], named["revision"] or "main", scratch)


def _in_folder(address: str, folder: Storage) -> Pretrained:
    final = next((place for place in (folder, folder.within(FINAL)) if _manifest_of(place) is not None), None)
    if final is not None:
        return _of_run(address, final)
    there = {path for path in folder.list() if "/" not in path}
    if "lit_model.pth" in there:
        return _litgpt(address, folder, [_source(folder, name) for name in ("model_config.yaml", "lit_model.pth")])
    if "config.json" in there and any(name.endswith(".safetensors") for name in there):
        return _huggingface_folder(address, folder)
    if folder.exists(CONFIG) and folder.list("checkpoints"):
        raise UserError(
            f"model.from={address}: the run has no final model yet; let it end, or collect what is there: "
            f"train-litgpt collect {address} --newest"
        )
    some = ", ".join(sorted(there)[:10]) or "nothing"
    raise UserError(
        f"model.from={address} holds no weights that can be read ({some}); it needs lit_model.pth and "
        "model_config.yaml, or config.json and *.safetensors (other files of weights execute code as they are read: "
        "open them with transformers and save_pretrained)"
    )


def _manifest_of(place: Storage) -> FinalManifest | None:
    """Return the manifest of a run's final folder; None for any other folder."""
    return read_manifest(place, FinalManifest) if place.exists(f"{LITGPT.partition('/')[2]}/lit_model.pth") else None


def _of_run(address: str, final: Storage) -> Pretrained:
    manifest = _manifest_of(final)
    assert manifest is not None
    folder = LITGPT.partition("/")[2]
    records = {record.path: record for record in manifest.files}
    files = [
        Source(
            address=final.address(f"{folder}/{name}"), name=name,
            size=records[f"{folder}/{name}"].size, version=f"crc32c:{records[f'{folder}/{name}'].crc32c}",
        )
        for name in ("model_config.yaml", "lit_model.pth")
    ]  # fmt: skip
    return _litgpt(address, final.within(folder), files)


def _litgpt(address: str, folder: Storage, files: list[Source]) -> Pretrained:
    where = folder.address("model_config.yaml")
    try:
        fields = yaml.safe_load(folder.read("model_config.yaml"))
        built = asdict(catalogue.config_of(fields))
    except (yaml.YAMLError, UnicodeDecodeError, TypeError, AssertionError, ValueError) as error:
        raise UserError(
            f"{where} is no model_config.yaml of LitGPT 0.5 ({error}); convert the checkpoint anew"
        ) from error
    return Pretrained(
        address=address,
        kind="litgpt",
        fields=built,
        files=tuple(files),
        tokenizer=_tokenizer(LitgptTokenizer(kind="litgpt", path=folder.address())),
        use_tokenizer=f"data.tokenizer={{kind: litgpt, path: {folder.address()}}}",
    )


def _huggingface_folder(address: str, folder: Storage) -> Pretrained:
    index = folder.read(_INDEX) if folder.exists(_INDEX) else None
    names = _weight_files(index, folder.address(_INDEX), [path for path in folder.list() if "/" not in path])
    where = folder.address("config.json")
    return Pretrained(
        address=address,
        kind="huggingface",
        fields=_config_json(folder.read("config.json"), where),
        files=tuple(_source(folder, name) for name in ("config.json", *names)),
        tokenizer=_tokenizer(TokenizerFile(kind="file", path=folder.address("tokenizer.json"))),
        use_tokenizer=f"data.tokenizer={{kind: file, path: {folder.address('tokenizer.json')}}}",
    )


def _on_the_hub(address: str, name: str, revision: str, scratch: Path) -> Pretrained:
    repository = Repository(
        kind="model",
        name=name,
        revision=revision,
        setting="model.from",
        revised_by=f"model.from={name}@REVISION",
    )
    there = {file.name: file for file in hub_files(repository)}
    if "config.json" not in there:
        raise UserError(f"model.from={address}: the model {name} has no config.json, so it is none of transformers'")

    def content(file: str) -> bytes:
        with local_copy(there[file], scratch) as path:
            return path.read_bytes()

    index = content(_INDEX) if _INDEX in there else None
    names = _weight_files(index, f"{_INDEX} of {name}", list(there))
    return Pretrained(
        address=address,
        kind="huggingface",
        fields=_config_json(content("config.json"), f"config.json of {name}"),
        files=tuple(there[file] for file in ("config.json", *names)),
        tokenizer=_tokenizer(HubTokenizer(kind="hub", name=name, revision=revision)),
        use_tokenizer=f"data.tokenizer={{kind: hub, name: {name}, revision: {revision}}}",
    )


def _weight_files(index: bytes | None, where: str, there: list[str]) -> list[str]:
    """Return the names of the files that hold the weights, by their index where there is one."""
    if index is not None:
        names = sorted(set(parse_json(index, _Index, where=where, fix="download the model anew").weight_map.values()))
    else:
        names = [name for name in there if name == "model.safetensors"]
    if not names or set(names) - set(there):
        lack = ", ".join(sorted(set(names) - set(there))) or "model.safetensors"
        raise UserError(
            f"model.from: {lack} is not there; download the model anew, or where its weights are pickles alone, open "
            "it with transformers and save_pretrained"
        )
    return names


def _source(folder: Storage, name: str) -> Source:
    try:
        stored = folder.stat(name)
    except FileNotFoundError as error:
        raise UserError(f"model.from: {folder.address(name)} is not there; a LitGPT folder has it") from error
    return Source(address=folder.address(name), name=name, size=stored.size, version=f"crc32c:{stored.crc32c}")


@dataclass(frozen=True)
class _Index:
    weight_map: dict[str, str]


def _config_json(content: bytes, where: str) -> dict[str, Any]:
    config = parse_json(content, dict[str, Any], where=where, fix="download the model anew")
    if not isinstance(config.get("vocab_size"), int) or not isinstance(config.get("model_type"), str):
        raise UserError(f"model.from: {where} has no vocab_size or model_type; is it that of a text model?")
    return config


def _tokenizer(settings: LitgptTokenizer | TokenizerFile | HubTokenizer) -> TokenizerFiles | None:
    try:
        return load_tokenizer(settings)
    except Unreachable:
        raise
    except UserError:  # there is none, or it is of a kind that we cannot train with
        return None


# --- the model that they are of ---------------------------------------------------------------------------------------


def weights_model(asked: ModelConfig, weights: Pretrained) -> ModelConfig:
    """Return the model that is trained: as the config names it, or else the weights' own with the config's changes.

    Raises:
        UserError: nobody says what model these weights are of, or the changes cannot be made to it.
    """
    if not asked.is_open:
        return asked
    name, fields = _catalogued(weights) if weights.kind == "litgpt" else (_named_on_the_hub(weights), {})
    try:
        return ModelConfig.model_validate(
            asked.model_dump(mode="json") | {"name": name, "config": fields | asked.config, "from": asked.pretrained}
        )
    except ValidationError as error:
        problem = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise UserError(f"model.from={asked.pretrained} with the changes of model.config: {problem}") from error


def _catalogued(weights: Pretrained) -> tuple[str | None, dict[str, Any]]:
    """Return a LitGPT model as a name of the catalogue with changes, or as fields alone."""
    fields = {name: value for name, value in weights.fields.items() if value is not None}
    name = str(fields["name"])
    if name not in catalogue.models():
        return None, fields
    own = asdict(catalogue.config_of(catalogue.settings(name, {})))
    return name, {field: value for field, value in weights.fields.items() if own[field] != value}


def _named_on_the_hub(weights: Pretrained) -> str:
    """Return the model of the catalogue that Hugging Face's config.json describes."""
    from litgpt_demo.pretrained.huggingface import catalogued

    if (name := catalogued(weights.fields, weights.address)) is None:
        raise UserError(
            f"model.from={weights.address} is a {weights.fields['model_type']} of a shape that LitGPT's catalogue does "
            "not have; describe it by model.name and model.config, or by model.config alone"
        )
    return name


# --- comparing --------------------------------------------------------------------------------------------------------


def problems(asked: ModelConfig, model: ModelConfig, weights: Pretrained) -> Iterator[Problem]:
    """Yield each way in which the weights are not of the model that is to be trained.

    Args:
        asked: the model as the config has it.
        model: the same as `weights_model` completes it.
    """
    yield from _other_fields(model, weights) if weights.kind == "litgpt" else _other_architecture(model, weights)
    rows = catalogue.padded_vocabulary(model.name, model.config)
    if rows is None or rows < weights.rows or (rows > weights.rows and "padded_vocab_size" not in asked.config):
        has = "as many embeddings as the tokenizer has ids" if rows is None else f"{rows:,}"
        yield (
            f"model.from={weights.address} has {weights.rows:,} embeddings, and the model {has}",
            f"set model.config.padded_vocab_size={weights.rows}, or a larger one to add rows for new ids",
        )


def _other_fields(model: ModelConfig, weights: Pretrained) -> Iterator[Problem]:
    ours = asdict(catalogue.config_of(catalogue.settings(model.name, model.config)))
    for name in sorted(set(ours) - _FREE):
        if ours[name] != weights.fields[name]:
            yield (
                f"model.from={weights.address} has {name}={weights.fields[name]}, and the model {ours[name]}",
                f"set model.config.{name}={weights.fields[name]}, or leave out model.name: the weights say the rest",
            )


def _other_architecture(model: ModelConfig, weights: Pretrained) -> Iterator[Problem]:
    from litgpt_demo.pretrained.huggingface import config_differences

    # Changes to a named model's positions are made on purpose, as above.
    changes = {name: value for name, value in model.config.items() if model.name is None or name not in _FREE}
    for difference in config_differences(catalogue.settings(model.name, changes), weights.fields):
        yield (
            f"model.from={weights.address} {difference}",
            "name the model that these weights are of, by model.name or model.config",
        )


def tokenizer_problem(weights: Pretrained, ours: TokenizerFiles) -> Problem | None:
    """Return how the dataset's tokenizer differs from the weights' own; new ids behind theirs are an extension.

    Where the weights have no tokenizer, there is nothing to compare.
    """
    theirs = weights.tokenizer
    if theirs is None or theirs.hash == ours.hash:
        return None
    known, given = theirs.ids, ours.ids
    for token, number in known.items():
        if given.get(token) != number:
            has = f"is {given[token]}" if token in given else "is none"
            return (
                f"the dataset's tokenizer is not that of model.from={weights.address}: {token!r} is {number} there, "
                f"and {has} here",
                f"set {weights.use_tokenizer}",
            )
    if len(given) == len(known) and (theirs.merges != ours.merges or theirs.end_of_text != ours.end_of_text):
        return (
            f"the dataset's tokenizer has the ids of model.from={weights.address}, and cuts or closes texts otherwise",
            f"set {weights.use_tokenizer}",
        )
    return None


def require_fitting(found: list[Problem]) -> None:
    """Refuse weights that do not fit.

    Raises:
        UserError: names every problem.
    """
    if found:
        raise UserError("; ".join(f"{what}: {fix}" for what, fix in found))


def tokenizer_at(dataset: Storage) -> TokenizerFiles:
    """Return the tokenizer of a finished dataset.

    Raises:
        DataError: its files are gone.
    """
    try:
        return load_tokenizer(LitgptTokenizer(kind="litgpt", path=dataset.address("tokenizer")))
    except UserError as error:
        raise DataError(str(error)) from error
