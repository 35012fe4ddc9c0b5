"""What is sent to Kubernetes: golden files for every machine family, network, kind of job and network namespace."""

from __future__ import annotations

import itertools
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes_cluster.schemas import shape_troubles

from launcher.config import RunConfig, read_document, validated
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

# One machine of each family; a family is what shares a GPU and the networks.
FAMILIES = (
    "a3-highgpu-8g", "a3-megagpu-8g", "a3-ultragpu-8g", "a4-highgpu-8g", "a4x-highgpu-4g",
    "a2-highgpu-8g", "g2-standard-48", "n1-standard-8-t4", "n1-standard-8-v100",
)  # fmt: skip

MATRIX = {
    f"{machine}-{network}-{workload}{'-host' if on_host else ''}": {
        "machine": machine, "network": network, "workload": workload, "host_network": on_host,
    }
    for machine in FAMILIES
    for network in networks_of(MACHINES[machine])
    for workload, on_host in itertools.product(("jobset", "job"), (False, True))
}  # fmt: skip

VARIANTS: dict[str, dict[str, Any]] = {
    "any-cpu": {"cpus": "4", "memory": "8Gi", "claim": "shared"},
    "any-gpu": {"gpus": 2, "node_selector": {"gpu": "rtx"}, "workload": "job"},
    "tcpx-before-gke-1.34": {"machine": "a3-highgpu-8g", "network": "tcpx", "network_plugin": "v3.1.9"},
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
    "flex": {"machine": "a2-highgpu-8g", "flex_start": 3600},
    "fuse": {"machine": "g2-standard-48", "stage": "fuse", "service_account": "trainer"},
    "fuse-host": {"machine": "g2-standard-48", "stage": "fuse", "service_account": "trainer", "host_network": True},
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
SHIPPED = {f"config-{path.stem}": read_document(path)["platform"] for path in CONFIGS}


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


@pytest.fixture(params={**MATRIX, **VARIANTS, **SHIPPED}.items(), ids=lambda case: case[0])
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
    assert yaml.safe_load(text) == rendered(options).body


def test_no_golden_file_is_left_over() -> None:
    assert {path.stem for path in GOLDEN.glob("*.yaml")} == MATRIX.keys() | VARIANTS.keys() | SHIPPED.keys()


def test_the_api_knows_every_field_of_it(case: tuple[str, dict[str, Any]]) -> None:
    """Kubernetes' own schemas, strict; the JobSet's by its CRD, and the Job within it as one that stands alone."""
    for thing in rendered(case[1]).body["items"]:
        assert shape_troubles(thing) == []
        if thing["kind"] == "JobSet":
            template = thing["spec"]["replicatedJobs"][0]["template"]
            thing = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **template}
        if thing["kind"] != "ComputeDomain":  # no schema of it is published on its own
            kubernetes_validate.validate(thing, "1.37", strict=True)


def test_it_is_consistent(case: tuple[str, dict[str, Any]]) -> None:
    settings = configured(case[1])
    found = lint(GkePlatform(settings).render(training(settings)).body["items"], settings)
    assert [str(finding) for finding in found if finding.code != "gke.host-network-identity"] == []


def test_everything_that_is_created_has_the_labels_of_its_attempt(case: tuple[str, dict[str, Any]]) -> None:
    submission = rendered(case[1])
    objects = [*(item["metadata"] for item in submission.body["items"]), pod_of(submission)["metadata"]]
    for metadata in objects:
        wanted = {"train-litgpt/run": "owt-0123456789", "train-litgpt/attempt": "1"}
        assert wanted.items() <= metadata["labels"].items()


def test_only_what_the_host_network_needs_is_privileged(case: tuple[str, dict[str, Any]]) -> None:
    template = pod_of(rendered(case[1]))["spec"]
    for container in [*template.get("initContainers", ()), *template["containers"]]:
        privileged = container.get("securityContext", {}).get("privileged", False)
        assert not privileged or (template.get("hostNetwork") and case[1].get("network", "plain") != "plain")


def test_no_pod_gets_a_token_of_the_clusters_api(case: tuple[str, dict[str, Any]]) -> None:
    """A user's script could start pods with it. Workload Identity needs none."""
    assert pod_of(rendered(case[1]))["spec"]["automountServiceAccountToken"] is False


def test_a_node_keeps_no_capability_that_its_network_does_not_need(case: tuple[str, dict[str, Any]]) -> None:
    submission, fast = rendered(case[1]), case[1].get("network", "plain") != "plain"
    security = node_of(submission)["securityContext"]
    if not security.get("privileged"):
        assert security["allowPrivilegeEscalation"] is False
        wanted = {"add": ["IPC_LOCK"]} if fast else {"drop": ["ALL"]}
        assert security.get("capabilities", wanted if fast else None) == wanted


# --- the job ----------------------------------------------------------------------------------------------------------


def test_a_fault_that_comes_back_ends_the_jobset_and_a_preemption_is_not_counted() -> None:
    policy = rendered({"machine": "g2-standard-48"}).body["items"][0]["spec"]["failurePolicy"]
    # The Job controller's own words (KEP-262); what no rule matches is restarted, and counted.
    said = {
        "Pod default/x-0 has condition DisruptionTarget matching FailJob rule at index 0": "disrupted",
        "Container node for pod default/x-0 failed with exit code 45 matching FailJob rule at index 2": "preempted",
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
    actions = {rule["name"]: rule["action"] for rule in policy["rules"]}
    assert actions["hopeless"] == "FailJobSet"
    assert {actions["disrupted"], actions["preempted"]} == {"RestartJobSetAndIgnoreMaxRestarts"}


def test_no_pod_of_the_next_life_starts_before_the_last_one_of_this_is_gone() -> None:
    """Two pods of one node would write over each other's checkpoints."""
    jobset = rendered({"machine": "g2-standard-48"}).body["items"][0]["spec"]
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
        service = submission.body["items"][0]
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
