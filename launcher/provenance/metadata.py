"""Metadata of a model and its datasets in formats that catalogues read: CycloneDX and Croissant."""

from __future__ import annotations

import json
import uuid
from contextlib import suppress
from pathlib import PurePosixPath
from typing import Any

from launcher.images.identity import SBOM
from launcher.provenance.dependencies import datasets_of, digest_of, files_of, recorded_digest, uri_of
from litgpt_demo.config import TrainingSpec
from litgpt_demo.export import FinalManifest
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import MANIFEST, Storage

MODEL_BILL = "model.cdx.json"
CROISSANT = "croissant.json"

_WEIGHTS = (".pth", ".safetensors")
_MEDIA_TYPES = {".json": "application/json", ".txt": "text/plain"}
_TERMS = (
    "arrayShape citeAs column containedIn equivalentProperty extract field fileProperty fileObject fileSet format "
    "includes isArray isLiveDataset jsonPath key md5 parentField path recordSet references regex repeated replace "
    "samplingRate separator source subField transform"
)
"""The terms of Croissant 1.1 that mean the same under their own names; readers expect all of them in a context."""


def model_bill_of(run: Storage, final: FinalManifest) -> dict[str, Any]:
    """Return the run's bill of materials with the model and its datasets as components, in CycloneDX 1.6.

    cyclonedx-python-lib 11 has no `modelParameters.datasets`, so the parts are made here.
    """
    bill: dict[str, Any] = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1}
    with suppress(FileNotFoundError):
        bill = json.loads(run.read(SBOM))
    spec, datasets = read_spec(run), list[dict[str, Any]]()
    for storage, manifest in datasets_of(spec.dataset):
        digest, reference = digest_of(storage, MANIFEST)["sha256"], f"dataset:{manifest.content_hash}"
        datasets.append({
            "type": "data", "bom-ref": reference, "name": manifest.name, "version": manifest.content_hash,
            "hashes": [{"alg": "SHA-256", "content": digest}],
            "data": [{"type": "dataset", "name": manifest.name, "contents": {"url": uri_of(storage.address())}}],
        })  # fmt: skip
    model = _model(final, spec, [dataset["bom-ref"] for dataset in datasets])
    parts = [*bill.get("components", []), model, *datasets]
    content = json.dumps([bill.get("serialNumber"), model, datasets], sort_keys=True)
    return bill | {"components": parts, "serialNumber": uuid.uuid5(uuid.NAMESPACE_OID, content).urn}


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
    weights = [file for file in final.files if file.path.endswith(_WEIGHTS) and file.sha256]
    files = [
        {
            "type": "file", "bom-ref": f"{reference}/{file.path}", "name": file.path,
            "hashes": [{"alg": "SHA-256", "content": file.sha256}],
        }
        for file in weights
    ]  # fmt: skip
    return {
        "type": "machine-learning-model",
        "bom-ref": reference,
        "name": final.run.rpartition("-")[0] or final.run,
        "version": final.run.rpartition("-")[2],
        "components": files,
        "modelCard": {
            "modelParameters": parameters,
            "quantitativeAnalysis": {
                "performanceMetrics": [{"type": kind, "value": f"{value:.6g}"} for kind, value in metrics.items()]
            },
        },
    }


def croissant_of(run: Storage) -> dict[str, Any] | None:
    """Return the datasets of a run as one dataset in Croissant 1.1; None if they do not exist any more.

    https://docs.mlcommons.org/croissant/docs/croissant-spec-1.1.html
    """
    datasets = list(datasets_of(read_spec(run).dataset))
    if not datasets:
        return None
    files = [
        {
            "@type": "cr:FileObject",
            "@id": f"{storage.address().rpartition('/')[2]}/{record.path}",
            "name": f"{storage.address().rpartition('/')[2]}/{record.path}",
            "contentUrl": uri_of(place.address(record.path)),
            "contentSize": f"{record.size} B",
            "encodingFormat": _MEDIA_TYPES.get(PurePosixPath(record.path).suffix, "application/octet-stream"),
            **recorded_digest(place, record),
        }
        for storage, manifest in datasets
        for place, record in files_of(storage, manifest)
    ]
    storage, manifest = datasets[0]
    context: dict[str, Any] = {term: f"cr:{term}" for term in _TERMS.split()}
    context |= {
        "@language": "en", "@vocab": "https://schema.org/", "sc": "https://schema.org/", "conformsTo": "dct:conformsTo",
        "cr": "http://mlcommons.org/croissant/", "dct": "http://purl.org/dc/terms/",
        "rai": "http://mlcommons.org/croissant/RAI/", "data": {"@id": "cr:data", "@type": "@json"},
        "dataType": {"@id": "cr:dataType", "@type": "@vocab"}, "examples": {"@id": "cr:examples", "@type": "@json"},
        "name": {"@container": "@language"}, "description": {"@container": "@language"},
    }  # fmt: skip
    return {
        "@context": context,
        "@type": "sc:Dataset",
        "conformsTo": "http://mlcommons.org/croissant/1.1",
        "name": manifest.name,
        "identifier": manifest.content_hash,
        "description": f"{manifest.tokens:,} token ids of {manifest.documents:,} documents for a language model",
        "url": uri_of(storage.address()),
        "distribution": files,
    }
