from __future__ import annotations

import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from strangers import evil_scheduler
from strict_platform import StrictPlatform

from launcher.checks.preflight import (
    check_architecture,
    check_image,
    check_precision,
    check_program,
    check_root,
    check_run,
    check_script,
    check_secrets,
    check_strategy,
    check_vocabulary,
    check_workers,
)
from launcher.config import DaskWorkers, RunConfig, ScriptConfig, validated
from launcher.errors import ConfigProblem, LoginProblem, NoCredentials, NotInstalled, PlatformUnreachable
from launcher.findings import finding_of, require
from launcher.job import Job
from launcher.platforms.base import Capability
from launcher.platforms.local.platform import LocalPlatform
from launcher.platforms.local.settings import LocalPlatformConfig
from litgpt_demo.errors import DataError, Fault, NetworkError, Unreachable
from litgpt_demo.findings import Finding, fault_of_findings

HAS_GPU = Path("/proc/driver/nvidia/gpus").is_dir()


def config(**settings: Any) -> RunConfig:
    return validated(RunConfig, settings, where="test")


def only(findings: Iterable[Finding]) -> Finding:
    """The one finding, which says what to do unless it is good news."""
    (finding,) = findings
    assert finding.what
    assert finding.fix or finding.severity == "info"
    return finding


def job(folder: Path, **changes: Any) -> Job:
    settings = {"name": "gpt-1", "attempt": 1, "nodes": 1, "processes": 1, "program": ("x.py",)}
    return Job(**{**settings, "directory": f"{folder}/attempts/1", **changes})


# --- the root ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("root", ["", "not/yet/there"])
def test_a_folder_that_can_be_written_or_made_is_fine_and_left_as_it_is(tmp_path: Path, root: str) -> None:
    assert [one for one in check_root(str(tmp_path / root)) if one.severity == "error"] == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", ["", "/below", "/far/below"])
def test_a_root_at_or_below_a_file_is_refused(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").touch()
    finding = only(check_root(f"{tmp_path}/file{below}"))
    assert (finding.severity, finding.code) == ("error", "root.not-a-folder")
    assert f"{tmp_path}/file is a file" in finding.what


@pytest.mark.skipif(sys.platform != "linux", reason="a folder that not even root can write")
def test_a_root_that_cannot_be_written_is_refused() -> None:
    finding = only(check_root("/proc/runs"))
    assert (finding.severity, finding.code) == ("error", "root.not-writable")
    assert "cannot write to /proc (" in finding.what


def test_a_root_of_an_unknown_scheme_is_refused_and_a_bucket_is_asked_later() -> None:
    finding = only(check_root("s3://bucket/x"))
    assert (finding.severity, finding.code, finding.fix) == ("error", "root.scheme", "a folder, or gs://bucket/prefix")
    assert list(check_root("gs://bucket/x")) == []


# --- data and model ---------------------------------------------------------------------------------------------------

TRAINED_70K = {"tokenizer": {"kind": "train", "vocab_size": 70_000}}


def test_more_token_ids_than_embeddings_are_refused_with_a_number_that_would_do() -> None:
    finding = only(check_vocabulary(config(data=TRAINED_70K), None))
    assert (finding.severity, finding.code) == ("error", "model.vocabulary")
    assert "the tokenizer has 70000 ids and model pythia-14m has 50304 embeddings" in finding.what
    assert finding.fix.endswith("set model.config.padded_vocab_size=70016")
    fixed = config(data=TRAINED_70K, model={"config": {"padded_vocab_size": 70_016}})
    assert list(check_vocabulary(fixed, None)) == []


def test_a_tokenizer_that_is_there_is_taken_as_it_is() -> None:
    hub = config(data={"tokenizer": {"kind": "hub"}})
    assert list(check_vocabulary(hub, None)) == []
    assert list(check_vocabulary(hub, 50_257)) == []
    assert only(check_vocabulary(hub, 128_000)).code == "model.vocabulary"


def test_a_model_without_a_vocabulary_takes_the_tokenizers() -> None:
    inline = {"name": None, "config": {"n_layer": 2, "n_embd": 64, "n_head": 2}}
    assert list(check_vocabulary(config(data=TRAINED_70K, model=inline), None)) == []


@pytest.mark.skipif(HAS_GPU, reason="needs a machine without a GPU")
@pytest.mark.parametrize(
    ("precision", "severity"),
    [("16-mixed", "error"), ("16-true", "error"), ("bf16-mixed", "warning"), ("bf16-true", "warning")],
)
def test_half_precision_without_a_gpu_is_told(precision: str, severity: str) -> None:
    finding = only(check_precision(config(train={"precision": precision})))
    assert (finding.severity, finding.code) == (severity, "train.precision")
    assert precision in finding.what
    assert "32-true" in finding.fix


def test_full_precision_is_fine_everywhere() -> None:
    assert list(check_precision(config(train={"precision": "32-true"}))) == []


def test_a_strategy_for_several_processes_is_told_to_do_nothing_for_one() -> None:
    finding = only(check_strategy(config(train={"strategy": "fsdp"})))
    assert (finding.severity, finding.code) == ("warning", "train.strategy")
    several = {"platform": {"kind": "local", "processes": 2}}
    assert list(check_strategy(config(train={"strategy": "fsdp"}, **several))) == []
    assert list(check_strategy(config())) == []


# --- software ---------------------------------------------------------------------------------------------------------


class RunsImages(StrictPlatform):
    capabilities: ClassVar[frozenset[Capability]] = frozenset({Capability.IMAGES})


PREBUILT = {"kind": "prebuilt", "reference": "example.test/litgpt@sha256:" + "0" * 64}


def test_an_image_is_asked_for_where_one_is_needed() -> None:
    finding = only(check_image(config(), RunsImages()))
    assert (finding.severity, finding.code) == ("error", "image.missing")
    assert list(check_image(config(image=PREBUILT), RunsImages())) == []


def test_an_image_that_nobody_uses_is_told() -> None:
    finding = only(check_image(config(image=PREBUILT), StrictPlatform()))
    assert (finding.severity, finding.code) == ("warning", "image.unused")
    assert list(check_image(config(), StrictPlatform())) == []


ON_MACHINES: list[dict[str, Any]] = [
    {"kind": "gke"},
    {"kind": "batch", "project": "my-project", "location": "us-central1"},
]


@pytest.mark.parametrize("platform", ON_MACHINES, ids=[str(one["kind"]) for one in ON_MACHINES])
@pytest.mark.parametrize(("machine", "needed"), [("a3-highgpu-8g", "amd64"), ("a4x-highgpu-4g", "arm64")])
def test_an_image_for_another_processor_than_the_machines_is_found_wherever_machines_are_named(
    platform: dict[str, Any], machine: str, needed: str
) -> None:
    def found(arch: str) -> list[Finding]:
        image = {"kind": "docker", "repository": "r/x", "platform": f"linux/{arch}"}
        document = {"script": "-m x", "platform": {**platform, "machine": machine}, "image": image}
        return list(check_architecture(validated(ScriptConfig, document, where="here")))

    other = "arm64" if needed == "amd64" else "amd64"
    finding = only(found(other))
    assert (finding.severity, finding.code) == ("error", "image.architecture")
    assert finding.fix.startswith(f"set image.platform to linux/{needed},")
    assert found(needed) == []


def test_a_script_that_is_not_there_is_refused(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    finding = only(check_program(ScriptConfig(script=str(script))))
    assert (finding.severity, finding.code) == ("error", "script.missing")
    assert f"{script} is not a file" in finding.what
    script.touch()
    assert list(check_program(ScriptConfig(script=str(script)))) == []
    assert only(check_program(ScriptConfig(script=str(tmp_path)))).code == "script.missing"


@pytest.mark.parametrize("module", ["no_such_module", "no_such.module", ".relative"])
def test_a_module_that_is_not_there_is_refused(module: str) -> None:
    finding = only(check_program(ScriptConfig(script=f"-m {module}")))
    assert (finding.severity, finding.code) == ("error", "script.missing")


def test_a_module_is_found_where_the_ranks_will_find_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They start in this folder, which a console script has not on its path."""
    (tmp_path / "my_program.py").touch()
    assert only(check_program(ScriptConfig(script="-m my_program"))).code == "script.missing"
    monkeypatch.chdir(tmp_path)
    assert list(check_program(ScriptConfig(script="-m my_program"))) == []
    assert list(check_program(ScriptConfig(script="-m json.tool"))) == []


@pytest.mark.parametrize("kind", ["gke", "batch"])
@pytest.mark.parametrize(("spot", "max_restarts", "told"), [(True, 0, True), (True, 1, False), (False, 0, False)])
def test_a_script_on_spot_machines_is_told_what_a_preemption_does(
    kind: str, spot: bool, max_restarts: int, told: bool, tmp_path: Path
) -> None:
    platform = {"kind": kind, "machine": "g2-standard-4", "location": "us-central1", "spot": spot}
    platform |= {"cluster": "mine"} if kind == "gke" else {"project": "my-project"}
    document = {"script": "/a.py", "max_restarts": max_restarts, "platform": platform}
    script = validated(ScriptConfig, document, where="test")
    other = {"max_restarts": 1 - max_restarts, "restarts": {"preempted": max_restarts}}
    same = validated(ScriptConfig, document | other, where="test")
    found = check_script(script, StrictPlatform(), job(tmp_path))
    assert "script.preemptions" in {one.code for one in check_script(same, StrictPlatform(), job(tmp_path))} or not told
    [*said] = [one for one in found if one.code == "script.preemptions"]
    assert [one.severity for one in said] == ["info"] * told
    assert all("the first preemption" in one.what and "raise max_restarts" in one.fix for one in said)


@pytest.mark.parametrize(
    ("image", "told"),
    [({}, True), ({"service_account": "builder"}, False), ({"push_secret": "registry"}, False)],
)
def test_a_builder_with_the_trainings_account_lets_any_code_overwrite_images(
    image: dict[str, str], told: bool, tmp_path: Path
) -> None:
    given = {"kind": "cluster", "repository": "ghcr.io/team/train", **image}
    script = validated(ScriptConfig, {"script": "/a.py", "image": given}, where="test")

    class Containers(StrictPlatform):
        capabilities = frozenset({Capability.IMAGES})

    found = {one.code: one for one in check_image(script, Containers())}
    assert ("image.account" in found) == told
    assert not told or "image.service_account" in found["image.account"].fix


# --- all together -----------------------------------------------------------------------------------------------------


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.socket() as listener:
        listener.bind(("", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_what_the_platform_finds_is_among_the_findings(tmp_path: Path, taken_port: int) -> None:
    platform = LocalPlatform(port=taken_port)
    settings = {"kind": "local", "port": taken_port}
    run = check_run(config(root=str(tmp_path), platform=settings), platform, job(tmp_path), vocab_size=None)
    script = check_script(ScriptConfig(root=str(tmp_path), script=__file__), platform, job(tmp_path))
    for found in (run, script):
        finding = only(one for one in found if one.code == "local.port")
        assert finding.severity == "error"
        assert f"port {taken_port} is in use" in finding.what
        assert "platform.port" in finding.fix


def test_everything_that_stands_in_the_way_is_told_at_once(tmp_path: Path, taken_port: int) -> None:
    (tmp_path / "file").touch()
    broken = config(
        root=f"{tmp_path}/file",
        data=TRAINED_70K,
        train={"strategy": "fsdp", "precision": "16-true"},
        image=PREBUILT,
        platform={"kind": "local", "port": taken_port},
    )
    found = check_run(broken, LocalPlatform(port=taken_port), job(tmp_path), vocab_size=None)
    precision = set() if HAS_GPU else {"train.precision"}
    told = {"root.not-a-folder", "model.vocabulary", "train.strategy", "image.unused", "local.port", *precision}
    assert {one.code for one in found} >= told
    with pytest.raises(ConfigProblem) as caught:
        require(found)
    refused = {"root.not-a-folder", "model.vocabulary", "local.port", *precision}
    assert all(f"[{code}]" in str(caught.value) for code in refused)
    assert "train.strategy" not in str(caught.value)


def test_nothing_stands_in_the_way_of_a_sound_script(tmp_path: Path) -> None:
    sound = ScriptConfig(root=str(tmp_path), script=__file__, platform=LocalPlatformConfig(kind="local"))
    assert [one for one in check_script(sound, LocalPlatform(), job(tmp_path)) if one.severity == "error"] == []


def test_errors_refuse_and_warnings_do_not() -> None:
    warning = Finding("warning", "a.b", "odd", "look")
    errors = [Finding("error", "c.d", "wrong", "fix it"), Finding("error", "e.f", "worse")]
    assert require([warning]) == [warning]
    assert require([]) == []
    with pytest.raises(ConfigProblem) as caught:
        require([errors[0], warning, errors[1]])
    assert str(caught.value).splitlines() == ["2 problems:", "  [c.d] wrong -> fix it", "  [e.f] worse"]


# --- workers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_workers_of_this_machine_are_there(kind: str) -> None:
    assert check_workers(config(workers={"kind": kind}).workers) == []


def test_a_dask_scheduler_that_does_not_answer_is_named() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        found = only(check_workers(DaskWorkers(kind="dask", scheduler=address)))
    assert (found.severity, found.code) == ("error", "workers.scheduler")
    assert address in found.what


def test_a_plan_executes_nothing_that_the_scheduler_of_somebodys_config_answers(tmp_path: Path) -> None:
    with evil_scheduler(tmp_path / "ran") as address:
        assert check_workers(DaskWorkers(kind="dask", scheduler=address)) == []
    assert not (tmp_path / "ran").exists()


def test_without_dask_it_is_said_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    without = [folder for folder in sys.path if not Path(folder, "distributed").is_dir()]
    monkeypatch.setattr(sys, "path", without)
    for name in [name for name in sys.modules if name.split(".")[0] in {"distributed", "prefect_dask"}]:
        monkeypatch.delitem(sys.modules, name)
    found = only(check_workers(DaskWorkers(kind="dask", scheduler="tcp://127.0.0.1:1")))
    assert (found.severity, found.code) == ("error", "workers.dask-missing")
    assert "train-litgpt[dask]" in found.fix


# --- secrets ----------------------------------------------------------------------------------------------------------


def test_a_secret_that_the_cluster_is_not_told_of_is_missed_beforehand(tmp_path: Path) -> None:
    needs = job(tmp_path, secrets=("WANDB_API_KEY",))
    finding = only(check_secrets(config(platform={"kind": "gke", "nodes": 1}), needs))
    assert (finding.severity, finding.code) == ("error", "platform.secrets")
    assert "WANDB_API_KEY" in finding.what
    there = {"kind": "gke", "nodes": 1, "secrets": {"WANDB_API_KEY": "loggers/wandb"}}
    assert list(check_secrets(config(platform=there), needs)) == []


def test_a_secret_that_this_environment_lacks_is_missed_beforehand(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    needs = job(tmp_path, secrets=("WANDB_API_KEY",))
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    finding = only(check_secrets(config(), needs))
    assert (finding.severity, finding.code) == ("error", "platform.secrets")
    monkeypatch.setenv("WANDB_API_KEY", "not told")
    assert list(check_secrets(config(), needs)) == []


# --- what one list means to a plan and to a run -----------------------------------------------------------------------


def test_what_could_not_be_looked_at_refuses_a_run_and_not_a_plan() -> None:
    unknown = finding_of(PlatformUnreachable("the cluster does not answer; try again"), "gke.cluster")
    assert (unknown.severity, unknown.what, unknown.fix) == ("unknown", "the cluster does not answer", "try again")
    assert fault_of_findings([unknown]) is None
    with pytest.raises(ConfigProblem, match="the cluster does not answer"):
        require([unknown])


@pytest.mark.parametrize(
    ("error", "severity"),
    [
        (NoCredentials("there are none"), "unknown"),
        (NotInstalled("there is no such program"), "unknown"),
        (Unreachable("the Hub cannot be reached"), "unknown"),
        (NetworkError("the bucket does not answer"), "unknown"),
        (LoginProblem("a role is missing"), "error"),
        (ConfigProblem("there is no such cluster"), "error"),
        (DataError("holds no text"), "error"),
    ],
)
def test_only_what_says_nothing_about_the_config_is_unknown(error: Exception, severity: str) -> None:
    assert finding_of(error, "some.code").severity == severity


def test_a_corpus_that_is_all_that_is_wrong_ends_a_run_as_its_preparation_would() -> None:
    data, wrong = finding_of(DataError("holds no text"), "data.refused"), Finding("error", "a.b", "wrong")
    assert fault_of_findings([data]) is Fault.DATA
    assert fault_of_findings([data, wrong]) is Fault.USER
    with pytest.raises(DataError, match="holds no text"):
        require([data])
    with pytest.raises(ConfigProblem, match=r"wrong(.|\n)*holds no text|holds no text(.|\n)*wrong"):
        require([wrong, data])
