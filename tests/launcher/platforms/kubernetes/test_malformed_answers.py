"""No answer of an API server, or of a proxy before it, and no object that others wrote ends the following of a job."""

import contextlib
import copy
import io
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launcher.errors import PlatformUnreachable
from launcher.platforms.kubernetes import cluster as cluster_module
from launcher.platforms.kubernetes.cluster import PODS, Cluster
from launcher.platforms.kubernetes.reasons import explain
from launcher.platforms.kubernetes.states import JobName

JOB = JobName.parse("research/owt-0123456789-1")
WORKLOAD: dict[str, Any] = {
    "kind": "Job",
    "metadata": {"name": JOB.name, "uid": "u-1"},
    "spec": {"completions": 1},
}
POD: dict[str, Any] = {
    "metadata": {"name": "pod-0", "uid": "u-2"},
    "spec": {"containers": [{"name": "node"}]},
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


def codes(events: list[Any], pods: list[Any]) -> list[str]:
    """Why the job waits, in a cluster that has these events and nothing else."""
    listed: Any = SimpleNamespace(list=lambda *_, **__: (events, "1"))
    return [finding.code.removeprefix("kubernetes.pending.") for finding in explain(listed, JOB, WORKLOAD, pods)]


@st.composite
def without_some(draw: st.DrawFn, complete: dict[str, Any]) -> dict[str, Any]:
    """The object with some of its optional fields left out or null."""
    thing = copy.deepcopy(complete)
    for key in draw(st.sets(st.sampled_from(sorted(complete)))):
        if draw(st.booleans()):
            thing[key] = None
        else:
            del thing[key]
    return thing


@given(event=without_some(EVENT), status=without_some(POD["status"]))
def test_waiting_job_is_explained_despite_malformed_objects(event: Any, status: Any) -> None:
    assert "volume" in codes([event, EVENT], [{**POD, "status": status}])


def answering(status: int, content: bytes, **headers: str) -> Cluster:
    """A cluster whose server, or a proxy before it, has one answer to everything."""
    import urllib3

    def call_api(*_: object, **__: object) -> SimpleNamespace:
        body = io.BytesIO(content)
        answer = urllib3.HTTPResponse(body, status=status, headers=headers, preload_content=False)
        return SimpleNamespace(response=answer)

    client: Any = SimpleNamespace(
        call_api=call_api,
        configuration=SimpleNamespace(host="http://cluster"),
        default_headers={},
        update_params_for_auth=lambda *_: None,
    )
    return Cluster(client, where="the cluster")


@pytest.mark.parametrize("content", [b"<html>a page</html>", b"", b"[]", b"{}", b'{"items": 3', b"[" * 100_000])
def test_answer_without_a_list_is_an_unreachable_cluster(content: bytes) -> None:
    with pytest.raises(PlatformUnreachable):
        answering(200, content).list(PODS, "research")


KEYS = st.sampled_from(["items", "metadata", "gitVersion", "resources", "name", "status", "allowed", "rows", "cells"])
ANSWERS = st.recursive(
    st.none() | st.integers() | st.text(), lambda values: st.lists(values) | st.dictionaries(KEYS, values)
)


@given(ANSWERS)
def test_malformed_answer_raises_a_launcher_error(answer: Any) -> None:
    cluster = answering(200, json.dumps(answer).encode())
    for ask, arguments in (
        (cluster.version, ()), (cluster.list, (PODS, "research")), (cluster.get, (PODS, "research", "pod-0")),
        (cluster.serves, (PODS,)), (cluster.allows, ("list", PODS, "here")), (cluster.has_secret, ("research", "hub")),
    ):  # fmt: skip
        with contextlib.suppress(PlatformUnreachable):
            ask(*arguments)


def test_retry_after_may_be_a_date(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_module, "_PAUSES", ())
    busy = answering(503, b"", **{"Retry-After": "Wed, 25 Nov 2026 07:28:00 GMT"})
    with pytest.raises(PlatformUnreachable, match="does not answer"):
        busy.list(PODS, "research")
