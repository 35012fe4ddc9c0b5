"""The cluster's API answers as a real one does, to the official client."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes.client as k8s
import pytest
import urllib3
from cluster_objects import GROUP, VERSION, client, indexed_job, jobset, submit
from kubernetes import config, watch
from kubernetes.client.exceptions import ApiException
from kubernetes_cluster import Cluster, running_cluster


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    with running_cluster(simulate=True, nodes=3) as made:
        yield made


@pytest.fixture
def core(cluster: Cluster) -> k8s.CoreV1Api:
    return k8s.CoreV1Api(client(cluster))


def refusal(error: pytest.ExceptionInfo[ApiException]) -> dict[str, Any]:
    body = json.loads(error.value.body)
    assert body["kind"] == "Status"
    assert body["code"] == error.value.status
    return body


def config_map(name: str, **labels: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": labels}, "data": {"a": "1"}}


def test_a_kubeconfig_leads_to_the_cluster(cluster: Cluster) -> None:
    api = config.new_client_from_config(str(cluster.kubeconfig), context="test")
    assert len(k8s.CoreV1Api(api).list_node().items) == 3
    assert k8s.VersionApi(api).get_code().git_version == "v1.36.2-gke.1034000"


def test_objects_are_selected_by_labels_and_fields(core: k8s.CoreV1Api) -> None:
    for name, labels in (("one", {"run": "a"}), ("two", {"run": "b"}), ("three", {})):
        core.create_namespaced_config_map("default", config_map(name, **labels))

    def names(**selectors: str) -> set[str]:
        return {one.metadata.name for one in core.list_namespaced_config_map("default", **selectors).items}

    assert names(label_selector="run=a") == {"one"}
    assert names(label_selector="run in (a, b)") == {"one", "two"}
    assert names(label_selector="run") == {"one", "two"}
    assert names(label_selector="!run") == {"three"}
    assert names(label_selector="run!=a") == {"two", "three"}
    assert names(field_selector="metadata.name=two") == {"two"}
    with pytest.raises(ApiException) as error:
        names(field_selector="data.a=1")
    assert "field label not supported" in refusal(error)["message"]


def test_long_lists_come_in_pages_until_the_token_is_too_old(cluster: Cluster, core: k8s.CoreV1Api) -> None:
    for number in range(5):
        core.create_namespaced_config_map("default", config_map(f"map-{number}"))
    first = core.list_namespaced_config_map("default", limit=2)
    second = core.list_namespaced_config_map("default", limit=2, _continue=first.metadata._continue)
    assert [one.metadata.name for one in (*first.items, *second.items)] == [f"map-{i}" for i in range(4)]
    assert second.metadata.remaining_item_count == 1
    cluster.expire_watches()
    with pytest.raises(ApiException) as error:
        core.list_namespaced_config_map("default", limit=2, _continue=second.metadata._continue)
    assert refusal(error)["reason"] == "Expired"


def test_items_of_lists_do_not_say_their_kind_unless_they_are_custom(cluster: Cluster) -> None:
    submit(cluster, jobset())
    api = client(cluster)
    paths = {"/api/v1/nodes": False, f"/apis/{GROUP}/{VERSION}/jobsets": True}
    for path, named in paths.items():
        answer = api.rest_client.pool_manager.request(
            "GET", cluster.host + path, headers={"Authorization": f"Bearer {cluster.token}"}
        )
        listed = json.loads(answer.data)
        assert listed["kind"].endswith("List")
        assert ("kind" in listed["items"][0]) is named


def test_a_watch_goes_on_where_the_list_ended(cluster: Cluster, core: k8s.CoreV1Api) -> None:
    core.create_namespaced_config_map("default", config_map("before"))
    since = core.list_namespaced_config_map("default").metadata.resource_version
    core.create_namespaced_config_map("default", config_map("after", run="a"))
    core.patch_namespaced_config_map("after", "default", {"metadata": {"labels": {"run": "b"}}})
    core.delete_namespaced_config_map("after", "default")

    def seen(**selectors: str) -> list[tuple[str, str]]:
        events = watch.Watch().stream(
            core.list_namespaced_config_map, "default", resource_version=since, timeout_seconds=1, **selectors
        )
        return [(one["type"], one["object"].metadata.name) for one in events]

    assert seen() == [("ADDED", "after"), ("MODIFIED", "after"), ("DELETED", "after")]
    # What ceases to match a selector is gone to whoever watches by it.
    assert seen(label_selector="run=a") == [("ADDED", "after"), ("DELETED", "after")]


def test_a_watch_from_too_long_ago_gets_410(cluster: Cluster, core: k8s.CoreV1Api) -> None:
    since = core.list_namespaced_config_map("default").metadata.resource_version
    cluster.expire_watches()
    with pytest.raises(ApiException) as error:
        list(
            watch.Watch().stream(core.list_namespaced_config_map, "default", resource_version=since, timeout_seconds=1)
        )
    assert error.value.status == 410


def test_an_open_watch_that_expires_ends_with_410(cluster: Cluster, core: k8s.CoreV1Api) -> None:
    threading.Timer(0.3, cluster.expire_watches).start()
    since = core.list_namespaced_config_map("default").metadata.resource_version
    with pytest.raises(ApiException) as error:
        list(
            watch.Watch().stream(core.list_namespaced_config_map, "default", resource_version=since, timeout_seconds=5)
        )
    assert error.value.status == 410


def test_bookmarks_carry_the_version_while_nothing_happens(cluster: Cluster, core: k8s.CoreV1Api) -> None:
    cluster.api.bookmark_every = 0.1
    since = core.list_namespaced_config_map("default").metadata.resource_version
    core.create_namespaced_secret("default", {"metadata": {"name": "elsewhere"}})
    answer = core.list_namespaced_config_map(
        "default", watch=True, resource_version=since, allow_watch_bookmarks=True, timeout_seconds=1,
        _preload_content=False,
    )  # fmt: skip
    events = [json.loads(line) for line in answer.read().splitlines()]
    assert {one["type"] for one in events} == {"BOOKMARK"}
    assert all(int(one["object"]["metadata"]["resourceVersion"]) > int(since) for one in events)


def test_writing_over_somebody_elses_change_is_a_conflict(core: k8s.CoreV1Api) -> None:
    core.create_namespaced_config_map("default", config_map("shared"))
    mine = core.read_namespaced_config_map("shared", "default")
    core.patch_namespaced_config_map("shared", "default", {"data": {"a": "theirs"}})
    mine.data["a"] = "mine"
    with pytest.raises(ApiException) as error:
        core.replace_namespaced_config_map("shared", "default", mine)
    assert refusal(error)["reason"] == "Conflict"


def test_the_same_name_twice_is_refused(cluster: Cluster) -> None:
    submit(cluster, jobset("twice"))
    with pytest.raises(ApiException) as error:
        submit(cluster, jobset("twice"))
    assert refusal(error)["reason"] == "AlreadyExists"


def test_a_deleted_job_leaves_its_pods_unless_told_otherwise(cluster: Cluster) -> None:
    batch = k8s.BatchV1Api(client(cluster))
    for name in ("orphans", "takes-all"):
        submit(cluster, indexed_job(name))
        cluster.wait(lambda name=name: len(cluster.pods(name)) == 2)
    batch.delete_namespaced_job("orphans", "default")
    batch.delete_namespaced_job("takes-all", "default", propagation_policy="Background")
    cluster.wait(lambda: not cluster.pods("takes-all", live=False))
    assert len(cluster.pods("orphans")) == 2
    assert not cluster.objects("jobs")


def test_deleting_in_the_foreground_waits_for_the_pods(cluster: Cluster) -> None:
    submit(cluster, jobset("whole"))
    cluster.wait(lambda: len(cluster.pods("whole")) == 2)
    custom = k8s.CustomObjectsApi(client(cluster))
    custom.delete_namespaced_custom_object(
        GROUP, VERSION, "default", "jobsets", "whole", propagation_policy="Foreground"
    )
    cluster.wait(lambda: not cluster.objects("jobsets"))
    assert not cluster.pods(live=False)
    assert not cluster.objects("jobs")
    assert not cluster.objects("services")


def test_no_token_or_an_old_one_is_401(cluster: Cluster) -> None:
    core = k8s.CoreV1Api(client(cluster))
    cluster.expire_token()
    with pytest.raises(ApiException) as error:
        core.list_node()
    assert error.value.status == 401
    assert len(k8s.CoreV1Api(client(cluster)).list_node().items) == 3


def test_what_no_rule_allows_is_forbidden_and_can_be_asked_before(cluster: Cluster, core: k8s.CoreV1Api) -> None:
    cluster.allow([{"apiGroups": [""], "resources": ["pods", "pods/log"], "verbs": ["get", "list"]}])
    core.list_namespaced_pod("default")
    with pytest.raises(ApiException) as error:
        core.list_node()
    assert refusal(error)["message"] == (
        'nodes is forbidden: User "tester" cannot list resource "nodes" in API group "" at the cluster scope'
    )
    with pytest.raises(ApiException) as error:
        k8s.BatchV1Api(client(cluster)).delete_namespaced_job("demo", "default")
    assert refusal(error) == {
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "reason": "Forbidden", "code": 403,
        "message": 'jobs.batch "demo" is forbidden: User "tester" cannot delete resource "jobs" in API group "batch" '
        'in the namespace "default"',
        "details": {"name": "demo", "group": "batch", "kind": "jobs"},
    }  # fmt: skip
    reviews = k8s.AuthorizationV1Api(client(cluster))

    def may(verb: str, resource: str, **more: str) -> bool:
        attributes = {"verb": verb, "resource": resource, "namespace": "default", **more}
        made = reviews.create_self_subject_access_review({"spec": {"resourceAttributes": attributes}})
        return bool(made.status.allowed)

    assert may("list", "pods")
    assert may("get", "pods", subresource="log")
    assert not may("watch", "pods")
    assert not may("list", "jobsets", group=GROUP)


def test_the_api_can_be_made_to_fail_for_a_while(cluster: Cluster, core: k8s.CoreV1Api) -> None:
    cluster.answer(429, times=2, verb="list", resource="pods", retry_after=1)
    core.list_node()
    for _ in range(2):
        with pytest.raises(ApiException) as error:
            core.list_namespaced_pod("default")
        assert refusal(error)["reason"] == "TooManyRequests"
        assert error.value.headers["Retry-After"] == "1"
    core.list_namespaced_pod("default")
    end = cluster.answer(500)
    with pytest.raises(ApiException):
        core.list_node()
    end()
    core.list_node()


def test_connections_break_without_an_answer(cluster: Cluster, core: k8s.CoreV1Api) -> None:
    cluster.answer(0, times=1)
    with pytest.raises(urllib3.exceptions.HTTPError):
        core.list_node()
    core.list_node()
    open_watch = core.list_namespaced_pod("default", watch=True, _preload_content=False)
    cluster.break_streams()
    with pytest.raises(urllib3.exceptions.HTTPError):
        open_watch.read()


def test_without_jobset_its_kind_is_not_known() -> None:
    with running_cluster(simulate=True, jobset=None) as cluster:
        groups = {one.name for one in k8s.ApisApi(client(cluster)).get_api_versions().groups}
        with pytest.raises(ApiException) as error:
            submit(cluster, jobset())
    assert error.value.status == 404
    assert "batch" in groups
    assert GROUP not in groups


def test_discovery_names_what_is_served(cluster: Cluster) -> None:
    api = client(cluster)
    assert GROUP in {one.name for one in k8s.ApisApi(api).get_api_versions().groups}
    resources = k8s.CustomObjectsApi(api).get_api_resources(GROUP, VERSION).resources
    assert {(one.name, one.kind, one.namespaced) for one in resources if "/" not in one.name} == {
        ("jobsets", "JobSet", True)
    }


def test_calls_and_bytes_are_counted(cluster: Cluster, core: k8s.CoreV1Api) -> None:
    cluster.traffic.clear()
    for _ in range(3):
        core.list_node()
    assert cluster.traffic.calls == {("list", "nodes"): 3}
    assert cluster.traffic.sent["list", "nodes"] > 3 * 500


def test_reactions_of_a_tests_own_are_kmocks(cluster: Cluster) -> None:
    cluster.call(lambda: cluster.api["get /healthz"] << b"ok")
    answer = client(cluster).rest_client.pool_manager.request(
        "GET", f"{cluster.host}/healthz", headers={"Authorization": f"Bearer {cluster.token}"}
    )
    assert answer.data == b"ok"


def test_ending_the_cluster_does_not_wait_for_open_watches() -> None:
    with running_cluster(simulate=True) as cluster:
        core = k8s.CoreV1Api(client(cluster))
        open_watch = core.list_namespaced_pod("default", watch=True, _preload_content=False)
        began = time.monotonic()
    assert time.monotonic() - began < 3
    open_watch.close()


def test_the_api_is_to_be_had_over_tls(cluster: Cluster, tmp_path: Path) -> None:
    address, certificate = cluster.tls()
    (tmp_path / "ca.pem").write_text(certificate)
    configuration = k8s.Configuration(host=address)
    configuration.api_key = {"authorization": f"Bearer {cluster.token}"}
    configuration.ssl_ca_cert = str(tmp_path / "ca.pem")
    assert len(k8s.CoreV1Api(k8s.ApiClient(configuration)).list_node().items) == 3


def test_a_kind_that_the_cluster_lacks_is_a_plain_404_to_those_who_may_ask(cluster: Cluster) -> None:
    """The API server looks at permissions before it looks at what there is."""
    custom = k8s.CustomObjectsApi(client(cluster))

    def listed() -> ApiException:
        with pytest.raises(ApiException) as error:
            custom.list_namespaced_custom_object("example.com", "v1", "default", "widgets")
        return error.value

    assert (listed().status, listed().body) == (404, "404 page not found\n")
    cluster.allow([{"apiGroups": ["batch"], "resources": ["jobs"], "verbs": ["list"]}])
    assert listed().status == 403
    assert json.loads(listed().body)["message"] == (
        'widgets.example.com is forbidden: User "tester" cannot list resource "widgets" in API group "example.com" '
        'in the namespace "default"'
    )
