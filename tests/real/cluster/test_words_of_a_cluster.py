"""The words in which a cluster refuses pods are understood: the emulated cluster's, and a real control plane's.

Neither a kubelet nor an image is needed. On a real cluster (`make test-cluster`) the jobs are in the namespace
`default`, are called words-…, and are cancelled.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import real_cluster
from gke_jobs import job
from kubernetes_cluster import running_cluster
from waiting import until

from launcher.platforms.kubernetes.platform import GkePlatform
from launcher.platforms.kubernetes.settings import GkePlatformConfig


@pytest.mark.parametrize("place", ["emulated", "real"])
@pytest.mark.parametrize(
    ("settings", "found", "why"),
    [
        ({"service_account": "no-such"}, "gke.service-account", "gke.pending.service-account"),
        ({"priority": "no-such"}, "gke.priority", "gke.pending.priority"),
        ({"node_selector": {"train-litgpt/no-such": "machine"}}, "gke.machines", "gke.pending.selector"),
    ],
)
def test_what_keeps_a_job_from_running_is_found_beforehand_and_is_the_reason_why_it_waits(
    place: str, tmp_path: Path, settings: dict[str, Any], found: str, why: str
) -> None:
    with contextlib.ExitStack() as stack:
        if place == "real":
            (kubeconfig,) = real_cluster.needed("KUBECONFIG")
        else:
            kubeconfig = str(stack.enter_context(running_cluster(simulate=True)).kubeconfig)
        given = {"kind": "gke", "kubeconfig": kubeconfig, "nodes": 2, **settings}
        platform = GkePlatform(GkePlatformConfig.model_validate(given))
        stack.callback(platform.close)
        submission = platform.render(job(tmp_path, f"words-{why.rpartition('.')[2]}"))
        stack.callback(platform.cancel, submission.job_id)
        assert found in {one.code for one in platform.check(submission)}
        job_id = platform.submit(submission)
        assert platform.submit(submission) == job_id
        until(lambda: why in {one.code for one in platform.status(job_id).reasons})
        platform.cancel(job_id)
        assert platform.left(job_id) == ()
