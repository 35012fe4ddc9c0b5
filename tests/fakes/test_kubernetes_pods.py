"""Pods run: their actual commands, with addresses, names, files and ends as on a node."""

from __future__ import annotations

import http.server
import json
import re
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import kubernetes.client as k8s
import psutil
import pytest
from cluster_objects import changed, client, indexed_job, jobset, submit
from kubernetes.client.exceptions import ApiException
from kubernetes_cluster import Cluster, running_cluster
from kubernetes_cluster.isolation import Plain, namespaces_work

POD = "spec.template.spec"
NODE = f"{POD}.containers.0"
SLEEP = "import time; print('up', flush=True); time.sleep(60)"
root = pytest.mark.skipif(not namespaces_work(), reason="pods get namespaces where root makes them")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with running_cluster(shared=[tmp_path], nodes=2) as made:
        yield made


def single(name: str = "demo", program: str = "pass", **changes: Any) -> dict[str, Any]:
    return indexed_job(name, program, nodes=1, **changes)


def log(cluster: Cluster, pod: str, container: str = "node", **query: Any) -> str:
    core = k8s.CoreV1Api(client(cluster))
    return str(core.read_namespaced_pod_log(pod, "default", container=container, **query))


def ended(cluster: Cluster, text: str = "demo") -> dict[str, Any]:
    """Wait for the pod to end, and return it."""

    def found() -> dict[str, Any] | None:
        done = ("Succeeded", "Failed")
        return next((one for one in cluster.pods(text, live=False) if one["status"]["phase"] in done), None)

    pod = cluster.wait(found)
    assert pod is not None
    return pod


def name_of(pod: dict[str, Any]) -> str:
    return str(pod["metadata"]["name"])


def up(cluster: Cluster, text: str = "demo", count: int = 1) -> list[str]:
    """Wait until so many pods have printed something; their names."""

    def names() -> list[str] | None:
        found = [name_of(pod) for pod in cluster.pods(text) if pod["status"]["phase"] == "Running"]
        return found if len(found) == count and all(log(cluster, name) for name in found) else None

    names_up = cluster.wait(names)
    assert names_up is not None
    return names_up


def terminated(pod: dict[str, Any], container: str = "node") -> dict[str, Any]:
    rows = [*pod["status"].get("containerStatuses", []), *pod["status"].get("initContainerStatuses", [])]
    state = next(one["state"] for one in rows if one["name"] == container)
    return dict(state["terminated"])


def test_a_container_has_the_environment_of_its_spec_and_no_other(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_TEST", "leaks")
    cluster.apply("secrets", {"metadata": {"name": "keys"}, "stringData": {"token": "t0p"}})
    env = [
        {"name": "POD", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}},
        {"name": "ADDRESS", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": "TOKEN", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "token"}}},
        {"name": "RUN", "value": "run-$(POD)-$(LATER)"},
        {"name": "LATER", "value": "x"},
    ]
    job = changed(single(program="import os, json; print(json.dumps(dict(os.environ)))"), f"{NODE}.env", env)
    submit(cluster, changed(job, f"{NODE}.args", ["$(POD)"]))
    pod = ended(cluster)
    started = cluster.started[0]
    assert started.real
    assert started.command[-1] == name_of(pod)
    seen = json.loads(log(cluster, name_of(pod)))
    assert seen["POD"] == name_of(pod)
    assert seen["RUN"] == f"run-{name_of(pod)}-$(LATER)"
    assert seen["NODE"] == "node-0"
    assert seen["ADDRESS"] == pod["status"]["podIP"]
    assert seen["TOKEN"] == "t0p"
    assert seen["JOB_COMPLETION_INDEX"] == "0"
    assert "OF_THE_TEST" not in seen


SERVER_AND_CLIENT = """
import os, socket, time
address = ("demo-nodes-0-0.demo", 29500)
if os.environ["JOB_COMPLETION_INDEX"] == "0":
    listener = socket.create_server(("", 29500))
    peer, (host, _) = listener.accept()
    print("called by", host, peer.recv(100).decode())
else:
    while True:
        try:
            with socket.create_connection(address, timeout=1) as connection:
                connection.sendall(socket.gethostname().encode())
            break
        except OSError as error:
            time.sleep(0.1)
"""


@root
def test_pods_have_addresses_and_find_each_other_by_name(cluster: Cluster) -> None:
    submit(cluster, jobset(program=SERVER_AND_CLIENT))
    cluster.wait(lambda: cluster.objects("jobsets")[0]["status"].get("terminalState") == "Completed")
    first, second = cluster.pods("demo", live=False)
    assert first["status"]["podIP"] != second["status"]["podIP"]
    expected = f"called by {second['status']['podIP']} demo-nodes-0-1\n"
    assert log(cluster, name_of(first)) == expected


@root
def test_a_name_without_its_service_does_not_resolve(cluster: Cluster) -> None:
    program = "import socket\ntry: print(socket.gethostbyname('demo-0.demo'))\nexcept OSError as e: print('no', e)"
    submit(cluster, changed(single(program=program), f"{POD}.subdomain", "demo"))
    assert log(cluster, name_of(ended(cluster))).startswith("no ")


@root
def test_names_need_the_right_policy_on_the_nodes_network(cluster: Cluster) -> None:
    program = "import socket\ntry: print(socket.gethostbyname('%s-0.%s'))\nexcept OSError as e: print('no')"
    answers = {}
    for name, policy in (("hidden", "ClusterFirst"), ("seen", "ClusterFirstWithHostNet")):
        cluster.apply(
            "services",
            {
                "metadata": {"name": name},
                "spec": {"clusterIP": "None", "selector": {"job-name": name}, "publishNotReadyAddresses": True},
            },
        )
        job = changed(single(name, program=program % (name, name)), f"{POD}.hostNetwork", True)
        job = changed(job, f"{POD}.subdomain", name)
        submit(cluster, changed(job, f"{POD}.dnsPolicy", policy))
        answers[name] = log(cluster, name_of(ended(cluster, name))).strip()
    assert answers["hidden"] == "no"
    assert re.fullmatch(r"10\.\d+\.\d+\.\d+", answers["seen"])


@root
def test_extra_networks_are_interfaces_of_the_pod(cluster: Cluster) -> None:
    program = "import socket; print(*sorted(name for _, name in socket.if_nameindex()))"
    rows = '[{"interfaceName":"eth0","network":"default"},{"interfaceName":"eth1","network":"vpc1"}]'
    meta = {"annotations": {"networking.gke.io/interfaces": rows}}
    submit(cluster, changed(single(program=program), "spec.template.metadata", meta))
    assert log(cluster, name_of(ended(cluster))) == "eth0 eth1 lo\n"


@root
def test_files_memory_and_processes_are_the_pods_own(cluster: Cluster, tmp_path: Path) -> None:
    program = f"""
import os, pathlib, time
for folder in ("/run/litgpt", "/dev/shm", "/tmp", "{tmp_path}"):
    with open(folder + "/mark-" + os.environ["JOB_COMPLETION_INDEX"], "w") as file:
        file.write("x")
while len(list(pathlib.Path("{tmp_path}").glob("mark-*"))) < 2:
    time.sleep(0.05)
size = os.statvfs("/dev/shm")
print(*(len([x for x in os.listdir(f) if "mark-" in x]) for f in ("/run/litgpt", "/dev/shm", "/tmp")), os.getpid(),
      size.f_frsize * size.f_blocks)
"""
    job = changed(indexed_job(program=program), f"{POD}.volumes", [
        {"name": "scratch", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "32Mi"}},
    ])  # fmt: skip
    mounts = [{"name": "scratch", "mountPath": "/run/litgpt"}, {"name": "shm", "mountPath": "/dev/shm"}]
    submit(cluster, changed(job, f"{NODE}.volumeMounts", mounts))
    cluster.wait(lambda: len(cluster.pods("demo", live=False)) == 2 and not cluster.pods("demo"))
    for pod in cluster.pods("demo", live=False):
        assert log(cluster, name_of(pod)) == f"1 1 1 1 {32 * 2**20}\n"
    assert not Path("/run/litgpt").exists()
    assert not list(Path("/tmp").glob("mark-*"))


def test_pods_reach_servers_of_the_test(cluster: Cluster) -> None:
    class Hello(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"from the test")

    with http.server.HTTPServer(("127.0.0.1", 0), Hello) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        cluster.options.image_environment["BUCKETS"] = f"http://{cluster.check_access(server.server_port)}"
        program = "import os, urllib.request; print(urllib.request.urlopen(os.environ['BUCKETS']).read().decode())"
        submit(cluster, single(program=program))
        assert log(cluster, name_of(ended(cluster))) == "from the test\n"
        server.shutdown()


@root
def test_init_containers_and_sidecars_come_first_and_share_volumes(cluster: Cluster) -> None:
    image = "registry.example/train@sha256:1"
    job = changed(single(program="print(open('/data/x').read())"), f"{POD}.volumes", [{"name": "data", "emptyDir": {}}])
    mount = [{"name": "data", "mountPath": "/data"}]
    job = changed(job, f"{NODE}.volumeMounts", mount)
    job = changed(job, f"{POD}.initContainers", [
        {"name": "installer", "image": "us-docker.pkg.dev/plugin:v1"},
        {"name": "daemon", "image": "us-docker.pkg.dev/rxdm:v1", "restartPolicy": "Always"},
        {"name": "stage", "image": image, "command": ["sh", "-c", "echo -n staged > /data/x"], "volumeMounts": mount},
    ])  # fmt: skip
    submit(cluster, job)
    pod = ended(cluster)
    assert [(one.container, one.real) for one in cluster.started] == [
        ("installer", False), ("daemon", False), ("stage", True), ("node", True),
    ]  # fmt: skip
    assert log(cluster, name_of(pod)) == "staged\n"
    assert pod["status"]["phase"] == "Succeeded"
    assert terminated(pod, "daemon")["exitCode"] == 0


def test_an_init_container_that_fails_fails_the_pod(cluster: Cluster) -> None:
    cluster.options.outcomes["installer"] = 3
    submit(cluster, changed(single(), f"{POD}.initContainers", [{"name": "installer", "image": "cloud:v1"}]))
    pod = ended(cluster)
    assert pod["status"]["phase"] == "Failed"
    assert terminated(pod, "installer")["exitCode"] == 3
    assert [one.container for one in cluster.started] == ["installer"]


def test_exit_codes_and_last_words_are_reported(cluster: Cluster) -> None:
    program = "import sys; open('/dev/termination-log', 'w').write('no such dataset'); sys.exit(41)"
    submit(cluster, single(program=program if namespaces_work() else "import sys; sys.exit(41)"))
    pod = ended(cluster)
    end = terminated(pod)
    assert (pod["status"]["phase"], end["exitCode"], end["reason"]) == ("Failed", 41, "Error")
    if namespaces_work():
        assert end["message"] == "no such dataset"


def test_a_killed_container_has_137_and_one_out_of_memory_says_so(cluster: Cluster) -> None:
    for name, out_of_memory in (("killed", False), ("oom", True)):
        submit(cluster, single(name, SLEEP))
        cluster.kill(up(cluster, name)[0], out_of_memory=out_of_memory)
        end = terminated(ended(cluster, name))
        assert (end["exitCode"], end["reason"]) == (137, "OOMKilled" if out_of_memory else "Error")


POLITE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saving", flush=True), sys.exit(45)))
print("up", flush=True)
time.sleep(60)
"""
STUBBORN = "import signal, time; signal.signal(15, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"


def test_a_deleted_pod_gets_its_grace(cluster: Cluster) -> None:
    events = cluster.call(lambda: cluster.store.history)
    submit(cluster, single("polite", POLITE))
    cluster.delete_pod(up(cluster, "polite")[0])
    submit(cluster, changed(single("stubborn", STUBBORN), f"{POD}.terminationGracePeriodSeconds", 1))
    stubborn = up(cluster, "stubborn")[0]
    began = time.monotonic()
    cluster.delete_pod(stubborn)
    cluster.wait(lambda: not cluster.pods(live=False))
    assert 0.9 < time.monotonic() - began < 5
    ends = {}
    for change in events:
        if change.kind == "pods" and change.after and change.after["status"]["phase"] == "Failed":
            ends[change.after["metadata"]["labels"]["job-name"]] = terminated(change.after)["exitCode"]
    assert ends == {"polite": 45, "stubborn": 137}


def test_nothing_is_left_of_a_killed_container(cluster: Cluster, tmp_path: Path) -> None:
    child = f"import time; open('{tmp_path}/mark', 'w').close(); time.sleep(97)"
    program = f"""
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", {child!r}])
print("up", flush=True)
time.sleep(97)
"""
    submit(cluster, single(program=program))
    pod = up(cluster)[0]
    cluster.wait((tmp_path / "mark").exists)
    assert strays("time.sleep(97)")
    cluster.kill(pod)
    ended(cluster)
    assert not strays("time.sleep(97)")


def strays(text: str) -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        line = " ".join(process.info["cmdline"] or ())
        if text in line and "/env -i" not in line and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


def test_nothing_is_left_when_the_cluster_ends(tmp_path: Path) -> None:
    before = set(psutil.net_if_addrs())
    with running_cluster(shared=[tmp_path]) as cluster:
        submit(cluster, indexed_job(program=STUBBORN.replace("60", "98")))
        up(cluster, count=2)
        folder = cluster.folder
        began = time.monotonic()
    assert time.monotonic() - began < 5
    assert not strays("time.sleep(98)")
    assert not folder.exists()
    assert {name for name in psutil.net_if_addrs() if name.startswith("fk")} <= before


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_preempted_node_restarts_the_jobset(cluster: Cluster) -> None:
    submit(cluster, jobset(program=POLITE))
    before = up(cluster, count=2)
    cluster.preempt(before[1])
    cluster.wait(lambda: cluster.objects("jobsets")[0]["status"]["restarts"] == 1)
    cluster.wait(lambda: not set(up(cluster, count=2)) & set(before))
    assert cluster.objects("jobsets")[0]["status"]["restartsCountTowardsMax"] == 0


def test_a_lost_node_takes_its_pod_along_and_the_job_goes_elsewhere(cluster: Cluster) -> None:
    cluster.add_nodes(1)
    submit(cluster, jobset(program=POLITE))
    before = up(cluster, count=2)
    node = next(pod["spec"]["nodeName"] for pod in cluster.pods("demo") if name_of(pod) == before[0])
    cluster.lose(node)
    with pytest.raises(ApiException) as error:
        log(cluster, before[0])
    assert "no route to host" in error.value.body
    cluster.wait(lambda: cluster.objects("jobsets")[0]["status"]["restarts"] == 1)
    held = [one for one in cluster.objects("events") if "DisruptionTarget" in one["message"]]
    assert held
    assert not [one for one in cluster.objects("nodes") if one["metadata"]["name"] == node]
    cluster.wait(lambda: len(cluster.pods("demo")) == 2 and not set(up(cluster, count=2)) & set(before))
    assert node not in {pod["spec"]["nodeName"] for pod in cluster.pods("demo")}


def test_a_node_that_shuts_down_lets_its_pods_save(cluster: Cluster) -> None:
    submit(cluster, single(program=POLITE))
    pod = up(cluster)[0]
    cluster.shut_down(cluster.pods("demo")[0]["spec"]["nodeName"])
    gone = ended(cluster)
    assert gone["status"]["reason"] == "Terminated"
    assert terminated(gone)["exitCode"] == 45
    assert "saving" in log(cluster, pod)
    held = {one["type"]: one["reason"] for one in gone["status"]["conditions"]}
    assert held["DisruptionTarget"] == "TerminationByKubelet"


def waiting(cluster: Cluster, reason: str) -> dict[str, Any]:
    def found() -> dict[str, Any] | None:
        states = [one["state"] for pod in cluster.pods("demo") for one in pod["status"].get("containerStatuses", [])]
        return next((one["waiting"] for one in states if one.get("waiting", {}).get("reason") == reason), None)

    held = cluster.wait(found)
    assert held is not None
    return held


def test_an_image_that_cannot_be_pulled_is_waited_for(cluster: Cluster) -> None:
    job = single()
    image = job["spec"]["template"]["spec"]["containers"][0]["image"]
    cluster.break_image(image)
    submit(cluster, job)
    assert f'failed to resolve reference "{image}"' in waiting(cluster, "ErrImagePull")["message"]
    assert f'Back-off pulling image "{image}"' in waiting(cluster, "ImagePullBackOff")["message"]
    with pytest.raises(ApiException) as error:
        log(cluster, name_of(cluster.pods("demo")[0]))
    assert error.value.status == 400
    assert "is waiting to start: " in error.value.body
    cluster.mend_image(image)
    assert ended(cluster)["status"]["phase"] == "Succeeded"


def test_what_the_pod_refers_to_has_to_be_there(cluster: Cluster) -> None:
    env = [{"name": "T", "valueFrom": {"secretKeyRef": {"name": "keys", "key": "token"}}}]
    submit(cluster, changed(single(), f"{NODE}.env", env))
    assert waiting(cluster, "CreateContainerConfigError")["message"] == 'secret "keys" not found'
    cluster.apply("secrets", {"metadata": {"name": "keys"}, "stringData": {"token": "x"}})
    assert ended(cluster)["status"]["phase"] == "Succeeded"
    fuse = {"driver": "gcsfuse.csi.storage.gke.io", "volumeAttributes": {"bucketName": "my-data"}}
    submit(cluster, changed(single("fused"), f"{POD}.volumes", [{"name": "data", "csi": fuse}]))
    cluster.wait(lambda: [one for one in cluster.objects("events") if one["reason"] == "FailedMount"])
    cluster.options.buckets["my-data"] = Path("/tmp")
    assert ended(cluster, "fused")["status"]["phase"] == "Succeeded"


# --- logs -------------------------------------------------------------------------------------------------------------

COUNTING = "import time\nfor i in range(6): print('line', i, flush=True); time.sleep(0.25)"


def test_logs_are_followed_to_the_end_and_read_again_from_a_time(cluster: Cluster) -> None:
    submit(cluster, single(program=COUNTING))
    pod = name_of(cluster.wait(lambda: [one for one in cluster.pods("demo") if one["status"]["phase"] == "Running"])[0])
    core = k8s.CoreV1Api(client(cluster))
    stream = core.read_namespaced_pod_log(pod, "default", follow=True, timestamps=True, _preload_content=False)
    lines = stream.read().decode().splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [f"line {i}" for i in range(6)]
    stamps = [line.split(" ", 1)[0] for line in lines]
    assert stamps == sorted(set(stamps))
    ended(cluster)
    assert log(cluster, pod, limit_bytes=9) == "line 0\nli"
    assert log(cluster, pod, tail_lines=2) == "line 4\nline 5\n"
    # In whole seconds: what came earlier within that second comes again.
    answer = client(cluster).rest_client.pool_manager.request(
        "GET",
        f"{cluster.host}/api/v1/namespaces/default/pods/{pod}/log?sinceTime={stamps[5]}",
        headers={"Authorization": f"Bearer {cluster.token}"},
    )
    second = stamps[5][:19]
    assert answer.data.decode().splitlines() == [f"line {i}" for i in range(6) if stamps[i][:19] >= second]
    future = (datetime.now(UTC) + timedelta(hours=1)).strftime("%Y-%m-%dT%H:%M:%SZ")
    answer = client(cluster).rest_client.pool_manager.request(
        "GET",
        f"{cluster.host}/api/v1/namespaces/default/pods/{pod}/log?sinceTime={future}",
        headers={"Authorization": f"Bearer {cluster.token}"},
    )
    assert answer.data == b""


def test_a_log_connection_breaks_and_the_next_one_does_not(cluster: Cluster) -> None:
    submit(cluster, single(program="print('a' * 50); print('b' * 50)"))
    pod = name_of(ended(cluster))
    cluster.cut_logs(60)
    with pytest.raises(Exception, match=r"IncompleteRead|Connection|broken"):
        log(cluster, pod)
    assert log(cluster, pod) == f"{'a' * 50}\n{'b' * 50}\n"


def test_with_several_containers_one_has_to_be_named(cluster: Cluster) -> None:
    sidecar = {"name": "daemon", "image": "cloud:v1", "restartPolicy": "Always"}
    submit(cluster, changed(single(program=SLEEP), f"{POD}.initContainers", [sidecar]))
    pod = up(cluster)[0]
    core = k8s.CoreV1Api(client(cluster))
    with pytest.raises(ApiException) as error:
        core.read_namespaced_pod_log(pod, "default")
    assert (
        f"a container name must be specified for pod {pod}, "
        "choose one of: [node] or one of the init containers: [daemon]"
    ) in error.value.body
    with pytest.raises(ApiException) as error:
        log(cluster, pod, container="main")
    assert f"container main is not valid for pod {pod}" in error.value.body
    assert log(cluster, pod, container="daemon") == ""


def test_a_pod_without_a_node_has_no_log(cluster: Cluster) -> None:
    submit(cluster, changed(single(), f"{POD}.nodeSelector", {"pool": "none"}))
    pod = name_of(cluster.wait(lambda: cluster.pods("demo"))[0])
    with pytest.raises(ApiException) as error:
        log(cluster, pod)
    assert f"pod {pod} does not have a host assigned" in error.value.body


# --- without root -----------------------------------------------------------------------------------------------------


def test_without_namespaces_names_and_paths_are_written_out(tmp_path: Path) -> None:
    program = "import sys, os; print(sys.argv[1:]); open(sys.argv[2] + '/x', 'w').close()"
    with running_cluster(shared=[tmp_path], isolation=Plain()) as cluster:
        job = changed(jobset(program=program), "spec.replicatedJobs.0.template.spec.template.spec", {
            "restartPolicy": "Never", "volumes": [{"name": "scratch", "emptyDir": {}}],
            "containers": [{
                "name": "node", "image": "x", "volumeMounts": [{"name": "scratch", "mountPath": "/run/litgpt"}],
                "command": ["python", "-c", program, "demo-nodes-0-0.demo:29500", "/run/litgpt"],
            }],
        })  # fmt: skip
        submit(cluster, job)
        cluster.wait(lambda: cluster.objects("jobsets")[0]["status"].get("terminalState"))
        assert cluster.objects("jobsets")[0]["status"]["terminalState"] == "Completed"
        first = cluster.pods("demo", live=False)[0]
        line = log(cluster, name_of(first))
        assert f"{first['status']['podIP']}:29500" in line
        assert "/run/litgpt" not in line


WHO = """
import os, pathlib
def may_write(path):
    try:
        pathlib.Path(path, "probe").write_text("x")
    except OSError as error:
        return error.strerror
    return "written"
status = dict(line.split(":", 1) for line in open("/proc/self/status") if ":" in line)
print(os.getuid(), os.getgid(), os.getgroups(), status["CapBnd"].strip(), status["NoNewPrivs"].strip())
print(*(f"{path}={may_write(path)}" for path in ("/", "/opt", "/scratch", "/dev/shm", "SHARED")), sep="; ")
"""


def who(cluster: Cluster, folder: Path, pod: dict[str, Any], container: dict[str, Any]) -> list[str]:
    """Return the words of the container about itself, and about where it may write."""
    changes = {
        f"{POD}.securityContext": pod, f"{NODE}.securityContext": container,
        f"{POD}.volumes": [{"name": "scratch", "emptyDir": {}}],
        f"{NODE}.volumeMounts": [{"name": "scratch", "mountPath": "/scratch"}],
    }  # fmt: skip
    made = single(program=WHO.replace("SHARED", str(folder)))
    for path, value in changes.items():
        made = changed(made, path, value)
    submit(cluster, made)
    return log(cluster, name_of(ended(cluster))).splitlines()


DROPPED: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


@root
def test_a_pod_is_the_user_that_its_security_context_names(cluster: Cluster, tmp_path: Path) -> None:
    identity, writes = who(cluster, tmp_path, {"runAsNonRoot": True, "runAsUser": 1000, "fsGroup": 1000}, DROPPED)
    assert identity == "1000 0 [1000] 0000000000000000 1"
    assert writes.split("; ") == [
        "/=Permission denied", "/opt=Permission denied", "/scratch=written", "/dev/shm=written", f"{tmp_path}=written",
    ]  # fmt: skip


@root
def test_a_read_only_image_is_read_only_for_root_too_and_its_volumes_are_not(cluster: Cluster, tmp_path: Path) -> None:
    identity, writes = who(
        cluster, tmp_path, {}, {"readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"], "add": ["IPC_LOCK"]}}
    )
    assert identity.startswith("0 0 [] 0000000000004000 0")
    assert writes.split("; ") == [
        "/=Read-only file system", "/opt=Read-only file system", "/scratch=written", "/dev/shm=written",
        f"{tmp_path}=written",
    ]  # fmt: skip


def test_a_pod_that_must_not_be_root_and_is_never_starts(cluster: Cluster) -> None:
    submit(cluster, changed(single(), f"{POD}.securityContext", {"runAsNonRoot": True}))
    cluster.wait(lambda: "runAsNonRoot and image will run as root" in str(cluster.pods("demo")))
