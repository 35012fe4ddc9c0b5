"""The contract of every platform, and the reasons of waiting jobs, on a real cluster: that of $KUBECONFIG.

CLUSTER_TEST_IMAGE has this project in it; the PersistentVolumeClaim CLUSTER_TEST_PVC is the folder
CLUSTER_TEST_SHARED, here and in the pods (CONTRIBUTING.md has it for kind).
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import kubernetes_jobs
import pytest
import real_cluster
from kubernetes_cluster import running_cluster
from waiting import until

from launcher.job import JOB_LABEL, JobId
from launcher.platforms.kubernetes.cluster import JOBS, JOBSETS, NotFound
from launcher.platforms.kubernetes.platform import KubernetesPlatform
from launcher.platforms.kubernetes.settings import KubernetesPlatformConfig

sys.path.append(str(Path(__file__).parents[2] / "launcher" / "platforms"))
import test_platform_contract
from test_platform_contract import *  # noqa: F403  the same tests, with the place of this file
from test_platform_contract import Place


@contextlib.contextmanager
def platform_of(kubeconfig: str, **settings: Any) -> Iterator[KubernetesPlatform]:
    fields = {
        "kind": "kubernetes",
        "kubeconfig": kubeconfig,
        "nodes": 2,
        "grace_period": 2,
        "network_test": 0,
        **settings,
    }
    platform = KubernetesPlatform(KubernetesPlatformConfig.model_validate(fields | settings))
    yield platform
    platform.close()


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    kubeconfig, image, pvc, shared = real_cluster.needed(
        "KUBECONFIG", "CLUSTER_TEST_IMAGE", "CLUSTER_TEST_PVC", "CLUSTER_TEST_SHARED"
    )
    monkeypatch.setattr(test_platform_contract, "IMAGE", image)

    def jobs() -> set[JobId]:
        """This suite's, all of which are called contract-…: also of a run that was interrupted."""
        names = set[str]()
        for resource in (JOBSETS, JOBS):  # a JobSet is there at once, its Job when the controller has made it
            with contextlib.suppress(NotFound):
                listed, _ = platform.cluster.list(resource, "default", labels=JOB_LABEL)
                names |= {thing["metadata"]["labels"][JOB_LABEL] for thing in listed}
        return {JobId(f"default/{name}") for name in names if name.startswith("contract-")}

    def cancelled() -> None:
        for job_id in jobs():
            platform.cancel(job_id)

    with (
        contextlib.ExitStack() as stack,
        platform_of(kubeconfig, pvc=pvc, pvc_path=shared) as platform,
        TemporaryDirectory(dir=shared, prefix="contract-", ignore_cleanup_errors=True) as folder,
    ):
        cancelled()
        # Pods are another user: below a folder that all may write to, the umask decides who may use what is made.
        Path(folder).chmod(0o777)
        before = os.umask(0)
        stack.callback(os.umask, before)
        yield Place(platform=platform, folder=Path(folder), live_jobs=lambda: len(jobs()), written=jobs)
        cancelled()


@pytest.fixture
def running_place(place: Place) -> Place:
    return place


@pytest.fixture(params=["emulated", "real"])
def control_plane(request: pytest.FixtureRequest) -> Iterator[str]:
    """A kubeconfig; of the real one neither a kubelet nor an image is needed."""
    if request.param == "real":
        yield real_cluster.needed("KUBECONFIG")[0]
    else:
        with running_cluster(simulate=True) as cluster:
            yield str(cluster.kubeconfig)


@pytest.mark.parametrize(
    ("settings", "found", "why"),
    [
        ({"service_account": "no-such"}, "kubernetes.service-account", "kubernetes.pending.service-account"),
        ({"priority": "no-such"}, "kubernetes.priority", "kubernetes.pending.priority"),
        ({"node_selector": {"train-litgpt/no-such": "machine"}}, "kubernetes.machines", "kubernetes.pending.selector"),
    ],
)
def test_check_finds_what_keeps_a_job_from_running(
    control_plane: str, tmp_path: Path, settings: dict[str, Any], found: str, why: str
) -> None:
    with platform_of(control_plane, **settings) as platform:
        submission = platform.render(kubernetes_jobs.job(tmp_path, "contract-words"))
        assert found in {finding.code for finding in platform.check(submission)}
        job_id = platform.submit(submission)
        until(lambda: why in {finding.code for finding in platform.status(job_id).reasons})
        platform.cancel(job_id)
        assert platform.remaining_resources(job_id) == ()
