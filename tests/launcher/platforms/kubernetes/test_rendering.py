"""What is sent to Kubernetes: a golden file for every network and kind of job, and what other machines change in it."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import ANY

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes_cluster import running_cluster
from kubernetes_cluster.schemas import shape_troubles

from launcher.config import RunConfig, read_yaml, validated
from launcher.errors import ConfigProblem
from launcher.job import Job, Submission
from launcher.machines import MACHINES
from launcher.networks import networks_of
from launcher.platforms.kubernetes.lint import lint
from launcher.platforms.kubernetes.platform import GkePlatform
from launcher.platforms.kubernetes.settings import GkePlatformConfig
from litgpt_demo.node.network import NodeNetwork

GOLDEN = Path(__file__).parents[3] / "golden" / "gke"
IMAGE = "europe-west4-docker.pkg.dev/project/litgpt/train@sha256:" + 64 * "0"

# The machine whose golden files show each network; every other machine and the host network are differences from these.
SHOWN = {
    "plain": ("g2-standard-48",),
    "tcpx": ("a3-highgpu-8g",),
    "tcpxo": ("a3-megagpu-8g",),
    "gib": ("a3-ultragpu-8g", "a4x-highgpu-4g"),
}
WORKLOADS = ("jobset", "job")

MATRIX = {
    f"{machine}-{network}-{workload}": {"machine": machine, "network": network, "workload": workload}
    for network, machines in SHOWN.items()
    for machine, workload in itertools.product(machines, WORKLOADS)
}

VARIANTS: dict[str, dict[str, Any]] = {
    "any-cpu": {"cpus": "4", "memory": "8Gi", "claim": "shared"},
    "any-gpu": {"gpus": 2, "node_selector": {"gpu": "rtx"}, "workload": "job"},
    "tcpx-before-gke-1.34": {"machine": "a3-highgpu-8g", "network": "tcpx", "network_plugin": "v3.1.9"},
    "tcpx-mirrored": {
        "machine": "a3-highgpu-8g", "network": "tcpx", "network_install": "pod", "disable_pmtu": True,
        "network_registry": "mirror.example/google", "host_network": True,
        "network_daemon": "registry.example/own/daemon:v2.0.15@sha256:" + 64 * "1",
    },
    "tcpx-in-pod": {"machine": "a3-highgpu-8g", "network": "tcpx", "network_install": "pod"},
    "tcpxo-in-pod": {"machine": "a3-megagpu-8g", "network": "tcpxo", "network_install": "pod"},
    "tcpxo-old": {"machine": "a3-megagpu-8g", "network": "tcpxo", "network_plugin": "v1.0.4"},
    "gib-in-pod": {"machine": "a3-ultragpu-8g", "network": "gib", "network_install": "pod"},
    "gib-extra-nic": {"machine": "a4-highgpu-8g", "network": "gib", "extra_nic": True},
    "gib-claims": {"machine": "a4-highgpu-8g", "network": "gib", "network_attach": "dra"},
    "a4x-claims": {"machine": "a4x-highgpu-4g", "network": "gib", "network_attach": "dra", "network_install": "pod"},
    "a4x-slices": {
        "machine": "a4x-highgpu-4g", "network": "gib", "queue": "research", "topology": "block", "slice_nodes": 2,
    },
    "queued": {
        "machine": "a3-ultragpu-8g", "network": "gib", "queue": "research", "priority": "high",
        "topology": "block", "topology_required": True, "flex_start": 86_400,
    },
    "spot": {
        "machine": "g2-standard-48", "spot": True, "grace": 20, "exclude_nodes": ("gke-bad-1",), "priority": "batch",
        "node_pool": "spot", "local_ssd": True,
    },
    "reserved": {"machine": "a2-highgpu-8g", "reservation": "mine", "flex_start": None, "service_account": "trainer"},
    "private-registry": {"cpus": "4", "image_pull_secrets": ("login", "mirror")},
    "flex": {"machine": "a2-highgpu-8g", "flex_start": 3600},
    "fuse": {"machine": "g2-standard-48", "stage": "fuse", "service_account": "trainer"},
    "roce-multus": {
        "gpus": 8, "network": "roce", "roce_network": "rails/a@rail0,rails/b@rail1", "roce_resource": "rdma/a,rdma/b",
    },
    "roce-host": {"gpus": 8, "network": "roce", "roce_resource": "nvidia.com/hostdev=8", "host_network": True},
    "overridden": {
        "machine": "a3-highgpu-8g", "network": "tcpx", "shm": "64Gi", "gate": 0, "allow_sockets": True,
        "overrides": {"NCCL_ALGO": "Ring", "NCCL_DEBUG": "WARN"},
    },
}  # fmt: skip

# What the shipped configs say of their platform.
CONFIGS = sorted((Path(__file__).parents[4] / "deployments" / "configs").glob("gke*.yaml"))
SHIPPED = {f"config-{path.stem}": read_yaml(path)["platform"] for path in CONFIGS}
CASES: dict[str, dict[str, Any]] = {**MATRIX, **VARIANTS, **SHIPPED}

# Fields of a pod, with what they are on the machine or network that has the golden file and what they are here;
# None is for a field that is not there.
Differences: TypeAlias = Mapping[str, tuple[Any, Any]]

NODE = "spec.containers.node"
TOLD = f"{NODE}.env.LITGPT_NETWORK"
ANNOTATIONS = "metadata.annotations"


def machine_of(accelerator: str, gpus: int, shm: str) -> Differences:
    """What another machine changes in a job on plain TCP."""
    return {
        "spec.nodeSelector.cloud.google.com/gke-accelerator": ("nvidia-l4", accelerator),
        f"{NODE}.command.9": ("4", str(gpus)),
        f"{NODE}.resources.limits.nvidia.com/gpu": (4, gpus),
        f"{TOLD}.gpus": (4, gpus),
        "spec.volumes.shared-memory.emptyDir.sizeLimit": ("48Gi", shm),
    }


OTHER_MACHINES: dict[tuple[str, str], Differences] = {
    ("plain", "n1-standard-8-t4"): machine_of("nvidia-tesla-t4", 1, "7Gi"),
    ("plain", "n1-standard-8-v100"): machine_of("nvidia-tesla-v100", 1, "7Gi"),
    ("plain", "a2-highgpu-8g"): machine_of("nvidia-tesla-a100", 8, "64Gi"),
    ("plain", "a2-ultragpu-8g"): machine_of("nvidia-a100-80gb", 8, "64Gi"),
    ("plain", "a3-highgpu-8g"): machine_of("nvidia-h100-80gb", 8, "64Gi"),
    ("plain", "a3-megagpu-8g"): machine_of("nvidia-h100-mega-80gb", 8, "64Gi"),
    ("plain", "a3-ultragpu-8g"): machine_of("nvidia-h200-141gb", 8, "64Gi"),
    ("plain", "a4-highgpu-8g"): machine_of("nvidia-b200", 8, "64Gi"),
    ("plain", "a4x-highgpu-4g"): {
        **machine_of("nvidia-gb200", 4, "64Gi"),
        "spec.nodeSelector.kubernetes.io/arch": (None, "arm64"),
        "spec.tolerations.3.key": (None, "kubernetes.io/arch"),
        "spec.tolerations.3.operator": (None, "Equal"),
        "spec.tolerations.3.value": (None, "arm64"),
        "spec.tolerations.3.effect": (None, "NoSchedule"),
    },
    ("gib", "a4-highgpu-8g"): {
        "spec.nodeSelector.cloud.google.com/gke-accelerator": ("nvidia-h200-141gb", "nvidia-b200"),
        **{
            f"{where}.{name}": (None, value)
            for where in (f"{NODE}.env", f"{TOLD}.environment")
            for name, value in {
                "NCCL_SOCKET_IFNAME": "eth0",
                "NCCL_TUNER_CONFIG_PATH": "/usr/local/gib/configs/tuner_config_a4.txtpb",
            }.items()
        },
        f"{TOLD}.floor_gbytes.2": (195.0, 410.0),
    },
}  # fmt: skip

ON_HOST: Differences = {"spec.hostNetwork": (None, True), "spec.dnsPolicy": (None, "ClusterFirstWithHostNet")}
WITH_DEVICES: Differences = {
    f"{NODE}.securityContext.allowPrivilegeEscalation": (False, None),
    f"{NODE}.securityContext.seccompProfile.type": ("RuntimeDefault", None),
    f"{NODE}.securityContext.capabilities.drop.0": ("ALL", None),
    f"{NODE}.securityContext.privileged": (None, True),
    f"{ANNOTATIONS}.networking.gke.io/default-interface": ("eth0", None),
    f"{ANNOTATIONS}.networking.gke.io/interfaces": (ANY, None),
}
LOCKS_MEMORY: Differences = {
    f"{NODE}.securityContext.capabilities.add.0": ("IPC_LOCK", None),
    f"{NODE}.securityContext.capabilities.add.1": ("DAC_OVERRIDE", None),
}
READS_ALL: Differences = {f"{NODE}.securityContext.capabilities.add.0": ("DAC_OVERRIDE", None)}


def daemon_on_host(name: str, *capabilities: str) -> Differences:
    """A daemon with all rights, in place of the devices and capabilities that it has in a network of the pod's own."""
    context = f"spec.initContainers.{name}.securityContext"
    return {
        f"{ANNOTATIONS}.devices.gke.io/container.{name}": (ANY, None),
        f"{context}.privileged": (None, True),
        **{f"{context}.capabilities.add.{place}": (one, None) for place, one in enumerate(capabilities)},
    }


def interfaces(*numbers: int) -> Differences:
    return {f"{TOLD}.interfaces.{place}": (f"eth{number}", None) for place, number in enumerate(numbers)}


HOST_NETWORKS: dict[tuple[str, str], Differences] = {
    ("plain", "g2-standard-48"): ON_HOST,
    ("tcpx", "a3-highgpu-8g"): {
        **ON_HOST, **WITH_DEVICES, **LOCKS_MEMORY, **daemon_on_host("tcpx-daemon", "NET_ADMIN"),
    },
    ("tcpxo", "a3-megagpu-8g"): {
        **ON_HOST, **WITH_DEVICES, **READS_ALL, **daemon_on_host("tcpxo-daemon", "NET_ADMIN", "NET_BIND_SERVICE"),
        f"{NODE}.env.NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY": ("/dev/aperture_devices", None),
        f"{NODE}.volumeMounts.aperture-devices.mountPath": ("/dev/aperture_devices", None),
        "spec.volumes.aperture-devices.hostPath.path": ("/dev/aperture_devices", None),
    },
    ("gib", "a3-ultragpu-8g"): {**ON_HOST, **WITH_DEVICES, **LOCKS_MEMORY, **interfaces(0, 2, 3, 4, 5, 6, 7, 8, 9)},
    ("gib", "a4x-highgpu-4g"): {**ON_HOST, **WITH_DEVICES, **LOCKS_MEMORY, **interfaces(0, 2, 3, 4, 5)},
}  # fmt: skip


def configured(options: Mapping[str, Any]) -> GkePlatformConfig:
    return GkePlatformConfig.model_validate({"kind": "gke", "nodes": 2, **options})


def training(platform: GkePlatformConfig) -> Job:
    root = platform.claim_path if platform.claim else "gs://bucket/pretraining"
    run = f"{root}/runs/owt-0123456789"
    return Job(
        name="owt-0123456789",
        attempt=1,
        nodes=platform.nodes,
        processes=platform.processes,
        program=("-m", "litgpt_demo", "train", "--run", run),
        directory=f"{run}/attempts/1",
        image=IMAGE,
        stage=(f"{root}/datasets/owt-9876543210",),
        labels={"litgpt-demo.dev/flow-run-id": "none"},
    )


def rendered(options: Mapping[str, Any]) -> Submission:
    platform = configured(options)
    return GkePlatform(platform).render(training(platform))


def pod_of(submission: Submission) -> dict[str, Any]:
    work = submission.body["items"][-1]
    job = work["spec"]["replicatedJobs"][0]["template"] if work["kind"] == "JobSet" else work
    template: dict[str, Any] = job["spec"]["template"]
    return template


def node_of(submission: Submission) -> dict[str, Any]:
    container: dict[str, Any] = pod_of(submission)["spec"]["containers"][0]
    return container


def variables_of(submission: Submission) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in node_of(submission)["env"]}


def fields(thing: Any, where: str = "") -> dict[str, Any]:
    """Every value of a document under its path; parts of a list go by their name where they have one."""
    if isinstance(thing, str) and thing.startswith("{"):
        thing = json.loads(thing)
    if isinstance(thing, Mapping) and thing.keys() == {"name", "value"}:  # a variable
        thing = thing["value"] if not thing["value"].startswith("{") else json.loads(thing["value"])
    if isinstance(thing, Mapping):
        parts = [(key, value) for key, value in thing.items() if key != "name"]
    elif isinstance(thing, Sequence) and not isinstance(thing, str):
        parts = [(one.get("name", n) if isinstance(one, Mapping) else n, one) for n, one in enumerate(thing)]
    else:
        return {where: thing}
    return {path: leaf for key, part in parts for path, leaf in fields(part, f"{where}.{key}".lstrip(".")).items()}


def differences(first: Submission, second: Submission) -> Differences:
    """Every field in which two submissions differ; all of them stand in the pod, NetworkPolicies aside."""
    one, other = fields(pod_of(first)), fields(pod_of(second))
    found = {
        path: (one.get(path), other.get(path)) for path in one.keys() | other.keys() if one.get(path) != other.get(path)
    }
    in_all = [
        fields([one for one in submission.body["items"] if one["kind"] != "NetworkPolicy"])
        for submission in (first, second)
    ]
    elsewhere = {path for path in in_all[0].keys() | in_all[1].keys() if in_all[0].get(path) != in_all[1].get(path)}
    assert len(elsewhere) == len(found), elsewhere
    return found


@pytest.fixture(params=CASES.items(), ids=lambda case: case[0])
def case(request: pytest.FixtureRequest) -> tuple[str, dict[str, Any]]:
    name, options = request.param
    return name, options


def test_what_is_sent_is_the_golden_one(case: tuple[str, dict[str, Any]]) -> None:
    """`make golden` writes them anew; the difference is read in review."""
    name, options = case
    text, file = str(rendered(options)), GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert text == file.read_text()
    assert yaml.load(text, yaml.CSafeLoader) == rendered(options).body


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == CASES.keys()


def test_every_family_of_machines_is_a_golden_file_or_a_difference_from_one() -> None:
    """A family is what shares a GPU and the networks; one machine of each is shown."""
    compared = {(network, machine) for network, machines in SHOWN.items() for machine in machines} | set(OTHER_MACHINES)
    shown = {(network, MACHINES[machine].gpu.label) for network, machine in compared}
    assert shown == {(network, machine.gpu.label) for machine in MACHINES.values() for network in networks_of(machine)}


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(("network", "machine"), OTHER_MACHINES)
def test_another_machine_changes_these_fields_alone(network: str, machine: str, workload: str) -> None:
    shown = {"machine": SHOWN[network][0], "network": network, "workload": workload}
    found = differences(rendered(shown), rendered({**shown, "machine": machine}))
    assert found == {path: pair for path, pair in OTHER_MACHINES[network, machine].items() if pair[0] != pair[1]}


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize(("network", "machine"), HOST_NETWORKS)
def test_the_network_of_the_host_changes_these_fields_alone(network: str, machine: str, workload: str) -> None:
    shown = {"machine": machine, "network": network, "workload": workload}
    assert differences(rendered(shown), rendered({**shown, "host_network": True})) == HOST_NETWORKS[network, machine]


def test_a_mounted_bucket_is_told_of_the_hosts_network() -> None:
    fuse = VARIANTS["fuse"]
    found = differences(rendered(fuse), rendered({**fuse, "host_network": True}))
    attribute = "spec.volumes.bucket-0.csi.volumeAttributes.hostNetworkPodKSA"
    assert found == {**ON_HOST, attribute: (None, "true")}


# Every golden case, and each network on the host's.
EVERYTHING = [
    *CASES.values(),
    *(
        {"machine": machine, "network": network, "workload": workload, "host_network": True}
        for (network, machine), workload in itertools.product(HOST_NETWORKS, WORKLOADS)
    ),
]


def test_the_api_knows_every_field_of_it() -> None:
    """Kubernetes' own schemas, strict; the JobSet's by its CRD, and the Job within it as one that stands alone."""
    for options in EVERYTHING:
        for thing in rendered(options).body["items"]:
            assert shape_troubles(thing) == [], options
            if thing["kind"] == "JobSet":
                template = thing["spec"]["replicatedJobs"][0]["template"]
                thing = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **template}
            if thing["kind"] != "ComputeDomain":  # no schema of it is published on its own
                kubernetes_validate.validate(thing, "1.37", strict=True)


PLURALS = {"NetworkPolicy": "networkpolicies"}


def test_an_api_server_admits_all_of_it() -> None:
    with running_cluster(simulate=True, nodes=1) as cluster:
        for namespace in {configured(options).namespace for options in EVERYTHING} - {"default"}:
            cluster.add_namespace(namespace)
        for number, options in enumerate(EVERYTHING):
            for thing in rendered(options).body["items"]:
                thing["metadata"]["name"] = f"case-{number}"
                cluster.apply(PLURALS.get(thing["kind"], f"{thing['kind'].lower()}s"), thing)


def test_it_is_consistent() -> None:
    for options in EVERYTHING:
        settings = configured(options)
        found = lint(GkePlatform(settings).render(training(settings)).body["items"], settings)
        assert [str(one) for one in found if one.code != "gke.host-network-identity"] == [], options


def test_everything_that_is_created_has_the_labels_of_its_attempt() -> None:
    for options in EVERYTHING:
        submission = rendered(options)
        objects = [*(item["metadata"] for item in submission.body["items"]), pod_of(submission)["metadata"]]
        for metadata in objects:
            wanted = {"train-litgpt/run": "owt-0123456789", "train-litgpt/attempt": "1"}
            assert wanted.items() <= metadata["labels"].items(), options


def test_only_what_the_host_network_needs_is_privileged() -> None:
    for options in EVERYTHING:
        template = pod_of(rendered(options))["spec"]
        for container in [*template.get("initContainers", ()), *template["containers"]]:
            privileged = container.get("securityContext", {}).get("privileged", False)
            by_right = template.get("hostNetwork") and options.get("network", "plain") != "plain"
            assert not privileged or by_right, options


def test_no_pod_gets_a_token_of_the_clusters_api(case: tuple[str, dict[str, Any]]) -> None:
    """A user's script could start pods with it. Workload Identity needs none."""
    assert pod_of(rendered(case[1]))["spec"]["automountServiceAccountToken"] is False


def test_a_node_keeps_no_capability_that_its_network_does_not_need(case: tuple[str, dict[str, Any]]) -> None:
    security, network = node_of(rendered(case[1]))["securityContext"], case[1].get("network", "plain")
    wanted = {"plain": [], "tcpxo": ["DAC_OVERRIDE"]}.get(network, ["IPC_LOCK", "DAC_OVERRIDE"])
    if not security.get("privileged"):
        assert security["allowPrivilegeEscalation"] is False
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        assert security["capabilities"] == {"drop": ["ALL"], **({"add": wanted} if wanted else {})}


def test_a_node_is_root_where_its_network_needs_it_and_nowhere_else(case: tuple[str, dict[str, Any]]) -> None:
    submission, plain = rendered(case[1]), case[1].get("network", "plain") == "plain"
    of_pod, of_node = pod_of(submission)["spec"].get("securityContext", {}), node_of(submission)["securityContext"]
    wanted = {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000}
    assert {name: of_pod[name] for name in wanted if name in of_pod} == (wanted if plain else {})
    assert of_node.get("runAsUser", 1000) == (1000 if plain else 0)
    assert ("/tmp" in mounts_of(submission)) == bool(of_node.get("readOnlyRootFilesystem")) == plain


def mounts_of(submission: Submission) -> set[str]:
    return {one["mountPath"] for one in node_of(submission)["volumeMounts"]}


def test_the_image_is_read_only_for_our_own_training_and_a_script_of_the_users_may_write_beside_itself() -> None:
    platform = configured({"cpus": "4", "memory": "8Gi"})
    script = GkePlatform(platform).render(replace(training(platform), program=("train.py",)))
    assert "readOnlyRootFilesystem" not in node_of(script)["securityContext"]
    assert variables_of(script)["USER"] == "trainer"
    assert "HOME" not in variables_of(script), "the image's home may hold a model or a token"
    assert variables_of(rendered({"cpus": "4", "memory": "8Gi"}))["HOME"] == "/tmp"


@pytest.mark.parametrize("mine", ["overrides", "env"])
def test_a_home_and_a_user_of_the_configs_own_win(mine: str) -> None:
    platform = configured({"overrides": {"HOME": "/run/litgpt", "USER": "me"} if mine == "overrides" else {}})
    env = {"HOME": "/run/litgpt", "USER": "me"} if mine == "env" else {}
    made = variables_of(GkePlatform(platform).render(replace(training(platform), env=env)))
    assert (made["HOME"], made["USER"]) == ("/run/litgpt", "me")


def test_an_image_that_needs_root_is_given_it_and_that_is_told() -> None:
    platform = configured({"uid": 0, "claim": "shared"})
    submission = GkePlatform(platform).render(training(platform))
    assert node_of(submission)["securityContext"] == {
        "allowPrivilegeEscalation": False, "runAsUser": 0, "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    found = {one.code: one for one in lint(submission.body["items"], platform)}
    assert found["gke.root"].severity == "warning"
    assert "platform.uid=0" in found["gke.root"].what
    fast = configured({"uid": 0, "machine": "a3-highgpu-8g", "network": "tcpx"})
    assert lint(GkePlatform(fast).render(training(fast)).body["items"], fast) == []


def test_pods_take_connections_of_their_own_attempt_alone(case: tuple[str, dict[str, Any]]) -> None:
    submission = rendered(case[1])
    policies = [one for one in submission.body["items"] if one["kind"] == "NetworkPolicy"]
    if case[1].get("host_network"):
        assert policies == []
        return
    (policy,) = policies
    labels = policy["spec"]["podSelector"]["matchLabels"]
    assert labels.items() <= pod_of(submission)["metadata"]["labels"].items()
    assert labels == {"train-litgpt/run": "owt-0123456789", "train-litgpt/attempt": "1"}
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]


@pytest.mark.parametrize("without", [{"network_policy": False}, {"host_network": True}])
def test_a_network_policy_can_be_left_out_and_is_where_it_would_have_no_hold(without: dict[str, bool]) -> None:
    kinds = [one["kind"] for one in rendered({"machine": "g2-standard-48", **without}).body["items"]]
    assert kinds == ["JobSet"]


# --- the job ----------------------------------------------------------------------------------------------------------


def test_a_fault_that_comes_back_ends_the_jobset_and_anything_else_restarts_it_so_many_times() -> None:
    policy = rendered({"machine": "g2-standard-48"}).body["items"][-1]["spec"]["failurePolicy"]
    # The Job controller's own words (KEP-262); what no rule matches is restarted, and counted.
    said = {
        "Pod default/x-0 has condition DisruptionTarget matching FailJob rule at index 0": None,
        "Container node for pod default/x-0 failed with exit code 45 matching FailJob rule at index 2": None,
        "Container node for pod default/x-0 failed with exit code 1 matching FailJob rule at index 1": "hopeless",
        "Container node for pod default/x-0 failed with exit code 42 matching FailJob rule at index 1": "hopeless",
        "Job has reached the specified backoff limit": None,
        "Container node for pod default/x-0 failed with exit code 143 matching FailJob rule at index 9": None,
    }
    for message, name in said.items():
        first = next(
            (
                rule["name"]
                for rule in policy["rules"]
                if any(re.search(one, message) for one in rule["onJobFailureMessagePatterns"])
            ),
            None,
        )
        assert first == name, message
    assert [rule["action"] for rule in policy["rules"]] == ["FailJobSet"]
    assert policy["maxRestarts"] == 1


def test_no_pod_of_the_next_life_starts_before_the_last_one_of_this_is_gone() -> None:
    """Two pods of one node would write over each other's checkpoints."""
    jobset = rendered({"machine": "g2-standard-48"}).body["items"][-1]["spec"]
    assert jobset["failurePolicy"]["restartStrategy"] == "BlockingRecreate"
    job = rendered({"machine": "g2-standard-48", "workload": "job"}).body["items"][-1]["spec"]
    assert (job["backoffLimit"], job["podReplacementPolicy"]) == (0, "Failed")


def test_a_restart_is_another_life_with_another_rendezvous() -> None:
    with_restarts = variables_of(rendered({"machine": "g2-standard-48"}))
    assert with_restarts["LITGPT_ATTEMPT"] == "owt-0123456789-1-$(LITGPT_RESTART)"
    without = variables_of(rendered({"machine": "g2-standard-48", "workload": "job"}))
    assert without["LITGPT_ATTEMPT"] == "owt-0123456789-1"


def test_an_attempt_avoids_the_machines_of_the_config_and_its_own() -> None:
    platform = configured({"machine": "g2-standard-48", "exclude_nodes": ("gke-a", "gke-b")})
    submission = GkePlatform(platform).render(replace(training(platform), exclude_nodes=("gke-b", "gke-c")))
    terms = pod_of(submission)["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    rule = terms["nodeSelectorTerms"][0]["matchExpressions"][0]
    assert (rule["operator"], rule["values"]) == ("NotIn", ["gke-a", "gke-b", "gke-c"])


def test_the_second_attempt_has_another_name_and_the_same_run() -> None:
    platform = configured({"machine": "g2-standard-48"})
    job = training(platform)
    first, second = (GkePlatform(platform).render(replace(job, attempt=number)) for number in (1, 2))
    assert (first.job_id, second.job_id) == ("default/owt-0123456789-1", "default/owt-0123456789-2")


@pytest.mark.parametrize("workload", ["jobset", "job"])
def test_node_0_is_found_under_the_name_that_the_controller_gives_it(workload: str) -> None:
    submission = rendered({"machine": "g2-standard-48", "workload": workload})
    command = node_of(submission)["command"]
    host, port = command[command.index("--master") + 1].rsplit(":", 1)
    name = submission.body["items"][-1]["metadata"]["name"]
    assert host == (f"{name}-nodes-0-0.{name}" if workload == "jobset" else f"{name}-0.{name}")
    assert port == "29500"
    if workload == "job":
        (service,) = (one for one in submission.body["items"] if one["kind"] == "Service")
        assert service["metadata"]["name"] == pod_of(submission)["spec"]["subdomain"] == name
        assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}


@settings(max_examples=50, deadline=None)
@given(word=st.text(alphabet="$()ab \n'\"é", max_size=12), workload=st.sampled_from(["jobset", "job"]))
def test_a_program_gets_its_words_as_they_are(word: str, workload: str) -> None:
    """Kubernetes would expand `$(NAME)` in commands and values; here nobody means that."""
    platform = configured({"workload": workload, "claim": "shared"})
    job = replace(training(platform), program=("script.py", word), env={"WORD": word})
    submission = GkePlatform(platform).render(job)

    def expand(text: str) -> str:
        out, rest = "", text
        while rest:
            if rest.startswith("$$"):
                out, rest = out + "$", rest[2:]
            else:
                assert not (rest.startswith("$(") and ")" in rest), "a reference to a variable"
                out, rest = out + rest[0], rest[1:]
        return out

    assert expand(node_of(submission)["command"][-1]) == word
    assert expand(variables_of(submission)["WORD"]) == word


def test_a_job_of_a_thousand_nodes_is_rendered_within_a_second_and_is_no_larger() -> None:
    small = len(str(rendered({"machine": "a3-megagpu-8g", "network": "tcpxo"})))
    start = time.perf_counter()
    large = len(str(rendered({"machine": "a3-megagpu-8g", "network": "tcpxo", "nodes": 1000})))
    assert time.perf_counter() - start < 1
    assert large - small < 100


def test_names_that_do_not_fit_are_refused_with_what_would() -> None:
    platform = configured({"machine": "g2-standard-48", "nodes": 1000})
    job = replace(training(platform), name="a-name-of-thirty-two-characters0-0123456789", attempt=11)
    with pytest.raises(ConfigProblem, match=r"names of 64 characters.*takes 63.*1 characters shorter"):
        GkePlatform(platform).render(job)
    GkePlatform(platform).render(replace(job, attempt=9))


# --- what the node is told --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "network", "reported", "nics"),
    [
        ("a3-highgpu-8g", "tcpx", "GPUDirectTCPX_v7", 5),
        ("a3-megagpu-8g", "tcpxo", "FasTrak", 9),
        ("a3-ultragpu-8g", "gib", "gIB", 9),
        ("a4-highgpu-8g", "gib", "gIB", 9),
        ("a4x-highgpu-4g", "gib", "gIB", 5),
        ("g2-standard-48", "plain", None, 0),
    ],
)
def test_the_node_knows_what_its_network_has_to_be(machine: str, network: str, reported: str, nics: int) -> None:
    told = variables_of(rendered({"machine": machine, "network": network}))["LITGPT_NETWORK"]
    node = NodeNetwork.model_validate_json(told)
    assert (node.name, node.nccl_net, node.gpus) == (network, reported, MACHINES[machine].gpus)
    assert len(node.interfaces) == nics


def test_what_the_user_overrides_is_set_after_the_scripts() -> None:
    overrides = {"NCCL_DEBUG": "WARN", "NCCL_BUFFSIZE": "1"}
    submission = rendered({"machine": "a3-megagpu-8g", "network": "tcpxo", "overrides": overrides})
    node = NodeNetwork.model_validate_json(variables_of(submission)["LITGPT_NETWORK"])
    assert node.overrides == overrides
    assert node.scripts == ("/usr/local/nvidia/lib64/nccl-env-profile.sh",)


def test_one_node_and_plain_tcp_measure_no_network() -> None:
    assert json.loads(variables_of(rendered({}))["LITGPT_NETWORK"])["gate_seconds"] == 0
    told = json.loads(
        variables_of(rendered({"machine": "a3-highgpu-8g", "network": "tcpx", "nodes": 1}))["LITGPT_NETWORK"]
    )
    assert told["gate_seconds"] == 0


def test_the_dataset_is_staged_or_mounted_never_both() -> None:
    copied = rendered({"machine": "g2-standard-48"})
    assert "--stage" in node_of(copied)["command"]
    assert "LITGPT_DATASET" not in variables_of(copied)
    mounted = rendered(VARIANTS["fuse"])
    assert "--stage" not in node_of(mounted)["command"]
    where = variables_of(mounted)["LITGPT_DATASET"]
    paths = {one["mountPath"]: one["name"] for one in node_of(mounted)["volumeMounts"]}
    assert where == "/gcs/bucket/pretraining/datasets/owt-9876543210"
    assert paths["/gcs/bucket"] in {one["name"] for one in pod_of(mounted)["spec"]["volumes"]}


def test_a_folder_cannot_be_mounted_as_a_bucket() -> None:
    platform = configured({**VARIANTS["fuse"], "claim": "shared"})
    with pytest.raises(ConfigProblem, match=r"is in none; take platform.stage=copy"):
        GkePlatform(platform).render(training(platform))


def test_a_config_file_becomes_the_same_job() -> None:
    document = {"name": "x", "platform": {"kind": "gke", "machine": "a3-highgpu-8g", "network": "tcpx", "nodes": 2}}
    config = validated(RunConfig, document, where="here")
    assert config.platform == configured({"machine": "a3-highgpu-8g", "network": "tcpx"})
    assert config.world_size == 16
    assert validated(RunConfig, config.model_dump(mode="json"), where="again") == config
