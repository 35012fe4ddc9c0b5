"""What is sent to Run:ai: golden files for both command lines and the REST API."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from launcher.config import RunConfig, ScriptConfig, load
from launcher.errors import ConfigProblem
from launcher.job import Job, Submission
from launcher.platforms.runai.platform import RunaiPlatform
from launcher.platforms.runai.render import WorkloadReference
from launcher.platforms.runai.settings import RunaiPlatformConfig
from launcher.runs.run import plan_script, script_job
from litgpt_demo.node.spec import plain, unpack

CHECKOUT = Path(__file__).parents[4]
GOLDEN = CHECKOUT / "tests" / "golden" / "runai"
CONFIGS = sorted((CHECKOUT / "deployments" / "configs").glob("runai*.yaml"))

WAYS: dict[str, dict[str, Any]] = {
    "v1": {"api": "cli", "cli_version": "v1"},
    "v2": {"api": "cli", "cli_version": "v2"},
    "rest": {"api": "rest", "url": "https://my-company.run.ai"},
}
SCRATCH = {"claims": [{"name": "scratch", "path": "/scratch"}]}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {**SCRATCH, "processes": 8},
    "roce": {**SCRATCH, "gpus": 8, "network": "roce"},
    "site": {
        **SCRATCH, "gpus": 8, "network": "roce", "roce_network": "default/rdma-net", "roce_resource": "nvidia.com/hca",
        "roce_interface": "net2", "node_pools": ["h100", "default"], "node_type": "dgx", "topology": "rack",
        "topology_required": True, "cpus": 32, "memory": "400G", "run_as_user": True,
        "overrides": {"NCCL_IB_TC": "106"}, "gate": 0, "allow_sockets": True,
    },
    "part-of-a-gpu": {"nodes": 1, "gpus": 0.5, "large_shm": False},
    "interactive": {**SCRATCH, "gpus": 8, "network": "roce", "interactive": True},
}  # fmt: skip
EXCLUDING = "rest-excluding"
# What only REST and the newest program have.
REST_ONLY: dict[str, dict[str, Any]] = {
    "queued": {
        **SCRATCH, "gpus": 8, "priority": "train", "preemptible": False, "uid": 1000, "gid": 2000,
        "secrets": {"WANDB_API_KEY": "wandb/key"},
    },
    "excluding": SCRATCH,
}  # fmt: skip
CASES = {f"{way}-{name}": {**WAYS[way], **variant} for way in WAYS for name, variant in VARIANTS.items()} | {
    f"rest-{name}": {**WAYS["rest"], **variant} for name, variant in REST_ONLY.items()
}


def rendered(options: dict[str, Any], job: Callable[..., Job], *, exclude: bool = False) -> Submission:
    config = RunaiPlatformConfig.model_validate({"kind": "runai", "project": "team-a", "nodes": 2, **options})
    avoided = {"exclude_nodes": ("gpu-bad-1", "gpu-bad-2")} if exclude else {}
    return RunaiPlatform(config).render(job(nodes=config.nodes, processes=config.processes, **avoided))


def of_config(path: Path) -> Submission:
    """A shipped config's submission; that of a training as far as it does not follow from the data."""
    kind = ScriptConfig if "script:" in path.read_text() else RunConfig
    config = load(kind, path)
    platform = RunaiPlatform(config.platform)  # type: ignore[arg-type]
    if isinstance(config, ScriptConfig):
        return platform.render(
            script_job(plan_script(config), attempt=1, image="registry.example/litgpt@sha256:" + 64 * "0")
        )
    run = f"{config.root}/runs/{config.name}-0123456789"
    return platform.render(
        Job(
            name=f"{config.name}-0123456789", attempt=1, nodes=config.platform.nodes,
            processes=config.platform.processes, program=("-m", "litgpt_demo", "train", "--run", run),
            directory=f"{run}/attempts/1", image="registry.example/litgpt@sha256:" + 64 * "0",
            stage=(f"{config.root}/datasets/openwebtext-9876543210",),
        )
    )  # fmt: skip


def golden(name: str, text: str) -> str:
    file = GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return file.read_text()


@pytest.mark.parametrize("name", CASES)
def test_what_is_sent_is_the_golden_one(name: str, job: Callable[..., Job]) -> None:
    """`make golden` writes them anew; the difference is read in review."""
    submission = rendered(CASES[name], job, exclude=name == EXCLUDING)
    assert str(submission) == golden(name, str(submission))
    assert yaml.safe_load(str(submission)) == submission.body


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_what_a_shipped_config_sends_is_the_golden_one(path: Path) -> None:
    text = str(of_config(path))
    assert text == golden(f"config-{path.stem}", text)


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == {*CASES, *(f"config-{path.stem}" for path in CONFIGS)}


@pytest.mark.parametrize("way", WAYS)
@given(nodes=st.integers(1, 500))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
def test_pods_are_workers_and_one_master(way: str, nodes: int, job: Callable[..., Job]) -> None:
    sent = rendered({**WAYS[way], "nodes": nodes}, job).body["sent"]
    if way == "rest":
        assert sent["json"]["spec"]["numWorkers"] + 1 == nodes
    else:
        assert int(sent["argv"][sent["argv"].index("--workers") + 1]) + 1 == nodes


TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=20)


@pytest.mark.parametrize("way", WAYS)
@given(argument=TEXT, value=TEXT)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=50, deadline=None)
def test_no_quoting_can_harm_an_argument_or_a_variable(
    way: str, argument: str, value: str, job: Callable[..., Job]
) -> None:
    """A program that joins the words, one that keeps them, and a server that splits them all start the same command."""
    asked = job(program=("script.py", argument), env={"ASKED": value})
    config = RunaiPlatformConfig.model_validate({"kind": "runai", "project": "team-a", "nodes": 2, **WAYS[way]})
    sent = RunaiPlatform(config).render(asked).body["sent"]
    if way == "rest":
        spec = sent["json"]["spec"]
        words = [spec["command"], *spec["args"].split(" ")]
        variables = {one["name"]: one.get("value") for one in spec["environmentVariables"]}
    else:
        argv = sent["argv"]
        words = argv[argv.index("--") + 1 :]
        pairs = [argv[place + 1] for place, word in enumerate(argv[: argv.index("--")]) if word == "-e"]
        variables = dict(pair.split("=", 1) for pair in pairs)
    assert all(plain(word) for word in words)
    assert shlex.split(" ".join(words)) == words
    found = dict(variables)
    assert unpack(words[4:], found)[-2:] == ["script.py", argument]
    assert found["ASKED"] == value


def test_names_that_cannot_be_pods_are_refused_beforehand(job: Callable[..., Job]) -> None:
    with pytest.raises(ConfigProblem, match=r"names of 71 characters, and Kubernetes takes 63; make .* 8 characters"):
        rendered(WAYS["v2"], lambda **changes: job(**{**changes, "name": "a" * 58}))
    with pytest.raises(ConfigProblem, match="'my_first_distributed_app-1' cannot be a workload's name"):
        rendered(WAYS["v1"], lambda **changes: job(**{**changes, "name": "my_first_distributed_app"}))


def test_a_program_that_asks_for_another_transport_is_refused(job: Callable[..., Job]) -> None:
    with pytest.raises(ConfigProblem, match="env sets NCCL_SOCKET_NTHREADS=1, and the network profile sets"):
        rendered(
            {**WAYS["v2"], "gpus": 8, "network": "roce"},
            lambda **changes: job(**changes, env={"NCCL_SOCKET_NTHREADS": "1"}),
        )


@pytest.mark.parametrize("flag", ["priority", "uid", "preemptible", "secrets"])
def test_a_flag_that_the_program_has_not_got_is_named_with_its_setting(flag: str, job: Callable[..., Job]) -> None:
    given = {"priority": "high", "uid": 1000, "preemptible": True, "secrets": {"KEY": "name/key"}}[flag]
    with pytest.raises(ConfigProblem, match=rf"has not got every flag: platform\.{flag} needs .*platform\.url"):
        rendered({**WAYS["v1"], flag: given}, job)


def test_several_attachments_need_the_rest_api_as_a_program_takes_lists_apart(job: Callable[..., Job]) -> None:
    rails = {"gpus": 8, "network": "roce", "roce_network": "rails/a@r0,rails/b@r1", "roce_resource": "rdma/a,rdma/b=2"}
    with pytest.raises(ConfigProblem, match=r"platform\.network needs .*platform\.url"):
        rendered({**WAYS["v2"], **rails}, job)
    pod = rendered({**WAYS["rest"], **rails}, job).body["node"]["environment"]["LITGPT_NETWORK"]
    assert '"interfaces":["r0","r1"]' in pod


@given(project=st.from_regex(r"[a-z]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True), nodes=st.integers(1, 99), folder=TEXT)
def test_a_jobs_id_says_where_it_is_and_where_its_logs_are(project: str, nodes: int, folder: str) -> None:
    reference = WorkloadReference(project=project, name="owt-1", nodes=nodes, directory=f"gs://bucket/{folder}")
    assert WorkloadReference.of(reference.job_id) == reference
