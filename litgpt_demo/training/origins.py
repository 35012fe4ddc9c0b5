"""The weights that `model.init_from` names, found and pinned by their checksums, without torch.

A checkpoint of a run is read where it lies. A folder is copied to weights/<key>/ below the root before a job begins.
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
"""The file that says which model the weights of a folder are of."""
_TOKENIZER = "tokenizer.json"
_SAFETENSORS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_BESIDE = ("config.json", "tokenizer*.json", _INDEX)
_HUB = re.compile(r"([\w.-]+/[\w.-]+)(?:@([\w./-]+))?")


class _Index(TypedDict):
    weight_map: dict[str, str]


def find_initial_weights(name: str | None, optimizer: bool, root: str) -> InitialWeights | None:
    """Find the weights that a model starts `from`, and read their checksums; None where it starts from random ones.

    Of a model of the Hub its settings and tokenizer are fetched, into its client's own cache, and no weights. A
    UserError where there is nothing to start from.
    """
    if name is None:
        return None
    place, is_path = open_storage(name), is_remote(name) or name.startswith(("/", "~", "."))
    # A run's name goes before that of a folder here, and both go before a name on the Hub.
    own = [] if is_path else [open_storage(root).within(f"runs/{name}")]
    found = next(filter(None, (_of_run(one, name) or _of_folder(one) for one in (*own, place))), None)
    if found is None and not is_path and (hub := _HUB.fullmatch(name)) and not place.list():
        found = _of_hub(hub[1], hub[2])
    if found is None:
        fix = "give the whole name of a run (`train-litgpt runs`), a checkpoint of one, a folder with lit_model.pth "
        fix += f"and model_config.yaml, or with config.json and {_SAFETENSORS}, as transformers' save_pretrained "
        fix += "writes it, or owner/name of such a one on the Hub"
        raise UserError(f"model.init_from={name} holds no weights to start from", fix=fix)
    if optimizer and found.kind != "checkpoint":
        fix = "leave it out, or name a run, or a checkpoint of one"
        raise UserError(
            f"model.load_optimizer_state=true, and model.init_from={name} has no optimizer's state", fix=fix
        )
    return found.model_copy(update={"optimizer": optimizer})


def _of_hub(repository: str, revision: str | None) -> InitialWeights | None:
    """The model of a repository, its weights by their checksums there: without a network, by those of the cache."""
    from huggingface_hub import HfApi, constants

    listed, offline = dict[str, tuple[int, str]](), constants.HF_HUB_OFFLINE
    folder = _from_hub(repository, revision, [*_BESIDE, *(["*.safetensors"] if offline else [])])
    if not offline:
        with translate_hub_errors(repository, commit := folder.name):
            api = HfApi(endpoint=hub_endpoint())
            info = api.model_info(repository, revision=commit, files_metadata=True, timeout=60)
        for file in info.siblings or []:
            if file.size is not None and (version := file.lfs.sha256 if file.lfs else file.blob_id):
                listed[file.rfilename] = file.size, _listed(version)
    # In the client's cache a file is a link to content that is called as the Hub lists it.
    listed |= {path.name: (path.stat().st_size, _listed(path.resolve().name)) for path in folder.glob("*")}
    names, index = [_SAFETENSORS], folder / _INDEX
    if index.exists():
        names = _names_in(index.read_bytes(), str(index), fix="remove it")
    names.append(CONFIGS["huggingface"])
    if names[0] not in listed:
        return None
    if missing := [name for name in names if name not in listed]:
        what = f"model.init_from: {repository} has no {', '.join(missing)}"
        raise UserError(what, fix="ask its author for the whole model")
    files = {name: listed[name] for name in names}
    return InitialWeights(kind="huggingface", name=f"{repository}@{folder.name}", address=str(folder), files=files)


def _names_in(index: bytes, address: str, *, fix: str) -> list[str]:
    refuse_lfs_pointer(index, address)
    return sorted({*parse_json(index, _Index, where=address, fix=fix)["weight_map"].values()})


def _listed(version: str) -> str:
    return f"{'sha256' if len(version) == 64 else 'git'}:{version}"


def _from_hub(repository: str, revision: str | None, patterns: list[str]) -> Path:
    """Fetch files into the cache of the Hub's client; the folder has the name of the commit."""
    from huggingface_hub import snapshot_download

    with translate_hub_errors(repository, revision or "main"):
        return Path(snapshot_download(repository, revision=revision, allow_patterns=patterns, endpoint=hub_endpoint()))


def _fetched(origin: InitialWeights) -> InitialWeights:
    """Fetch the weights of a model of the Hub; a DataError where they are not what the Hub lists."""
    repository, _, commit = origin.name.rpartition("@")
    folder = _from_hub(repository, commit, [*_BESIDE, *origin.files])
    for name, (_, version) in origin.files.items():
        algorithm, _, listed = version.partition(":")
        if CHECKSUMS[algorithm](path := folder / name) != listed:
            path.resolve().unlink()
            raise DataError(f"{name} of {origin.name} came damaged from the Hub, and was removed", fix="run again")
    found = _of_folder(open_storage(str(folder)))
    assert found is not None, origin.name
    return found.model_copy(
        update={"name": origin.name, "listed_as": origin.content_hash, "optimizer": origin.optimizer}
    )


def _of_run(place: Storage, name: str) -> InitialWeights | None:
    """The checkpoint at `place`, or the last one of the run there, which has to have come to its end."""
    if not place.exists(checkpoints.INDEX):
        if not (there := checkpoints.list_complete(place)):
            return None
        if not checkpoints.reached_end(there[0], spec := read_spec(place)):
            steps = ", ".join(f"{name.rstrip('/')}/{checkpoints.folder_of(one.step)}" for one in there)
            what = f"model.init_from={name} has reached step {there[0].step} of {spec.steps}"
            raise UserError(what, fix=f"name one of its checkpoints: {steps}")
        place = place.within(checkpoints.folder_of(there[0].step))
    manifest = read_manifest(place, CheckpointManifest)
    if manifest is None:
        return None
    return _origin("checkpoint", place, manifest.files).model_copy(update={"trained_on": manifest.trained_on})


def _of_folder(place: Storage) -> InitialWeights | None:
    kind, names = "litgpt", ["lit_model.pth"]
    if not place.exists(names[0]):
        kind, names = "huggingface", [_SAFETENSORS]
        if place.exists(_INDEX):
            names = _names_in(place.read(_INDEX), place.address(_INDEX), fix="copy the folder anew")
    try:
        files = [place.stat(name) for name in (*names, CONFIGS[kind])]
        for file in (file for file in files if file.size < MOST_POINTER):
            refuse_lfs_pointer(place.read(file.path), place.address(file.path))
        return _origin(kind, place, files)
    except FileNotFoundError as error:
        if not place.exists(names[0]):
            return None
        fix = "copy the whole folder there, as it was written"
        raise UserError(f"model.init_from: {error.filename} is missing", fix=fix) from error


def _origin(kind: str, place: Storage, files: list[ObjectInfo] | tuple[FileRecord, ...]) -> InitialWeights:
    where, known = place.address(), {file.path: (file.size, file.crc32c) for file in files}
    return InitialWeights.model_validate({"kind": kind, "name": where, "address": where, "files": known})


def records_of(origin: InitialWeights) -> list[FileRecord]:
    """Return the files that the weights are, as the run was made of them."""
    return [FileRecord(path=path, size=size, crc32c=crc32c) for path, (size, crc32c) in origin.files.items()]


def fetch_initial_weights(
    origin: InitialWeights, root: Storage, check: Callable[[InitialWeights], object] = lambda fetched: None
) -> InitialWeights:
    """Copy weights below the root, where every node finds them, unless they are there; a DataError where they have
    changed since they were found. `check` gets those that are fetched from the Hub only now, before they are copied."""
    if origin.kind == "checkpoint":
        return origin
    place = root.within(f"weights/{origin.content_hash}")
    stored = read_manifest(place, InitialWeights)
    if any(":" in checksum for _, checksum in origin.files.values()):
        if stored is None:
            check(origin := _fetched(origin))
        else:
            origin = origin.model_copy(update={"files": stored.files, "listed_as": origin.content_hash})
    source = open_storage(origin.address)
    copy = origin.model_copy(update={"address": place.address()})
    if stored is None:
        for record in records_of(origin):
            with tempfile.TemporaryDirectory(prefix="weights-") as folder:
                if (path := source.local_path(record.path)) is None:
                    source.download(record.path, path := Path(folder, "file"))
                if FileRecord.of(place.upload(path, record.path)) != record:
                    what = f"{source.address(record.path)} has changed while the run was being submitted"
                    raise DataError(what, fix="submit it again")
        write_manifest(place, copy)
    return copy


def replay_problem(origin: InitialWeights | None, keys: set[str], seed: int) -> tuple[str, str] | None:
    """Return what is wrong, and what would do, where a training that continues with the optimizer's state would take
    samples in an order that its weights have seen: that of a dataset, by its `sample_keys`, and a seed."""
    if origin is None or not origin.optimizer:
        return None
    again = sorted(key for key, number in origin.trained_on if key in keys and number == seed)
    if not again:
        return None
    samples = f"with train.seed={seed} the samples of dataset {', '.join(again)}"
    seen = f"come in the order in which the weights of {origin.name} have seen them, from the first one on"
    seeds = {number for _, number in origin.trained_on}
    free = next(number for number in count(1) if number not in seeds)
    what = f"{samples} {seen}, and model.load_optimizer_state=true continues that training"
    return what, f"set another train.seed, such as {free}, or train on another dataset"


def tokenizer_problem(origin: InitialWeights, planned: PlannedDataset, dataset: str | None) -> tuple[str, str] | None:
    """What is wrong and what would do, where ids of the dataset mean other texts than they do to the weights.

    `dataset` is the address of the finished one, None where it is yet to be made.
    """
    from tokenizers import Tokenizer

    folder, ours = origin.address, planned.tokenizer and planned.tokenizer.files[_TOKENIZER]
    try:
        if origin.kind == "checkpoint":
            if not (own := origin.address.rpartition("/checkpoints/")[0]):
                fix = "name it within its run, as RUN/checkpoints/step-…"
                return f"{origin.address} lies outside its run, so that nobody knows its tokenizer", fix
            source = read_spec(open_storage(own)).dataset
            if open_dataset(source).key == planned.key:
                return None
            folder = f"{source}/tokenizer"
        theirs = open_storage(folder).read(_TOKENIZER)
    except (FileNotFoundError, DataError) as error:
        what = (
            f"the tokenizer of model.init_from is not there, so that nobody knows what ids mean to its weights: {error}"
        )
        return what, f"put its {_TOKENIZER} there"
    if dataset is not None:
        ours = open_storage(dataset).read(f"tokenizer/{_TOKENIZER}")
    fix = f"take its own: data.tokenizer={json.dumps({'kind': 'litgpt', 'path': folder})}"
    if ours is None:
        return "data.tokenizer is to be trained anew, and the weights of model.init_from know another one's ids", fix
    one, other = (Tokenizer.from_buffer(content).get_vocab(with_added_tokens=True) for content in (ours, theirs))
    wrong = len({*one.values()} & {one[text] for text in one if other.get(text) != one[text]})
    return (f"{wrong:,} ids of data.tokenizer mean other texts to the weights of {origin.name}", fix) if wrong else None
