"""What is sent to Kubernetes: golden files, and what other machines, networks and settings change in them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from golden_files import GOLDEN, require_differences, require_golden
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
IMAGE = "europe-west4-docker.pkg.dev/project/litgpt/train@sha256:" + 64 * "0"

PLAIN = {"machine": "g2-standard-48"}
TCPX = {"machine": "a3-highgpu-8g", "network": "tcpx"}
TCPXO = {"machine": "a3-megagpu-8g", "network": "tcpxo"}
GIB = {"machine": "a3-ultragpu-8g", "network": "gib"}
A4 = {"machine": "a4-highgpu-8g", "network": "gib"}
A4X = {"machine": "a4x-highgpu-4g", "network": "gib"}
FUSE = {**PLAIN, "stage": "fuse", "service_account": "trainer"}

NETWORKS = ("plain", "tcpx", "tcpxo", "gib", "a4x")
SHIPPED = {
    "gke": "plain", "gke-tcpx": "tcpx", "gke-tcpxo": "tcpxo", "gke-gib-a3-ultra": "gib", "gke-gib-a4": "gib",
}  # fmt: skip

# A file each.
SHOWN: dict[str, Options] = {
    "plain": PLAIN,
    "plain-job": {**PLAIN, "workload": "job"},
    "tcpx": TCPX,
    "tcpxo": TCPXO,
    "gib": GIB,
    "a4x": A4X,
    "roce": {
        "gpus": 8, "network": "roce", "roce_network": "rails/a@rail0,rails/b@rail1", "roce_resource": "rdma/a,rdma/b",
    },
    "queued": {
        **GIB, "queue": "research", "priority": "high", "topology": "block", "topology_required": True,
        "flex_start": 86_400,
    },
}  # fmt: skip

# What else there is, and the file that it is told as differences from.
VARIANTS: dict[str, tuple[str, Options]] = {
    "any-cpu": ("plain", {"cpus": "4", "memory": "8Gi", "claim": "shared"}),
    "any-gpu-job": ("plain-job", {"gpus": 2, "node_selector": {"gpu": "rtx"}, "workload": "job"}),
    "spot": ("plain", {
        **PLAIN, "spot": True, "grace": 20, "exclude_nodes": ("gke-bad-1",), "priority": "batch",
        "node_pool": "spot", "local_ssd": True,
    }),
    "reserved": ("plain", {**PLAIN, "reservation": "mine", "flex_start": None, "service_account": "trainer"}),
    "flex": ("plain", {**PLAIN, "flex_start": 3600}),
    "private-registry": ("plain", {**PLAIN, "image_pull_secrets": ("login", "mirror")}),
    "fuse": ("plain", FUSE),
    "tcpx-before-gke-1.34": ("tcpx", {**TCPX, "network_plugin": "v3.1.9"}),
    "tcpx-in-pod": ("tcpx", {**TCPX, "network_install": "pod"}),
    "tcpx-mirrored": ("tcpx", {
        **TCPX, "network_install": "pod", "network_registry": "mirror.example/google", "disable_pmtu": True,
        "network_daemon": "registry.example/own/daemon:v2.0.15@sha256:" + 64 * "1",
    }),
    "overridden": ("tcpx", {
        **TCPX, "shm": "64Gi", "gate": 0, "allow_sockets": True,
        "overrides": {"NCCL_ALGO": "Ring", "NCCL_DEBUG": "WARN"},
    }),
    "tcpxo-in-pod": ("tcpxo", {**TCPXO, "network_install": "pod"}),
    "tcpxo-old": ("tcpxo", {**TCPXO, "network_plugin": "v1.0.4"}),
    "gib-in-pod": ("gib", {**GIB, "network_install": "pod"}),
    "gib-a4": ("gib", A4),
    "gib-extra-nic": ("gib", {**A4, "extra_nic": True}),
    "gib-claims": ("gib", {**A4, "network_attach": "dra"}),
    "a4x-claims": ("a4x", {**A4X, "network_attach": "dra", "network_install": "pod"}),
    "a4x-slices": ("a4x", {**A4X, "queue": "research", "topology": "block", "slice_nodes": 2}),
    "roce-on-host": ("roce", {
        "gpus": 8, "network": "roce", "roce_resource": "nvidia.com/hostdev=8", "host_network": True,
    }),
    **{f"plain-{machine}": ("plain", {"machine": machine}) for machine in (
        "n1-standard-8-t4", "n1-standard-8-v100", "a2-highgpu-8g", "a2-ultragpu-8g", "a3-highgpu-8g",
        "a3-megagpu-8g", "a3-ultragpu-8g", "a4-highgpu-8g", "a4x-highgpu-4g",
    )},
    **{f"{file}-on-host": (file, {**SHOWN[file], "host_network": True}) for file in NETWORKS[:4]},
    **{f"config-{name}": (file, read_yaml(CONFIGS / f"{name}.yaml")["platform"]) for name, file in SHIPPED.items()},
}  # fmt: skip

EVERYTHING = [*SHOWN.values(), *(options for _, options in VARIANTS.values())]


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
    """Every value of a document under its path: short lists of words whole, parts of others by name or number."""
    if isinstance(thing, str) and thing.startswith("{"):
        thing = json.loads(thing)
    if isinstance(thing, Mapping) and thing.keys() == {"name", "value"}:  # a variable
        thing = thing["value"] if not thing["value"].startswith("{") else json.loads(thing["value"])
    if isinstance(thing, Mapping):
        parts = [(key, value) for key, value in thing.items() if key != "name"]
    elif isinstance(thing, list) and (len(thing) > 9 or any(isinstance(one, Mapping) for one in thing)):
        parts = [(one.get("name", n) if isinstance(one, Mapping) else n, one) for n, one in enumerate(thing)]
    else:
        return {where: thing}
    return {path: leaf for key, part in parts for path, leaf in fields(part, f"{where}.{key}".lstrip(".")).items()}


def told(submission: Submission) -> dict[str, Any]:
    """The fields of all objects, by kind; those of the pod are `pod.…`."""
    found = {}
    for item in submission.body["items"]:
        for path, value in fields(item).items():
            whole = f"{item['kind']}.{path}"
            found[re.sub(r"^(JobSet.spec.replicatedJobs.nodes.template|Job).spec.template\b", "pod", whole)] = value
    return found


def differences(first: Submission, second: Submission) -> dict[str, list[Any]]:
    """Every field in which two submissions differ, with both values; None is for a field that is not there."""
    one, other = told(first), told(second)
    gone = {path.partition(".")[0] for path in one} - {path.partition(".")[0] for path in other}
    found = {kind: ["there", None] for kind in sorted(gone)}
    paths = sorted(path for path in one.keys() | other.keys() if path.partition(".")[0] not in gone)
    return {**found, **{path: [one.get(path), other.get(path)] for path in paths if one.get(path) != other.get(path)}}


@pytest.mark.parametrize("name", SHOWN)
def test_what_is_sent_is_the_golden_one(name: str) -> None:
    submission = rendered(SHOWN[name])
    require_golden(f"gke/{name}.yaml", str(submission))
    assert yaml.load(str(submission), yaml.CSafeLoader) == submission.body


def test_other_jobs_differ_from_the_golden_ones_in_these_fields_alone() -> None:
    shown = {name: rendered(options) for name, options in SHOWN.items()}
    found = {
        name: {"from": file, **differences(shown[file], rendered(options))}
        for name, (file, options) in VARIANTS.items()
    }
    require_differences("gke/differences.yaml", found)
    assert {path.stem for path in (GOLDEN / "gke").glob("*.yaml")} == {*SHOWN, "differences"}


def test_every_family_of_machines_and_every_shipped_config_is_among_them() -> None:
    """A family is what shares a GPU and the networks; one machine of each is shown."""
    shown = {
        (one.get("network", "plain"), MACHINES[one["machine"]].gpu.label) for one in EVERYTHING if "machine" in one
    }
    assert shown >= {(network, one.gpu.label) for one in MACHINES.values() for network in networks_of(one)}
    assert {path.stem for path in CONFIGS.glob("gke*.yaml")} == SHIPPED.keys()


@pytest.mark.parametrize("network", NETWORKS)
def test_a_job_without_jobset_has_the_pods_of_one_with_it(network: str) -> None:
    found = differences(rendered(SHOWN[network]), rendered({**SHOWN[network], "workload": "job"}))
    pods = {path.removeprefix("pod.spec.containers.node.") for path in found if path.startswith("pod.")}
    assert pods == {
        "command.11", "env.LITGPT_ATTEMPT", "env.LITGPT_RESTART.valueFrom.fieldRef.fieldPath", "pod.spec.subdomain",
    }  # fmt: skip


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


def test_the_parts_of_every_submission_agree_with_each_other() -> None:
    """What no schema sees: a volume without its mount, a rule or an annotation for a container that is not there."""
    for options in EVERYTHING:
        submission, machine = rendered(options), MACHINES.get(options.get("machine", ""))
        pod, notes = pod_of(submission)["spec"], pod_of(submission)["metadata"]["annotations"]
        containers = [*pod.get("initContainers", ()), *pod["containers"]]
        there = {one["name"] for one in containers}
        mounted = [one["name"] for container in containers for one in container.get("volumeMounts", ())]
        asked = {one["name"] for each in containers for one in each.get("resources", {}).get("claims", ())}
        annotated = {key.partition("/")[2].partition(".")[2] for key in notes if key.startswith("devices.gke.io/")}
        work = submission.body["items"][-1]["spec"]
        job = work["replicatedJobs"][0]["template"]["spec"] if "replicatedJobs" in work else work
        rules = [rule.get("onExitCodes", {}) for rule in job["podFailurePolicy"]["rules"]]
        assert len(there) == len(containers), options
        assert annotated | {rule["containerName"] for rule in rules if rule} <= there, options
        assert {one["name"] for one in pod["volumes"]} == set(mounted), options
        assert asked == {one["name"] for one in pod.get("resourceClaims", ())}, options
        assert all("@sha256:" in one["image"] or re.search(r":v?\d", one["image"]) for one in containers), options
        assert pod.get("dnsPolicy") == ("ClusterFirstWithHostNet" if pod.get("hostNetwork") else None), options
        if machine is not None:
            assert set(machine.taints) <= {one["key"] for one in pod["tolerations"]}, options
        if text := notes.get("networking.gke.io/interfaces"):
            attached = {one["interfaceName"]: one["network"] for one in json.loads(text)}
            expected = json.loads(variables_of(submission)["LITGPT_NETWORK"])["interfaces"]
            assert attached["eth0"] == "default", options
            assert len(set(attached.values())) == len(attached), options
            assert set(expected) <= set(attached), options


def test_everything_that_is_created_has_the_labels_of_its_attempt() -> None:
    for options in EVERYTHING:
        submission = rendered(options)
        objects = [*(item["metadata"] for item in submission.body["items"]), pod_of(submission)["metadata"]]
        for metadata in objects:
            wanted = {"train-litgpt/run": "owt-0123456789", "train-litgpt/attempt": "1"}
            assert wanted.items() <= metadata["labels"].items(), options


def test_no_pod_gets_a_token_of_the_clusters_api() -> None:
    """A user's script could start pods with it. Workload Identity needs none."""
    for options in EVERYTHING:
        assert pod_of(rendered(options))["spec"]["automountServiceAccountToken"] is False, options


def test_a_node_keeps_no_capability_that_its_network_does_not_need() -> None:
    for options in EVERYTHING:
        template, network = pod_of(rendered(options))["spec"], options.get("network", "plain")
        wanted = {"plain": [], "tcpxo": ["DAC_OVERRIDE"]}.get(network, ["IPC_LOCK", "DAC_OVERRIDE"])
        for container in [*template.get("initContainers", ()), *template["containers"]]:
            security = container.get("securityContext", {})
            if security.get("privileged"):
                assert (template.get("hostNetwork"), network == "plain") == (True, False), options
            elif container["name"] == "node":
                assert security["allowPrivilegeEscalation"] is False, options
                assert security["seccompProfile"] == {"type": "RuntimeDefault"}, options
                assert security["capabilities"] == {"drop": ["ALL"], **({"add": wanted} if wanted else {})}, options


def test_a_node_is_root_where_its_network_needs_it_and_nowhere_else() -> None:
    user = {"runAsNonRoot": True, "runAsUser": 1000, "runAsGroup": 1000}
    for options in EVERYTHING:
        submission, plain = rendered(options), options.get("network", "plain") == "plain"
        of_pod, of_node = pod_of(submission)["spec"].get("securityContext", {}), node_of(submission)["securityContext"]
        assert {name: of_pod[name] for name in user if name in of_pod} == (user if plain else {}), options
        assert of_node.get("runAsUser", 1000) == (1000 if plain else 0), options
        writable = {one["mountPath"] for one in node_of(submission)["volumeMounts"]}
        assert ("/tmp" in writable) == bool(of_node.get("readOnlyRootFilesystem")) == plain, options


def test_the_image_is_read_only_for_our_own_training_and_a_script_of_the_users_may_write_beside_itself() -> None:
    platform = configured({"cpus": "4", "memory": "8Gi"})
    script = GkePlatform(platform).render(replace(training(platform), program=("train.py",)))
    assert "readOnlyRootFilesystem" not in node_of(script)["securityContext"]
    assert variables_of(script)["USER"] == "trainer"
    assert "HOME" not in variables_of(script), "the image's home may hold a model or a token"
    assert variables_of(rendered({"cpus": "4", "memory": "8Gi"}))["HOME"] == "/tmp"


def test_pods_take_connections_of_their_own_attempt_alone() -> None:
    for options in [*EVERYTHING, {**PLAIN, "network_policy": False}]:
        submission = rendered(options)
        policies = [one for one in submission.body["items"] if one["kind"] == "NetworkPolicy"]
        if options.get("host_network") or not options.get("network_policy", True):
            assert policies == []
            continue
        (policy,) = policies
        labels = policy["spec"]["podSelector"]["matchLabels"]
        assert labels.items() <= pod_of(submission)["metadata"]["labels"].items()
        assert labels == {"train-litgpt/run": "owt-0123456789", "train-litgpt/attempt": "1"}
        assert policy["spec"]["policyTypes"] == ["Ingress"]
        assert policy["spec"]["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]


# --- the job ----------------------------------------------------------------------------------------------------------


def test_a_fault_that_comes_back_ends_the_jobset_and_anything_else_restarts_it_so_many_times() -> None:
    policy = rendered(PLAIN).body["items"][-1]["spec"]["failurePolicy"]
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
        matching = [
            rule["name"]
            for rule in policy["rules"]
            if any(re.search(one, message) for one in rule["onJobFailureMessagePatterns"])
        ]
        assert matching[:1] == ([name] if name else []), message
    assert [rule["action"] for rule in policy["rules"]] == ["FailJobSet"]
    assert policy["maxRestarts"] == 1


def test_no_pod_of_the_next_life_starts_before_the_last_one_of_this_is_gone() -> None:
    """Two pods of one node would write over each other's checkpoints."""
    jobset = rendered(PLAIN).body["items"][-1]["spec"]
    assert jobset["failurePolicy"]["restartStrategy"] == "BlockingRecreate"
    job = rendered({**PLAIN, "workload": "job"}).body["items"][-1]["spec"]
    assert (job["backoffLimit"], job["podReplacementPolicy"]) == (0, "Failed")


def test_an_attempt_avoids_the_machines_of_the_config_and_its_own() -> None:
    platform = configured({**PLAIN, "exclude_nodes": ("gke-a", "gke-b")})
    submission = GkePlatform(platform).render(replace(training(platform), exclude_nodes=("gke-b", "gke-c")))
    terms = pod_of(submission)["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    rule = terms["nodeSelectorTerms"][0]["matchExpressions"][0]
    assert (rule["operator"], rule["values"]) == ("NotIn", ["gke-a", "gke-b", "gke-c"])


@pytest.mark.parametrize("workload", ["jobset", "job"])
def test_node_0_is_found_under_the_name_that_the_controller_gives_it(workload: str) -> None:
    submission = rendered({**PLAIN, "workload": workload})
    command = node_of(submission)["command"]
    host = command[command.index("--master") + 1].rpartition(":")[0]
    name = submission.body["items"][-1]["metadata"]["name"]
    assert host == (f"{name}-nodes-0-0.{name}" if workload == "jobset" else f"{name}-0.{name}")
    if workload == "job":
        (service,) = (one for one in submission.body["items"] if one["kind"] == "Service")
        assert service["metadata"]["name"] == pod_of(submission)["spec"]["subdomain"] == name
        assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": name}


@settings(max_examples=50)
@given(word=st.text(alphabet="$()ab \n'\"é", max_size=12), workload=st.sampled_from(["jobset", "job"]))
def test_a_program_gets_its_words_as_they_are(word: str, workload: str) -> None:
    """Kubernetes would expand `$(NAME)` in commands and values; here nobody means that."""
    platform = configured({"workload": workload, "claim": "shared"})
    job = replace(training(platform), program=("script.py", word), env={"WORD": word})
    submission = GkePlatform(platform).render(job)
    assert expand(node_of(submission)["command"][-1], {"a": "expanded"}) == word
    assert expand(variables_of(submission)["WORD"], {"a": "expanded"}) == word


def test_a_job_of_a_thousand_nodes_is_no_larger() -> None:
    assert len(str(rendered({**TCPXO, "nodes": 1000}))) - len(str(rendered(TCPXO))) < 100


def test_names_that_do_not_fit_are_refused_with_what_would() -> None:
    platform = configured({**PLAIN, "nodes": 1000})
    job = replace(training(platform), name="a-name-of-thirty-two-characters0-0123456789", attempt=11)
    with pytest.raises(ConfigProblem, match=r"names of 64 characters.*takes 63.*1 characters shorter"):
        GkePlatform(platform).render(job)
    GkePlatform(platform).render(replace(job, attempt=9))


# --- what the node is told --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reported", "nics"),
    [(TCPX, "GPUDirectTCPX_v7", 5), (TCPXO, "FasTrak", 9), (GIB, "gIB", 9), (A4X, "gIB", 5), (PLAIN, None, 0)],
)
def test_the_node_knows_what_its_network_has_to_be(options: Options, reported: str, nics: int) -> None:
    node = NodeNetwork.model_validate_json(variables_of(rendered(options))["LITGPT_NETWORK"])
    assert (node.name, node.nccl_net) == (options.get("network", "plain"), reported)
    assert (node.gpus, len(node.interfaces)) == (MACHINES[options["machine"]].gpus, nics)


def test_the_dataset_is_staged_or_mounted_never_both() -> None:
    copied, mounted = rendered(PLAIN), rendered(FUSE)
    assert "--stage" in node_of(copied)["command"]
    assert "LITGPT_DATASET" not in variables_of(copied)
    assert "--stage" not in node_of(mounted)["command"]
    assert variables_of(mounted)["LITGPT_DATASET"] == "/gcs/bucket/pretraining/datasets/owt-9876543210"
    (bucket,) = (one["name"] for one in node_of(mounted)["volumeMounts"] if one["mountPath"] == "/gcs/bucket")
    on_host = {one["name"]: one for one in pod_of(rendered({**FUSE, "host_network": True}))["spec"]["volumes"]}
    assert on_host[bucket]["csi"]["volumeAttributes"]["hostNetworkPodKSA"] == "true"
    platform = configured({**FUSE, "claim": "shared"})
    with pytest.raises(ConfigProblem, match=r"is in none; take platform.stage=copy"):
        GkePlatform(platform).render(training(platform))
