"""What is sent to Batch: golden files, what has to hold for whatever is asked, and what is refused before."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from batch_jobs import job_of, settings_of
from golden_files import GOLDEN, differences, require_differences, require_golden
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from launcher.config import RunConfig, validated
from launcher.errors import ConfigProblem
from launcher.job import Submission
from launcher.platforms.batch.platform import BatchPlatform
from launcher.platforms.batch.render import container_of, labels_of
from launcher.platforms.batch.settings import BatchPlatformConfig
from launcher.yaml_files import read_yaml
from litgpt_demo.errors import Finding

CONFIGS = sorted((Path(__file__).parents[4] / "deployments" / "configs").glob("batch*.yaml"))

# The first is the golden file; the others are told as differences from it, and those of one node from `one`.
CASES: dict[str, dict[str, Any]] = {
    "gpus": {"machine": "a2-highgpu-8g"},
    "cos": {"machine": "a2-highgpu-8g", "os": "cos"},
    "one": {"machine": "a2-highgpu-8g", "nodes": 1},
    "spot": {"machine": "g2-standard-48", "spot": True, "zones": ("us-central1-a", "us-central1-b")},
    "reserved": {
        "machine": "a3-highgpu-8g", "reservation": "projects/p/zones/us-central1-a/reservations/mine", "compact": True,
        "gvnic": True, "boot_image": "projects/p/global/images/trainer",
    },
    "flex": {
        "machine": "a4-highgpu-8g", "flex_start": True, "flex_start_duration": "168h",
        "boot_disk_type": "hyperdisk-balanced",
    },
    "attached": {"machine": "n1-standard-8-t4", "nodes": 1, "gpu_driver": "535.129.03", "in_place_restarts": 0},
    "nfs": {"machine": "n2-standard-8", "gpus": 0, "nfs": "10.0.0.2:/data", "nfs_path": "/mnt/disks/data"},
    "private": {
        "machine": "g2-standard-48", "vpc": "projects/p/global/networks/training", "external_ip": False,
        "subnetwork": "projects/p/regions/us-central1/subnetworks/training", "tags": ("trainer",), "priority": 7,
        "service_account": "trainer@p.iam.gserviceaccount.com", "shm": "16Gi",
        "secrets": {"WANDB_API_KEY": "projects/p/secrets/wandb/versions/latest"}, "env": {"NCCL_DEBUG": "WARN"},
        "registry_username": "projects/p/secrets/registry-user/versions/1",
        "registry_password": "projects/p/secrets/registry-password/versions/latest",
    },
    **{f"config-{path.stem}": read_yaml(path)["platform"] for path in CONFIGS},
}  # fmt: skip


def rendered(case: str, **changes: Any) -> Submission:
    settings = settings_of(**CASES[case])
    return BatchPlatform(settings).render(job_of(settings, **changes))


def test_submissions_are_golden() -> None:
    """The others differ from the golden submission only in the recorded fields."""
    require_golden("batch/gpus.yaml", str(rendered("gpus")))
    found = {}
    for case in [case for case in CASES if case != "gpus"]:
        base = "one" if CASES[case].get("nodes") == 1 and case != "one" else "gpus"
        found[case] = {"from": base, **differences(rendered(base), rendered(case))}
    require_differences("batch/differences.yaml", found)
    assert {path.stem for path in (GOLDEN / "batch").iterdir()} == {"gpus", "differences"}


def test_nodes_start_together_and_restart_only_alone() -> None:
    """Otherwise the first would wait for the others forever, or one that comes back find no peers."""
    from google.cloud import batch_v1

    for case, options in CASES.items():
        submission, nodes = rendered(case), settings_of(**options).nodes
        batch_v1.Job.from_json(json.dumps(submission.body["job"]))  # an unknown field would be refused
        found = BatchPlatform(settings_of(**options)).check(submission)
        assert [str(finding) for finding in found if finding.severity == "error"] == [], case
        [group] = submission.body["job"]["taskGroups"]
        assert (group["taskCount"], group["parallelism"], group["taskCountPerNode"]) == (nodes, nodes, 1)
        assert group.get("requireHostsFile", False) == (nodes > 1)
        assert nodes == 1 or group["taskSpec"]["maxRetryCount"] == 0
        assert "--shm-size=" in container_of(submission.body)["options"], "it would be Docker's 64 MB"


@pytest.mark.parametrize("case", ["gpus", "cos", "one", "nfs"])
def test_container_has_only_the_rights_it_needs(case: str) -> None:
    options = shlex.split(container_of(rendered(case).body)["options"])
    assert ("--network=host" in options) == (settings_of(**CASES[case]).nodes > 1), "one node listens to itself alone"
    confined = {"--cap-drop=ALL", "--security-opt=no-new-privileges"}
    assert confined & set(options) == (set() if "--privileged" in options else confined)
    assert ("--privileged" in options) == (CASES[case].get("os") == "cos"), "only there is no toolkit that gives GPUs"


@given(st.lists(st.text(min_size=1, max_size=30), min_size=1, max_size=4))
def test_arguments_arrive_as_they_were_given(arguments: list[str]) -> None:
    commands = container_of(rendered("gpus", program=("-m", "mine", *arguments)).body)["commands"]
    assert commands[commands.index("--") + 1 :] == ["-m", "mine", *arguments]


@given(st.text(max_size=80), st.text(max_size=80))
def test_labels_are_what_batch_takes(key: str, value: str) -> None:
    job = job_of(settings_of(), labels={f"x{key}": value})
    for name, text in labels_of(job).items():
        assert re.fullmatch(r"[a-z][a-z0-9_-]{0,62}", name)
        assert re.fullmatch(r"[a-z0-9_-]{0,63}", text)


def test_a_variable_of_the_launcher_is_refused() -> None:
    with pytest.raises(ConfigProblem, match="LITGPT_NETWORK"):
        rendered("gpus", env={"LITGPT_NETWORK": "{}"})


def test_secrets_are_named_and_never_held() -> None:
    environment = rendered("private").body["job"]["taskGroups"][0]["taskSpec"]["environment"]
    assert environment["secretVariables"] == {"WANDB_API_KEY": "projects/p/secrets/wandb/versions/latest"}
    assert "WANDB_API_KEY" not in environment["variables"]


# --- what is refused before -------------------------------------------------------------------------------------------

L4 = {"machine": "g2-standard-4"}
SECRET = "projects/p/secrets/registry/versions/latest"


def found(settings: BatchPlatformConfig, **changes: Any) -> dict[str, Finding]:
    platform = BatchPlatform(settings)
    return {finding.code: finding for finding in platform.check(platform.render(job_of(settings, **changes)))}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"machine": "a2-highgpu-8g", "gpus": 4}, "has 8; leave platform.gpus out"),
        ({**L4, "spot": True, "reservation": "projects/p/zones/z/reservations/mine"}, "keep one"),
        ({**L4, "flex_start": True}, "needs platform.flex_start_duration"),
        ({**L4, "registry_username": SECRET}, "make one login"),
        ({**L4, "zones": ["us-east1-b"]}, "us-east1-b, which is not a zone of platform.location=us-central1"),
        ({**L4, "tags": ["No Tag"]}, "tags.0"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        settings_of(**changes)


@pytest.mark.parametrize(
    ("changes", "code", "fix"),
    [
        ({"machine": "n2-standard-8"}, "batch.machine", "platform.gpus to its number of them (0 trains on CPUs)"),
        ({"machine": "a3-highgpu-8g"}, "batch.network", "platform.kind=gke"),
        ({"machine": "a4-highgpu-8g"}, "batch.boot-disk", "hyperdisk-balanced"),
        ({**L4, "subnetwork": "projects/p/regions/us-east1/subnetworks/s"}, "batch.subnetwork", "regions/us-central1"),
        ({**L4, "external_ip": False}, "batch.external-ip", "platform.subnetwork"),
        ({**L4, "boot_image": "projects/cos-cloud/global/images/cos-125"}, "batch.cos", "platform.os=cos"),
    ],
)
def test_check_finds_mistakes_with_fixes(changes: dict[str, Any], code: str, fix: str) -> None:
    assert fix in found(settings_of(**changes))[code].fix


@pytest.mark.parametrize("setting", [{"secrets": {"KEY": "hunter2"}}, {"registry_password": "hunter2"}])
def test_secret_in_place_of_its_name_is_not_shown(setting: dict[str, Any]) -> None:
    section = {"kind": "batch", "project": "my-project", "location": "us-central1", **L4, **setting}
    with pytest.raises(ConfigProblem, match="is not the name of a secret") as caught:
        validated(RunConfig, {"platform": section}, where="run.yaml")
    assert "hunter2" not in str(caught.value)


def test_a_root_on_this_machine_needs_a_file_server_that_has_it() -> None:
    assert "platform.nfs" in found(settings_of(), directory="/home/me/output/runs/x/attempts/1")["batch.root"].fix
    shared = settings_of(nfs="10.0.0.2:/data")
    assert "batch.root" not in found(shared, directory="/mnt/disks/shared/runs/x/attempts/1")
    assert "nfs_path" in found(shared, directory="/mnt/disks/other/runs/x/attempts/1")["batch.root"].what
