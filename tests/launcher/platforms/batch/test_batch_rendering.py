"""What is sent to Batch: golden files, and what has to hold for whatever is asked."""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml
from batch_jobs import IMAGE
from google.cloud import batch_v1
from hypothesis import given, settings
from hypothesis import strategies as st

from launcher.config import read_yaml
from launcher.errors import ConfigProblem
from launcher.job import Job, Submission
from launcher.platforms.batch.lint import container_of, group_of, lint
from launcher.platforms.batch.platform import BatchPlatform
from launcher.platforms.batch.render import labels_of
from launcher.platforms.batch.settings import BatchPlatformConfig

GOLDEN = Path(__file__).parents[3] / "golden" / "batch"
CONFIGS = sorted((Path(__file__).parents[4] / "deployments" / "configs").glob("batch*.yaml"))

CASES: dict[str, dict[str, Any]] = {
    "a2-debian": {"machine": "a2-highgpu-8g"},
    "a2-cos": {"machine": "a2-highgpu-8g", "os": "cos"},
    "a2-one": {"machine": "a2-highgpu-8g", "nodes": 1},
    "a2-one-cos": {"machine": "a2-highgpu-1g", "nodes": 1, "os": "cos"},
    "g2-spot": {"machine": "g2-standard-48", "spot": True, "zones": ("us-central1-a", "us-central1-b")},
    "a3-reserved": {
        "machine": "a3-highgpu-8g", "reservation": "projects/p/zones/us-central1-a/reservations/mine", "compact": True,
        "gvnic": True, "boot_image": "projects/p/global/images/trainer",
    },
    "a4-flex": {
        "machine": "a4-highgpu-8g", "flex_start": True, "max_seconds": 604_800, "boot_disk_type": "hyperdisk-balanced",
    },
    "n1-attached": {"machine": "n1-standard-8-t4", "nodes": 1, "gpu_driver": "535.129.03", "restarts": 0},
    "cpus-nfs": {"machine": "n2-standard-8", "gpus": 0, "nfs": "10.0.0.2:/data", "nfs_path": "/mnt/disks/data"},
    "private": {
        "machine": "g2-standard-48", "vpc": "projects/p/global/networks/training", "external_ip": False,
        "subnetwork": "projects/p/regions/us-central1/subnetworks/training", "tags": ("trainer",), "priority": 7,
        "service_account": "trainer@p.iam.gserviceaccount.com", "shm": "16Gi",
        "secrets": {"WANDB_API_KEY": "projects/p/secrets/wandb/versions/latest"}, "overrides": {"NCCL_DEBUG": "WARN"},
        "registry_username": "projects/p/secrets/registry-user/versions/1",
        "registry_password": "projects/p/secrets/registry-password/versions/latest",
    },
    **{f"config-{path.stem}": read_yaml(path)["platform"] for path in CONFIGS},
}  # fmt: skip


def configured(options: Mapping[str, Any]) -> BatchPlatformConfig:
    base = {"kind": "batch", "project": "my-project", "location": "us-central1", "nodes": 2}
    return BatchPlatformConfig.model_validate({**base, **options})


def training(platform: BatchPlatformConfig, **changes: Any) -> Job:
    root = platform.nfs_path if platform.nfs else "gs://bucket/pretraining"
    run = f"{root}/runs/owt-0123456789"
    asked: dict[str, Any] = {
        "name": "owt-0123456789", "attempt": 1, "nodes": platform.nodes, "processes": platform.processes,
        "program": ("-m", "litgpt_demo", "train", "--run", run), "directory": f"{run}/attempts/1", "image": IMAGE,
        "stage": (f"{root}/datasets/owt-9876543210",), "labels": {"litgpt-demo.dev/flow-run-id": "none"},
    }  # fmt: skip
    return Job(**{**asked, **changes})


def rendered(options: Mapping[str, Any], **changes: Any) -> Submission:
    platform = configured(options)
    return BatchPlatform(platform).render(training(platform, **changes))


@pytest.mark.parametrize("case", CASES)
def test_the_submission_is_the_golden_one(case: str) -> None:
    path, text = GOLDEN / f"{case}.yaml", str(rendered(CASES[case]))
    if os.environ.get("UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), "UPDATE_GOLDEN=1, and review the difference"


def test_every_golden_file_has_its_case() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == set(CASES)


@pytest.mark.parametrize("case", CASES)
def test_it_is_a_job_of_the_client_s_own_types_and_nothing_is_wrong_with_it(case: str) -> None:
    submission = rendered(CASES[case])
    sent = submission.body["job"]
    made = batch_v1.Job.from_json(json.dumps(sent))  # an unknown field would be refused
    again = json.loads(
        batch_v1.Job.to_json(made, use_integers_for_enums=False, always_print_fields_with_no_presence=False)
    )
    assert _read_as(sent, again)
    assert [str(one) for one in lint(submission, configured(CASES[case])) if one.severity == "error"] == []
    assert yaml.safe_load(str(submission)) == submission.body


def _read_as(sent: Any, again: Any) -> bool:
    """Whether the client understood what was sent; it leaves out zeros, and writes large integers as strings."""
    if isinstance(sent, dict):
        return all(_read_as(value, again.get(key, 0)) for key, value in sent.items())
    if isinstance(sent, list):
        return len(sent) == len(again) and all(map(_read_as, sent, again))
    return str(sent) == str(again)


@pytest.mark.parametrize("nodes", [2, 3, 16])
def test_a_gang_runs_at_once_or_not_at_all_and_is_never_restarted_in_part(nodes: int) -> None:
    group = group_of(rendered(CASES["a2-debian"] | {"nodes": nodes}).body)
    assert (group["taskCount"], group["parallelism"], group["taskCountPerNode"]) == (nodes, nodes, 1)
    assert group["requireHostsFile"]
    assert group["taskSpec"]["maxRetryCount"] == 0
    kinds = [next(key for key in one if key in {"script", "container", "barrier"}) for one in _runnables(group)]
    assert kinds == ["script", "barrier", "script", "container", "barrier"]


def test_one_node_needs_no_peers() -> None:
    group = group_of(rendered(CASES["a2-one"]).body)
    assert not any("barrier" in one for one in _runnables(group))
    assert "requireHostsFile" not in group


def _runnables(group: Mapping[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = group["taskSpec"]["runnables"]
    return found


def test_what_stops_a_job_is_listed_so_that_both_readings_of_the_policy_agree() -> None:
    spec = group_of(rendered(CASES["a2-one"]).body)["taskSpec"]
    (policy,) = spec["lifecyclePolicies"]
    assert policy == {"action": "FAIL_TASK", "actionCondition": {"exitCodes": [1, 2, 40, 41, 42, 47, 50005]}}
    assert spec["maxRetryCount"] == 1


@pytest.mark.parametrize(
    ("case", "has", "lacks"),
    [
        ("a2-debian", {"--runtime=nvidia", "--gpus=all"}, {"--privileged"}),
        ("a2-cos", {"--privileged"}, {"--runtime=nvidia", "--gpus=all"}),
        ("cpus-nfs", set(), {"--privileged", "--runtime=nvidia"}),
    ],
)
def test_the_container_gets_gpus_the_way_the_boot_image_has(case: str, has: set[str], lacks: set[str]) -> None:
    words = set(shlex.split(container_of(rendered(CASES[case]).body)["options"]))
    assert has <= words
    assert not words & lacks
    assert any(word.startswith("--shm-size=") and int(word.partition("=")[2]) >= 2**30 for word in words)


@pytest.mark.parametrize("case", CASES)
def test_a_container_may_do_no_more_than_its_network_and_its_gpus_need(case: str) -> None:
    body = rendered(CASES[case]).body
    words = shlex.split(container_of(body)["options"])
    assert ("--network=host" in words) == (group_of(body)["taskCount"] > 1), "one node listens to itself alone"
    confined = {"--cap-drop=ALL", "--security-opt=no-new-privileges"}
    assert confined & set(words) == (set() if "--privileged" in words else confined)


def test_the_driver_of_container_optimized_os_is_mounted_where_programs_look() -> None:
    submission = rendered(CASES["a2-cos"])
    assert "/var/lib/nvidia/lib64:/usr/local/nvidia/lib64:ro" in container_of(submission.body)["volumes"]
    variables = group_of(submission.body)["taskSpec"]["environment"]["variables"]
    assert json.loads(variables["LITGPT_NETWORK"])["library_paths"] == ["/usr/local/nvidia/lib64"]


@settings(deadline=None)
@given(st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=4))
def test_arguments_arrive_as_they_were_given(arguments: list[str]) -> None:
    commands = container_of(rendered(CASES["a2-debian"], program=("-m", "mine", *arguments)).body)["commands"]
    assert commands[commands.index("--") + 1 :] == ["-m", "mine", *arguments]


def test_our_own_words_need_no_quoting() -> None:
    container = container_of(rendered(CASES["a2-debian"]).body)
    words = [*container["commands"], *container["options"].split()]
    assert [word for word in words if re.search(r"[\s'\"$`\\]", word)] == []


@settings(deadline=None)
@given(st.text(max_size=80), st.text(max_size=80))
def test_labels_are_what_batch_takes(key: str, value: str) -> None:
    job = training(configured(CASES["a2-debian"]), labels={f"x{key}": value})
    for name, text in labels_of(job).items():
        assert re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", name)
        assert re.fullmatch(r"[a-z0-9_-]{0,63}", text)


@pytest.mark.parametrize("name", ["o" * 64, "9owt", "Owt", "owt.1"])
def test_a_name_that_batch_would_refuse_is_refused_with_the_rule(name: str) -> None:
    with pytest.raises(ConfigProblem, match="63 lower-case letters"):
        rendered(CASES["a2-debian"], name=name)


def test_a_variable_that_the_launcher_sets_is_not_the_job_s_to_set() -> None:
    with pytest.raises(ConfigProblem, match="LITGPT_NETWORK"):
        rendered(CASES["a2-debian"], env={"LITGPT_NETWORK": "{}"})


def test_secrets_are_named_and_never_held() -> None:
    environment = group_of(rendered(CASES["private"]).body)["taskSpec"]["environment"]
    assert environment["secretVariables"] == {"WANDB_API_KEY": "projects/p/secrets/wandb/versions/latest"}
    assert "WANDB_API_KEY" not in environment["variables"]


def test_every_variable_is_told_with_its_origin(job: Callable[..., Job]) -> None:
    told = {row["variable"]: row["from"] for row in rendered(CASES["private"], env={"MINE": "1"}).environment}
    assert told["NCCL_DEBUG"] == "user"
    assert told["MINE"] == "job"
    assert told["LITGPT_NETWORK"] == "platform"
