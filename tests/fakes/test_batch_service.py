"""The stand-in for Batch refuses what Batch refuses; a fake that says yes to everything proves nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from batch import docker
from batch.admission import RefusedCallError, admit
from batch_jobs import IMAGE
from google.cloud.batch_v1 import types

from launcher.job import Job
from launcher.platforms.batch.platform import BatchPlatform
from launcher.platforms.batch.settings import BatchPlatformConfig


def request(change: Callable[[dict[str, Any]], object] = lambda body: None) -> types.CreateJobRequest:
    settings = BatchPlatformConfig(
        kind="batch", project="my-project", location="us-central1", machine="g2-standard-24", nodes=2
    )
    job = Job(
        name="owt-01", attempt=1, nodes=2, processes=2, program=("-m", "x"), directory="gs://b/runs/x/attempts/1",
        image=IMAGE,
    )  # fmt: skip
    body = json.loads(json.dumps(BatchPlatform(settings).render(job).body))
    change(body)
    return types.CreateJobRequest(
        parent=body["parent"], job_id=body["jobId"], job=types.Job.from_json(json.dumps(body["job"]))
    )


def group(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["job"]["taskGroups"][0]
    return found


def policy(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["job"]["allocationPolicy"]["instances"][0]["policy"]
    return found


def test_what_we_render_is_admitted() -> None:
    admit(request(), "my-project")


CHANGES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "name": (lambda body: body.update(jobId="Owt_1"), "does not match"),
    "project": (lambda body: body.update(parent="projects/other/locations/us-central1"), "batch.jobs.create"),
    "location": (lambda body: body.update(parent="projects/my-project/locations/mars-1"), "not found"),
    "groups": (lambda body: body["job"]["taskGroups"].append(group(body)), "exactly one is supported"),
    "label": (lambda body: body["job"]["labels"].update({"goog-x": "1"}), "reserved"),
    "label value": (lambda body: body["job"]["labels"].update({"version": "1.2"}), "invalid"),
    "priority": (lambda body: body["job"].update(priority=100), r"\[0, 100\)"),
    "parallelism": (lambda body: group(body).update(parallelism=3), "parallelism 3 of 2"),
    "in order": (lambda body: group(body).update(schedulingPolicy="IN_ORDER"), "IN_ORDER"),
    "retries": (lambda body: group(body)["taskSpec"].update(maxRetryCount=11), r"\[0, 10\]"),
    "duration": (lambda body: group(body)["taskSpec"].update(maxRunDuration="1209601s"), "longer than 14 days"),
    "timeout": (lambda body: group(body)["taskSpec"]["runnables"][0].update(timeout="1209601s"), "longer than 14 days"),
    "flex start": (lambda body: policy(body).update(provisioningModel="FLEX_START"), "needs max_run_duration"),
    "long flex start": (
        lambda body: (
            policy(body).update(provisioningModel="FLEX_START"),
            group(body)["taskSpec"].update(maxRunDuration="604801s"),
        ),
        "longer than 7 days",
    ),
    "policies": (
        lambda body: group(body)["taskSpec"].update(
            lifecyclePolicies=[{"action": "FAIL_TASK", "actionCondition": {"exitCodes": [1]}}] * 2
        ),
        "only one lifecycle policy",
    ),
    "no runnables": (lambda body: group(body)["taskSpec"].update(runnables=[]), "no runnables"),
    "empty runnable": (lambda body: group(body)["taskSpec"]["runnables"].append({"displayName": "x"}), "exactly one"),
    "barriers": (
        lambda body: group(body)["taskSpec"]["runnables"].append({"barrier": {"name": "all-up"}}), "share a name",
    ),
    "variable": (
        lambda body: group(body)["taskSpec"]["environment"]["variables"].update({"not-a-name": "1"}), "invalid",
    ),
    "machine": (lambda body: policy(body).update(machineType="x9-huge"), "does not exist"),
    "too large": (
        lambda body: group(body)["taskSpec"].update(computeResource={"cpuMilli": 999_000}), "do not fit",
    ),
    "disk": (lambda body: policy(body)["bootDisk"].update(image="debian"), "boot disk image"),
    "elsewhere": (
        lambda body: body["job"]["allocationPolicy"]["location"].update(allowedLocations=["regions/us-east4"]),
        "not in the job's location",
    ),
    "attached": (
        lambda body: policy(body).update(accelerators=[{"type": "nvidia-l4", "count": 8}]), "has 2 GPUs, not 8",
    ),
    "logs": (lambda body: body["job"].pop("logsPolicy"), "logs_policy"),
}  # fmt: skip


@pytest.mark.parametrize("case", CHANGES)
def test_what_batch_refuses_is_refused(case: str) -> None:
    change, named = CHANGES[case]
    with pytest.raises(RefusedCallError, match=named):
        admit(request(change), "my-project")


def test_a_request_id_has_to_be_a_uuid() -> None:
    asked = request()
    asked.request_id = "again"
    with pytest.raises(RefusedCallError, match="UUID"):
        admit(asked, "my-project")


def test_docker_takes_no_flag_that_it_does_not_know() -> None:
    made = docker.parsed("--network=host --shm-size 4gb --runtime=nvidia --gpus all --privileged")
    assert (made.host_network, made.shm, made.runtime, made.gpus, made.privileged) == (
        True, 4 * 2**30, "nvidia", True, True,
    )  # fmt: skip
    assert docker.parsed("").shm == 64 * 2**20
    for text in ("--shm-sized=4g", "--shm-size=lots", "--network", "train"):
        with pytest.raises(docker.UnknownFlagError):
            docker.parsed(text)
