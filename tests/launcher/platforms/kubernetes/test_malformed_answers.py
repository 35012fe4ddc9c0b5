"""No answer of an API server, or of a proxy before it, and no object that others wrote ends the following of a job."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from serving_thread import served

from launcher.errors import PlatformUnreachable
from launcher.platforms.kubernetes import cluster as cluster_module
from launcher.platforms.kubernetes.cluster import EVENTS, PODS, Cluster, Resource
from launcher.platforms.kubernetes.connection import _configuration
from launcher.platforms.kubernetes.informer import JobName
from launcher.platforms.kubernetes.pending import explain

JOB = JobName.parse("research/owt-0123456789-1")
WORKLOAD: dict[str, Any] = {
    "kind": "Job",
    "metadata": {"name": JOB.name, "uid": "u-1", "labels": {}},
    "spec": {"completions": 1, "template": {"spec": {"containers": [{"name": "node"}]}}},
    "status": {},
}
POD: dict[str, Any] = {
    "metadata": {
        "name": "pod-0", "uid": "u-2", "labels": {}, "annotations": {"batch.kubernetes.io/job-completion-index": "0"},
    },
    "spec": {"containers": [{"name": "node"}], "schedulingGates": []},
    "status": {
        "phase": "Pending",
        "conditions": [{"type": "PodScheduled", "status": "False", "message": "0/1 nodes are available: 1 no."}],
        "containerStatuses": [
            {"name": "node", "image": "i", "state": {"waiting": {"reason": "ErrImagePull", "message": "no such image"}}}
        ],
    },
}  # fmt: skip
EVENT: dict[str, Any] = {
    "type": "Warning", "reason": "FailedMount", "message": "no such volume", "lastTimestamp": "2026-11-25T00:00:00Z",
    "involvedObject": {"name": "pod-0", "uid": "u-2"},
}  # fmt: skip


class Listed:
    """A cluster that has these events and nothing else."""

    def __init__(self, *events: Any) -> None:
        self._events = events

    def list(self, resource: Resource, namespace: str | None, **_: str) -> tuple[list[Any], str]:
        assert resource is EVENTS
        return list(self._events), "1"


def codes(events: list[Any], pods: list[Any]) -> list[str]:
    found = explain(Listed(*events), JOB, WORKLOAD, pods)  # type: ignore[arg-type]
    return [finding.code.removeprefix("gke.pending.") for finding in found]


@st.composite
def without_some(draw: st.DrawFn, whole: dict[str, Any]) -> dict[str, Any]:
    """The object with some of its optional fields left out or null."""
    thing = copy.deepcopy(whole)
    for key in draw(st.sets(st.sampled_from(sorted(whole)))):
        if draw(st.booleans()):
            thing[key] = None
        else:
            del thing[key]
    return thing


def test_an_event_needs_neither_reason_nor_message() -> None:
    odd = [{"involvedObject": {"uid": "u-2"}}, {"reason": None, "message": None}, {"reason": "FailedMount"}]
    assert "volume" in codes([*odd, EVENT], [POD])


@given(event=without_some(EVENT), status=without_some(POD["status"]))
def test_a_waiting_job_is_explained_as_far_as_it_can_be_whatever_others_wrote(event: Any, status: Any) -> None:
    told = codes([event, EVENT], [{**POD, "status": status}])
    assert "volume" in told


@contextmanager
def answering(status: int, content: bytes, **headers: str) -> Iterator[Cluster]:
    """A cluster whose server, or a proxy before it, has one answer to everything."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(content))}.items():
                self.send_header(name.replace("_", "-"), value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Nothing: pytest shows what went wrong."""

    from kubernetes.client import ApiClient

    server, configuration = HTTPServer(("127.0.0.1", 0), Answer), _configuration()
    configuration.host = f"http://127.0.0.1:{server.server_port}"
    with served(server), ApiClient(configuration) as client:
        yield Cluster(client, where="the cluster")


@pytest.mark.parametrize("content", [b"<html>a page</html>", b"", b"[]", b"null", b"{}", b'{"items": 3', b"\xff"])
def test_what_is_no_list_is_an_unreachable_cluster_and_no_empty_one(content: bytes) -> None:
    with answering(200, content) as cluster, pytest.raises(PlatformUnreachable):
        cluster.list(PODS, "research")


def test_a_server_may_name_the_date_at_which_it_is_to_be_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "_PAUSES", ())
    with (
        answering(503, b"", Retry_After="Wed, 25 Nov 2026 07:28:00 GMT") as cluster,
        pytest.raises(PlatformUnreachable, match="does not answer"),
    ):
        cluster.list(PODS, "research")
