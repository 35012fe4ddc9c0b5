"""Network profiles: what is chosen is what was released together, and everything names its source."""

from __future__ import annotations

import pytest

from launcher.errors import ConfigProblem
from launcher.machines import MACHINES, Machine
from launcher.networks import NETWORKS, gib, networks_of, open_network, tcpx, tcpxo
from launcher.networks.profile import Choice, NetworkCapability
from litgpt_demo.node.network import NcclFit, check_nccl_version

HIGH = Choice(machine=MACHINES["a3-highgpu-8g"])
MEGA = Choice(machine=MACHINES["a3-megagpu-8g"])
ULTRA = Choice(machine=MACHINES["a3-ultragpu-8g"])
A4X = Choice(machine=MACHINES["a4x-highgpu-4g"])
DIGEST = "@sha256:" + 64 * "0"


@pytest.mark.parametrize("pair", tcpx.PAIRS, ids=lambda pair: pair.plugin)
def test_a_plugin_brings_the_daemon_it_was_released_with(pair: tcpx.Pair) -> None:
    made = open_network("tcpx", HIGH, network_plugin=pair.plugin, network_install="pod")
    images = [one["image"].rsplit(":", 1)[-1] for one in made.init_containers]
    assert images == [pair.plugin, pair.daemon]


def test_plugins_before_june_2026_have_their_own_variables() -> None:
    new = {one.name: one.value for one in open_network("tcpx", HIGH).environment}
    old = {one.name: one.value for one in open_network("tcpx", HIGH, network_plugin="v3.1.9").environment}
    assert (new["NCCL_ALGO"], old["NCCL_ALGO"]) == ("Ring,Tree", "Ring")
    assert old.keys() - new.keys() >= {"NCCL_MAX_NCHANNELS", "NCCL_GPUDIRECTTCPX_FORCE_ACK"}


@pytest.mark.parametrize(
    ("daemon", "flags", "probed"),
    [
        ("v1.0.21", "--num_hops=2", True),
        ("v1.0.18", "--num_hops=2 --num_nics=8", True),
        ("v1.0.13_1", "--num_hops=2 --num_nics=8 --uid= --alsologtostderr", True),
        ("v1.0.10", "--num_hops=2 --num_nics=8 --uid= --alsologtostderr", False),
    ],
)
def test_a_tcpxo_daemon_gets_the_flags_of_its_release(daemon: str, flags: str, probed: bool) -> None:
    pair = next(pair for pair in tcpxo.PAIRS if pair.daemon == daemon)
    container = tcpxo.daemon(pair, "registry.example/daemon:1", privileged=False)
    assert container["command"][-1].endswith(f"exec /fts/entrypoint_rxdm_container.sh {flags}")
    assert ("startupProbe" in container) is probed


@pytest.mark.parametrize(
    ("network", "choice", "options", "message"),
    [
        ("tcpx", HIGH, {"network_plugin": "latest"}, "network_plugin=latest is another build each time"),
        ("tcpxo", MEGA, {"network_daemon": f"my.example/daemon:latest@sha256:{64 * '0'}"}, "network_daemon=latest"),
        ("tcpx", HIGH, {"network_plugin": "v9.9.9"}, "no tcpx release that we know.*give platform.network_daemon too"),
        ("tcpx", MEGA, {}, "network=tcpx, which a a3-megagpu-8g has not got; take tcpxo or plain"),
        ("tcpxo", Choice(), {}, "belongs to particular machines"),
        ("ethernet", HIGH, {}, "'ethernet' is no network; there are plain, gib"),
    ],
)
def test_what_is_not_to_be_had_is_refused(network: str, choice: Choice, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigProblem, match=message):
        open_network(network, choice, **options)


@pytest.mark.parametrize(
    ("network", "choice", "options", "first"),
    [
        ("tcpx", HIGH, {"network_registry": "mirror.example:5000/google"}, "mirror.example:5000/google/gce-ai-infra/"),
        ("tcpxo", MEGA, {"network_plugin": f"my.example/own:v1.0.14{DIGEST}"}, f"my.example/own:v1.0.14{DIGEST}"),
        ("gib", ULTRA, {"network_registry": "mirror.example"}, "mirror.example/gce-ai-infra/gpudirect-gib/"),
        ("gib", A4X, {}, f"{gib.ARM_IMAGE}:"),
    ],
)
def test_images_come_from_a_mirror_or_are_the_users_own_and_are_for_the_processor(
    network: str, choice: Choice, options: dict[str, str], first: str
) -> None:
    made = open_network(network, choice, network_install="pod", **options)
    assert made.init_containers[0]["image"].startswith(first)
    daemons = [one["image"] for one in made.init_containers[1:]]
    known = [one["image"] for one in open_network(network, choice, network_install="pod").init_containers[1:]]
    mirrored = options.get("network_registry", "")
    assert all(image.startswith(mirrored) for image in daemons)
    assert len(daemons) == len(known)


def test_a_whole_image_is_qualified_as_the_known_release_that_its_tag_names() -> None:
    known = open_network("tcpxo", MEGA, network_plugin="v1.0.14")
    own = open_network("tcpxo", MEGA, network_plugin=f"my.example/own/plugin:v1.0.14{DIGEST}")
    assert (own.pair, own.node.nccl_versions) == (known.pair, known.node.nccl_versions)
    patched = {"network_plugin": "my.example/own/plugin:patched", "network_daemon": "my.example/own/daemon:patched"}
    assert open_network("tcpxo", MEGA, **patched).node.nccl_versions == ()


def test_sending_and_receiving_threads_leave_each_other_and_the_ranks_alone() -> None:
    def cores(text: str) -> set[int]:
        ranges = [one.split("-") for one in text.split(",")]
        return {core for first, last in ranges for core in range(int(first), int(last) + 1)}

    sending, receiving = (dict(one.split(":") for one in text.split(";")) for text in (tcpx.TX, tcpx.RX))
    for interface in sending:
        assert not cores(sending[interface]) & cores(receiving[interface])
        assert not (cores(sending[interface]) | cores(receiving[interface])) & cores(tcpx.FREE_CORES)


def machine_of(network: str) -> Machine | None:
    return next((one for one in MACHINES.values() if network in networks_of(one)), None)


@pytest.mark.parametrize("network", NETWORKS)
def test_every_value_names_its_source_and_a_floor_is_between_plain_sockets_and_the_best(network: str) -> None:
    made = open_network(network, Choice(machine=machine_of(network), carries=frozenset(NetworkCapability)))
    assert [one.name for one in (*made.environment, *made.scripted) if not one.source.startswith("https://")] == []
    assert made.node.floor(1) is None
    if measured := {"tcpx": (20, 66), "tcpxo": (4, 318), "roce": (3.75, 15.3)}.get(network):  # GB/s
        assert measured[0] * 1.5 < (made.node.floor(2) or 0) < measured[1] * 0.7


def test_every_machine_has_the_networks_it_names_and_says_where_that_was_read() -> None:
    for machine in MACHINES.values():
        assert machine.sources
        assert all(source.startswith("https://") for source in (*machine.sources, machine.gpu.source))
        for network in networks_of(machine):
            made = open_network(network, Choice(machine=machine))
            assert len([name for name in made.node.interfaces if name != "eth0"]) in {0, machine.nics}


@pytest.mark.parametrize(
    ("network", "choice", "nccl", "fit"),
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
    network: str, choice: Choice, nccl: str, fit: NcclFit
) -> None:
    options = {"network_plugin": "v1.1.2"} if choice is A4X else {}
    assert open_network(network, choice, **options).node.nccl_fit(nccl) is fit


@pytest.mark.parametrize(
    ("network", "choice", "nccl", "severities"),
    [("tcpxo", MEGA, "2.29.7", ["error", "warning"]), ("tcpx", HIGH, "2.21.5", ["error", "error"])],
)
def test_an_unqualified_nccl_is_refused_until_the_user_takes_the_risk_and_one_that_fails_always(
    network: str, choice: Choice, nccl: str, severities: list[str]
) -> None:
    found = [
        check_nccl_version(open_network(network, choice, **options).node, nccl, owner="the image's torch")
        for options in ({}, {"allow_unqualified_nccl": True})
    ]
    assert [(one.severity, one.code) for (one,) in found] == [(severity, "nccl.version") for severity in severities]
