"""What is sent to Kubernetes: golden files, and what other machines, networks and settings change in them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from golden_files import GOLDEN, differences, require_differences, require_golden
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes_cluster.environment import expand
from kubernetes_cluster.schemas import shape_troubles

from launcher.config import read_yaml
from launcher.errors import ConfigProblem
from launcher.job import Job, Submission
from launcher.machines import MACHINES
from launcher.networks import networks_of
from launcher.platforms.kubernetes.platform import GkePlatform
from launcher.platforms.kubernetes.settings import GkePlatformConfig
from litgpt_demo.node.network import NodeNetwork

Options = dict[str, Any]

CONFIGS = Path(__file__).parents[4] / "deployments" / "configs"

PLAIN = {"machine": "g2-standard-48"}
A4 = {"machine": "a4-highgpu-8g"}
FUSE = {**PLAIN, "stage": "fuse", "service_account": "trainer"}

# A file each.
SHOWN: dict[str, Options] = {
    "plain": PLAIN,
    "plain-job": {**PLAIN, "workload": "job"},
    "tcpx": {"machine": "a3-highgpu-8g", "network": "tcpx"},
    "tcpxo": {"machine": "a3-megagpu-8g", "network": "tcpxo"},
    "gib": {"machine": "a3-ultragpu-8g", "network": "gib"},
    "a4x": {"machine": "a4x-highgpu-4g", "network": "gib"},
    "roce": {
        "gpus": 8, "network": "roce", "roce_network": "rails/a@rail0,rails/b@rail1", "roce_resource": "rdma/a,rdma/b",
    },
    "queued": {
        "machine": "a3-ultragpu-8g", "network": "gib", "queue": "research", "priority": "high", "topology": "block",
        "topology_required": True, "flex_start": 86_400,
    },
}  # fmt: skip

# What else there is: the file that it is told as differences from, and the settings that are other than there.
VARIANTS: dict[str, tuple[str, Options]] = {
    "any-cpu": ("plain", {"machine": None, "cpus": "4", "memory": "8Gi", "claim": "shared"}),
    "any-gpu-job": ("plain-job", {"machine": None, "gpus": 2, "node_selector": {"gpu": "rtx"}}),
    "spot": ("plain", {
        "spot": True, "grace": 20, "exclude_nodes": ("gke-bad-1",), "priority": "batch", "node_pool": "spot",
        "local_ssd": True, "image_pull_secrets": ("login", "mirror"),
    }),
    "reserved": ("plain", {"reservation": "mine", "flex_start": 3600, "service_account": "trainer"}),
    "fuse": ("plain", FUSE),
    "tcpx-before-gke-1.34": ("tcpx", {"network_plugin": "v3.1.9"}),
    "tcpx-in-pod": ("tcpx", {
        "network_install": "pod", "network_registry": "mirror.example/google", "disable_pmtu": True,
        "network_daemon": "registry.example/own/daemon:v2.0.15@sha256:" + 64 * "1",
    }),
    "overridden": ("tcpx", {
        "shm": "64Gi", "gate": 0, "allow_sockets": True, "overrides": {"NCCL_ALGO": "Ring", "NCCL_DEBUG": "WARN"},
    }),
    "tcpxo-in-pod": ("tcpxo", {"network_install": "pod"}),
    "gib-in-pod": ("gib", {"network_install": "pod"}),
    "gib-extra-nic": ("gib", {**A4, "extra_nic": True}),
    "gib-claims": ("gib", {**A4, "network_attach": "dra"}),
    "a4x-claims": ("a4x", {"network_attach": "dra", "network_install": "pod"}),
    "a4x-slices": ("a4x", {"queue": "research", "topology": "block", "slice_nodes": 2}),
    "roce-on-host": ("roce", {"roce_network": None, "roce_resource": "nvidia.com/hostdev=8", "host_network": True}),
    **{f"{file}-on-host": (file, {"host_network": True}) for file in ("plain", "tcpx", "tcpxo", "gib")},
}  # fmt: skip


def rendered(options: Options, **changes: Any) -> Submission:
    platform = GkePlatformConfig.model_validate({"kind": "gke", "nodes": 2, **options})
    root = platform.claim_path if platform.claim else "gs://bucket/pretraining"
    run = f"{root}/runs/owt-0123456789"
    asked = Job(
        name="owt-0123456789",
        attempt=1,
        nodes=platform.nodes,
        processes=platform.processes,
        program=("-m", "litgpt_demo", "train", "--run", run),
        directory=f"{run}/attempts/1",
        image="europe-west4-docker.pkg.dev/project/litgpt/train@sha256:" + 64 * "0",
        stage=(f"{root}/datasets/owt-9876543210",),
        labels={"litgpt-demo.dev/flow-run-id": "none"},
    )
    return GkePlatform(platform).render(replace(asked, **changes))


def variant(name: str) -> Options:
    file, changes = VARIANTS[name]
    return {**SHOWN[file], **changes}


@cache
def everything() -> list[tuple[Options, Submission]]:
    """What is told in golden files, one machine of each GPU and network, and the configs that we ship."""
    families = {(one.gpu.label, network): name for name, one in MACHINES.items() for network in networks_of(one)}
    asked = [
        *SHOWN.values(),
        *map(variant, VARIANTS),
        *({"machine": machine, "network": network} for (_, network), machine in families.items()),
        *(read_yaml(path)["platform"] for path in CONFIGS.glob("gke*.yaml")),
    ]
    return [(options, rendered(options)) for options in asked]


def work_of(submission: Submission) -> dict[str, Any]:
    """The spec of the JobSet or the Job."""
    spec: dict[str, Any] = submission.body["items"][-1]["spec"]
    return spec


def job_of(submission: Submission) -> dict[str, Any]:
    work = work_of(submission)
    job: dict[str, Any] = work["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in work else work
    return job


def pod_of(submission: Submission) -> dict[str, Any]:
    pod: dict[str, Any] = job_of(submission)["template"]["spec"]
    return pod


def containers_of(submission: Submission) -> list[dict[str, Any]]:
    pod = pod_of(submission)
    return [*pod.get("initContainers", ()), *pod["containers"]]


def node_of(submission: Submission) -> dict[str, Any]:
    container: dict[str, Any] = pod_of(submission)["containers"][0]
    return container


def variables_of(submission: Submission) -> dict[str, str]:
    return {one["name"]: one.get("value", "") for one in node_of(submission)["env"]}


def test_what_is_sent_is_the_golden_one_and_other_jobs_differ_from_it_in_these_fields_alone() -> None:
    shown = {name: rendered(options) for name, options in SHOWN.items()}
    for name, submission in shown.items():
        require_golden(f"gke/{name}.yaml", str(submission))
    found = {
        name: {"from": file, **differences(shown[file], rendered(variant(name)))}
        for name, (file, _) in VARIANTS.items()
    }
    require_differences("gke/differences.yaml", found)
    assert {path.stem for path in (GOLDEN / "gke").glob("*.yaml")} == {*SHOWN, "differences"}


def test_the_api_knows_every_field_of_it() -> None:
    for options, submission in everything():
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job_of(submission)}
        for thing in [*submission.body["items"], job]:
            assert shape_troubles(thing) == [], options


def test_the_parts_of_every_submission_agree_with_each_other() -> None:
    """What no schema sees: a volume without its mount, a rule or an annotation for a container that is not there."""
    for options, submission in everything():
        pod, containers, job = pod_of(submission), containers_of(submission), job_of(submission)
        notes = job["template"]["metadata"]["annotations"]
        there = {one["name"] for one in containers}
        mounted = {one["name"] for container in containers for one in container.get("volumeMounts", ())}
        asked = {one["name"] for each in containers for one in each.get("resources", {}).get("claims", ())}
        annotated = {key.partition("/")[2].partition(".")[2] for key in notes if key.startswith("devices.gke.io/")}
        rules = [rule.get("onExitCodes", {}) for rule in job["podFailurePolicy"]["rules"]]
        assert len(there) == len(containers), options
        assert annotated | {rule["containerName"] for rule in rules if rule} <= there, options
        assert {one["name"] for one in pod["volumes"]} == mounted, options
        assert {one["name"] for one in pod.get("resourceClaims", ())} == asked, options
        assert all("@sha256:" in one["image"] or re.search(r":v?\d", one["image"]) for one in containers), options


def test_every_submission_suits_its_machine_and_its_node_expects_the_interfaces_that_it_gets() -> None:
    for options, submission in everything():
        node = NodeNetwork.model_validate_json(variables_of(submission)["LITGPT_NETWORK"])
        if (machine := MACHINES.get(options.get("machine") or "")) is not None:
            assert node.gpus == machine.gpus, options
            assert set(machine.taints) <= {one["key"] for one in pod_of(submission)["tolerations"]}, options
        notes = job_of(submission)["template"]["metadata"]["annotations"]
        if text := notes.get("networking.gke.io/interfaces"):
            attached = {one["interfaceName"]: one["network"] for one in json.loads(text)}
            assert attached["eth0"] == "default", options
            assert len(set(attached.values())) == len(attached), options
            assert set(node.interfaces) <= set(attached), options


def test_everything_that_is_created_has_the_labels_of_its_attempt() -> None:
    for options, submission in everything():
        objects = [*submission.body["items"], job_of(submission)["template"]]
        for thing in objects:
            wanted = {"train-litgpt/run": "owt-0123456789", "train-litgpt/attempt": "1"}
            assert wanted.items() <= thing["metadata"]["labels"].items(), options


def test_no_pod_gets_a_token_of_the_clusters_api() -> None:
    """A user's script could start pods with it. Workload Identity needs none."""
    for options, submission in everything():
        assert pod_of(submission)["automountServiceAccountToken"] is False, options


def test_a_node_keeps_no_capability_that_its_network_does_not_need() -> None:
    for options, submission in everything():
        network = options.get("network", "plain")
        wanted = {"plain": [], "tcpxo": ["DAC_OVERRIDE"]}.get(network, ["IPC_LOCK", "DAC_OVERRIDE"])
        for container in containers_of(submission):
            security = container.get("securityContext", {})
            if security.get("privileged"):
                assert (pod_of(submission).get("hostNetwork"), network == "plain") == (True, False), options
            elif container["name"] == "node":
                assert security["allowPrivilegeEscalation"] is False, options
                assert security["seccompProfile"] == {"type": "RuntimeDefault"}, options
                assert security["capabilities"] == {"drop": ["ALL"], **({"add": wanted} if wanted else {})}, options


def test_a_node_is_root_where_its_network_needs_it_and_nowhere_else() -> None:
    user = {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000}
    for options, submission in everything():
        plain = options.get("network", "plain") == "plain"
        of_pod, of_node = pod_of(submission).get("securityContext", {}), node_of(submission)["securityContext"]
        assert {name: of_pod[name] for name in user if name in of_pod} == (user if plain else {}), options
        assert of_node.get("runAsUser", 1000) == (1000 if plain else 0), options
        writable = {one["mountPath"] for one in node_of(submission)["volumeMounts"]}
        assert ("/tmp" in writable) == bool(of_node.get("readOnlyRootFilesystem")) == plain, options


def test_the_image_is_read_only_for_our_own_training_and_a_script_of_the_users_may_write_beside_itself() -> None:
    script = rendered(PLAIN, program=("train.py",))
    assert "readOnlyRootFilesystem" not in node_of(script)["securityContext"]
    assert variables_of(script)["USER"] == "trainer"
    assert "HOME" not in variables_of(script), "the image's home may hold a model or a token"
    assert variables_of(rendered(PLAIN))["HOME"] == "/tmp"


def test_pods_take_connections_of_their_own_attempt_alone() -> None:
    alone = {**PLAIN, "network_policy": False}
    for options, submission in [*everything(), (alone, rendered(alone))]:
        policies = [one["spec"] for one in submission.body["items"] if one["kind"] == "NetworkPolicy"]
        if options.get("host_network") or not options.get("network_policy", True):
            assert policies == []
            continue
        (policy,) = policies
        labels = {"train-litgpt/run": "owt-0123456789", "train-litgpt/attempt": "1"}
        assert policy["podSelector"]["matchLabels"] == labels
        assert policy["policyTypes"] == ["Ingress"]
        assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]


# --- the job ----------------------------------------------------------------------------------------------------------


def test_a_fault_that_comes_back_ends_the_jobset_and_anything_else_restarts_it_so_many_times() -> None:
    policy = work_of(rendered(PLAIN))["failurePolicy"]
    (rule,) = policy["rules"]
    # The Job controller's own words (KEP-262); what no rule matches is restarted, and counted.
    said = {
        "Pod default/x-0 has condition DisruptionTarget matching FailJob rule at index 0": False,
        "Container node for pod default/x-0 failed with exit code 45 matching FailJob rule at index 2": False,
        "Container node for pod default/x-0 failed with exit code 42 matching FailJob rule at index 1": True,
        "Job has reached the specified backoff limit": False,
    }
    for message, ends in said.items():
        matching = any(re.search(one, message) for one in rule["onJobFailureMessagePatterns"])
        assert matching is ends, message
    assert (rule["action"], policy["maxRestarts"]) == ("FailJobSet", 1)


def test_no_pod_of_the_next_life_starts_before_the_last_one_of_this_is_gone() -> None:
    """Two pods of one node would write over each other's checkpoints."""
    assert work_of(rendered(PLAIN))["failurePolicy"]["restartStrategy"] == "BlockingRecreate"
    job = work_of(rendered(SHOWN["plain-job"]))
    assert (job["backoffLimit"], job["podReplacementPolicy"]) == (0, "Failed")


def test_an_attempt_avoids_the_machines_of_the_config_and_its_own() -> None:
    submission = rendered({**PLAIN, "exclude_nodes": ("gke-a", "gke-b")}, exclude_nodes=("gke-b", "gke-c"))
    terms = pod_of(submission)["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    rule = terms["nodeSelectorTerms"][0]["matchExpressions"][0]
    assert (rule["operator"], rule["values"]) == ("NotIn", ["gke-a", "gke-b", "gke-c"])


@pytest.mark.parametrize("workload", ["jobset", "job"])
def test_node_0_is_found_under_the_name_that_the_controller_gives_it(workload: str) -> None:
    submission = rendered({**PLAIN, "workload": workload})
    command = node_of(submission)["command"]
    host = command[command.index("--master") + 1].rpartition(":")[0]
    name = submission.body["items"][-1]["metadata"]["name"]
    assert host == (f"{name}-nodes-0-0.{name}" if workload == "jobset" else f"{name}-0.{name}")
    services = [one for one in submission.body["items"] if one["kind"] == "Service"]
    for service in services:
        assert service["metadata"]["name"] == pod_of(submission)["subdomain"] == name
        assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}
    assert len(services) == (workload == "job"), "JobSet makes its own"


@settings(max_examples=50)
@given(word=st.text(alphabet="$()ab \n'\"é", max_size=12), workload=st.sampled_from(["jobset", "job"]))
def test_a_program_gets_its_words_as_they_are(word: str, workload: str) -> None:
    """Kubernetes would expand `$(NAME)` in commands and values; here nobody means that."""
    submission = rendered({"workload": workload}, program=("script.py", word), env={"WORD": word})
    assert expand(node_of(submission)["command"][-1], {"a": "expanded"}) == word
    assert expand(variables_of(submission)["WORD"], {"a": "expanded"}) == word


def test_a_job_of_a_thousand_nodes_is_no_larger() -> None:
    assert len(str(rendered({**PLAIN, "nodes": 1000}))) - len(str(rendered(PLAIN))) < 100


def test_names_that_do_not_fit_are_refused_with_what_would() -> None:
    many, name = {**PLAIN, "nodes": 1000}, "a-name-of-thirty-two-characters0-0123456789"
    with pytest.raises(ConfigProblem, match=r"names of 64 characters.*takes 63.*1 characters shorter"):
        rendered(many, name=name, attempt=11)
    rendered(many, name=name, attempt=9)


def test_the_dataset_is_staged_or_mounted_never_both() -> None:
    copied, mounted = rendered(PLAIN), rendered(FUSE)
    assert "--stage" in node_of(copied)["command"]
    assert "LITGPT_DATASET" not in variables_of(copied)
    assert "--stage" not in node_of(mounted)["command"]
    assert variables_of(mounted)["LITGPT_DATASET"] == "/gcs/bucket/pretraining/datasets/owt-9876543210"
    (bucket,) = (one["name"] for one in node_of(mounted)["volumeMounts"] if one["mountPath"] == "/gcs/bucket")
    on_host = {one["name"]: one for one in pod_of(rendered({**FUSE, "host_network": True}))["volumes"]}
    assert on_host[bucket]["csi"]["volumeAttributes"]["hostNetworkPodKSA"] == "true"
    with pytest.raises(ConfigProblem, match=r"is in none; take platform.stage=copy"):
        rendered({**FUSE, "claim": "shared"})
