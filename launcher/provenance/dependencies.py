"""The dependencies of a run, as resource descriptors of in-toto: datasets, tokenizers, initial weights and software.

Digests come from the manifests that were written with the files. Unknown facts are left out.
https://github.com/in-toto/attestation/blob/main/spec/v1/resource_descriptor.md
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from launcher.images.identity import OURS
from litgpt_demo.config import InitialWeights
from litgpt_demo.data.dataset import DatasetManifest
from litgpt_demo.documents import FileRecord, read_manifest
from litgpt_demo.errors import DataError, TrainLitgptError
from litgpt_demo.runs import ATTEMPTS, RunDocument, dataset_address, read_document
from litgpt_demo.storage import MANIFEST, Storage, is_remote, open_storage, sha256_of
from litgpt_demo.training.checkpoints import CheckpointManifest


def descriptor(name: str, **fields: Any) -> dict[str, Any]:
    """Return a resource descriptor without its empty fields."""
    return {"name": name, **{field: value for field, value in fields.items() if value}}


def uri_of(address: str) -> str:
    """Return the URI of an address: `gs://…` or `file:///…`."""
    if is_remote(address):
        return address
    return Path(address).absolute().as_uri()


def digest_of(storage: Storage, path: str) -> dict[str, str]:
    """Return the SHA-256 of a stored file; a FileNotFoundError if it does not exist."""
    local = storage.local_path(path)
    if local is not None:
        return {"sha256": sha256_of(local)}
    with TemporaryDirectory(prefix="train-litgpt-digest-") as folder:
        storage.download(path, Path(folder, "file"))
        return {"sha256": sha256_of(Path(folder, "file"))}


def recorded_digest(record: FileRecord) -> dict[str, str]:
    """Return the SHA-256 of a file by its manifest, or else its CRC32C."""
    if record.sha256:
        return {"sha256": record.sha256}
    return {"crc32c": record.crc32c}


def generations(run: Storage) -> Iterator[tuple[Storage, RunDocument]]:
    """Return the run and its config.json, then those of the run whose checkpoint it started from, and so on.

    They end with random weights, with weights of no run, and with a run that does not exist any more.
    """
    document, seen = read_document(run), set[str]()
    while run.address() not in seen:
        seen.add(run.address())
        yield run, document
        origin = document.training.origin
        if origin is None or origin.kind != "checkpoint":
            return
        run = open_storage(origin.address.rpartition("/checkpoints/")[0])
        try:
            document = read_document(run)
        except TrainLitgptError:  # of a run before this one, which may be out of reach by now
            return


def dependencies_of(run: Storage) -> list[dict[str, Any]]:
    """Return everything that a training was made from, and everything that the runs before it were made from."""
    found: dict[str, dict[str, Any]] = {}
    for each, document in generations(run):
        spec = document.training
        try:
            resources = [
                *dataset_dependencies(dataset_address(each, spec.dataset)),
                *_software(each, document),
                *_weights(spec.origin),
            ]
        except TrainLitgptError:
            if each == run:
                raise
            continue
        for resource in resources:
            if each != run:
                resource["annotations"] = {"run": spec.run, **resource.get("annotations", {})}
            found.setdefault(resource["name"] + repr(sorted(resource.get("digest", {}).items())), resource)
    return list(found.values())


def datasets_of(address: str) -> Iterator[tuple[Storage, DatasetManifest]]:
    """Return the dataset at an address and those that it mixes, as far as they exist."""
    with suppress(DataError):
        storage = open_storage(address)
        manifest = read_manifest(storage, DatasetManifest)
        if manifest is not None:
            yield storage, manifest
            for ingredient in manifest.ingredients(address):
                yield from datasets_of(ingredient)


def files_of(storage: Storage, manifest: DatasetManifest) -> Iterator[tuple[FileRecord, dict[str, Any]]]:
    """Return each file of a dataset, with its descriptor."""
    folder = f"datasets/{storage.address().rpartition('/')[2]}"
    for record in manifest.files:
        address = storage.address(record.path)
        if record in manifest.external_files:
            address = f"{manifest.external_root}/{record.path}"
        yield record, descriptor(f"{folder}/{record.path}", uri=uri_of(address), digest=recorded_digest(record))


def dataset_dependencies(address: str) -> Iterator[dict[str, Any]]:
    """Return the manifest and the files of a dataset, and of those that it mixes."""
    for storage, manifest in datasets_of(address):
        about = {"contentHash": manifest.content_hash, "documents": manifest.documents, "tokens": manifest.tokens}
        name = f"datasets/{storage.address().rpartition('/')[2]}/{MANIFEST}"
        uri, digest = uri_of(storage.address(MANIFEST)), digest_of(storage, MANIFEST)
        yield descriptor(name, uri=uri, digest=digest, annotations=about)
        yield from (resource for _, resource in files_of(storage, manifest))


def _weights(origin: InitialWeights | None) -> Iterator[dict[str, Any]]:
    if origin is None:
        return
    parts = {"checkpoint": 4}.get(origin.kind, 2)  # of runs/<run>/checkpoints/<step> and weights/<hash>
    folder = "/".join(origin.address.split("/")[-parts:])
    about: dict[str, Any] = {"kind": origin.kind, "from": origin.name, "contentHash": origin.content_hash}
    if origin.kind == "checkpoint":
        storage = open_storage(origin.address)
        with suppress(TrainLitgptError):
            manifest = read_manifest(storage, CheckpointManifest)
            if manifest is not None:
                seen = [order._asdict() for order in manifest.trained_on]
                facts = {"run": manifest.run, "step": manifest.step, "tokens": manifest.tokens, "trainedOn": seen}
                if manifest.link is not None:
                    facts["link"] = manifest.link.columns()
                uri, digest = uri_of(storage.address(MANIFEST)), digest_of(storage, MANIFEST)
                yield descriptor(f"{folder}/{MANIFEST}", uri=uri, digest=digest, annotations=about | facts)
    for name, (_, checksum) in sorted(origin.files.items()):
        algorithm, _, value = checksum.rpartition(":")  # with an algorithm if the Hub lists it, else a CRC32C
        digest = {{"": "crc32c", "git": "gitBlob"}.get(algorithm, algorithm): value}
        uri = uri_of(f"{origin.address}/{name}")
        yield descriptor(f"{folder}/{name}", uri=uri, digest=digest, annotations=about)


def _software(run: Storage, document: RunDocument) -> Iterator[dict[str, Any]]:
    recorded = [document.software]
    for number in attempt_numbers(run):
        with suppress(DataError):
            recorded.append(read_document(run.within(f"{ATTEMPTS}/{number}")).software)
    for software in recorded:
        yield from _parts_of(software)


def attempt_numbers(run: Storage) -> list[int]:
    """Return the numbers of the attempts that have a folder."""
    folders = {path.partition("/")[0] for path in run.within(ATTEMPTS).list() if "/" in path}
    return sorted(int(folder) for folder in folders if folder.isdecimal())


def _parts_of(software: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    from packageurl import PackageURL

    if software.get("image"):
        name, _, digest = software["image"].partition("@sha256:")
        image = descriptor(f"image {name}", uri=f"docker://{software['image']}")
        if digest:  # a reference may have a tag instead
            image["digest"] = {"sha256": digest}
        yield image
    for name, version in sorted((software.get("packages") or {}).items()):
        kind = {"python": "generic"}.get(name, "pypi")
        yield descriptor(f"package {name}", uri=PackageURL(kind, None, name, version).to_string())
    if software.get("commit"):
        about = {"uncommittedChanges": bool(software.get("dirty"))}
        yield descriptor(f"source {OURS}", digest={"gitCommit": software["commit"]}, annotations=about)
