"""The networks of Slurm's nodes, which are machines with all of their cards."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from services.slurm_cluster import SlurmCluster
from waiting import until

from launcher.job import Job
from launcher.platforms.slurm.platform import SlurmPlatform
from launcher.platforms.slurm.settings import SlurmPlatformConfig
from launcher.runs.diagnosis import diagnose
from litgpt_demo.errors import EXIT_CODES, Fault
from litgpt_demo.node.network import job_network


def settings_of(**settings: Any) -> SlurmPlatformConfig:
    venv = {"kind": "venv", "path": sys.prefix}
    return SlurmPlatformConfig.model_validate({"kind": "slurm", "nodes": 2, "environment": venv, **settings})


def variables(settings: SlurmPlatformConfig, job: Job) -> dict[str, str]:
    """Return the variables that the script exports."""
    return {row["variable"]: row["value"] for row in SlurmPlatform(settings).render(job).environment}


@pytest.mark.parametrize(("name", "link", "prefix"), [("ib", "InfiniBand", ""), ("roce", "Ethernet", "mlx5")])
def test_nodes_are_told_the_network_and_to_prove_it(
    job_of: Callable[..., Job], name: str, link: str, prefix: str
) -> None:
    told = variables(settings_of(network=name), job_of("true"))
    network = job_network(told)
    assert (network.name, network.nccl_net, network.link, network.hca) == (name, "IB", link, prefix)
    assert (told["NCCL_DEBUG"], told["NCCL_DEBUG_SUBSYS"]) == ("INFO", "INIT,NET")
    assert "NCCL_IB_GID_INDEX" not in told


def test_the_cards_of_a_machine_need_no_attachment_but_may_be_named(job_of: Callable[..., Job]) -> None:
    settings = settings_of(network="roce", roce_interface="rdma0,rdma1")
    assert job_network(variables(settings, job_of("true"))).interfaces == ("rdma0", "rdma1")


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({"network": "roce", "roce_resource": "rdma/rdma"}, id="a pod's resource"),
        pytest.param({"network": "roce", "roce_network": "kube-system/roce"}, id="a pod's attachment"),
        pytest.param({"network": "ib", "roce_interface": "rdma0"}, id="another network's option"),
        pytest.param({"network": "tcpx"}, id="a network of other machines"),
    ],
)
def test_what_means_nothing_on_machines_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        settings_of(**settings)


def test_a_node_without_infiniband_says_what_it_has_and_is_to_blame(
    slurm: SlurmCluster, job_of: Callable[..., Job], tmp_path: Path
) -> None:
    if any(Path("/sys/class/infiniband").glob("*/ports/*")):
        pytest.skip("this machine has RDMA cards")
    script = tmp_path / "script.py"
    script.write_text("print(1)")
    platform = SlurmPlatform(settings_of(network="ib", gate=0, grace=2), settle=0)
    job_id = platform.submit(platform.render(job_of(str(script))))
    until(lambda: not platform.status(job_id).state.live, seconds=120)
    done = platform.status(job_id)
    assert set(done.exit_codes.values()) == {EXIT_CODES[Fault.NODE]}
    told = "\n".join(line.text for line in platform.logs(job_id).lines)
    assert "platform.network=ib, and no InfiniBand port is active on this node; it has no RDMA card at all" in told
    assert diagnose(done, (), (), logs=told, nodes=2).fault is Fault.NODE
