"""The way into a pod, and pods that only wait for a command."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from gke_jobs import gke, job, started
from kubernetes_cluster import Cluster, running_cluster

from launcher.errors import ConfigProblem
from launcher.platforms.base import BY_HAND


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster(simulate=True) as made:
        yield made


def test_kubectl_enters_the_pod_of_a_node(cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    platform = gke(cluster)
    job_id = started(cluster, platform, job(tmp_path))
    with pytest.raises(ConfigProblem, match="export KUBECONFIG="):
        platform.entrance(job_id, 1, terminal=True)  # a config may name a kubeconfig that runs programs
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    words = platform.entrance(job_id, 1, terminal=True).words
    assert words[:4] == ("kubectl", f"--kubeconfig={cluster.kubeconfig}", "exec", "--stdin")
    assert "--tty" in words
    assert "--tty" not in platform.entrance(job_id, 1, terminal=False).words
    [pod] = {one["metadata"]["name"] for one in cluster.pods()} & set(words)
    assert "-0-1" in pod
    with pytest.raises(ConfigProblem, match="has no node 2 that runs; there are 0, 1"):
        platform.entrance(job_id, 2, terminal=True)


@pytest.mark.parametrize("workload", ["jobset", "job"])
def test_interactive_pods_wait_with_the_command_in_their_environment(
    cluster: Cluster, tmp_path: Path, workload: str
) -> None:
    asked = job(tmp_path)
    plain, waits = (gke(cluster, workload=workload, interactive=one).render(asked) for one in (False, True))
    before, after = (
        next(one for item in submission.body["items"] for one in containers(item)) for submission in (plain, waits)
    )
    assert after["command"][:2] == ["sh", "-c"]
    told = {entry["name"]: entry.get("value") for entry in after["env"]}
    assert shlex.split(told[BY_HAND]) == before["command"]
    assert [entry for entry in after["env"] if entry["name"] != BY_HAND] == before["env"]


def containers(thing: object) -> Iterator[dict[str, object]]:
    """Every container that is called node, however deep in an object."""
    if isinstance(thing, dict):
        if thing.get("name") == "node" and "command" in thing:
            yield thing
        for value in thing.values():
            yield from containers(value)
    elif isinstance(thing, list):
        for value in thing:
            yield from containers(value)
