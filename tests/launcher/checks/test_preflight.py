import socket
import sys
from pathlib import Path
from typing import Any

import pytest
from bucket_emulator import RUNNING, bucket_emulator
from echoing_server import echoing_server
from strangers import evil_scheduler
from strict_platform import StrictPlatform

from launcher.checks.doctor import examine_environment
from launcher.checks.preflight import check_access, check_place, check_training, check_workers
from launcher.config import DaskWorkers, RunConfig, validated
from launcher.errors import ConfigProblem, LoginProblem, NoCredentials, PlatformUnreachable, finding_of, raise_on_errors
from launcher.job import Job
from launcher.platforms.local.platform import LocalPlatform
from launcher.platforms.local.settings import LocalPlatformConfig
from litgpt_demo.errors import DataError, DiskFull, FailureClass, Finding, NetworkError, TrainLitgptError, Unreachable
from litgpt_demo.storage.local import LocalStorage


def test_access_is_proved_by_a_write_that_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "config.json").write_text("{}")
    assert "can be written" in check_access(RunConfig(root=str(tmp_path)))
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["runs", "runs/config.json"]
    with pytest.raises(LoginProblem, match=r"cannot be written: .+"):
        check_access(RunConfig(root=str(tmp_path / "runs" / "config.json" / "out")))


@pytest.mark.parametrize("kind", [DiskFull, NetworkError, Unreachable])
def test_full_or_silent_root_is_no_login_problem(
    kind: type[TrainLitgptError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps its failure class."""

    def fail(*_: Any) -> None:
        raise kind("it is so")

    monkeypatch.setattr(LocalStorage, "write", fail)
    with pytest.raises(kind, match="it is so"):
        check_access(RunConfig(root=str(tmp_path)))


def test_plan_executes_nothing_that_a_scheduler_answers(tmp_path: Path) -> None:
    with evil_scheduler(tmp_path / "ran") as address:
        assert check_workers(DaskWorkers(kind="dask", scheduler=address)) == []
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("bucket", "location", "elsewhere"),
    [
        ("US-EAST1", "europe-west4-b", True), ("EUROPE-WEST4", "europe-west4-b", False), ("EU", "europe-west4", False),
        ("NAM4", "europe-west4", True), ("EUROPE-WEST1", "europe-west4", True), ("", "europe-west4", False),
    ],
)  # fmt: skip
def test_bucket_in_another_region_than_the_machines_is_a_warning(
    bucket: str, location: str, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with bucket_emulator("runs") as address:
        RUNNING[address].location = bucket
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        document = {"root": "gs://runs/a", "platform": {"kind": "gke", "cluster": "c", "location": location}}
        config = validated(RunConfig, document, where="test")
        job = Job(name="gpt-1", attempt=1, nodes=1, processes=1, program=("x.py",), directory="gs://runs/a/1")
        found = [finding for finding in check_place(config, StrictPlatform(), job) if finding.code == "root.region"]
    assert [finding.severity for finding in found] == ["warning"] * elsewhere
    assert all(f"is in {bucket.lower()}, but the machines are in europe-west4" in finding.what for finding in found)


def test_everything_that_stands_in_the_way_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    settings = {"data": {"tokenizer": {"kind": "train", "vocab_size": 70_000}}, "train": {"strategy": "fsdp"}}
    image = {"kind": "prebuilt", "reference": "example.test/litgpt@sha256:" + "0" * 64}
    broken = validated(RunConfig, {"root": f"{tmp_path}/file", "image": image, **settings}, where="test")
    job = Job(name="gpt-1", attempt=1, nodes=1, processes=1, program=("x.py",), directory=f"{tmp_path}/attempts/1")
    with socket.create_server(("", 0)) as taken:
        place = check_place(broken, LocalPlatform(LocalPlatformConfig(kind="local", port=taken.getsockname()[1])), job)
        found = [*place, *check_training(broken, job, vocab_size=70_000)]
    assert all(finding.fix for finding in found if finding.severity != "info")
    codes = {(finding.severity, finding.code) for finding in found}
    errors = {("error", code) for code in ("root.not-a-folder", "model.vocabulary", "local.port")}
    assert codes >= errors | {("warning", "train.strategy"), ("warning", "image.unused")}
    with pytest.raises(ConfigProblem) as caught:
        raise_on_errors(found)
    assert all(f"[{code}]" in str(caught.value) for _, code in errors)
    assert "train.strategy" not in str(caught.value)
    assert "set model.config.padded_vocab_size=70016" in str(caught.value)


def test_plan_refuses_packages_from_another_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(name="gpt-1", attempt=1, nodes=1, processes=1, program=("x.py",), directory=f"{tmp_path}/attempts/1")
    config = RunConfig(root=str(tmp_path))
    (tmp_path / "torch.py").touch()
    for path, problems in (("", []), (str(tmp_path), [("error", "python.packages")])):
        monkeypatch.setenv("PYTHONPATH", path)
        findings = [*check_training(config, job, vocab_size=300)]
        places = [finding for finding in findings if f"would load torch from {tmp_path}/torch.py" in finding.what]
        assert [(finding.severity, finding.code) for finding in places] == problems


@pytest.mark.parametrize(
    ("model", "length", "code", "message"),
    [
        ({"name": "Mixtral-8x7B-v0.1"}, 128, "model.experts", "routes tokens to 8 experts"),
        ({"name": "Mixtral-8x7B-v0.1", "init_from": "a/mixtral"}, 128, "train.float8", "an expert gets any"),
        ({"name": "pythia-14m"}, 100, "train.float8", "model.sequence_length=100 are 100"),
        ({"name": "pythia-14m"}, 128, None, ""),
    ],
)
def test_plan_refuses_experts_or_rows_without_products(
    model: dict[str, str], length: int, code: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts from random weights are not balanced; float8 multiplies rows in multiples of 16."""
    monkeypatch.setattr("launcher.checks.preflight.gpu_names", lambda: ["NVIDIA H100 80GB HBM3"])
    job = Job(name="gpt-1", attempt=1, nodes=1, processes=1, program=("x.py",), directory="runs/gpt-1/attempts/1")
    train = {"float8": True, "compile": "blocks", "micro_batch": 1, "global_batch": 1}
    config = validated(RunConfig, {"model": {**model, "sequence_length": length}, "train": train}, where="test")
    found = {
        finding.code: finding.what
        for finding in check_training(config, job, vocab_size=300)
        if finding.severity == "error"
    }
    assert message in found.get(code or "", "")
    assert (code in found) == (code is not None)


def test_changed_named_model_is_shown_with_its_changes() -> None:
    """The fix is the setting that takes it unchanged."""
    job = Job(name="gpt-1", attempt=1, nodes=1, processes=1, program=("x.py",), directory="runs/gpt-1/attempts/1")
    model = {"name": "pythia-14m", "config": {"n_layer": 4, "n_embd": 128, "padded_vocab_size": 512}}
    found = check_training(validated(RunConfig, {"model": model}, where="test"), job, vocab_size=300)
    [text] = [str(finding) for finding in found if finding.code == "model.config"]
    assert "model.config changes pythia-14m: n_layer 6→4 -> model.config={} takes it unchanged" in text
    with pytest.raises(ConfigProblem, match=r"n_embd 2048→192, n_head 32→6; model\.config=\{\} takes it unchanged"):
        validated(RunConfig, {"model": {"name": "Llama-3.2-1B", "config": {"n_embd": 192, "n_head": 6}}}, where="test")


def test_failed_check_is_unknown_which_refuses_a_run() -> None:
    """A failure that is about the config is an error."""
    for error in (NoCredentials("none"), PlatformUnreachable("no answer"), NetworkError("no bucket")):
        finding = finding_of(error, "data.refused")
        assert finding.severity == "unknown"
        with pytest.raises(ConfigProblem, match=str(error)) as refused:
            raise_on_errors([finding])
        assert refused.value.fault is error.fault
    assert finding_of(LoginProblem("a role is missing"), "data.refused").severity == "error"


def test_advice_of_two_parts_and_quoted_words_are_told_whole() -> None:
    refused = LoginProblem("the cluster does not let you create a; b", fix="have the Role bound; or do without")
    finding, quoted = finding_of(refused, "kubernetes.access"), finding_of(DataError("it says: a; b"), "data.refused")
    assert (finding.what, finding.fix) == (refused.what, "have the Role bound; or do without")
    assert str(refused) == "the cluster does not let you create a; b; have the Role bound; or do without"
    assert (quoted.what, quoted.fix) == ("it says: a; b", "")


def test_refused_corpus_alone_raises_the_error_of_preparation() -> None:
    data, wrong = (
        finding_of(DataError("holds no text"), "data.refused"),
        Finding("error", "script.missing", "wrong", "fix it"),
    )
    assert data.fault is FailureClass.DATA
    with pytest.raises(DataError, match="holds no text"):
        raise_on_errors([data])
    with pytest.raises(ConfigProblem) as caught:
        raise_on_errors([wrong, Finding("warning", "image.unused", "odd", "look"), data])
    lines = ["2 problems:", "  [script.missing] wrong -> fix it", "  [data.refused] holds no text"]
    assert str(caught.value).splitlines() == lines


def test_doctor_tells_what_is_there_and_a_fix_of_what_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def severities(root: Path) -> dict[str, str]:
        return {check.code: check.severity for check in examine_environment(str(root))}

    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    found = {check.code: check for check in examine_environment(str(tmp_path))}
    assert found["python.version"].what == "Python " + ".".join(map(str, sys.version_info[:3]))
    assert found["package.torch"].what.startswith("torch ")
    assert {"machine.memory", "machine.cores", "machine.gpus", "network.loopback", "tool.git"} <= set(found)
    assert all(check.fix for check in found.values() if check.severity != "info")
    with echoing_server(status=200) as server:
        monkeypatch.setenv("PREFECT_API_URL", f"{server.address}/api")
        assert severities(tmp_path)["prefect.server"] == "info"
        assert [check.splitlines()[0] for check in server.requests] == ["GET /api/health HTTP/1.1"]
    assert severities(tmp_path)["prefect.server"] == "error"
    (tmp_path / "litgpt").mkdir()
    (tmp_path / "litgpt/__init__.py").touch()
    with monkeypatch.context() as patch:
        patch.setenv("PYTHONPATH", str(tmp_path))
        assert severities(tmp_path)["python.packages"] == "error"
    (tmp_path / "file").touch()
    assert severities(tmp_path / "file")["root.not-a-folder"] == "error"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert severities(tmp_path)["tool.git"] == "warning"
    with monkeypatch.context() as patch:
        patch.setattr("importlib.metadata.version", lambda name: "0rc1")
        assert severities(tmp_path)["package.torch"] == "warning"
    monkeypatch.setattr(sys, "path", [])
    assert severities(tmp_path)["package.litgpt"] == "error"
