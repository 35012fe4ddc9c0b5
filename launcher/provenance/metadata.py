"""Metadata of a model and its datasets in formats that catalogues read: CycloneDX and Croissant."""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

from launcher.images.identity import SBOM
from launcher.provenance.dependencies import datasets_of, digest_of, files_of, uri_of
from litgpt_demo.config import TrainingSpec
from litgpt_demo.export import FinalManifest
from litgpt_demo.runs import dataset_address, read_spec
from litgpt_demo.storage import MANIFEST, Storage

MODEL_BILL = "model.cdx.json"
CROISSANT = "croissant.json"

_WEIGHTS = (".pth", ".safetensors")
_MEDIA_TYPES = {".json": "application/json", ".txt": "text/plain"}
_CONTEXT = "croissant-context.json"
"""The context of Croissant 1.1 that its readers expect, also with the terms that are not used here."""


def model_bill_of(run: Storage, final: FinalManifest) -> dict[str, Any]:
    """Return the run's bill of materials with the model and its datasets as components, in CycloneDX 1.6.

    cyclonedx-python-lib 11 has no `modelParameters.datasets`, so the parts are made here.
    """
    bill: dict[str, Any] = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1}
    with suppress(FileNotFoundError):
        bill = json.loads(run.read(SBOM))
    spec, datasets = read_spec(run), list[dict[str, Any]]()
    for storage, manifest in datasets_of(dataset_address(run, spec.dataset)):
        datasets.append({
            "type": "data", "bom-ref": f"dataset:{manifest.content_hash}", "name": manifest.name,
            "version": manifest.content_hash, "hashes": _hashes(digest_of(storage, MANIFEST)["sha256"]),
            "data": [{"type": "dataset", "name": manifest.name, "contents": {"url": uri_of(storage.address())}}],
        })  # fmt: skip
    model = _model(final, spec, [dataset["bom-ref"] for dataset in datasets])
    parts = [*bill.get("components", []), model, *datasets]
    content = json.dumps([bill.get("serialNumber"), model, datasets], sort_keys=True)
    return bill | {"components": parts, "serialNumber": uuid.uuid5(uuid.NAMESPACE_OID, content).urn}


def _hashes(sha256: str) -> list[dict[str, str]]:
    return [{"alg": "SHA-256", "content": sha256}]


def _model(final: FinalManifest, spec: TrainingSpec, datasets: list[str]) -> dict[str, Any]:
    reference, architecture = f"model:{final.run}", spec.model.name
    if final.huggingface is not None:
        architecture = final.huggingface.architecture
    parameters: dict[str, Any] = {
        "approach": {"type": "self-supervised"},
        "task": "text-generation",
        "architectureFamily": "transformer",
        "datasets": [{"ref": dataset} for dataset in datasets],
    }
    if architecture:
        parameters["modelArchitecture"] = architecture
    metrics = {"validation loss": final.validation_loss, "perplexity": final.perplexity}
    figures = [{"type": kind, "value": f"{value:.6g}"} for kind, value in metrics.items()]
    name, _, version = final.run.rpartition("-")
    return {
        "type": "machine-learning-model",
        "bom-ref": reference,
        "name": name or final.run,
        "version": version,
        "components": [
            {"type": "file", "bom-ref": f"{reference}/{file.path}", "name": file.path, "hashes": _hashes(file.sha256)}
            for file in final.files
            if file.path.endswith(_WEIGHTS) and file.sha256
        ],
        "modelCard": {"modelParameters": parameters, "quantitativeAnalysis": {"performanceMetrics": figures}},
    }


def croissant_of(run: Storage) -> dict[str, Any] | None:
    """Return the datasets of a run as one dataset in Croissant 1.1; None if they do not exist any more.

    https://docs.mlcommons.org/croissant/docs/croissant-spec-1.1.html
    """
    datasets = list(datasets_of(dataset_address(run, read_spec(run).dataset)))
    if not datasets:
        return None
    files = [
        {
            "@type": "cr:FileObject",
            "@id": resource["name"],
            "name": resource["name"],
            "contentUrl": resource["uri"],
            "contentSize": f"{record.size} B",
            "encodingFormat": _MEDIA_TYPES.get(PurePosixPath(record.path).suffix, "application/octet-stream"),
            **resource["digest"],
        }
        for storage, manifest in datasets
        for record, resource in files_of(storage, manifest)
    ]
    storage, manifest = datasets[0]
    return {
        "@context": json.loads(Path(__file__).with_name("templates").joinpath(_CONTEXT).read_text("utf-8")),
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.1",
        "name": manifest.name,
        "identifier": manifest.content_hash,
        "description": f"{manifest.tokens:,} token ids of {manifest.documents:,} documents for a language model",
        "url": uri_of(storage.address()),
        "distribution": files,
    }
