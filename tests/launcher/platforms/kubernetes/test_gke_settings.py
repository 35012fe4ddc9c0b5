"""What a `platform: {kind: gke}` section may say, and where every variable of a node comes from."""

from dataclasses import replace
from typing import Any

import pytest

from launcher.config import ScriptConfig, validated
from launcher.errors import ConfigProblem
from launcher.job import Job, Submission
from launcher.platforms.kubernetes.platform import GkePlatform
from launcher.platforms.kubernetes.preflight import check_settings
from launcher.platforms.kubernetes.settings import GkePlatformConfig
from litgpt_demo.errors import Finding

JOB = Job(
    name="owt-01", attempt=1, nodes=2, processes=8, program=("-m", "x"), directory="gs://b/runs/owt-01/attempts/1",
    image="registry/train@sha256:" + 64 * "0",
)  # fmt: skip
TCPX = {"machine": "a3-highgpu-8g", "network": "tcpx"}
TCPXO = {"machine": "a3-megagpu-8g", "network": "tcpxo"}


def config(script: str = "-m x", **options: Any) -> ScriptConfig:
    return validated(ScriptConfig, {"script": script, "platform": {"kind": "gke", **options}}, where="here")


def rendered(options: dict[str, Any], **changes: Any) -> Submission:
    return GkePlatform(config(nodes=2, **options).platform).render(replace(JOB, **changes))


def found(options: dict[str, Any], **changes: Any) -> dict[str, Finding]:
    """Findings of the settings by code."""
    settings = GkePlatformConfig.model_validate({"kind": "gke", "nodes": 2, **options})
    return {one.code: one for one in check_settings(settings, rendered(options, **changes).body["items"])}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"machine": "a3-highgpu-8"}, "'a3-highgpu-8' is not in the table.*did you mean a3-highgpu-8g"),
        ({"machine": "a3-highgpu-8g", "processes": 16}, "has 8 GPUs, and ranks cannot share one"),
        ({"network_registry": "google"}, "network_registry: 'google' given"),  # somebody's folder on Docker Hub
        ({"cluster": "mine", "location": "x", "kubeconfig": "k"}, "different ways to a cluster; keep one"),
        ({"secrets": {"KEY": "the key itself"}}, r"secrets\.KEY"),
    ],
)
def test_what_cannot_be_is_refused_with_what_would(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigProblem, match=message):
        config(**options)


def test_a_folder_that_other_nodes_do_not_see_is_refused_and_one_in_the_claim_is_not() -> None:
    directory = "/data/runs/owt-01/attempts/1"
    assert found({}, directory=directory).keys() == {"gke.root-not-shared"}
    assert found({"claim": "nfs", "claim_path": "/data"}, directory=directory) == {}


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"uid": 0}, "gke.root"),
        ({"spot": True, "grace": 60}, "gke.spot-grace"),
        ({"host_network": True, "service_account": "trainer"}, "gke.host-network-identity"),
    ],
)
def test_what_may_be_wished_for_and_does_not_end_well_is_a_warning(options: dict[str, Any], code: str) -> None:
    assert {code: one.severity for code, one in found(options).items()} == {code: "warning"}


def test_names_that_only_the_site_knows_have_to_be_given() -> None:
    roce = {"gpus": 8, "network": "roce"}
    given = {**roce, "roce_resource": "rdma/shared", "roce_network": "rails/a"}
    lacking, without_need = found(roce), found({**given, "host_network": True})
    assert lacking.keys() == {"network.roce-network", "network.roce-resource"}
    assert found(given) == {}
    assert "leave out platform.roce_network" in without_need["network.roce-network"].fix


# --- variables --------------------------------------------------------------------------------------------------------


def told(options: dict[str, Any], **env: str) -> dict[str, dict[str, str]]:
    return {row["variable"]: dict(row) for row in rendered(options, env=env).environment}


def test_every_variable_says_which_profile_platform_user_or_job_it_came_from_and_why() -> None:
    rows = told({**TCPXO, "overrides": {"NCCL_DEBUG": "WARN", "NCCL_BUFFSIZE": "1"}}, MY_FLAG="1", NCCL_BUFFSIZE="1")
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
        (TCPX, {"NCCL_NET": "Socket"}, r"the network profile.*set it in platform.overrides"),
        (TCPXO, {"NCCL_BUFFSIZE": "1"}, r"a script of the network profile sets NCCL_BUFFSIZE=8388608"),
        (TCPX, {"LITGPT_ATTEMPT": "x"}, r"the launcher sets LITGPT_ATTEMPT.*leave it out of env"),
        ({**TCPX, "overrides": {"A": "1"}}, {"A": "2"}, r"platform.overrides sets A=1"),
        ({**TCPX, "overrides": {"LITGPT_NETWORK": "{}"}}, {}, r"platform.overrides sets LITGPT_NETWORK"),
        (TCPX, {"not a name": "1"}, r"'not a name' cannot be an environment variable"),
    ],
)
def test_variables_that_disagree_are_refused(options: dict[str, Any], env: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigProblem, match=message):
        told(options, **env)


def test_a_secret_is_read_from_the_cluster_and_only_its_name_is_shown() -> None:
    options = {"secrets": {"WANDB_API_KEY": "loggers/wandb"}}
    entry = told(options)["WANDB_API_KEY"]
    assert (entry["value"], entry["from"], "loggers/wandb" in entry["why"]) == ("", "user", True)
    assert "secretKeyRef:" in str(rendered(options))
