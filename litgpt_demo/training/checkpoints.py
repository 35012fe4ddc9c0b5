"""Checkpoints: sharded, committed by a manifest written last, resumed from the newest one that verifies."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from io import BytesIO
from pathlib import Path

from pydantic import Field, JsonValue

from litgpt_demo.config import SeenSamples, Settings, TrainingSpec
from litgpt_demo.documents import FileRecord, at_rest, differences, misread, parse_json, read_manifest, write_manifest
from litgpt_demo.errors import DataError
from litgpt_demo.storage import MANIFEST, Storage
from litgpt_demo.storage.base import copy_with_crc
from litgpt_demo.training.chain import Link

FORMAT = 2
INDEX = ".metadata"
"""The file that says where everything is in the others; torch.distributed.checkpoint gives it that name."""

_ALL, _QUARANTINE = "checkpoints", "quarantine"
_STEP = re.compile(r"step-\d{8,}")


class CheckpointManifest(Settings):
    format: int
    run: str
    step: int
    tokens: int
    seconds: float = 0.0
    """Training time that led here, over all attempts."""
    dataset_hash: str
    trained_on: tuple[SeenSamples, ...] = ()
    """The samples that its weights have seen: in the run, and in those that it started from."""
    config: dict[str, JsonValue] = Field({})
    """The settings that decided the weights: `model` and `train` of the run's config.json; empty in format 1."""
    validation_loss: float | None
    """The validation loss of this step, if it was evaluated; nats per token."""
    evaluation_samples: int | None = None
    """The `train.evaluation_samples` of that loss; with the dataset they determine the samples."""
    link: Link | None = None
    """Its digests; None in a checkpoint of an older version."""
    world_size: int
    versions: dict[str, str]
    files: tuple[FileRecord, ...]

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(record.size for record in self.files)


def reached_end(manifest: CheckpointManifest, spec: TrainingSpec) -> bool:
    """Return True if a training of `spec` ends with this checkpoint: by its steps, or because its time is up."""
    limit = spec.train.max_time
    return manifest.step >= spec.steps or (limit is not None and manifest.seconds >= limit.total_seconds())


def folder_of(step: int) -> str:
    """Return its path below the run's folder; the zeros keep a listing in order."""
    return f"{_ALL}/step-{step:08d}"


def list_complete(
    run: Storage, *, on_damaged: Callable[[str, DataError], object] = lambda folder, error: None
) -> list[CheckpointManifest]:
    """Return the run's checkpoints that have a manifest, newest first; `on_damaged` gets the damaged ones."""
    complete = []
    manifests = [path for path in run.within(_ALL).list() if path.endswith(f"/{MANIFEST}")]
    for folder in sorted({f"{_ALL}/{path.split('/')[0]}" for path in manifests}):
        try:
            manifest = read_manifest(run.within(folder), CheckpointManifest)
            if manifest is not None and folder_of(manifest.step) != folder:
                raise DataError(f"{run.address(folder)} holds the manifest of step {manifest.step}: was it moved?")
        except DataError as error:
            on_damaged(folder, error)
        else:
            if manifest is not None:
                complete.append(manifest)
    return sorted(complete, key=lambda manifest: -manifest.step)


def newest_step(run: Storage, *, max_step: int | None = None, min_bytes: int = 0) -> int:
    """Return the step of the newest checkpoint of `min_bytes` or more that verifies, at most `max_step`; 0 if none."""
    # A bucket returns sizes and checksums, so nothing is fetched; in a folder the newest checkpoint is read.

    def verifies(manifest: CheckpointManifest) -> bool:
        files = manifest.files
        is_plausible = INDEX in {file.path for file in files} and len(files) > 1 and manifest.size >= min_bytes
        return is_plausible and not _problems(run.within(folder_of(manifest.step)), files)

    newest = next((manifest.step for manifest in list_complete(run) if verifies(manifest)), 0)
    if max_step is not None:
        newest = min(newest, max_step)
    return newest


def _problems(storage: Storage, records: Iterable[FileRecord]) -> list[str]:
    folder = storage.local_path()
    if folder is not None:
        return differences(folder, records)
    stored = {file.path: (file.size, file.crc32c) for file in storage.inventory()}
    pairs = [(file.path, stored.get(file.path), (file.size, file.crc32c)) for file in records]
    return [
        f"{path} has size and crc32c {found}, but its manifest says {expected}"
        for path, found, expected in pairs
        if found != expected
    ]


def require_same(run: Storage, manifest: CheckpointManifest, spec: TrainingSpec) -> None:
    """Refuse a checkpoint of another model or dataset: a training resumes from its own."""
    address, fix = run.address(folder_of(manifest.step)), "give the run another name or root"
    if manifest.dataset_hash != spec.dataset_hash:
        what = f"{address} was trained on dataset {manifest.dataset_hash}, but this run is on {spec.dataset_hash}"
        raise DataError(what, fix=fix)
    # The address of the weights that it starts from does not matter: the run's id has their checksums.
    stored, expected = manifest.config.get("model"), spec.model.model_dump(mode="json", exclude={"init_from"})
    if isinstance(stored, dict):
        stored = {name: value for name, value in stored.items() if name != "init_from"}
    if stored not in (None, expected):
        raise DataError(f"{address} is of the model {stored}, but this run trains {expected}", fix=fix)


def require_damaged(run: Storage, folder: str, error: DataError) -> None:
    """Read a damaged manifest once more; a NodeError if it is sound, and this machine misread it."""
    place = run.within(folder)
    with suppress(DataError):  # a bucket's bytes that never come out right
        content = place.read(MANIFEST)
        try:
            read = parse_json(content, CheckpointManifest, where=place.address(MANIFEST), fix="")
            damaged = folder_of(read.step) != folder
        except DataError:
            damaged = copy_with_crc(BytesIO(content))[1] == (at_rest(place, MANIFEST) or ("", ""))[1]
        if damaged:
            return
    raise misread(place.address(), str(error)) from error


def require_beginning(run: Storage) -> None:
    """Refuse to begin at the first step if checkpoints of the run were quarantined."""
    folders = sorted({path.split("/")[0] for path in run.within(_QUARANTINE).list()})
    if folders:
        what = (
            f"no checkpoint of {run.address()} verifies: {', '.join(folders)} in {run.address(_QUARANTINE)} are "
            "damaged, so the training would begin at step 0"
        )
        fix = (
            f"read why.txt in each, repair one and move it back to {run.address(_ALL)}, or remove "
            f"{run.address(_QUARANTINE)} to begin at step 0"
        )
        raise DataError(what, fix=fix)


def quarantine(run: Storage, folder: str, why: str) -> str:
    """Move a damaged folder out of the way, with a note for a person, and return its new address."""
    taken = {path.split("/")[0] for path in run.within(_QUARANTINE).list()}
    name, number = folder.rsplit("/", 1)[-1], 1
    while f"{name}.{number}" in taken:
        number += 1
    target = f"{_QUARANTINE}/{name}.{number}"
    run.move(folder, target)
    run.write(f"{target}/why.txt", f"{why}\n".encode())
    return run.address(target)


def upload_files(files: Iterable[Path], run: Storage, step: int) -> list[FileRecord]:
    """Move finished files to their folder in the run; the checkpoint still has no manifest afterwards."""
    folder = folder_of(step)
    stored = [run.upload(path, f"{folder}/{path.name}", move=True) for path in sorted(files)]
    return [FileRecord.of(info, relative_to=folder) for info in stored]


def commit(run: Storage, manifest: CheckpointManifest) -> None:
    write_manifest(run.within(folder_of(manifest.step)), manifest)


def verify(run: Storage, step: int, paths: Collection[str]) -> None:
    """Read these files of a committed checkpoint again, and compare them with its manifest."""
    folder = run.within(folder_of(step))
    manifest = read_manifest(folder, CheckpointManifest)
    records = {record.path: record for record in manifest.files} if manifest else {}
    problems = [f"its manifest does not list {path}" for path in paths if path not in records]
    problems += _problems(folder, [records[path] for path in paths if path in records])
    if problems:
        what = f"{folder.address()} is not what was written: {'; '.join(problems)}"
        raise DataError(what, fix="check that disk or mount")


def steps_to_keep(
    checkpoints: Iterable[CheckpointManifest], *, last: int, best: int, every: int | None = None
) -> set[int]:
    """Return the steps of the newest `last`, the `best` of each number of samples, and the multiples of `every`."""
    newest = sorted(checkpoints, key=lambda checkpoint: -checkpoint.step)
    kept = {checkpoint.step for checkpoint in newest[:last]}
    if every is not None:
        kept |= {checkpoint.step for checkpoint in newest if checkpoint.step % every == 0}
    scored: dict[int | None, list[tuple[float, int]]] = {}
    for checkpoint in newest:
        if checkpoint.validation_loss is not None:
            losses = scored.setdefault(checkpoint.evaluation_samples, [])
            losses.append((checkpoint.validation_loss, -checkpoint.step))
    for losses in scored.values():
        kept |= {-step for _, step in sorted(losses)[:best]}
    return kept


def prune(run: Storage, *, last: int, best: int, every: int | None = None) -> None:
    # No save may be in flight: parts of uploads are removed too, which no listing shows.
    run.within(_ALL).remove_unfinished()
    damaged: list[str] = []
    complete = list_complete(run, on_damaged=lambda folder, _: damaged.append(folder))
    kept = {folder_of(step) for step in steps_to_keep(complete, last=last, best=best, every=every)}
    for name in sorted({path.split("/")[0] for path in run.within(_ALL).list()}):
        folder = f"{_ALL}/{name}"
        if _STEP.fullmatch(name) and folder not in kept and folder not in damaged:
            run.remove(folder)
