"""Metadata of models and datasets in formats of others, checked by the schemas of those."""

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from launcher.images.identity import SBOM
from launcher.provenance.metadata import croissant_of, model_bill_of
from litgpt_demo.documents import FileRecord
from litgpt_demo.export import FinalManifest
from litgpt_demo.storage import Storage, open_storage

FINAL = FinalManifest(
    run="poems-0123456789", step=12, tokens=3072, parameters=100, dataset_hash="d", validation_loss=3.5,
    perplexity=33.1, validation_windows=7, logits_difference=1e-6, logits_tolerance=1e-4, huggingface=None, prompt="",
    sample="", files=(FileRecord(path="litgpt/lit_model.pth", size=1, crc32c="0" * 8, sha256="5" * 64),),
)  # fmt: skip
LIBRARY = {"type": "library", "bom-ref": "torch@2.13.0", "name": "torch", "version": "2.13.0"}


@pytest.fixture
def run(finished_copy: Path) -> Storage:
    return open_storage(str(finished_copy))


def components(bill: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {part["type"]: part for part in bill["components"]}


@pytest.mark.parametrize("has_bill", [True, False], ids=["with a bill", "of an image whose packages nobody knows"])
def test_bill_of_a_model_is_valid_cyclonedx(run: Storage, has_bill: bool) -> None:
    if has_bill:
        known = {"bomFormat": "CycloneDX", "specVersion": "1.6", "version": 1, "components": [LIBRARY]}
        run.write(SBOM, json.dumps(known).encode())
    bill = model_bill_of(run, FINAL)
    for version in (SchemaVersion.V1_6, SchemaVersion.V1_7):
        text = json.dumps(bill | {"specVersion": version.to_version()})
        assert JsonStrictValidator(version).validate_str(text) is None
    parts = components(bill)
    assert ("library" in parts) is has_bill
    assert model_bill_of(run, FINAL) == bill


def test_bill_names_weights_and_datasets_by_their_digests(run: Storage, tiny_dataset: Path) -> None:
    parts = components(model_bill_of(run, FINAL))
    model, data = parts["machine-learning-model"], parts["data"]
    assert (model["name"], model["version"]) == ("poems", "0123456789")
    assert model["components"][0]["hashes"] == [{"alg": "SHA-256", "content": "5" * 64}]
    assert model["modelCard"]["modelParameters"]["datasets"] == [{"ref": data["bom-ref"]}]
    manifest = sha256((tiny_dataset / "manifest.json").read_bytes()).hexdigest()
    assert data["hashes"] == [{"alg": "SHA-256", "content": manifest}]


def test_croissant_has_every_file_with_its_digest(run: Storage, tiny_dataset: Path) -> None:
    document = croissant_of(run)
    assert document is not None
    assert document["conformsTo"] == "http://mlcommons.org/croissant/1.1"
    files = {entry["name"].split("/", 2)[2]: entry for entry in document["distribution"]}
    assert files.keys() >= {"train.bin", "val.bin", "tokenizer/tokenizer.json"}
    for name, entry in files.items():
        content = (tiny_dataset / name).read_bytes()
        assert (entry["sha256"], entry["contentSize"]) == (sha256(content).hexdigest(), f"{len(content)} B")


def test_croissant_is_valid_by_mlcroissant(run: Storage) -> None:
    mlcroissant = pytest.importorskip("mlcroissant")  # the extra `croissant`
    dataset = mlcroissant.Dataset(jsonld=croissant_of(run))
    assert dataset.metadata.issues.errors == set()


def test_run_without_its_dataset_has_no_croissant(run: Storage) -> None:
    document = json.loads(run.read("config.json"))
    document["training"]["dataset"] = run.address("gone")
    run.write("config.json", json.dumps(document).encode())
    assert croissant_of(run) is None
    assert "data" not in components(model_bill_of(run, FINAL))
