"""The pages on which a platform shows a job in a browser, as a run's own page links to them."""

from __future__ import annotations

from typing import Any
from urllib.parse import unquote

import pytest

from launcher.config import ScriptConfig, validated
from launcher.job import JobId
from launcher.platforms.base import HasPages

PLACE = {"cluster": "gpus", "location": "us-east5-a", "project": "acme-llm", "namespace": "research"}


def pages(section: dict[str, Any], job_id: str) -> dict[str, str]:
    document = {"script": "-m x", "root": "gs://acme/llm", "platform": section}
    if section["kind"] != "local":
        document["image"] = {"kind": "prebuilt", "reference": f"us-docker.pkg.dev/acme-llm/it@sha256:{64 * '0'}"}
    platform = validated(ScriptConfig, document, where="here").platform.open()
    return dict(platform.pages(JobId(job_id))) if isinstance(platform, HasPages) else {}


@pytest.mark.parametrize(("workload", "shown"), [("jobset", "owt-1f-2-nodes-0"), ("job", "owt-1f-2")])
def test_a_job_on_gke_is_shown_as_a_workload_with_the_lines_of_its_pods(workload: str, shown: str) -> None:
    found = pages({"kind": "gke", **PLACE, "workload": workload}, "research/owt-1f-2")
    job = f"https://console.cloud.google.com/kubernetes/job/us-east5-a/gpus/research/{shown}/details"
    assert found["GKE workload"] == f"{job}?project=acme-llm"
    query, _, project = found["Cloud Logging"].partition("?")
    assert project == "project=acme-llm"
    assert unquote(query).splitlines() == [
        'https://console.cloud.google.com/logs/query;query=resource.type="k8s_container"',
        'resource.labels.cluster_name="gpus"',
        'resource.labels.namespace_name="research"',
        'resource.labels.pod_name:"owt-1f-2-"',
    ]


def test_a_cluster_of_a_kubeconfig_may_be_anywhere_and_has_no_pages() -> None:
    assert pages({"kind": "gke", "kubeconfig": "~/.kube/config"}, "default/owt-1f-2") == {}


def test_a_batch_job_is_shown_with_its_logs() -> None:
    section = {"kind": "batch", "project": "acme-llm", "location": "us-central1", "machine": "g2-standard-48"}
    page = "https://console.cloud.google.com/batch/jobsDetail/regions/us-central1/jobs/owt-1f-2"
    assert pages(section, "projects/acme-llm/locations/us-central1/jobs/owt-1f-2") == {
        "Batch job": f"{page}/details?project=acme-llm",
        "Cloud Logging": f"{page}/logs?project=acme-llm",
    }


def test_runai_is_shown_where_its_control_plane_is_known() -> None:
    section = {"kind": "runai", "project": "llm", "api": "cli"}
    assert pages({**section, "url": "https://acme.run.ai"}, "x") == {"Run:ai": "https://acme.run.ai"}
    assert pages(section, "x") == {}


def test_this_machine_has_no_pages() -> None:
    assert pages({"kind": "local"}, "1") == {}
