"""What is sent to Run:ai: golden files for both command lines and the REST API, and what a user may ask for."""

import shlex
from pathlib import Path
from typing import Any

import pytest
from golden_files import GOLDEN, differences, require_differences, require_golden
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from runai_jobs import job_of, settings_of

from launcher.errors import ConfigProblem
from launcher.job import Submission
from launcher.platforms.runai.platform import RunaiPlatform
from launcher.platforms.runai.render import WorkloadReference
from launcher.yaml_files import read_yaml
from litgpt_demo.node.rendezvous import plain, unpack

CONFIGS = sorted((Path(__file__).parents[4] / "deployments" / "configs").glob("runai*.yaml"))

WAYS: dict[str, dict[str, Any]] = {
    "v1": {"api": "cli", "cli_version": "v1"},
    "v2": {"api": "cli", "cli_version": "v2"},
    "rest": {"api": "rest", "url": "https://my-company.run.ai"},
}
SCRATCH = {"pvcs": [{"name": "scratch", "path": "/scratch"}]}
ROCE = {**SCRATCH, "gpus": 8, "network": "roce"}
VARIANTS: dict[str, dict[str, Any]] = {
    "site": {
        **ROCE, "roce_network": "default/rdma-net", "roce_resource": "nvidia.com/hca", "roce_interface": "net2",
        "node_pools": ["h100", "default"], "node_type": "dgx", "topology": "rack", "topology_required": True,
        "cpus": 32, "memory": "400G", "run_as_user": True, "env": {"NCCL_IB_TC": "106"}, "network_test": 0,
    },
    "part-of-a-gpu": {"nodes": 1, "gpus": 0.5, "large_shm": False},
    "interactive": {**ROCE, "interactive": True},
}  # fmt: skip
# What only REST and the newest program have.
QUEUED = {
    **SCRATCH, "priority": "train", "preemptible": False, "uid": 1000, "gid": 2000,
    "secrets": {"WANDB_API_KEY": "wandb/key"},
}  # fmt: skip
SHIPPED = {path.stem: read_yaml(path)["platform"] for path in CONFIGS}


def rendered(options: dict[str, Any], **changes: Any) -> Submission:
    config = settings_of(**options)
    return RunaiPlatform(config).render(
        job_of(**{"nodes": config.nodes, "processes": config.processes_per_node, **changes})
    )


def test_submissions_are_golden() -> None:
    """The others differ from the golden submissions only in the recorded fields."""
    bases = {way: rendered({**WAYS[way], **SCRATCH}) for way in WAYS}
    for way, base in bases.items():
        require_golden(f"runai/{way}.yaml", str(base))
    cases = {f"{way}-{name}": (way, {**WAYS[way], **variant}) for way in WAYS for name, variant in VARIANTS.items()}
    cases |= {"rest-queued": ("rest", {**WAYS["rest"], **QUEUED})}
    cases |= {
        f"config-{name}": ("rest" if "url" in section else "v2", {**WAYS["v2"], **section})
        for name, section in SHIPPED.items()
    }
    found = {
        name: {"from": way, **differences(bases[way], rendered(options))} for name, (way, options) in cases.items()
    }
    avoiding = rendered({**WAYS["rest"], **SCRATCH}, exclude_nodes=("gpu-bad-1", "gpu-bad-2"))
    require_differences("runai/differences.yaml", {**found, "rest-avoiding": differences(bases["rest"], avoiding)})
    assert {path.stem for path in (GOLDEN / "runai").iterdir()} == {*WAYS, "differences"}


TEXT = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), min_size=1, max_size=20)


@pytest.mark.parametrize("way", WAYS)
@given(argument=TEXT, value=TEXT)
def test_no_quoting_can_harm_an_argument_or_a_variable(way: str, argument: str, value: str) -> None:
    """A program that joins the words, one that keeps them, and a server that splits them all start the same command."""
    sent = rendered(WAYS[way], program=("script.py", argument), env={"ASKED": value}).body["sent"]
    if way == "rest":
        spec = sent["json"]["spec"]
        command = [spec["command"], *spec["args"].split(" ")]
        variables = {variable["name"]: variable.get("value") for variable in spec["environmentVariables"]}
    else:
        argv = sent["argv"]
        command = argv[argv.index("--") + 1 :]
        pairs = [argv[place + 1] for place, word in enumerate(argv[: argv.index("--")]) if word == "-e"]
        variables = dict(pair.split("=", 1) for pair in pairs)
    assert all(plain(word) for word in command)
    assert shlex.split(" ".join(command)) == command
    found = dict(variables)
    assert unpack(command[4:], found)[-2:] == ["script.py", argument]
    assert found["ASKED"] == value


# --- what cannot be ---------------------------------------------------------------------------------------------------


def test_missing_flag_is_named_with_its_setting() -> None:
    for setting in ({"priority": "high"}, {"uid": 1000}, {"preemptible": True}, {"secrets": {"KEY": "name/key"}}):
        with pytest.raises(ConfigProblem, match=rf"platform\.{next(iter(setting))} needs .*platform\.url"):
            rendered({**WAYS["v1"], **setting})


def test_names_that_cannot_be_pods_are_refused_beforehand() -> None:
    with pytest.raises(ConfigProblem, match="Kubernetes takes 63"):
        rendered(WAYS["v2"], name="a" * 58)


def test_there_is_one_rank_per_gpu() -> None:
    sections = ({"gpus": 8}, {"gpus": 8, "processes_per_node": 4}, {}, {"gpus": 0.5, "nodes": 1})
    assert [settings_of(**section).processes_per_node for section in sections] == [8, 4, 1, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 0.5}, "NCCL wants a GPU of its own for each rank; give whole GPUs, or a part"),
        ({"api": "rest"}, "platform.api=rest needs platform.url"),
        ({"url": "http://localhost.evil.example"}, "is not encrypted"),
        ({"cli": "/opt/runai/bin/runai"}, "add its folder to PATH, and give only its name"),
        ({"cli": "sh"}, "which must contain `runai`"),
        ({"secrets": {"KEY": "wandb"}}, "name a Kubernetes secret of the project and its entry"),
    ],
)
def test_impossible_settings_are_refused_with_a_fix(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        settings_of(**changes)
    assert message in str(caught.value)


@given(project=st.from_regex(r"[a-z]([a-z0-9-]{0,20}[a-z0-9])?", fullmatch=True), nodes=st.integers(1, 99), folder=TEXT)
def test_a_jobs_id_says_where_it_is_and_where_its_logs_are(project: str, nodes: int, folder: str) -> None:
    reference = WorkloadReference(scope=project, name="owt-1", nodes=nodes, directory=f"gs://bucket/{folder}")
    assert WorkloadReference.of(reference.job_id) == reference
