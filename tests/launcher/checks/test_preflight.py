from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from strangers import evil_scheduler
from strict_platform import StrictPlatform

from launcher.checks.access import check_access
from launcher.checks.preflight import (
    check_architecture,
    check_image,
    check_precision,
    check_program,
    check_root,
    check_run,
    check_secrets,
    check_vocabulary,
    check_workers,
)
from launcher.config import DaskWorkers, RunConfig, ScriptConfig, validated
from launcher.errors import ConfigProblem, LoginProblem, NoCredentials, PlatformUnreachable
from launcher.findings import finding_of, require
from launcher.job import Job
from launcher.platforms.base import Capability
from launcher.platforms.local.platform import LocalPlatform
from litgpt_demo.errors import DataError, DiskFull, Fault, NetworkError, TrainLitgptError, Unreachable
from litgpt_demo.findings import Finding, fault_of_findings
from litgpt_demo.storage.local import LocalStorage

PREBUILT = {"kind": "prebuilt", "reference": "example.test/litgpt@sha256:" + "0" * 64}


def config(**settings: Any) -> RunConfig:
    return validated(RunConfig, settings, where="test")


def script(**settings: Any) -> ScriptConfig:
    return validated(ScriptConfig, {"script": "/a.py", **settings}, where="test")


def told(findings: Iterator[Finding] | list[Finding]) -> set[tuple[str, str]]:
    """Severity and code of each finding, which says what to do unless it is good news."""
    found = list(findings)
    assert all(one.fix for one in found if one.severity != "info")
    return {(one.severity, one.code) for one in found}


def job(folder: Path, **changes: Any) -> Job:
    settings = {"name": "gpt-1", "attempt": 1, "nodes": 1, "processes": 1, "program": ("x.py",)}
    return Job(**{**settings, "directory": f"{folder}/attempts/1", **changes})


# --- the root ---------------------------------------------------------------------------------------------------------


def test_a_root_that_can_be_written_or_made_is_fine_and_left_as_it_is(tmp_path: Path) -> None:
    for root in (tmp_path, tmp_path / "not" / "yet" / "there"):
        assert [one for one in check_root(str(root)) if one.severity == "error"] == []
    assert list(check_root("gs://bucket/x")) == [], "asked by a real write"
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    assert told(check_root(f"{tmp_path}/file/far/below")) == {("error", "root.not-a-folder")}
    assert told(check_root("/proc/runs")) == {("error", "root.not-writable")}
    assert told(check_root("s3://bucket/x")) == {("error", "root.scheme")}


def test_access_is_proved_by_a_write_that_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "config.json").write_text("{}")
    assert "can be written" in check_access(RunConfig(root=str(tmp_path)))
    assert [path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*")] == ["runs", "runs/config.json"]
    with pytest.raises(LoginProblem, match=r"cannot be written: .+"):
        check_access(RunConfig(root=str(tmp_path / "runs" / "config.json" / "out")))


@pytest.mark.parametrize("kind", [DiskFull, NetworkError, Unreachable])
def test_a_root_that_is_full_or_silent_keeps_its_class_and_is_no_login(
    kind: type[TrainLitgptError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise kind("it is so")

    monkeypatch.setattr(LocalStorage, "write", fail)
    with pytest.raises(kind, match="it is so"):
        check_access(RunConfig(root=str(tmp_path)))


# --- data, model and software -----------------------------------------------------------------------------------------


def test_more_token_ids_than_embeddings_are_refused_with_a_number_that_would_do() -> None:
    trained = {"tokenizer": {"kind": "train", "vocab_size": 70_000}}
    (finding,) = check_vocabulary(config(data=trained), None)
    assert (finding.severity, finding.code) == ("error", "model.vocabulary")
    assert finding.fix.endswith("set model.config.padded_vocab_size=70016")
    assert list(check_vocabulary(config(data=trained, model={"config": {"padded_vocab_size": 70_016}}), None)) == []
    assert list(check_vocabulary(config(data={"tokenizer": {"kind": "hub"}}), 50_257)) == []


def test_an_image_is_asked_for_where_one_is_needed_and_for_the_machines_processor() -> None:
    class RunsImages(StrictPlatform):
        capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.IMAGES})

    assert told(check_image(config(), RunsImages())) == {("error", "image.missing")}
    assert list(check_image(config(image=PREBUILT), RunsImages())) == []
    assert told(check_image(config(image=PREBUILT), StrictPlatform())) == {("warning", "image.unused")}
    image = {"kind": "docker", "repository": "r/x", "platform": "linux/amd64"}
    for machine, found in (("a3-highgpu-8g", set()), ("a4x-highgpu-4g", {("error", "image.architecture")})):
        assert told(check_architecture(script(platform={"kind": "gke", "machine": machine}, image=image))) == found


def test_half_precision_without_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.checks.preflight.gpu_names", list)
    assert told(check_precision(config(train={"precision": "16-mixed"}))) == {("error", "train.precision")}
    assert told(check_precision(config(train={"precision": "bf16-true"}))) == {("warning", "train.precision")}


def test_a_module_is_found_where_the_ranks_will_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_program.py").touch()
    assert told(check_program(script(script="-m my_program"))) == {("error", "script.missing")}
    monkeypatch.chdir(tmp_path)
    for program in ("my_program.py", "-m my_program", "-m json.tool"):
        assert list(check_program(script(script=program))) == [], program


# --- workers and secrets ----------------------------------------------------------------------------------------------


def test_a_dask_scheduler_that_does_not_answer_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        workers = DaskWorkers(kind="dask", scheduler=f"tcp://127.0.0.1:{taken.getsockname()[1]}")
        assert told(check_workers(workers)) == {("error", "workers.scheduler")}


def test_a_plan_executes_nothing_that_the_scheduler_of_somebodys_config_answers(tmp_path: Path) -> None:
    with evil_scheduler(tmp_path / "ran") as address:
        assert check_workers(DaskWorkers(kind="dask", scheduler=address)) == []
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("platform", [{"kind": "local"}, {"kind": "gke", "nodes": 1}])
def test_a_secret_that_the_ranks_would_not_have_is_missed_beforehand(
    platform: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = job(tmp_path, secrets=("WANDB_API_KEY",))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    assert told(check_secrets(config(platform=platform), needs)) == {("error", "platform.secrets")}
    monkeypatch.setenv("WANDB_API_KEY", "not told")
    there = platform | ({} if platform["kind"] == "local" else {"secrets": {"WANDB_API_KEY": "loggers/wandb"}})
    assert list(check_secrets(config(platform=there), needs)) == []


# --- what one list means to a plan and to a run -----------------------------------------------------------------------


def test_everything_that_stands_in_the_way_is_told_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        data = {"tokenizer": {"kind": "train", "vocab_size": 70_000}}
        settings = {"train": {"strategy": "fsdp"}, "platform": {"kind": "local", "port": port}}
        broken = config(root=f"{tmp_path}/file", data=data, image=PREBUILT, **settings)
        found = check_run(broken, LocalPlatform(port=port), job(tmp_path), vocab_size=None)
    errors = {("error", code) for code in ("root.not-a-folder", "model.vocabulary", "local.port")}
    assert told(found) >= errors | {("warning", "train.strategy"), ("warning", "image.unused")}
    with pytest.raises(ConfigProblem) as caught:
        require(found)
    assert all(f"[{code}]" in str(caught.value) for _, code in errors)
    assert "train.strategy" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "severity"),
    [
        (NoCredentials("there are none"), "unknown"),
        (PlatformUnreachable("the cluster does not answer"), "unknown"),
        (NetworkError("the bucket does not answer"), "unknown"),
        (LoginProblem("a role is missing"), "error"),
    ],
)
def test_only_what_says_nothing_about_the_config_is_unknown_which_refuses_a_run_all_the_same(
    error: TrainLitgptError, severity: str
) -> None:
    finding = finding_of(error, "some.code")
    assert finding.severity == severity
    with pytest.raises(ConfigProblem, match=str(error)) as refused:
        require([finding])
    assert refused.value.fault is error.fault


def test_a_corpus_that_is_all_that_is_wrong_ends_a_run_as_its_preparation_would() -> None:
    data, wrong = finding_of(DataError("holds no text"), "data.refused"), Finding("error", "a.b", "wrong", "fix it")
    assert fault_of_findings([data]) is Fault.DATA
    with pytest.raises(DataError, match="holds no text"):
        require([data])
    with pytest.raises(ConfigProblem) as caught:
        require([wrong, Finding("warning", "c.d", "odd", "look"), data])
    first, *rest = str(caught.value).splitlines()
    assert (first, rest[0]) == ("2 problems:", "  [a.b] wrong -> fix it")
    assert len(rest) == 2
