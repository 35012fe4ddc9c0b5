"""Settings and submissions that Batch would refuse, or would run other than meant: refused before, with the fix."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from batch_jobs import IMAGE
from pydantic import ValidationError

from launcher.checks.preflight import check_image
from launcher.config import RunConfig, validated
from launcher.errors import ConfigProblem
from launcher.job import Job, Submission
from launcher.platforms.batch import zones
from launcher.platforms.batch.lint import container_of, group_of, lint
from launcher.platforms.batch.platform import BatchPlatform
from launcher.platforms.batch.settings import BatchPlatformConfig
from litgpt_demo.findings import Finding

Configured = Callable[..., BatchPlatformConfig]


def found(settings: BatchPlatformConfig, **changes: Any) -> dict[str, Finding]:
    asked: dict[str, Any] = {
        "name": "owt-01", "attempt": 1, "nodes": settings.nodes, "processes": settings.processes, "image": IMAGE,
        "program": ("-m", "x"), "directory": "gs://b/runs/owt-01/attempts/1",
    }  # fmt: skip
    platform = BatchPlatform(settings)
    return {one.code: one for one in platform.check(platform.render(Job(**{**asked, **changes})))}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"project": "No Project"}, "project"),
        ({"location": "us-central1-a"}, "location"),
        ({"machine": "a2-highgpu-8g", "gpus": 4}, "has 8; leave platform.gpus out"),
        ({"machine": "a2-highgpu-8g", "processes": 16}, "ranks cannot share one"),
        ({"machine": "g2-standard-4", "spot": True, "reservation": "x"}, "keep one"),
        ({"machine": "g2-standard-4", "flex_start": True}, "max_seconds is not given"),
        ({"machine": "g2-standard-4", "flex_start": True, "max_seconds": 604_801}, "a week"),
        ({"machine": "g2-standard-4", "max_seconds": 1_209_601}, "1209600"),
        ({"machine": "g2-standard-4", "priority": 100}, "priority"),
        ({"machine": "g2-standard-4", "shm": "lots"}, "shm"),
        ({"machine": "g2-standard-4", "nodes": 1001}, "nodes"),
        ({"machine": "g2-standard-4", "service_account": "trainer"}, "service_account"),
        ({"machine": "g2-standard-4", "image": "debian"}, "image"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes: dict[str, Any], named: str, configured: Configured) -> None:
    with pytest.raises(ValidationError, match=named):
        configured(**changes)


@pytest.mark.parametrize(
    ("machine", "gpus", "processes"),
    [("a2-highgpu-8g", None, 8), ("g2-standard-4", None, 1), ("n2-standard-8", 0, 1), ("x9-strange-4g", 4, 4)],
)
def test_there_is_one_rank_per_gpu_or_one(
    machine: str, gpus: int | None, processes: int, configured: Configured
) -> None:
    assert configured(machine=machine, gpus=gpus).processes == processes


@pytest.mark.parametrize(
    ("changes", "code", "fix"),
    [
        ({"machine": "n2-standard-8"}, "batch.machine", "platform.gpus (0 trains on CPUs)"),
        ({"machine": "a4x-highgpu-4g"}, "batch.machine", "platform.kind=gke"),
        ({"machine": "g2-standard-4", "location": "us-central9"}, "batch.location", "us-central1"),
        ({"machine": "a3-ultragpu-8g", "location": "us-east1"}, "batch.region", "us-south1"),
        ({"machine": "a2-ultragpu-1g", "location": "us-west1", "zones": ("us-west1-a",)}, "batch.zone", "known zones"),
        ({"machine": "g2-standard-4", "zones": ("europe-west4-a",)}, "batch.zone", "leave platform.zones out"),
        ({"machine": "a4-highgpu-8g"}, "batch.boot-disk", "hyperdisk-balanced"),
        ({"machine": "a3-highgpu-8g"}, "batch.network", "platform.kind=gke"),
        ({"machine": "g2-standard-4", "reservation": "mine"}, "batch.reservation", "projects/PROJECT/zones/"),
        ({"machine": "g2-standard-4", "secrets": {"KEY": "hunter2"}}, "batch.secret", "versions/latest"),
        ({"machine": "g2-standard-4", "tags": ("No Tag",)}, "batch.tag", "lower-case"),
        ({"machine": "g2-standard-4", "subnetwork": "projects/p/regions/us-east1/subnetworks/s"}, "batch.subnetwork",
         "regions/us-central1"),
        ({"machine": "g2-standard-4", "external_ip": False}, "batch.external-ip", "platform.subnetwork"),
        ({"machine": "g2-standard-4", "vpc": "projects/p/global/networks/n"}, "batch.firewall", "firewall-rules"),
        ({"machine": "g2-standard-4", "gvnic": True}, "batch.gvnic", "boot_image"),
        ({"machine": "g2-standard-4", "boot_image": "projects/cos-cloud/global/images/cos-125"}, "batch.cos",
         "platform.os=cos"),
        ({"machine": "g2-standard-4", "os": "cos", "boot_image": "projects/p/global/images/debian"}, "batch.cos",
         "platform.os=debian"),
    ],
)  # fmt: skip
def test_what_would_go_wrong_is_found_with_what_to_do(
    changes: dict[str, Any], code: str, fix: str, configured: Configured
) -> None:
    finding = found(configured(**changes))[code]
    assert fix in finding.fix
    assert finding.what


def test_a_secret_s_value_is_not_shown_where_its_name_should_stand(configured: Configured) -> None:
    told = found(configured(machine="g2-standard-4", secrets={"KEY": "hunter2"}))["batch.secret"]
    assert "hunter2" not in str(told)


def test_a_registrys_login_is_two_secrets_by_name(configured: Configured) -> None:
    name = "projects/p/secrets/registry/versions/latest"
    settings = configured(registry_username=name, registry_password=name)
    assert settings.registry_password == name
    with pytest.raises(ValidationError, match="a login takes both"):
        configured(registry_username=name)
    given = {"kind": "batch", "project": "my-project", "location": "us-central1", "registry_password": "hunter2"}
    with pytest.raises(ConfigProblem, match="is no name of a secret") as caught:
        validated(RunConfig, {"platform": given}, where="run.yaml")
    assert "hunter2" not in str(caught.value)


def test_a_root_on_this_machine_needs_a_file_server(configured: Configured) -> None:
    assert "platform.nfs" in found(configured(), directory="/home/me/output/runs/x/attempts/1")["batch.root"].fix
    shared = configured(nfs="10.0.0.2:/data")
    assert "batch.root" not in found(shared, directory="/mnt/disks/shared/runs/x/attempts/1")
    assert "nfs_path" in found(shared, directory="/mnt/disks/other/runs/x/attempts/1")["batch.root"].what


def test_an_image_is_needed_and_should_be_named_by_its_digest(configured: Configured) -> None:
    assert found(configured(), image="registry/train:latest")["batch.image"].severity == "warning"
    assert "batch.image" not in found(configured())
    from launcher.config import ScriptConfig

    config = ScriptConfig(script="-m x", platform=configured())
    assert [one.code for one in check_image(config, BatchPlatform(configured()))] == ["image.missing"]


def broken(submission: Submission, change: Callable[[dict[str, Any]], None]) -> set[str]:
    body = copy.deepcopy(dict(submission.body))
    change(body)
    settings = BatchPlatformConfig(kind="batch", project="my-project", location="us-central1", machine="g2-standard-4")
    changed = Submission(platform="batch", job_id=submission.job_id, body=body)
    return {one.code for one in lint(changed, settings) if one.severity == "error"}


def _set(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def change(body: dict[str, Any]) -> None:
        group_of(body)[key] = value  # type: ignore[index]

    return change


def _options(body: dict[str, Any]) -> None:
    container_of(body)["options"] = "--network=host"  # type: ignore[index]


def _label(body: dict[str, Any]) -> None:
    body["job"]["labels"] |= {"goog-mine": "x", "version": "1.2"}


def _retries(body: dict[str, Any]) -> None:
    group_of(body)["taskSpec"]["maxRetryCount"] = 3


def _lines(body: dict[str, Any]) -> None:
    group_of(body)["taskSpec"]["environment"]["variables"]["TEXT"] = "one\ntwo"


def _image(body: dict[str, Any]) -> None:
    body["job"]["allocationPolicy"]["instances"][0]["policy"]["bootDisk"]["image"] = "batch-cos"


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (_set("parallelism", 1), "batch.gang"),
        (_set("taskCountPerNode", 2), "batch.gang"),
        (_set("requireHostsFile", False), "batch.hosts"),
        (_retries, "batch.retries"),
        (_options, "batch.shm"),
        (_label, "batch.label"),
        (_lines, "batch.environment"),
        (_image, "batch.cos"),
        (lambda body: body.update(jobId="Owt-1"), "batch.name"),
    ],
)
def test_the_linter_reads_what_is_sent(
    change: Callable[[dict[str, Any]], None], code: str, configured: Configured, job: Callable[..., Job]
) -> None:
    submission = BatchPlatform(configured(machine="g2-standard-4")).render(job())
    assert broken(submission, lambda body: None) == set()
    assert broken(submission, change) == {code}


def test_every_known_zone_is_in_a_region_of_batch() -> None:
    for machine, places in zones.ZONES.items():
        assert places, machine
        assert {zones.region_of(zone) for zone in places} <= zones.LOCATIONS
    assert zones.zones_of("a2-highgpu-4g") == zones.ZONES["a2-highgpu"]
    assert zones.zones_of("n2-standard-8") is None
