"""Checkpoints: sharded, committed by a manifest written last, resumed from the newest one that verifies."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from io import BytesIO
from pathlib import Path

from pydantic import Field, JsonValue

from litgpt_demo.config import Orders, Settings, TrainingSpec
from litgpt_demo.documents import FileRecord, at_rest, differences, misread, parse_json, read_manifest, write_manifest
from litgpt_demo.errors import DataError
from litgpt_demo.storage import MANIFEST, Storage
from litgpt_demo.storage.base import copy_with_crc

FORMAT = 2
INDEX = ".metadata"
"""The file that says where everything is in the others; torch.distributed.checkpoint gives it that name."""

_ALL, _ASIDE = "checkpoints", "set-aside"
_STEP = re.compile(r"step-\d{8,}")


class CheckpointManifest(Settings):
    """A checkpoint that is all there."""

    format: int
    run: str
    step: int
    """Optimizer steps done."""
    tokens: int
    """Tokens seen."""
    seconds: float = 0.0
    """Training time that led here, over all attempts."""
    dataset_key: str
    trained_on: Orders = ()
    """The orders of samples that its weights have seen: the run's own, and those of what it started from."""
    config: dict[str, JsonValue] = Field({})
    """The settings that decided the weights: `model` and `train` of the run's config.json; empty in format 1."""
    validation_loss: float | None
    """The validation loss of this very step, where it was evaluated; nats per token."""
    evaluation_windows: int | None = None
    """The `train.evaluation_windows` of that loss: with the dataset it says which samples were taken."""
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
    """Below the run's folder; the zeros keep a listing in order."""
    return f"{_ALL}/step-{step:08d}"


def committed(
    run: Storage, *, damaged: Callable[[str, DataError], object] = lambda folder, error: None
) -> list[CheckpointManifest]:
    """Checkpoints of the run that have a manifest, newest first; a folder without one is a save that never ended.

    A damaged manifest is no manifest; `damaged` hears of its folder, below the run's, and of what is wrong.
    """
    found = []
    manifests = [path for path in run.within(_ALL).list() if path.endswith(f"/{MANIFEST}")]
    for folder in sorted({f"{_ALL}/{path.split('/')[0]}" for path in manifests}):
        try:
            manifest = read_manifest(run.within(folder), CheckpointManifest)
            if manifest is not None and folder_of(manifest.step) != folder:
                raise DataError(f"{run.address(folder)} holds the manifest of step {manifest.step}: was it moved?")
        except DataError as error:
            damaged(folder, error)
        else:
            found += [] if manifest is None else [manifest]
    return sorted(found, key=lambda manifest: -manifest.step)


def newest_step(run: Storage, *, most: int | None = None, least: int = 0) -> int:
    """Return the step of the run's newest checkpoint that verifies, 0 where there is none.

    Its manifest names an index and other files of `least` bytes, the model's weights, and they are there in their sizes
    and checksums. A bucket knows those itself, so that nothing is fetched; of a folder the newest checkpoint is read.
    No checkpoint is further than `most`, the steps of the training.
    """

    def verifies(manifest: CheckpointManifest) -> bool:
        said = manifest.files
        whole = INDEX in {file.path for file in said} and len(said) > 1 and manifest.size >= least
        return whole and not _wrong(run.within(folder_of(manifest.step)), said)

    newest = next((manifest.step for manifest in committed(run) if verifies(manifest)), 0)
    return newest if most is None else min(newest, most)


def _wrong(place: Storage, records: Iterable[FileRecord]) -> list[str]:
    """How files differ from their records, a sentence each. Those of a folder are read, of a bucket it says itself."""
    if (folder := place.local_path()) is not None:
        return differences(folder, records)
    there = {stored.path: (stored.size, stored.crc32c) for stored in place.inventory()}
    pairs = [(file.path, there.get(file.path), (file.size, file.crc32c)) for file in records]
    return [f"{path} has size and crc32c {has}, its manifest says {said}" for path, has, said in pairs if has != said]


def require_same(run: Storage, manifest: CheckpointManifest, spec: TrainingSpec) -> None:
    """Refuse a checkpoint of another model or dataset: a training goes on from its own."""
    where, what = run.address(folder_of(manifest.step)), ""
    # Wherever the weights lie that it starts from: its key holds their checksums.
    theirs, ours = manifest.config.get("model"), spec.model.model_dump(mode="json", exclude={"origin"})
    if isinstance(theirs, dict):
        theirs = {name: value for name, value in theirs.items() if name != "from"}
    if manifest.dataset_key != spec.dataset_key:
        what = f"{where} was trained on dataset {manifest.dataset_key}, this run is on {spec.dataset_key}"
    elif theirs not in (None, ours):
        what = f"{where} is of the model {theirs}, this run trains {ours}"
    if what:
        raise DataError(what, fix="give the run another name or root")


def require_damaged(run: Storage, folder: str, error: DataError) -> None:
    """Read a manifest that was found damaged once more; a NodeError if it is sound, and this machine misread it.

    What is read has to be what is stored, by its size and checksum: a bucket says them itself.
    """
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
    """Refuse to begin at the first step where checkpoints of the run were set aside."""
    folders = sorted({path.split("/")[0] for path in run.within(_ASIDE).list()})
    if folders:
        what = (
            f"no checkpoint of {run.address()} verifies: {', '.join(folders)} in {run.address(_ASIDE)} are damaged, "
            "and the training would begin at step 0"
        )
        fix = (
            f"read why.txt in each, and put one that can be mended back into {run.address(_ALL)}; or remove "
            f"{run.address(_ASIDE)} to begin at step 0"
        )
        raise DataError(what, fix=fix)


def set_aside(run: Storage, folder: str, why: str) -> str:
    """Move a folder that is not what it should be out of the way, with a note; returns its new address.

    It is kept, because a person who looks for the cause needs it, and is not read again.
    """
    there = {path.split("/")[0] for path in run.within(_ASIDE).list()}
    name = folder.rsplit("/", 1)[-1]
    place = next(place for number in range(1, len(there) + 2) if (place := f"{name}.{number}") not in there)
    target = f"{_ASIDE}/{place}"
    run.move(folder, target)
    run.write(f"{target}/why.txt", f"{why}\n".encode())
    return run.address(target)


def publish(files: Iterable[Path], run: Storage, step: int) -> list[FileRecord]:
    """Move finished files to their place in the run; the checkpoint still has no manifest afterwards."""
    place = folder_of(step)
    return [
        FileRecord.of(run.upload(path, f"{place}/{path.name}", move=True), relative_to=place) for path in sorted(files)
    ]


def commit(run: Storage, manifest: CheckpointManifest) -> None:
    """Write the manifest, when every file is there."""
    write_manifest(run.within(folder_of(manifest.step)), manifest)


def verify(run: Storage, step: int, paths: Collection[str]) -> None:
    """Read these files of a committed checkpoint again and compare them with its manifest. A bucket says itself."""
    place = run.within(folder_of(step))
    manifest = read_manifest(place, CheckpointManifest)
    said = {record.path: record for record in manifest.files} if manifest else {}
    missing = [f"its manifest does not list {path}" for path in paths if path not in said]
    if wrong := missing + _wrong(place, [said[path] for path in paths if path in said]):
        what = f"{place.address()} is not what was written: {'; '.join(wrong)}"
        raise DataError(what, fix="look at that disk or mount")


def retained(checkpoints: Iterable[CheckpointManifest], *, last: int, best: int, every: int | None = None) -> set[int]:
    """Steps to keep: the newest `last`, the `best` by validation loss, and the multiples of `every`.

    Losses of different samples are not ranked: the `best` of each number of evaluation windows are kept.
    """
    newest = sorted(checkpoints, key=lambda found: -found.step)
    kept = {found.step for found in newest[:last]}
    kept |= {found.step for found in newest if every is not None and found.step % every == 0}
    scored: dict[int | None, list[tuple[float, int]]] = {}
    for found in newest:
        if found.validation_loss is not None:
            scored.setdefault(found.evaluation_windows, []).append((found.validation_loss, -found.step))
    return kept | {-step for losses in scored.values() for _, step in sorted(losses)[:best]}


def retire(run: Storage, *, last: int, best: int, every: int | None = None) -> None:
    """Remove the checkpoints that are no longer kept, once their successor has verified, and saves that never ended.

    Nothing may be on its way into the run's checkpoints: parts of uploads go too, which no listing shows.
    """
    run.within(_ALL).remove_unfinished()
    damaged: list[str] = []
    there = committed(run, damaged=lambda folder, _: damaged.append(folder))
    kept = {folder_of(step) for step in retained(there, last=last, best=best, every=every)}
    for name in sorted({path.split("/")[0] for path in run.within(_ALL).list()}):
        folder = f"{_ALL}/{name}"
        if _STEP.fullmatch(name) and folder not in kept and folder not in damaged:
            run.remove(folder)
