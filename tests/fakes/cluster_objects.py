"""Small Kubernetes objects, written by hand, for the tests of the cluster."""

from __future__ import annotations

import copy
import sys
from typing import Any

import kubernetes.client as k8s
from kubernetes_cluster import Cluster

Object = dict[str, Any]
GROUP, VERSION = "jobset.x-k8s.io", "v1alpha2"


def client(cluster: Cluster) -> k8s.ApiClient:
    """The official client, with the token that is good now."""
    configuration = k8s.Configuration(host=cluster.host)
    configuration.api_key = {"authorization": f"Bearer {cluster.token}"}
    configuration.retries = False
    return k8s.ApiClient(configuration)


def pod_template(program: str = "pass", **changes: Any) -> Object:
    """One container `node` that runs a Python program."""
    container = {
        "name": "node",
        "image": "registry.example/train@sha256:1",
        "command": [sys.executable, "-uc", program],
    }
    return {
        "spec": {"restartPolicy": "Never", "terminationGracePeriodSeconds": 5, "containers": [container], **changes}
    }


def job_spec(program: str = "pass", *, nodes: int = 2, **changes: Any) -> Object:
    """All pods or none, as the launcher's jobs are: exit code 42 is hopeless, a disruption is nobody's fault."""
    return {
        "completionMode": "Indexed", "completions": nodes, "parallelism": nodes, "backoffLimit": 0,
        "podFailurePolicy": {"rules": [
            {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            {"action": "FailJob", "onExitCodes": {"containerName": "node", "operator": "In", "values": [42]}},
        ]},
        "template": pod_template(program),
    } | changes  # fmt: skip


def indexed_job(name: str = "demo", program: str = "pass", **changes: Any) -> Object:
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": name}, "spec": job_spec(program, **changes)}


def jobset(name: str = "demo", program: str = "pass", *, restarts: int = 2, **changes: Any) -> Object:
    def rule(name: str, action: str, pattern: str) -> Object:
        return {"name": name, "action": action, "onJobFailureReasons": ["PodFailurePolicy"],
                "onJobFailureMessagePatterns": [pattern]}  # fmt: skip

    return {
        "apiVersion": f"{GROUP}/{VERSION}", "kind": "JobSet", "metadata": {"name": name},
        "spec": {
            "failurePolicy": {"maxRestarts": restarts, "restartStrategy": "BlockingRecreate", "rules": [
                rule("disrupted", "RestartJobSetAndIgnoreMaxRestarts", "has condition DisruptionTarget"),
                rule("hopeless", "FailJobSet", "failed with exit code 42 "),
            ]},
            "replicatedJobs": [{"name": "nodes", "template": {"spec": job_spec(program, **changes)}}],
        },
    }  # fmt: skip


def submit(cluster: Cluster, thing: Object, *, namespace: str = "default") -> Object:
    """Create a JobSet or a Job as a user does, over HTTP."""
    api = client(cluster)
    if thing["kind"] == "JobSet":
        return k8s.CustomObjectsApi(api).create_namespaced_custom_object(GROUP, VERSION, namespace, "jobsets", thing)
    return k8s.BatchV1Api(api).create_namespaced_job(namespace, thing).to_dict()


def changed(thing: Object, path: str, value: Any) -> Object:
    """A copy with one field set, by its path: `spec.replicatedJobs.0.name`; None takes it away."""
    made = copy.deepcopy(thing)
    *way, last = path.split(".")
    here: Any = made
    for step in way:
        here = here[int(step)] if isinstance(here, list) else here.setdefault(step, {})
    if value is None:
        here.pop(last)
    else:
        here[int(last) if isinstance(here, list) else last] = value
    return made
