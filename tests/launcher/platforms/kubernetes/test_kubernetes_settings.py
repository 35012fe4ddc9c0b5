"""What a `platform: {kind: kubernetes}` section may say, and where every variable of a node comes from."""

from dataclasses import replace
from typing import Any

import pytest

from launcher.config import ScriptConfig, validated
from launcher.errors import ConfigProblem
from launcher.job import Job, Submission
from launcher.platforms.kubernetes.platform import KubernetesPlatform
from launcher.platforms.kubernetes.preflight import check_settings
from launcher.platforms.kubernetes.settings import KubernetesPlatformConfig
from litgpt_demo.errors import Finding

JOB = Job(
    name="owt-01", attempt=1, nodes=2, processes=8, program=("-m", "x"), directory="gs://b/runs/owt-01/attempts/1",
    image="registry/train@sha256:" + 64 * "0",
)  # fmt: skip
TCPX = {"machine": "a3-highgpu-8g", "network": "tcpx"}
TCPXO = {"machine": "a3-megagpu-8g", "network": "tcpxo"}


def config(script: str = "-m x", **options: Any) -> ScriptConfig:
    return validated(ScriptConfig, {"script": script, "platform": {"kind": "kubernetes", **options}}, where="here")


def rendered(options: dict[str, Any], **changes: Any) -> Submission:
    return KubernetesPlatform(config(nodes=2, **options).platform).render(replace(JOB, **changes))


def found(options: dict[str, Any], **changes: Any) -> dict[str, Finding]:
    """Findings of the settings by code."""
    settings = KubernetesPlatformConfig.model_validate({"kind": "kubernetes", "nodes": 2, **options})
    return {finding.code: finding for finding in check_settings(settings, rendered(options, **changes).body["items"])}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"machine": "a3-highgpu-8"}, "'a3-highgpu-8' is not in the table.*did you mean a3-highgpu-8g"),
        ({"machine": "a3-highgpu-8g", "processes_per_node": 16}, "has 8 GPUs, and ranks cannot share one"),
        ({"network_registry": "google"}, "network_registry: 'google' given"),  # somebody's folder on Docker Hub
        ({"in_cluster": True, "kubeconfig": "k"}, "different ways to a cluster; keep one"),
        ({"cluster": "mine", "location": "x"}, "platform.cluster belongs to a GKE cluster; set platform.kind=gke"),
        ({"kind": "gke", "cluster": "mine"}, "set platform.kind=kubernetes for another cluster"),
        ({"kind": "gke", "kubeconfig": "k"}, "set platform.kind=kubernetes for another cluster"),
        ({"secrets": {"KEY": "the key itself"}}, r"secrets\.KEY"),
    ],
)
def test_invalid_settings_are_refused_with_a_fix(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigProblem, match=message):
        config(**options)


def test_both_kinds_render_the_same() -> None:
    google = {"kind": "gke", "cluster": "c", "location": "l"}
    by_name, by_kubeconfig = rendered({**TCPX, **google}), rendered(TCPX)
    assert (by_name.platform, by_kubeconfig.platform) == ("gke", "kubernetes")
    assert replace(by_name, platform="kubernetes") == by_kubeconfig


def test_root_that_nodes_do_not_share_is_refused() -> None:
    """A folder in the PVC is accepted."""
    directory = "/data/runs/owt-01/attempts/1"
    assert found({}, directory=directory).keys() == {"kubernetes.root-not-shared"}
    assert found({"pvc": "nfs", "pvc_path": "/data"}, directory=directory) == {}


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"uid": 0}, "kubernetes.root"),
        ({"spot": True, "grace_period": 60}, "kubernetes.spot-grace"),
        ({"host_network": True, "service_account": "trainer"}, "kubernetes.host-network-identity"),
    ],
)
def test_risky_settings_are_warnings(options: dict[str, Any], code: str) -> None:
    assert {code: finding.severity for code, finding in found(options).items()} == {code: "warning"}


def test_names_of_the_site_are_required() -> None:
    roce = {"gpus": 8, "network": "roce"}
    complete = {**roce, "roce_resource": "rdma/shared", "roce_network": "rails/a"}
    lacking, without_need = found(roce), found({**complete, "host_network": True})
    assert lacking.keys() == {"network.roce-network", "network.roce-resource"}
    assert found(complete) == {}
    assert "leave out platform.roce_network" in without_need["network.roce-network"].fix


# --- variables --------------------------------------------------------------------------------------------------------


def told(options: dict[str, Any], **env: str) -> dict[str, dict[str, str]]:
    return {row["variable"]: dict(row) for row in rendered(options, env=env).environment}


def test_each_variable_has_its_origin_and_reason() -> None:
    rows = told({**TCPXO, "env": {"NCCL_DEBUG": "WARN", "NCCL_BUFFSIZE": "1"}}, MY_FLAG="1", NCCL_BUFFSIZE="1")
    assert {
        "LITGPT_ATTEMPT": "platform", "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY": "profile", "NCCL_DEBUG": "user",
        "MY_FLAG": "job", "NCCL_NVLSTREE_MAX_CHUNKSIZE": "script", "NCCL_BUFFSIZE": "user",
    }.items() <= {name: row["from"] for name, row in rows.items()}.items()  # fmt: skip
    assert "instead of INFO" in rows["NCCL_DEBUG"]["why"]
    assert rows["LD_LIBRARY_PATH"]["value"] == "/usr/local/nvidia/lib64:$LD_LIBRARY_PATH"
    assert all(row["why"] for row in rows.values())


@pytest.mark.parametrize(
    ("options", "env", "message"),
    [
        (TCPX, {"NCCL_NET": "Socket"}, r"the network profile.*set it in platform.env"),
        (TCPXO, {"NCCL_BUFFSIZE": "1"}, r"a script of the network profile sets NCCL_BUFFSIZE=8388608"),
        (TCPX, {"LITGPT_ATTEMPT": "x"}, r"the launcher sets LITGPT_ATTEMPT.*leave it out of env"),
        ({**TCPX, "env": {"A": "1"}}, {"A": "2"}, r"platform.env sets A=1"),
        ({**TCPX, "env": {"LITGPT_NETWORK": "{}"}}, {}, r"platform.env sets LITGPT_NETWORK"),
        (TCPX, {"not a name": "1"}, r"'not a name' cannot be an environment variable"),
    ],
)
def test_contradicting_variables_are_refused(options: dict[str, Any], env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigProblem, match=message):
        told(options, **env)


def test_secret_is_read_in_the_cluster_and_not_shown() -> None:
    options = {"secrets": {"WANDB_API_KEY": "loggers/wandb"}}
    entry = told(options)["WANDB_API_KEY"]
    assert (entry["value"], entry["from"], "loggers/wandb" in entry["why"]) == ("", "user", True)
    assert "secretKeyRef:" in str(rendered(options))
