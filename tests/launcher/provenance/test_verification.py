"""`train-litgpt sign` and `verify`: what was signed is accepted, and each of many forgeries is refused by name."""

import base64
import json
import shutil
import sys
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from console_script import Cli
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa
from training_runs import NewRun, TrainElsewhere

from launcher.provenance.statements import write_statements
from launcher.replay import ReplayPlan
from launcher.runs.run import RunManifest
from litgpt_demo.data.dataset import DatasetManifest
from litgpt_demo.documents import FileRecord, read_manifest, with_checksum, write_manifest
from litgpt_demo.errors import EXIT_CODES, FailureClass
from litgpt_demo.export import FinalManifest
from litgpt_demo.export.models import export
from litgpt_demo.replays import Replay, ReplayedStep
from litgpt_demo.storage import Storage, open_storage, sha256_of

USER, DATA = (EXIT_CODES[fault] for fault in (FailureClass.USER, FailureClass.DATA))
PASSWORD = "correct horse battery"


def write_keys(folder: Path, name: str, private: Any, password: bytes | None = None) -> Path:
    """Write a private key, and its public key as `<name>.pub`."""
    serial = serialization
    encryption = serial.BestAvailableEncryption(password) if password else serial.NoEncryption()
    form = serial.PrivateFormat.PKCS8
    (folder / name).write_bytes(private.private_bytes(serial.Encoding.PEM, form, encryption))
    public = private.public_key().public_bytes(serial.Encoding.PEM, serial.PublicFormat.SubjectPublicKeyInfo)
    (folder / f"{name}.pub").write_bytes(public)
    return folder / name


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("keys")
    write_keys(folder, "ours", ec.generate_private_key(ec.SECP256R1()))
    write_keys(folder, "theirs", ec.generate_private_key(ec.SECP256R1()))
    return folder


@pytest.fixture(scope="module")
def pristine(
    finished: Path, tiny_dataset: Path, keys: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """A root with a signed run and its dataset, and a copy of it."""
    folder = tmp_path_factory.mktemp("signed")
    root, run = folder / "root", folder / "root/runs/finished"
    shutil.copytree(finished, run)
    dataset = shutil.copytree(tiny_dataset, root / "datasets" / tiny_dataset.name)
    config = json.loads((run / "config.json").read_text())
    config["training"]["dataset"] = str(dataset)
    config |= {"run": {"name": "poems", "platform": {"kind": "local"}}, "software": {"packages": {"torch": "2"}}}
    (run / "config.json").write_text(json.dumps(config))
    (run / "sbom.cdx.json").write_text('{"bomFormat": "CycloneDX"}')
    (run / "report.html").write_text("<title>finished</title>")
    storage = open_storage(str(run))
    final = export(storage)
    models = [record.model_copy(update={"path": f"final/{record.path}"}) for record in final.files]
    manifest = RunManifest(
        run="finished", run_id="0", dataset=dataset.name, config={}, software={}, step=12, tokens=final.tokens,
        validation_loss=final.validation_loss, attempts=1,
        files=(*models, *write_statements(storage), FileRecord.of(storage.stat("report.html"))),
    )  # fmt: skip
    write_manifest(storage, manifest)
    return root, Path(shutil.copytree(root, folder / "copy"))


@pytest.fixture
def run(pristine: tuple[Path, Path], cli: Cli, keys: Path) -> Path:
    """The run as it was signed, at the place where it was made."""
    root, copy = pristine
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(copy, root)
    if not (copy / "runs/finished/final/model.sig").exists():
        assert cli("sign", str(root / "runs/finished"), "--key", str(keys / "ours")).code == 0
        shutil.rmtree(copy)
        shutil.copytree(root, copy)
    return root / "runs/finished"


STEP = "checkpoints/step-00000012"


def flip(path: Path, place: int = -2) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(bytes(content))


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def edit(path: Path, change: Callable[[Any], object], name: Any = None) -> None:
    """Change a JSON document; with `name`, its checksum is made right."""
    document = json.loads(path.read_text())
    document.pop(f"{name}_crc32c", None)
    change(document)
    text = json.dumps(document, indent=1).encode()
    path.write_bytes(with_checksum(text, name) if name else text)


def edit_rows(run: Path, change: Callable[[list[Any]], object]) -> None:
    """Change the metrics, and write statements that agree with them."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    change(rows)
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_statements(open_storage(str(run)))


def steps_of(rows: list[Any]) -> list[Any]:
    return [row for row in rows if row["kind"] == "step"]


def swap_batches(rows: list[Any]) -> None:
    first, second = steps_of(rows)[:2]
    first["batch_sha256"], second["batch_sha256"] = second["batch_sha256"], first["batch_sha256"]


def forge_link(rows: list[Any]) -> None:
    next(row for row in rows if row["kind"] == "checkpoint")["weights_sha256"] = "ab" * 32


def swap_weights(run: Path) -> None:
    """Put another model in, with manifests and statements that agree with it."""
    path, storage = run / "final/litgpt/lit_model.pth", open_storage(str(run / "final"))
    weights = torch.load(path, weights_only=True)
    next(iter(weights.values()))[0, 0] += 1
    torch.save(weights, path)
    manifest = read_manifest(storage, FinalManifest)
    assert manifest is not None
    record = FileRecord.of(storage.stat("litgpt/lit_model.pth"), sha256=sha256_of(path))
    files = tuple(record if file.path == record.path else file for file in manifest.files)
    write_manifest(storage, manifest.model_copy(update={"files": files}))
    write_statements(open_storage(str(run)))


def swap_tokens(run: Path) -> None:
    """Train on other tokens than those of the dataset's manifest, which agrees with them, as do the statements."""
    [folder] = (run.parents[1] / "datasets").iterdir()
    storage, tokens = open_storage(str(folder)), (folder / "train.bin").read_bytes()
    ids = np.frombuffer(tokens, dtype="<u2").copy()
    ids[:-1] = ids[:-1][::-1]
    ids.tofile(folder / "train.bin")
    manifest = read_manifest(storage, DatasetManifest)
    assert manifest is not None
    record = FileRecord.of(storage.stat("train.bin"), sha256=sha256_of(folder / "train.bin"))
    train = manifest.train.model_copy(update={"files": (record,)})
    write_manifest(storage, manifest.model_copy(update={"train": train}))
    write_statements(open_storage(str(run)))


def swap_average(run: Path) -> None:
    """Put in an averaged model without a signature, with a manifest and statements that agree with it."""
    ignored = shutil.ignore_patterns("attestations.intoto.jsonl", "model.sig")
    shutil.copytree(run / "final", run / "final-average", ignore=ignored)
    edit(run / "final-average/manifest.json", lambda m: m.update(average=True), "manifest")
    write_statements(open_storage(str(run)), "final-average")


def replace_by_a_run(run: Path) -> None:
    """Leave a folder that looks like a run without a model, which no signature can be of."""
    for name in ("final", "checkpoints"):
        shutil.rmtree(run / name)
    (run / "manifest.json").unlink()
    (run / "litgpt").mkdir()


def change_an_attempt(run: Path) -> None:
    """A replay would train as this attempt says, and the statements would say what the run's config says."""
    attempt = run / "attempts/1"
    attempt.mkdir(parents=True)
    shutil.copy(run / "config.json", attempt)
    write_statements(open_storage(str(run)))
    edit(attempt / "config.json", lambda c: c["training"]["train"].update(learning_rate=0.5))


def dataset_file(run: Path, name: str) -> Path:
    return next((run.parents[1] / "datasets").glob(f"*/{name}"))


def parameters(statement: Any) -> Any:
    return statement["predicate"]["buildDefinition"]["externalParameters"]["training"]["train"]


FORGERIES: dict[str, tuple[Callable[[Path], object], str]] = {
    "weights": (lambda run: flip(run / "final/litgpt/lit_model.pth"), "final/litgpt/lit_model.pth: its sha256 is"),
    "transformers": (
        lambda run: flip(run / "final/huggingface/model.safetensors"), "final/huggingface/model.safetensors: its sha256"
    ),
    "tokenizer": (lambda run: flip(run / "final/litgpt/tokenizer.json"), "final/litgpt/tokenizer.json: its sha256"),
    "missing-card": (lambda run: (run / "final/MODEL_CARD.md").unlink(), "final/MODEL_CARD.md: its sha256 is absent"),
    "extra-file": (lambda run: (run / "final/litgpt/run.py").write_text(""), "final/litgpt/run.py is not in its man"),
    "manifest": (lambda run: flip(run / "final/manifest.json", 99), "final/manifest.json is not "),
    "manifest-with-its-checksum": (
        lambda run: edit(run / "final/manifest.json", lambda m: m.update(validation_loss=1.0), "manifest"),
        "final/provenance.intoto.json: subject[manifest.json].digest.sha256 is",
    ),
    "model-with-all-its-digests": (swap_weights, "final/litgpt/lit_model.pth: the digest of its weights is"),
    "chain-of-the-model": (
        lambda run: edit(run / "final/manifest.json", lambda m: m.update(chain="ab" * 32), "manifest"),
        "final/manifest.json: its chain is abab",
    ),
    "dataset": (lambda run: flip(dataset_file(run, "train.bin"), 8), "train.bin has crc32c"),
    "dataset-tokenizer": (lambda run: flip(dataset_file(run, "tokenizer/tokenizer.json")), "tokenizer.json has crc32c"),
    "dataset-with-its-digests": (swap_tokens, "metrics.jsonl: batches_sha256 of step 12 is"),
    "metrics-row": (
        lambda run: replace(run / "metrics.jsonl", '"loss":5', '"loss":4'), "byproducts[metrics.jsonl].digest.sha256 is"
    ),
    "deleted-row": (
        lambda run: edit_rows(run, lambda rows: rows.remove(steps_of(rows)[4])),
        "metrics.jsonl: batch_sha256 of step 5 is absent",
    ),
    "swapped-batches": (lambda run: edit_rows(run, swap_batches), "metrics.jsonl: batch_sha256 of step 1 is"),
    "link": (lambda run: edit_rows(run, forge_link), "metrics.jsonl: the checkpoint of step 4: chain_sha256 is"),
    "config": (
        lambda run: edit(run / "config.json", lambda c: c["training"]["train"].update(seed=9)),
        "externalParameters.training.train.seed is 1337, but the files give 9",
    ),
    "subject": (
        lambda run: replace(run / "final/provenance.intoto.json", sha256_of(run / "final/lineage.json"), "ab" * 32),
        "final/provenance.intoto.json: subject[lineage.json].digest.sha256 is abab",
    ),
    "parameter": (
        lambda run: edit(run / "final/provenance.intoto.json", lambda s: parameters(s).update(learning_rate=1.0)),
        "externalParameters.training.train.learning_rate is 1.0, but the files give 0.02",
    ),
    "dependency": (
        lambda run: replace(
            run / "final/provenance.intoto.json", sha256_of(dataset_file(run, "val.bin")), "ab" * 32
        ),
        "/val.bin is abab",
    ),
    "test-result": (
        lambda run: edit(run / "final/test-result.intoto.json", lambda s: s["predicate"].update(failedTests=["all"])),
        "final/test-result.intoto.json: predicate.failedTests[0] is all, but the files give absent",
    ),
    "report": (lambda run: flip(run / "report.html"), "report.html: its crc32c is"),
    "bill": (lambda run: flip(run / "sbom.cdx.json"), "byproducts[sbom.cdx.json].digest.sha256 is"),
    "run-manifest": (lambda run: flip(run / "manifest.json", 99), "manifest.json is not "),
    "signature": (lambda run: flip(run / "final/attestations.intoto.jsonl", -9), "has no signature of test-result"),
    "no-signature": (lambda run: (run / "final/attestations.intoto.jsonl").unlink(), "intoto.jsonl is missing"),
    "model-signature": (lambda run: flip(run / "final/model.sig", -9), "final/model.sig was not made by this key"),
    "shard": (lambda run: flip(next((run / STEP).glob("__0_0.distcp"))), f"{STEP}/__0_0.distcp: its crc32c is"),
    "shards-stray": (lambda run: (run / STEP / "x.py").write_text(""), f"{STEP}/x.py is not in its manifest"),
    "shards-link": (
        lambda run: edit(run / STEP / "manifest.json", lambda m: m["link"].update(weights="ab" * 32), "manifest"),
        f"{STEP}/manifest.json: its link's weights_sha256 is abab",
    ),
    "shards-path": (
        lambda run: edit(run / STEP / "manifest.json", lambda m: m["files"][0].update(path="../../x"), "manifest"),
        f"{STEP}/../../x: its crc32c is unreadable (path '../../x' leaves",
    ),
    "shards-settings": (
        lambda run: edit(
            run / STEP / "manifest.json", lambda m: m["config"]["train"].update(learning_rate=0.5), "manifest"
        ),
        f"{STEP}/manifest.json: train.learning_rate is 0.5, but config.json has 0.02",
    ),
    "attempt": (change_an_attempt, "attempts/1/config.json: train.learning_rate is 0.5, but config.json has 0.02"),
    "run-manifest-with-its-checksum": (
        lambda run: edit(run / "manifest.json", lambda m: m.update(validation_loss=0.1), "manifest"),
        "manifest.json: its validation_loss is 0.1",
    ),
    "no-model": (replace_by_a_run, "there is no final that the public key could verify"),
    "average": (swap_average, "final-average/attestations.intoto.jsonl is missing"),
    "deep-signature": (
        lambda run: (run / "final/attestations.intoto.jsonl").write_text("[" * 200_000), "is not a DSSE envelope"
    ),
    "deep-model-signature": (
        lambda run: (run / "final/model.sig").write_text("[" * 200_000), "is not a signature of model_signing"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_each_forgery_is_refused_by_name(run: Path, cli: Cli, keys: Path, name: str) -> None:
    forge, problem = FORGERIES[name]
    forge(run)
    output = cli("verify", str(run), "--public-key", str(keys / "ours.pub"))
    print(output.err)
    assert output.code == 1
    assert problem in output.err


def test_a_signature_by_another_key_is_refused(run: Path, cli: Cli, keys: Path) -> None:
    assert cli("sign", str(run), "--key", str(keys / "theirs")).code == 0
    output = cli("verify", str(run), "--public-key", str(keys / "ours.pub"))
    assert (output.code, output.err.count("another key signed it")) == (1, 3)
    assert cli("verify", str(run), "--public-key", str(keys / "theirs.pub")).code == 0


def test_a_signed_run_verifies(run: Path, cli: Cli, keys: Path, tmp_path: Path) -> None:
    output = cli("verify", str(run), "--public-key", str(keys / "ours.pub"), "--output", str(tmp_path / "svr.json"))
    assert output.code == 0, output
    assert "not checked" not in output.out
    for line in ("12 files of final", "15 signatures of final", "3 digests of weights", "15 batches of the dataset"):
        assert line in output.out
    statement = json.loads((tmp_path / "svr.json").read_text())
    assert statement["predicateType"] == "https://in-toto.io/attestation/svr/v0.2"
    assert {part["name"]: part["digest"]["sha256"] for part in statement["subject"]}["litgpt/lit_model.pth"] == (
        sha256_of(run / "final/litgpt/lit_model.pth")
    )
    predicate = statement["predicate"]
    assert predicate["verifier"]["policies"] == []
    assert {"TRAIN_LITGPT_SIGNATURE", "TRAIN_LITGPT_BATCHES"} <= {*predicate["properties"]}


def test_a_copied_model_verifies_without_its_run(run: Path, cli: Cli, keys: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(run / "final", tmp_path / "model")
    output = cli("verify", str(copy), "--public-key", str(keys / "ours.pub"))
    assert output.code == 0, output
    assert "1 digests of weights" in output.out
    assert "not checked: config, metrics, checkpoints and dataset" in output.out
    flip(copy / "litgpt/model_config.yaml")
    output = cli("verify", str(copy))
    assert (output.code, "final/litgpt/model_config.yaml: its sha256" in output.err) == (1, True)


def test_a_statement_of_another_kind_is_refused(run: Path, cli: Cli, keys: Path, tmp_path: Path) -> None:
    """The key signed both, and both have the same subjects."""
    copy = shutil.copytree(run / "final", tmp_path / "model")
    shutil.copy(copy / "test-result.intoto.json", copy / "provenance.intoto.json")
    output = cli("verify", str(copy), "--public-key", str(keys / "ours.pub"))
    assert (output.code, "provenance.intoto.json: predicateType is" in output.err) == (1, True)


def test_a_copied_root_is_verified_with_its_own_dataset(run: Path, cli: Cli, keys: Path, tmp_path: Path) -> None:
    """Whether the original root exists or not."""
    copy = Path(shutil.copytree(run.parents[1], tmp_path / "copy"))
    options = ("--public-key", str(keys / "ours.pub"))
    assert cli("verify", str(copy / "runs/finished"), *options).code == 0
    [tokens] = copy.glob("datasets/*/train.bin")
    flip(tokens)
    forged = cli("verify", str(copy / "runs/finished"), *options)
    assert (forged.code, "train.bin" in forged.out + forged.err) == (1, True)
    flip(tokens)
    shutil.rmtree(run.parents[1])
    moved = cli("verify", str(copy / "runs/finished"), *options, "--json")
    assert (moved.code, json.loads(moved.out)["not_checked"]) == (0, [])


def test_a_model_collected_on_the_way_verifies_after_more_steps(run: Path, cli: Cli) -> None:
    storage, metrics = open_storage(str(run)), run / "metrics.jsonl"
    text = metrics.read_text()
    metrics.write_text("".join(line for line in text.splitlines(keepends=True) if json.loads(line)["step"] <= 8))
    shutil.rmtree(run / "final")
    (run / "manifest.json").unlink()
    export(storage, step=8)
    write_statements(storage)
    metrics.write_text(text)
    verified = cli("verify", str(run))
    assert (verified.code, "final: it was collected on the way" in verified.out) == (0, True), verified.err
    flip(run / "final/litgpt/lit_model.pth")
    assert cli("verify", str(run)).code == 1


def test_an_averaged_model_is_signed_too(run: Path, cli: Cli, keys: Path) -> None:
    swap_average(run)
    assert cli("sign", str(run), "--key", str(keys / "ours")).code == 0
    output = cli("verify", str(run), "--public-key", str(keys / "ours.pub"))
    assert output.code == 0, output
    assert "15 signatures of final-average" in output.out
    assert "not checked: the weights of final-average: no digest of them is recorded" in output.out
    output = cli("verify", str(run / "final-average"), "--public-key", str(keys / "ours.pub"))
    assert output.code == 0, output
    assert "not checked: the weights of final: no digest of them is recorded" in output.out


def test_an_encrypted_key_signs_with_its_password(
    run: Path, cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither the password nor the key is printed or written."""
    key = write_keys(tmp_path, "closed", ed25519.Ed25519PrivateKey.generate(), PASSWORD.encode())
    for password, problem in (("", "is encrypted with a password"), ("another", "does not open it")):
        monkeypatch.setenv("TRAIN_LITGPT_KEY_PASSWORD", password)
        refused = cli("sign", str(run), "--key", str(key))
        assert (refused.code, problem in refused.err) == (USER, True)
    monkeypatch.setenv("TRAIN_LITGPT_KEY_PASSWORD", PASSWORD)
    output = cli("sign", str(run), "--key", str(key))
    assert output.code == 0, output
    assert "there is no model.sig, because model_signing takes no Ed25519 key" in output.out
    assert not (run / "final/model.sig").exists(), "that of the key before"
    assert cli("verify", str(run), "--public-key", f"{key}.pub").code == 0
    written = b"".join(path.read_bytes() for path in (run / "final").rglob("*") if path.is_file())
    assert PASSWORD not in output.out + output.err + refused.err + written.decode(errors="replace")


@pytest.mark.parametrize("kind", ["missing", "rsa", "curve", "public", "text"])
def test_a_key_that_cannot_sign_is_refused_before_a_write(run: Path, cli: Cli, tmp_path: Path, kind: str) -> None:
    key = tmp_path / "key"
    if kind == "rsa":
        write_keys(tmp_path, "key", rsa.generate_private_key(65537, 2048))
    elif kind == "curve":
        write_keys(tmp_path, "key", ec.generate_private_key(ec.SECP256K1()))
    elif kind == "public":
        write_keys(tmp_path, "of", ec.generate_private_key(ec.SECP384R1()))
        key = tmp_path / "of.pub"
    elif kind == "text":
        key.write_text("no key")
    before = {path: path.read_bytes() for path in (run / "final").rglob("*") if path.is_file()}
    output = cli("sign", str(run), "--key", str(key))
    assert (output.code, output.out) == (USER, "")
    assert str(key) in output.err
    assert before == {path: path.read_bytes() for path in (run / "final").rglob("*") if path.is_file()}


def test_a_changed_model_is_not_signed(run: Path, cli: Cli, keys: Path) -> None:
    (run / "final/model.sig").unlink()
    flip(run / "final/litgpt/lit_model.pth")
    output = cli("sign", str(run), "--key", str(keys / "ours"))
    assert (output.code, "final/litgpt/lit_model.pth: its sha256 is" in output.err) == (DATA, True)
    assert not (run / "final/model.sig").exists()


def test_a_changed_statement_is_not_signed(run: Path, cli: Cli, keys: Path) -> None:
    """Its files are those that were collected, and it says something else of the run."""
    (run / "final/model.sig").unlink()
    edit(run / "final/provenance.intoto.json", lambda s: parameters(s).update(learning_rate=1.0))
    output = cli("sign", str(run), "--key", str(keys / "ours"))
    assert (output.code, "train.learning_rate is 1.0, but the files give 0.02" in output.err) == (DATA, True)
    assert not (run / "final/model.sig").exists()


def test_a_missing_package_names_its_extra(run: Path, cli: Cli, keys: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "securesystemslib.dsse", None)
    output = cli("sign", str(run), "--key", str(keys / "ours"))
    assert (output.code, "pip install '.[sign]'" in output.err) == (USER, True)


def test_a_run_in_a_bucket_is_signed_like_one_in_a_folder(run: Path, cli: Cli, keys: Path, bucket: Storage) -> None:
    for path in filter(Path.is_file, run.parents[1].rglob("*")):
        bucket.upload(path, str(path.relative_to(run.parents[1])))
    address = bucket.address("runs/finished")
    assert cli("sign", address, "--key", str(keys / "ours")).code == 0
    output = cli("verify", address, "--public-key", str(keys / "ours.pub"))
    assert output.code == 0, output
    bucket.write("runs/finished/final/MODEL_CARD.md", b"another")
    output = cli("verify", address)
    assert (output.code, "final/MODEL_CARD.md: its sha256 is" in output.err) == (1, True)


@pytest.mark.parametrize("options", [["--public-key"], ["--replay", "2"], ["--output", "svr.json"]])
def test_options_of_a_run_are_refused_for_a_dataset(
    tiny_dataset: Path, cli: Cli, keys: Path, options: list[str]
) -> None:
    if options == ["--public-key"]:
        options = [*options, str(keys / "ours.pub")]
    output = cli("verify", str(tiny_dataset), *options)
    assert (output.code, output.out, "neither a run nor its model" in output.err) == (USER, "", True)


def test_the_result_is_never_written_into_the_run(run: Path, cli: Cli) -> None:
    output = cli("verify", str(run), "--output", str(run / "final/svr.json"))
    assert (output.code, "is inside of what is verified" in output.err) == (USER, True)


def test_absent_parts_count_as_not_checked(run: Path, cli: Cli) -> None:
    """The dataset was removed, and nobody signed."""
    shutil.rmtree(run.parents[1] / "datasets")
    for name in ("attestations.intoto.jsonl", "model.sig"):
        (run / "final" / name).unlink()
    output = cli("verify", str(run))
    assert output.code == 0, output
    for sentence in ("the dataset: ", "the signature: final is not signed", "resources of final/provenance.intoto"):
        assert f"? not checked: {sentence}" in output.out or sentence in output.out
    assert "batches of the dataset" not in output.out


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> list[ReplayPlan]:
    """The replays that were made. Their losses are as recorded, but for step 10."""
    plans = list[ReplayPlan]()

    def replay(plan: ReplayPlan, **_: object) -> Replay:
        plans.append(plan)
        first, last = map(int, plan.script.args[plan.script.args.index("--steps") + 1].split("-"))
        steps = [
            ReplayedStep(step=step, recorded_loss=5.0, loss=5.0 + (step == 10), recorded_grad_norm=1.0, grad_norm=1.0)
            for step in range(first, last + 1)
        ]
        return Replay(run="finished", began_at=8, world_size=1, device="cpu", steps=tuple(steps), samples=())

    monkeypatch.setattr("launcher.provenance.replays.replay_here", replay)
    return plans


def test_steps_of_a_seed_are_replayed(run: Path, cli: Cli, replayed: list[ReplayPlan], tmp_path: Path) -> None:
    """One replay is enough for all that follow the same checkpoint, and nothing is written into the run."""
    before = sorted(run.rglob("*"))
    output = cli("verify", str(run), "--replay", "2", "--seed", "5")
    assert output.code == 0, output
    assert "replaying the steps 11, 12, drawn with --seed 5" in output.err
    assert "2 steps trained again, 2 of them equal bit for bit" in output.out
    assert sorted(run.rglob("*")) == before
    [plan] = replayed
    assert not plan.results.address().startswith(str(run.parents[1]))


def test_a_replay_with_another_loss_is_refused_by_name(run: Path, cli: Cli, replayed: list[ReplayPlan]) -> None:
    output = cli("verify", str(run), "--replay", "9")
    assert output.code == 1
    assert "replaying the steps 9, 10, 11, 12, drawn with --seed" in output.err, "all that follow a checkpoint"
    assert "metrics.jsonl: step 10 has a loss of 6.0 and a gradient norm of 1.0 if it is trained again" in output.err


def test_a_step_without_figures_is_no_replay(
    run: Path, cli: Cli, replayed: list[ReplayPlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever removes a row's loss and norm leaves nothing to compare."""
    bare = ReplayedStep(step=12, recorded_loss=None, loss=5.0, recorded_grad_norm=None, grad_norm=1.0)
    result = Replay(run="finished", began_at=8, world_size=1, device="cpu", steps=(bare,), samples=())
    monkeypatch.setattr("launcher.provenance.replays.replay_here", lambda plan, **_: result)
    output = cli("verify", str(run), "--replay", "9")
    assert (output.code, "step 12 was drawn, and its loss and gradient norm could not be" in output.err) == (1, True)


def test_a_run_without_a_step_to_replay_is_refused(run: Path, cli: Cli, replayed: list[ReplayPlan]) -> None:
    shutil.rmtree(run / "checkpoints/step-00000008")
    output = cli("verify", str(run), "--replay", "1")
    assert (output.code, replayed, "train.keep_every" in output.err) == (USER, [], True)


def test_a_changed_card_and_its_statements_verify(run: Path, cli: Cli) -> None:
    """As `evaluate` writes scores on the card of a run that has ended."""
    storage = open_storage(str(run))
    final = read_manifest(storage.within("final"), FinalManifest)
    assert final is not None
    card = FileRecord.of(
        storage.within("final").write("MODEL_CARD.md", b"# scores"), sha256=sha256(b"# scores").hexdigest()
    )
    files = (*(file for file in final.files if file.path != "MODEL_CARD.md"), card)
    write_manifest(storage.within("final"), final.model_copy(update={"files": files}))
    write_statements(storage)
    output = cli("verify", str(run))
    assert output.code == 0, output


def test_model_signature_has_the_form_of_model_signing(run: Path, keys: Path) -> None:
    """As model_signing 1.1 reads it: a Sigstore bundle, whose subject is the digest of all digests in their order."""
    bundle = json.loads((run / "final/model.sig").read_text())
    public = (keys / "ours.pub").read_bytes()
    assert bundle["mediaType"] == "application/vnd.dev.sigstore.bundle.v0.3+json"
    assert bundle["verificationMaterial"] == {
        "publicKey": {"hint": sha256(public).hexdigest()},
        "tlogEntries": [],
    }
    envelope = bundle["dsseEnvelope"]
    payload, [signature] = base64.b64decode(envelope["payload"]), envelope["signatures"]
    kind = b"application/vnd.in-toto+json"
    key: Any = serialization.load_pem_public_key(public)
    signed = b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)
    key.verify(base64.b64decode(signature["sig"]), signed, ec.ECDSA(hashes.SHA256()))
    statement = json.loads(payload)
    assert statement["predicateType"] == "https://model_signing/signature/v1.0"
    resources = statement["predicate"]["resources"]
    ignored = statement["predicate"]["serialization"]["ignore_paths"]
    paths = {path.relative_to(run / "final") for path in (run / "final").rglob("*") if path.is_file()}
    names = sorted(path for path in paths if str(path) not in ignored)
    assert [resource["name"] for resource in resources] == [str(path) for path in names]
    digests = [sha256_of(run / "final" / path) for path in names]
    assert [resource["digest"] for resource in resources] == digests
    assert statement["subject"] == [
        {"name": "finished", "digest": {"sha256": sha256(bytes.fromhex("".join(digests))).hexdigest()}}
    ]


def test_a_step_without_an_update_has_no_digest_to_miss(run: Path, cli: Cli) -> None:
    def skip(rows: list[Any]) -> None:
        rows[rows.index(steps_of(rows)[4])] = {"kind": "skip", "step": 5, "why": "the loss of step 5 is nan"}

    edit_rows(run, skip)
    output = cli("verify", str(run))
    assert output.code == 0, output


def test_a_run_that_moved_to_other_ranks_verifies(new_run: NewRun, train_elsewhere: TrainElsewhere, cli: Cli) -> None:
    """It was killed in a save, and not collected."""
    run = new_run("moved")
    assert train_elsewhere((run, 1, 8)) == [[-9]]
    assert train_elsewhere((new_run("moved", world_size=2), 2, 0)) == [[0, 0]]
    output = cli("verify", str(run))
    assert output.code == 0, output
    for line in ("2 digests of weights", "15 batches of the dataset", "not checked: the model: there is no final"):
        assert line in output.out
