"""Settings and submissions that Batch would refuse, or would run other than meant: refused before, with the fix."""

from __future__ import annotations

from typing import Any

import pytest
from batch_jobs import job_of, settings_of
from pydantic import ValidationError

from launcher.config import RunConfig, validated
from launcher.errors import ConfigProblem
from launcher.platforms.batch.platform import BatchPlatform
from launcher.platforms.batch.settings import BatchPlatformConfig
from litgpt_demo.findings import Finding

L4 = {"machine": "g2-standard-4"}
SECRET = "projects/p/secrets/registry/versions/latest"


def found(settings: BatchPlatformConfig, **changes: Any) -> dict[str, Finding]:
    platform = BatchPlatform(settings)
    return {one.code: one for one in platform.check(platform.render(job_of(settings, **changes)))}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"machine": "a2-highgpu-8g", "gpus": 4}, "has 8; leave platform.gpus out"),
        ({**L4, "spot": True, "reservation": "projects/p/zones/z/reservations/mine"}, "keep one"),
        ({**L4, "flex_start": True}, "max_seconds is not given"),
        ({**L4, "registry_username": SECRET}, "a login takes both"),
        ({**L4, "zones": ["us-east1-b"]}, "us-east1-b, which is no zone of platform.location=us-central1"),
        ({**L4, "tags": ["No Tag"]}, "tags.0"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError, match=named):
        settings_of(**changes)


@pytest.mark.parametrize(
    ("changes", "code", "fix"),
    [
        ({"machine": "n2-standard-8"}, "batch.machine", "platform.gpus (0 trains on CPUs)"),
        ({"machine": "a3-highgpu-8g"}, "batch.network", "platform.kind=gke"),
        ({"machine": "a4-highgpu-8g"}, "batch.boot-disk", "hyperdisk-balanced"),
        ({**L4, "subnetwork": "projects/p/regions/us-east1/subnetworks/s"}, "batch.subnetwork", "regions/us-central1"),
        ({**L4, "external_ip": False}, "batch.external-ip", "platform.subnetwork"),
        ({**L4, "boot_image": "projects/cos-cloud/global/images/cos-125"}, "batch.cos", "platform.os=cos"),
    ],
)
def test_what_would_go_wrong_is_found_with_what_to_do(changes: dict[str, Any], code: str, fix: str) -> None:
    assert fix in found(settings_of(**changes))[code].fix


@pytest.mark.parametrize("setting", [{"secrets": {"KEY": "hunter2"}}, {"registry_password": "hunter2"}])
def test_a_secret_s_value_is_not_shown_where_its_name_should_stand(setting: dict[str, Any]) -> None:
    given = {"kind": "batch", "project": "my-project", "location": "us-central1", **L4, **setting}
    with pytest.raises(ConfigProblem, match="is no name of a secret") as caught:
        validated(RunConfig, {"platform": given}, where="run.yaml")
    assert "hunter2" not in str(caught.value)


def test_a_root_on_this_machine_needs_a_file_server_that_has_it() -> None:
    assert "platform.nfs" in found(settings_of(), directory="/home/me/output/runs/x/attempts/1")["batch.root"].fix
    shared = settings_of(nfs="10.0.0.2:/data")
    assert "batch.root" not in found(shared, directory="/mnt/disks/shared/runs/x/attempts/1")
    assert "nfs_path" in found(shared, directory="/mnt/disks/other/runs/x/attempts/1")["batch.root"].what
