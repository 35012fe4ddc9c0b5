"""Network profiles: what is chosen is what was released together, and everything names its source."""

import pytest
from pydantic import ValidationError

from launcher.errors import ConfigProblem
from launcher.machines import MACHINES
from launcher.networks import NETWORKS, networks_of, tcpx
from launcher.networks.profile import Carrier, Network, NetworkContext
from launcher.platforms.kubernetes.settings import KubernetesPlatformConfig
from litgpt_demo.node.network import NcclFit

NAMES = ("a3-highgpu-8g", "a3-megagpu-8g", "a3-ultragpu-8g", "a4x-highgpu-4g")
HIGH, MEGA, ULTRA, A4X = (NetworkContext(machine=MACHINES[name]) for name in NAMES)
DIGEST = "@sha256:" + 64 * "0"


def make_network(name: str, context: NetworkContext, **options: str) -> Network:
    return NETWORKS[name].make(context, NETWORKS[name].settings[Carrier.PODS].model_validate(options))


def test_a_plugin_brings_the_daemon_it_was_released_with() -> None:
    for pair in tcpx.PAIRS:
        made = make_network("tcpx", HIGH, network_plugin=pair.plugin, network_install="pod")
        assert [container["image"].rsplit(":", 1)[-1] for container in made.init_containers] == [
            pair.plugin,
            pair.daemon,
        ]


@pytest.mark.parametrize(
    ("network", "machine", "options", "message"),
    [
        ("tcpx", "a3-highgpu-8g", {"network_plugin": "latest"}, "network_plugin=latest changes over time"),
        ("tcpxo", "a3-megagpu-8g", {"network_daemon": f"my.example/d:latest{DIGEST}"}, "network_daemon=latest"),
        ("tcpx", "a3-highgpu-8g", {"network_plugin": "v9.9.9"}, "unknown tcpx release.*platform.network_daemon too"),
        ("tcpx", "a3-megagpu-8g", {}, "=a3-megagpu-8g has no hardware for it; set it to tcpxo or tcp"),
        ("tcpxo", None, {}, "works only on certain machines"),
        ("ethernet", "a3-highgpu-8g", {}, "'tcp', 'gib'"),
    ],
)
def test_unavailable_network_is_refused(network: str, machine: str, options: dict[str, str], message: str) -> None:
    with pytest.raises((ConfigProblem, ValidationError), match=message):
        _ = KubernetesPlatformConfig.model_validate(
            {"kind": "kubernetes", "network": network, "machine": machine, **options}
        ).fabric


def test_image_is_qualified_as_the_release_of_its_tag() -> None:
    known = make_network("tcpxo", MEGA, network_plugin="v1.0.14")
    own = make_network("tcpxo", MEGA, network_plugin=f"my.example/own/plugin:v1.0.14{DIGEST}")
    assert (own.pair, own.node.nccl_versions) == (known.pair, known.node.nccl_versions)
    patched = {"network_plugin": "my.example/own/plugin:patched", "network_daemon": "my.example/own/daemon:patched"}
    assert make_network("tcpxo", MEGA, **patched).node.nccl_versions == ()


def test_machines_and_network_values_have_sources() -> None:
    for machine in MACHINES.values():
        assert machine.sources
        assert all(source.startswith("https://") for source in machine.sources)
        for network in networks_of(machine):
            made = make_network(network, NetworkContext(machine=machine))
            assert len([name for name in made.node.interfaces if name != "eth0"]) in {0, machine.nics}
            values = (*made.environment, *made.scripted)
            assert [value.name for value in values if not value.source.startswith("https://")] == []


@pytest.mark.parametrize(
    ("network", "context", "nccl", "fit"),
    [
        ("tcpx", HIGH, "2.19.3", NcclFit.QUALIFIED),
        ("tcpx", HIGH, "2.21.5", NcclFit.FAILS),
        ("tcpxo", MEGA, "2.28.9", NcclFit.QUALIFIED),
        ("tcpxo", MEGA, "2.30.7", NcclFit.UNQUALIFIED),
        ("gib", ULTRA, "2.29.7", NcclFit.UNSTATED),
        ("gib", A4X, "2.24.3", NcclFit.UNQUALIFIED),
    ],
)
def test_a_network_judges_an_nccl_by_what_its_publisher_tested(
    network: str, context: NetworkContext, nccl: str, fit: NcclFit
) -> None:
    options = {"network_plugin": "v1.1.2"} if context is A4X else {}
    assert make_network(network, context, **options).node.nccl_fit(nccl) is fit
