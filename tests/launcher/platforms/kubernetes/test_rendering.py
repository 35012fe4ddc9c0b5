"""What is sent to Kubernetes: golden files, and what other machines, networks and settings change in them."""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from golden_files import GOLDEN, differences, require_differences, require_golden, training_job
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes_cluster.environment import expand
from kubernetes_cluster.schemas import shape_troubles

from launcher.errors import ConfigProblem
from launcher.job import Submission
from launcher.machines import MACHINES
from launcher.networks import networks_of
from launcher.platforms.kubernetes.platform import KubernetesPlatform
from launcher.platforms.kubernetes.settings import GkePlatformConfig, KubernetesPlatformConfig
from launcher.yaml_files import read_yaml
from litgpt_demo.node.network import NodeNetwork

Options = dict[str, Any]

CONFIGS = Path(__file__).parents[4] / "deployments" / "configs"

TCP = {"machine": "g2-standard-48"}

# A file each.
SHOWN: dict[str, Options] = {
    "tcp": TCP,
    "tcp-job": {**TCP, "workload": "job"},
    "tcpx": {"machine": "a3-highgpu-8g", "network": "tcpx"},
    "tcpxo": {"machine": "a3-megagpu-8g", "network": "tcpxo"},
    "gib": {"machine": "a3-ultragpu-8g", "network": "gib"},
    "a4x": {"machine": "a4x-highgpu-4g", "network": "gib"},
    "roce": {
        "gpus": 8, "network": "roce", "roce_network": "rails/a@rail0,rails/b@rail1", "roce_resource": "rdma/a,rdma/b",
    },
    "queued": {
        "machine": "a3-ultragpu-8g", "network": "gib", "queue": "research", "priority": "high", "topology": "block",
        "topology_required": True, "flex_start": True, "flex_start_duration": "24h",
    },
}  # fmt: skip

# What else there is: the file that it is told as differences from, and the settings that are other than there.
VARIANTS: dict[str, tuple[str, Options]] = {
    "any-cpu": ("tcp", {"machine": None, "cpus": "4", "memory": "8Gi", "pvc": "shared"}),
    "spot": ("tcp", {
        "spot": True, "grace_period": 20, "exclude_nodes": ("gke-bad-1",), "priority": "batch", "node_pool": "spot",
        "local_ssd": True, "image_pull_secrets": ("login", "mirror"), "node_selector": {"disk": "fast"},
    }),
    "reserved": ("tcp", {
        "reservation": "mine", "flex_start": True, "flex_start_duration": "60m", "service_account": "trainer",
    }),
    "fuse-on-host": ("tcp", {"dataset_access": "fuse", "service_account": "trainer", "host_network": True}),
    "tcpx-in-pod": ("tcpx", {"network_install": "pod", "network_registry": "mirror.example", "disable_pmtu": True}),
    "tcpx-overridden": ("tcpx", {"network_plugin": "v3.1.9", "shm": "64Gi", "env": {"NCCL_DEBUG": "WARN"}}),
    "tcpxo-in-pod-on-host": ("tcpxo", {"network_install": "pod", "host_network": True}),
    "gib-in-pod-on-host": ("gib", {"network_install": "pod", "host_network": True}),
    "gib-claims": ("gib", {"machine": "a4-highgpu-8g", "network_attach": "dra"}),
    "gib-extra-nic": ("gib", {"machine": "a4-highgpu-8g", "extra_nic": True}),
    "a4x-slices": ("a4x", {"network_attach": "dra", "queue": "research", "topology": "block", "slice_nodes": 2}),
    "roce-on-host": ("roce", {"roce_network": None, "roce_resource": "nvidia.com/hostdev=8", "host_network": True}),
}  # fmt: skip


@dataclass(frozen=True)
class Sent:
    """What is sent for a job with these settings, and the parts of it."""

    options: Options
    submission: Submission
    items: list[Any]
    work: Options
    """The spec of the JobSet or Job; `job` is that of its Job, `pod` that of its pods."""
    job: Options
    pod: Options
    containers: list[Any]
    node: Options
    variables: dict[str, str]


def sent(options: Options, **changes: Any) -> Sent:
    section = {"kind": "kubernetes", "nodes": 2, **options}
    kinds = {"gke": GkePlatformConfig, "kubernetes": KubernetesPlatformConfig}
    platform = kinds[section["kind"]].model_validate(section)
    root = platform.pvc_path if platform.pvc else "gs://bucket/pretraining"
    training = training_job(root, **{"nodes": platform.nodes, "processes": platform.processes_per_node, **changes})
    submission = KubernetesPlatform(platform).render(training)
    items = submission.body["items"]
    work = items[-1]["spec"]
    job = work["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in work else work
    pod = job["template"]["spec"]
    containers = [*pod.get("initContainers", ()), *pod["containers"]]
    node = pod["containers"][0]
    variables = {variable["name"]: variable.get("value", "") for variable in node["env"]}
    return Sent(options, submission, items, work, job, pod, containers, node, variables)


def variant(name: str) -> Options:
    file, changes = VARIANTS[name]
    return {**SHOWN[file], **changes}


@cache
def everything() -> list[Sent]:
    """What is told in golden files, one machine of each GPU and network, and the configs that we ship."""
    families = {(machine.gpu, network): name for name, machine in MACHINES.items() for network in networks_of(machine)}
    sections = [
        *SHOWN.values(),
        *map(variant, VARIANTS),
        *({"machine": machine, "network": network} for (_, network), machine in families.items()),
        *(read_yaml(path)["platform"] for path in CONFIGS.glob("gke*.yaml")),
    ]
    return [sent(options) for options in sections]


def test_submissions_differ_from_the_golden_one_in_these_fields() -> None:
    shown = {name: sent(options).submission for name, options in SHOWN.items()}
    for name, submission in shown.items():
        require_golden(f"kubernetes/{name}.yaml", str(submission))
    found = {
        name: {"from": file, **differences(shown[file], sent(variant(name)).submission)}
        for name, (file, _) in VARIANTS.items()
    }
    require_differences("kubernetes/differences.yaml", found)
    assert {path.stem for path in (GOLDEN / "kubernetes").glob("*.yaml")} == {*SHOWN, "differences"}


def test_api_knows_each_rendered_field() -> None:
    for this in everything():
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": this.job}
        for thing in [*this.items, job]:
            assert shape_troubles(thing) == [], this.options


def test_parts_of_a_submission_agree() -> None:
    """What no schema sees: a volume without its mount, a rule or an annotation for a container that is not there."""
    for this in everything():
        notes, containers = this.job["template"]["metadata"]["annotations"], this.containers
        names = {item["name"] for item in containers}
        mounted = {item["name"] for each in containers for item in each.get("volumeMounts", ())}
        claims = {item["name"] for each in containers for item in each.get("resources", {}).get("claims", ())}
        annotated = {key.partition("/")[2].partition(".")[2] for key in notes if key.startswith("devices.gke.io/")}
        rules = [rule.get("onExitCodes", {}) for rule in this.job["podFailurePolicy"]["rules"]]
        assert len(names) == len(containers), this.options
        assert annotated | {rule["containerName"] for rule in rules if rule} <= names, this.options
        assert {item["name"] for item in this.pod["volumes"]} == mounted, this.options
        assert {item["name"] for item in this.pod.get("resourceClaims", ())} == claims, this.options
        assert all("@sha256:" in item["image"] or re.search(r":v?\d", item["image"]) for item in containers), (
            this.options
        )


def test_submission_suits_its_machine_and_its_nodes_interfaces() -> None:
    for this in everything():
        node = NodeNetwork.model_validate_json(this.variables["LITGPT_NETWORK"])
        if (machine := MACHINES.get(this.options.get("machine") or "")) is not None:
            assert node.gpus == machine.gpus, this.options
            tainted = {"nvidia.com/gpu"} | ({"kubernetes.io/arch"} if machine.arch == "arm64" else set())
            assert tainted <= {item["key"] for item in this.pod["tolerations"]}, this.options
        notes = this.job["template"]["metadata"]["annotations"]
        if text := notes.get("networking.gke.io/interfaces"):
            attached = {item["interfaceName"]: item["network"] for item in json.loads(text)}
            assert attached["eth0"] == "default", this.options
            assert len(set(attached.values())) == len(attached), this.options
            assert set(node.interfaces) <= set(attached), this.options


def test_created_objects_have_the_labels_of_their_attempt() -> None:
    for this in everything():
        for thing in [*this.items, this.job["template"]]:
            wanted = {"train-litgpt/run": "owt-0123456789", "train-litgpt/attempt": "1"}
            assert wanted.items() <= thing["metadata"]["labels"].items(), this.options


def test_pod_has_no_token_of_the_clusters_api() -> None:
    """A user's script could start pods with it. Workload Identity needs none."""
    for this in everything():
        assert this.pod["automountServiceAccountToken"] is False, this.options


def test_node_has_only_the_capabilities_of_its_network() -> None:
    for this in everything():
        network = this.options.get("network", "tcp")
        wanted = {"tcp": None, "tcpxo": ["DAC_OVERRIDE"]}.get(network, ["IPC_LOCK", "DAC_OVERRIDE"])
        for container in this.containers:
            security = container.get("securityContext", {})
            if security.get("privileged"):
                assert (this.pod.get("hostNetwork"), network == "tcp") == (True, False), this.options
            elif container["name"] == "node":
                assert security["allowPrivilegeEscalation"] is False, this.options
                assert security["seccompProfile"] == {"type": "RuntimeDefault"}, this.options
                rights = security["capabilities"]
                assert (rights["drop"], rights.get("add")) == (["ALL"], wanted), this.options


def test_node_is_root_only_if_its_network_needs_it() -> None:
    user = {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000}
    for this in everything():
        is_tcp = this.options.get("network", "tcp") == "tcp"
        of_pod, of_node = this.pod.get("securityContext", {}), this.node["securityContext"]
        assert {name: of_pod[name] for name in user if name in of_pod} == (user if is_tcp else {}), this.options
        assert of_node.get("runAsUser", 1000) == (1000 if is_tcp else 0), this.options
        writable = {mount["mountPath"] for mount in this.node["volumeMounts"]}
        assert ("/tmp" in writable) == bool(of_node.get("readOnlyRootFilesystem")) == is_tcp, this.options


def test_image_is_read_only_for_our_training_but_not_for_scripts() -> None:
    script = sent(TCP, program=("train.py",))
    assert "readOnlyRootFilesystem" not in script.node["securityContext"]
    assert script.variables["USER"] == "trainer"
    assert "HOME" not in script.variables, "the image's home may hold a model or a token"
    assert sent(TCP).variables["HOME"] == "/tmp"


def test_pods_accept_connections_of_their_own_attempt_only() -> None:
    for this in [*everything(), sent({**TCP, "network_policy": False})]:
        policies = [item["spec"] for item in this.items if item["kind"] == "NetworkPolicy"]
        if this.options.get("host_network") or not this.options.get("network_policy", True):
            assert policies == []
            continue
        (policy,) = policies
        labels = {"train-litgpt/job": "owt-0123456789-1-000000"}
        assert policy["podSelector"]["matchLabels"] == labels
        assert policy["policyTypes"] == ["Ingress"]
        assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]


# --- the job ----------------------------------------------------------------------------------------------------------


def test_permanent_failure_ends_the_jobset_and_others_restart_it() -> None:
    policy = sent(TCP).work["failurePolicy"]
    (rule,) = policy["rules"]
    # The Job controller's own words (KEP-262); what no rule matches is restarted, and counted.
    messages = {
        "Pod default/x-0 has condition DisruptionTarget matching FailJob rule at index 0": False,
        "Container node for pod default/x-0 failed with exit code 45 matching FailJob rule at index 2": False,
        "Container node for pod default/x-0 failed with exit code 42 matching FailJob rule at index 1": True,
        "Job has reached the specified backoff limit": False,
    }
    for message, ends in messages.items():
        matching = any(re.search(pattern, message) for pattern in rule["onJobFailureMessagePatterns"])
        assert matching is ends, message
    assert (rule["action"], policy["maxRestarts"]) == ("FailJobSet", 1)


def test_next_life_starts_after_the_last_pod_of_this_one() -> None:
    """Two pods of one node would write over each other's checkpoints."""
    assert sent(TCP).work["failurePolicy"]["restartStrategy"] == "BlockingRecreate"
    job = sent(SHOWN["tcp-job"]).work
    assert (job["backoffLimit"], job["podReplacementPolicy"]) == (0, "Failed")


def test_attempt_excludes_the_machines_of_the_config_and_its_own() -> None:
    this = sent({**TCP, "exclude_nodes": ("gke-a", "gke-b")}, exclude_nodes=("gke-b", "gke-c"))
    terms = this.pod["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    rule = terms["nodeSelectorTerms"][0]["matchExpressions"][0]
    assert (rule["operator"], rule["values"]) == ("NotIn", ["gke-a", "gke-b", "gke-c"])


@settings(max_examples=50)
@given(word=st.text(alphabet="$()ab \n'\"é", max_size=12), workload=st.sampled_from(["jobset", "job"]))
def test_program_gets_its_arguments_unchanged(word: str, workload: str) -> None:
    """Kubernetes would expand `$(NAME)` in commands and values; here nobody means that."""
    this = sent({"workload": workload}, program=("script.py", word), env={"WORD": word})
    assert expand(this.node["command"][-1], {"a": "expanded"}) == word
    assert expand(this.variables["WORD"], {"a": "expanded"}) == word


def test_too_long_names_are_refused_with_a_fix() -> None:
    many, name = {**TCP, "nodes": 1000}, "a-name-of-twenty-five-chr-0123456789"
    for attempt in (1, 999):  # a run is refused at once, and not in the middle
        with pytest.raises(ConfigProblem, match=r"names of 65 characters.*takes 63.*2 characters shorter"):
            sent(many, name=name, attempt=attempt)
        sent(many, name=name[2:], attempt=attempt)


def test_dataset_is_either_staged_or_mounted() -> None:
    for this in everything():
        assert ("--stage" in this.node["command"]) != ("LITGPT_DATASET" in this.variables), this.options
    with pytest.raises(ConfigProblem, match=r"is in none; take platform.dataset_access=copy"):
        sent({**TCP, "dataset_access": "fuse", "service_account": "trainer", "pvc": "shared"})
