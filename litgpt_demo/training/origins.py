"""The weights that `model.init_from` names, found and pinned by their checksums, without torch.

A checkpoint of a run is read in place. A folder is copied to weights/<content hash>/ below the root before the job.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Callable
from itertools import count
from pathlib import Path

from typing_extensions import TypedDict

from litgpt_demo.config import InitialWeights
from litgpt_demo.data.dataset import PlannedDataset, open_dataset
from litgpt_demo.data.fetching import CHECKSUMS
from litgpt_demo.data.hub import hub_endpoint, translate_hub_errors
from litgpt_demo.data.readers import MOST_POINTER, refuse_lfs_pointer
from litgpt_demo.documents import FileRecord, parse_json, read_manifest, write_manifest
from litgpt_demo.errors import DataError, UserError
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import ObjectInfo, Storage, is_remote, open_storage
from litgpt_demo.training import checkpoints
from litgpt_demo.training.checkpoints import CheckpointManifest

CONFIGS = {"litgpt": "model_config.yaml", "huggingface": "config.json"}
"""The file with the settings of the model whose weights are in a folder."""
_TOKENIZER = "tokenizer.json"
_SAFETENSORS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_SETTINGS_FILES = ("config.json", "tokenizer*.json", _INDEX)
_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")


class _Index(TypedDict):
    weight_map: dict[str, str]


def find_initial_weights(name: str | None, optimizer: bool, root: str) -> InitialWeights | None:
    """Find what `model.init_from` names, and read its checksums; from the Hub, settings and tokenizer are fetched."""
    if name is None:
        return None
    found, storage = None, open_storage(name)
    is_path = is_remote(name) or name.startswith(("/", "~", "."))
    # A run's name comes before that of a folder here, and both come before a name on the Hub.
    if not is_path:
        run = open_storage(root).within(f"runs/{name}")
        found = _in_run(run, name) or _in_folder(run)
    if found is None:
        found = _in_run(storage, name) or _in_folder(storage)
    hub_name = _HUB.fullmatch(name)
    if found is None and hub_name is not None and not is_path and not storage.list():
        found = _in_hub(hub_name[1], hub_name[2])
    if found is None:
        fix = "give the whole name of a run (`train-litgpt runs`), a checkpoint of one, a folder with lit_model.pth "
        fix += f"and model_config.yaml, or with config.json and {_SAFETENSORS}, as transformers' save_pretrained "
        fix += "writes it, or owner/name of a model on the Hub"
        raise UserError(f"model.init_from={name} holds no weights to start from", fix=fix)
    if optimizer and found.kind != "checkpoint":
        fix = "leave it out, or name a run, or a checkpoint of one"
        raise UserError(
            f"model.load_optimizer_state=true, but model.init_from={name} has no optimizer's state", fix=fix
        )
    return found.model_copy(update={"optimizer": optimizer})


def _in_hub(repository: str, revision: str | None) -> InitialWeights | None:
    from huggingface_hub import HfApi, constants

    listed, offline = dict[str, tuple[int, str]](), constants.HF_HUB_OFFLINE
    patterns = list(_SETTINGS_FILES)
    if offline:
        patterns.append("*.safetensors")
    folder = _from_hub(repository, revision, patterns)
    if not offline:
        with translate_hub_errors(repository, folder.name):
            api = HfApi(endpoint=hub_endpoint())
            info = api.model_info(repository, revision=folder.name, files_metadata=True, timeout=60)
        for file in info.siblings or []:
            version = file.lfs.sha256 if file.lfs else file.blob_id
            if file.size is not None and version:
                listed[file.rfilename] = file.size, _with_algorithm(version)
    # In the client's cache, a file is a link to content whose name is the checksum that the Hub lists.
    for path in folder.glob("*"):
        listed[path.name] = path.stat().st_size, _with_algorithm(path.resolve().name)
    names, index = [_SAFETENSORS], folder / _INDEX
    if index.exists():
        names = _names_in(index.read_bytes(), str(index), fix="remove it")
    names.append(CONFIGS["huggingface"])
    if names[0] not in listed:
        return None
    missing = [name for name in names if name not in listed]
    if missing:
        problem = f"model.init_from: {repository} has no {', '.join(missing)}"
        raise UserError(problem, fix="get the complete model from its author")
    files = {name: listed[name] for name in names}
    return InitialWeights(kind="huggingface", name=f"{repository}@{folder.name}", address=str(folder), files=files)


def _names_in(index: bytes, address: str, *, fix: str) -> list[str]:
    refuse_lfs_pointer(index, address)
    return sorted({*parse_json(index, _Index, where=address, fix=fix)["weight_map"].values()})


def _with_algorithm(version: str) -> str:
    return f"{'sha256' if len(version) == 64 else 'git'}:{version}"


def _from_hub(repository: str, revision: str | None, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download

    with translate_hub_errors(repository, revision or "main"):
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns, endpoint=hub_endpoint()))


def _fetched(origin: InitialWeights) -> InitialWeights:
    repository, _, commit = origin.name.rpartition("@")
    folder = _from_hub(repository, commit, [*_SETTINGS_FILES, *origin.files])
    for name, (_, version) in origin.files.items():
        algorithm, _, checksum = version.partition(":")
        path = folder / name
        if CHECKSUMS[algorithm](path) != checksum:
            path.resolve().unlink()
            raise DataError(f"{name} of {origin.name} was damaged on its way here, and removed", fix="run again")
    found = _in_folder(open_storage(str(folder)))
    assert found is not None, origin.name
    changes = {"name": origin.name, "listed_as": origin.content_hash, "optimizer": origin.optimizer}
    return found.model_copy(update=changes)


def _in_run(storage: Storage, name: str) -> InitialWeights | None:
    """Return the checkpoint in a folder, or the last one of the run there; a UserError if that run is unfinished."""
    if not storage.exists(checkpoints.INDEX):
        complete = checkpoints.list_complete(storage)
        if not complete:
            return None
        spec, last = read_spec(storage), complete[0]
        if not checkpoints.reached_end(last, spec):
            steps = ", ".join(f"{name.rstrip('/')}/{checkpoints.folder_of(each.step)}" for each in complete)
            problem = f"model.init_from={name} is at step {last.step} of {spec.steps}"
            raise UserError(problem, fix=f"name one of its checkpoints: {steps}")
        storage = storage.within(checkpoints.folder_of(last.step))
    manifest = read_manifest(storage, CheckpointManifest)
    if manifest is None:
        return None
    weights = _pinned("checkpoint", storage, manifest.files).model_copy(update={"trained_on": manifest.trained_on})
    train = manifest.config.get("train")
    # A checkpoint that does not name its optimizer was written when AdamW was the only one.
    named = train.get("optimizer") if isinstance(train, dict) else None
    return weights.model_copy(update={"trained_with": named or "adamw"})


def _in_folder(storage: Storage) -> InitialWeights | None:
    kind, names = "litgpt", ["lit_model.pth"]
    if not storage.exists(names[0]):
        kind, names = "huggingface", [_SAFETENSORS]
        if storage.exists(_INDEX):
            names = _names_in(storage.read(_INDEX), storage.address(_INDEX), fix="copy the folder again")
    try:
        files = [storage.stat(name) for name in (*names, CONFIGS[kind])]
        for file in files:
            if file.size < MOST_POINTER:
                refuse_lfs_pointer(storage.read(file.path), storage.address(file.path))
        return _pinned(kind, storage, files)
    except FileNotFoundError as error:
        if not storage.exists(names[0]):
            return None
        fix = "copy the whole folder there, as it was written"
        raise UserError(f"model.init_from: {error.filename} is missing", fix=fix) from error


def _pinned(kind: str, storage: Storage, files: list[ObjectInfo] | tuple[FileRecord, ...]) -> InitialWeights:
    address, checksums = storage.address(), {file.path: (file.size, file.crc32c) for file in files}
    return InitialWeights.model_validate({"kind": kind, "name": address, "address": address, "files": checksums})


def records_of(origin: InitialWeights) -> list[FileRecord]:
    return [FileRecord(path=path, size=size, crc32c=crc32c) for path, (size, crc32c) in origin.files.items()]


def fetch_initial_weights(
    origin: InitialWeights, root: Storage, check: Callable[[InitialWeights], object] = lambda fetched: None
) -> InitialWeights:
    """Copy weights below the root, unless they are there; `check` gets those that are fetched from the Hub, before."""
    if origin.kind == "checkpoint":
        return origin
    target = root.within(f"weights/{origin.content_hash}")
    stored = read_manifest(target, InitialWeights)
    if any(":" in checksum for _, checksum in origin.files.values()):
        if stored is None:
            origin = _fetched(origin)
            check(origin)
        else:
            origin = origin.model_copy(update={"files": stored.files, "listed_as": origin.content_hash})
    copy = origin.model_copy(update={"address": target.address()})
    if stored is not None:
        return copy
    source = open_storage(origin.address)
    for record in records_of(origin):
        with tempfile.TemporaryDirectory(prefix="weights-") as folder:
            path = source.local_path(record.path)
            if path is None:
                path = Path(folder, "file")
                source.download(record.path, path)
            if FileRecord.of(target.upload(path, record.path)) != record:
                problem = f"{source.address(record.path)} has changed while the run was being submitted"
                raise DataError(problem, fix="submit it again")
    write_manifest(target, copy)
    return copy


def position_problem(
    origin: InitialWeights | None, hashes: set[str], *, seed: int, length: int
) -> tuple[str, str] | None:
    """Return a problem and its fix if a training continues its weights, but their place in the samples is unknown."""
    if origin is None or not origin.optimizer:
        return None
    orders = [seen for seen in origin.trained_on if seen.dataset in hashes and seen.seed == seed]
    known = {seen.dataset for seen in orders if seen.length == length}
    unknown = [seen for seen in orders if seen.dataset not in known]
    if not unknown:
        return None
    used_seeds = {seen.seed for seen in origin.trained_on}
    free_seed = next(number for number in count(1) if number not in used_seeds)
    fix = f"set another train.seed, such as {free_seed}, or train on another dataset"
    reason = "their checkpoint does not say how far"
    if unknown[0].length is not None:
        reason = f"in samples of {unknown[0].length} tokens, not of model.sequence_length={length}"
    problem = f"with train.seed={seed} the training would continue dataset {unknown[0].dataset} where the weights of "
    return f"{problem}{origin.name} stood, which have seen it, but {reason}", fix


def optimizer_problem(origin: InitialWeights | None, optimizer: str) -> tuple[str, str] | None:
    """Return a problem and its fix if a training would load the state of another optimizer than its own."""
    if origin is None or not origin.optimizer or origin.trained_with in {None, optimizer}:
        return None
    problem = f"the optimizer's state of {origin.name} is that of {origin.trained_with}"
    problem += f", but train.optimizer={optimizer} cannot continue from it"
    return problem, f"set train.optimizer={origin.trained_with}, or leave out model.load_optimizer_state"


def tokenizer_problem(origin: InitialWeights, planned: PlannedDataset, dataset: str | None) -> tuple[str, str] | None:
    """Return a problem and its fix if ids of the dataset, finished at `dataset`, mean other texts to the weights."""
    from tokenizers import Tokenizer

    folder = origin.address
    try:
        if origin.kind == "checkpoint":
            run = origin.address.rpartition("/checkpoints/")[0]
            if not run:
                fix = "name it within its run, as RUN/checkpoints/step-…"
                return f"{origin.address} is outside its run, so its tokenizer is unknown", fix
            source = read_spec(open_storage(run)).dataset
            if open_dataset(source).content_hash == planned.content_hash:
                return None
            folder = f"{source}/tokenizer"
        weights_tokenizer = open_storage(folder).read(_TOKENIZER)
    except (FileNotFoundError, DataError) as error:
        problem = (
            f"the tokenizer of model.init_from is missing, so the meaning of ids to its weights is unknown: {error}"
        )
        return problem, f"copy its {_TOKENIZER} there"
    fix = f"take the weights' own: data.tokenizer={json.dumps({'kind': 'litgpt', 'path': folder})}"
    if dataset is not None:
        data_tokenizer = open_storage(dataset).read(f"tokenizer/{_TOKENIZER}")
    elif planned.tokenizer is not None:
        data_tokenizer = planned.tokenizer.files[_TOKENIZER]
    else:
        return (
            "data.tokenizer is trained on the corpus, but the weights of model.init_from have ids of another tokenizer",
            fix,
        )
    data_ids = Tokenizer.from_buffer(data_tokenizer).get_vocab(with_added_tokens=True)
    weights_ids = Tokenizer.from_buffer(weights_tokenizer).get_vocab(with_added_tokens=True)
    differing = {number for text, number in data_ids.items() if weights_ids.get(text) != number}
    wrong = len(differing)
    if not wrong:
        return None
    return f"{wrong:,} ids of data.tokenizer mean other texts to the weights of {origin.name}", fix
