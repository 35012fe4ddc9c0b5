"""Network profiles: what is chosen is what was released together, and everything names its source."""

from __future__ import annotations

import pytest

from launcher.errors import ConfigProblem
from launcher.machines import MACHINES, Machine
from launcher.networks import NETWORKS, gib, networks_of, open_network, tcpx, tcpxo
from launcher.networks.profile import Choice, NetworkCapability
from launcher.platforms.kubernetes.lint import parse_bindings
from litgpt_demo.findings import Finding
from litgpt_demo.node.network import NcclFit, check_nccl_version

HIGH = Choice(machine=MACHINES["a3-highgpu-8g"])
MEGA = Choice(machine=MACHINES["a3-megagpu-8g"])
ULTRA = Choice(machine=MACHINES["a3-ultragpu-8g"])


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


def test_glibc_is_asked_for_from_the_release_on_that_needs_it() -> None:
    assert open_network("tcpxo", MEGA).node.glibc == "2.35"
    assert open_network("tcpxo", MEGA, network_plugin="v1.0.8-1").node.glibc is None


@pytest.mark.parametrize(
    ("network", "choice", "options", "message"),
    [
        ("tcpx", HIGH, {"network_plugin": "latest"}, "network_plugin=latest is another build each time"),
        ("tcpxo", MEGA, {"network_daemon": "latest"}, "network_daemon=latest"),
        ("tcpx", HIGH, {"network_plugin": "my.example/plugin:latest"}, "network_plugin=latest is another build"),
        ("tcpxo", MEGA, {"network_daemon": f"my.example/daemon:latest@sha256:{64 * '0'}"}, "network_daemon=latest"),
        ("tcpx", HIGH, {"network_plugin": "my.example/plugin:v9"}, "no tcpx release that we know"),
        ("tcpx", HIGH, {"network_plugin": "v9.9.9"}, "no tcpx release that we know.*give platform.network_daemon too"),
        ("tcpx", MEGA, {}, "network=tcpx, which a a3-megagpu-8g has not got; take tcpxo or plain"),
        ("tcpxo", Choice(), {}, "belongs to particular machines"),
        ("ethernet", HIGH, {}, "'ethernet' is no network; there are plain, gib"),
    ],
)
def test_what_is_not_to_be_had_is_refused(network: str, choice: Choice, options: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigProblem, match=message):
        open_network(network, choice, **options)


def test_a_release_that_we_do_not_know_is_taken_when_both_parts_are_named() -> None:
    made = open_network("tcpxo", MEGA, network_plugin="v1.0.17", network_daemon="v1.0.23")
    assert made.init_containers[0]["image"].endswith(":v1.0.23")
    assert made.node.nccl_versions == ()


DIGEST = "@sha256:" + 64 * "0"


@pytest.mark.parametrize(
    ("network", "choice", "options", "images"),
    [
        (
            "tcpx", HIGH, {"network_registry": "mirror.example:5000/google"},
            [
                "mirror.example:5000/google/gce-ai-infra/gpudirect-tcpx/nccl-plugin-gpudirecttcpx-dev:v3.1.12",
                "mirror.example:5000/google/gce-ai-infra/gpudirect-tcpx/tcpgpudmarxd-dev:v2.0.15",
            ],
        ),
        (
            "tcpxo", MEGA, {"network_plugin": f"my.example/own/plugin:v1.0.14{DIGEST}"},
            [
                f"my.example/own/plugin:v1.0.14{DIGEST}",
                "us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpxo/tcpgpudmarxd-dev:v1.0.20",
            ],
        ),
        (
            "tcpxo", MEGA, {"network_registry": "mirror.example", "network_daemon": "my.example/own/daemon:v1.0.21"},
            [
                "mirror.example/gce-ai-infra/gpudirect-tcpxo/nccl-plugin-gpudirecttcpx-dev:v1.0.15",
                "my.example/own/daemon:v1.0.21",
            ],
        ),
        (
            "gib", ULTRA, {"network_registry": "mirror.example"},
            ["mirror.example/gce-ai-infra/gpudirect-gib/nccl-plugin-gib:v1.1.1"],
        ),
    ],
)  # fmt: skip
def test_images_come_from_a_mirror_or_are_the_users_own(
    network: str, choice: Choice, options: dict[str, str], images: list[str]
) -> None:
    made = open_network(network, choice, network_install="pod", **options)
    newest = NETWORKS[network].pairs["amd64"][0].plugin
    wanted = [image.replace(":v1.1.1", f":{newest}") if network == "gib" else image for image in images]
    assert [one["image"] for one in made.init_containers] == wanted


def test_a_whole_image_is_qualified_as_the_known_release_that_its_tag_names() -> None:
    known = open_network("tcpxo", MEGA, network_plugin="v1.0.14")
    own = open_network("tcpxo", MEGA, network_plugin=f"my.example/own/plugin:v1.0.14{DIGEST}")
    assert (own.pair, own.node.nccl_versions) == (known.pair, known.node.nccl_versions)
    patched = {"network_plugin": "my.example/own/plugin:patched", "network_daemon": "my.example/own/daemon:patched"}
    assert open_network("tcpxo", MEGA, **patched).node.nccl_versions == ()


def test_the_installer_of_a_mirrored_plugin_is_known_by_each_of_its_names() -> None:
    options = {"network_registry": "mirror.example", "network_plugin": f"my.example/own/plugin:v3.1.12{DIGEST}"}
    installer = open_network("tcpx", HIGH, **options).installer
    assert installer is not None
    assert installer.images == (
        tcpx.PLUGIN_IMAGE,
        "mirror.example/gce-ai-infra/gpudirect-tcpx/nccl-plugin-gpudirecttcpx-dev",
        "my.example/own/plugin",
    )


def test_what_a_node_does_about_the_mtu_of_paths_is_tcpx_s_own_setting() -> None:
    assert not open_network("tcpx", HIGH).node.disable_pmtu
    assert open_network("tcpx", HIGH, disable_pmtu=True).node.disable_pmtu


def test_sending_and_receiving_threads_leave_each_other_and_the_ranks_alone() -> None:
    sending, receiving = parse_bindings(tcpx.TX), parse_bindings(tcpx.RX)
    free = set(parse_bindings(f"x:{tcpx.FREE_CORES}")["x"])
    for interface in sending:
        assert not set(sending[interface]) & set(receiving[interface])
        assert not (set(sending[interface]) | set(receiving[interface])) & free


def machine_of(network: str) -> Machine | None:
    return next((one for one in MACHINES.values() if network in networks_of(one)), None)


@pytest.mark.parametrize("network", NETWORKS)
def test_every_value_names_its_source(network: str) -> None:
    made = open_network(network, Choice(machine=machine_of(network)))
    assert [one.name for one in (*made.environment, *made.scripted) if not one.source.startswith("https://")] == []


@pytest.mark.parametrize("network", NETWORKS)
def test_a_floor_is_below_what_was_measured_and_above_plain_sockets(network: str) -> None:
    measured = {"tcpx": (20, 66), "tcpxo": (4, 318), "roce": (3.75, 15.3)}  # GB/s, plain and best
    choice = Choice(machine=machine_of(network), carries=frozenset(NetworkCapability))
    floor = open_network(network, choice).node.floor(2)
    if network in measured:
        low, high = measured[network]
        assert floor is not None
        assert low * 1.5 < floor < high * 0.7
    assert open_network(network, choice).node.floor(1) is None


def test_an_option_that_several_networks_have_is_one_setting() -> None:
    told: dict[str, set[str]] = {}
    for profile in NETWORKS.values():
        for name, field in profile.options.model_fields.items():
            told.setdefault(name, set()).add(repr(field))
    assert {name: texts for name, texts in told.items() if len(texts) > 1} == {}


def test_every_machine_has_the_networks_it_names_and_says_where_that_was_read() -> None:
    for machine in MACHINES.values():
        assert machine.sources
        assert all(source.startswith("https://") for source in (*machine.sources, machine.gpu.source))
        for network in networks_of(machine):
            made = open_network(network, Choice(machine=machine))
            assert len([name for name in made.node.interfaces if name != "eth0"]) in {0, machine.nics}
        if machine.price:
            assert machine.price.usd / machine.gpus < 20
            assert machine.price.date.count("-") == 2


def test_arm_machines_get_arm_plugins() -> None:
    made = open_network("gib", Choice(machine=MACHINES["a4x-highgpu-4g"]), network_install="pod")
    assert made.init_containers[0]["image"].startswith(gib.ARM_IMAGE + ":")
    installer = open_network("gib", Choice(machine=MACHINES["a4x-highgpu-4g"])).installer
    assert installer is not None
    assert installer.manifest.endswith("-a4x.yaml")


# --- which NCCL a plug-in works with ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "choice", "nccl", "fit"),
    [
        ("tcpx", HIGH, "2.19.3", NcclFit.QUALIFIED),
        ("tcpx", HIGH, "2.21.5", NcclFit.FAILS),
        ("tcpx", HIGH, "2.29.7", NcclFit.UNQUALIFIED),
        ("tcpxo", MEGA, "2.28.9", NcclFit.QUALIFIED),
        ("tcpxo", MEGA, "2.29.7", NcclFit.UNQUALIFIED),
        ("tcpxo", MEGA, "2.30.7", NcclFit.UNQUALIFIED),
        ("gib", ULTRA, "2.29.7", NcclFit.UNSTATED),
        ("plain", HIGH, "2.29.7", NcclFit.UNSTATED),
    ],
)
def test_a_network_judges_an_nccl_by_what_its_publisher_tested(
    network: str, choice: Choice, nccl: str, fit: NcclFit
) -> None:
    assert open_network(network, choice).node.nccl_fit(nccl) is fit


def test_gib_on_arm_says_which_nccl_and_which_driver_it_supports() -> None:
    node = open_network("gib", Choice(machine=MACHINES["a4x-highgpu-4g"]), network_plugin="v1.1.2").node
    assert (node.nccl_fit("2.25.1"), node.nccl_fit("2.24.3")) == (NcclFit.QUALIFIED, NcclFit.UNQUALIFIED)
    assert node.drivers == (">=580.95.05",)


def version_findings(network: str, choice: Choice, nccl: str, **options: object) -> list[Finding]:
    return list(check_nccl_version(open_network(network, choice, **options).node, nccl, owner="the image's torch"))


def test_an_unqualified_nccl_is_refused_until_the_user_takes_the_risk() -> None:
    (refused,) = version_findings("tcpxo", MEGA, "2.29.7")
    (risked,) = version_findings("tcpxo", MEGA, "2.29.7", allow_unqualified_nccl=True)
    assert (refused.severity, risked.severity) == ("error", "warning")
    assert "the image's torch has NCCL 2.29.7" in refused.what
    assert "qualified for >=2.28.7,<2.29" in refused.what
    assert "loads it, which is no proof that it works" in refused.what
    assert "platform.allow_unqualified_nccl" in refused.fix
    (unseen,) = version_findings("tcpxo", MEGA, "2.30.7")
    assert "is not known to load it" in unseen.what


def test_no_setting_allows_an_nccl_that_is_known_to_fail() -> None:
    (found,) = version_findings("tcpx", HIGH, "2.21.5", allow_unqualified_nccl=True)
    assert (found.severity, found.code) == ("error", "nccl.version")
    assert "known to fail with the tcpx plug-in" in found.what


def test_a_qualified_nccl_and_a_network_without_a_plugin_are_not_mentioned() -> None:
    assert version_findings("tcpxo", MEGA, "2.28.9") == version_findings("plain", MEGA, "2.28.9") == []
