"""What every platform promises, on the cluster of $KUBECONFIG.

CLUSTER_TEST_IMAGE has this project in it; the PersistentVolumeClaim CLUSTER_TEST_CLAIM is the folder
CLUSTER_TEST_SHARED, here and in the pods (docs/gke.md has it for kind).
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import real_cluster

from launcher.job import ATTEMPT_LABEL, RUN_LABEL, JobId
from launcher.platforms.kubernetes.platform import GkePlatform
from launcher.platforms.kubernetes.settings import GkePlatformConfig

sys.path.append(str(Path(__file__).parents[2] / "launcher" / "platforms"))
from test_platform_contract import *  # noqa: F403  the same tests, with the place of this file
from test_platform_contract import Place


@pytest.fixture
def place() -> Iterator[Place]:
    from kubernetes import client, config

    kubeconfig, image, claim, shared = real_cluster.needed(
        "KUBECONFIG", "CLUSTER_TEST_IMAGE", "CLUSTER_TEST_CLAIM", "CLUSTER_TEST_SHARED"
    )
    settings = {"kubeconfig": kubeconfig, "nodes": 2, "grace": 2, "gate": 0, "claim": claim, "claim_path": shared}
    platform = GkePlatform(GkePlatformConfig.model_validate({"kind": "gke", **settings}))
    config.load_kube_config(kubeconfig)

    def jobs() -> set[JobId]:
        """This suite's, all of which are called contract-…: also of a run that was interrupted."""
        listed = client.BatchV1Api().list_namespaced_job("default", label_selector=RUN_LABEL).items
        marks = [(one.metadata.labels[RUN_LABEL], one.metadata.labels[ATTEMPT_LABEL]) for one in listed]
        return {JobId(f"default/{run}-{attempt}") for run, attempt in marks if run.startswith("contract-")}

    def cancelled() -> None:
        for job_id in jobs():
            platform.cancel(job_id)

    with TemporaryDirectory(dir=shared, prefix="contract-", ignore_cleanup_errors=True) as folder:
        cancelled()
        yield Place(platform=platform, directory=f"{folder}/runs", live_jobs=lambda: len(jobs()), image=image)
        cancelled()
        platform.close()


@pytest.fixture
def running_place(place: Place) -> Place:
    return place
