"""A network that nobody has: one file which, put next to the others in launcher/networks, is all there is to add."""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from launcher.networks.profile import (
    Choice,
    DaemonOptions,
    Network,
    NetworkCapability,
    Profile,
    ReleasePair,
    Variable,
    chosen_pair,
    host_path,
    interface_annotations,
    mount,
)
from litgpt_demo.findings import Finding
from litgpt_demo.node.network import NodeNetwork

SOURCE = "https://toy.example/manual"
PAIRS = (ReleasePair(plugin="v2", daemon="v7", nccl=(">=2.20",), released="2026", source=SOURCE),)


class Options(DaemonOptions):
    """The settings of the toy."""

    toy_lanes: int = Field(2, gt=0)
    """How many lanes each card has."""


def network(choice: Choice, options: Options) -> Network:
    """The toy, with four cards."""
    pair = chosen_pair(PAIRS, network="toy", tag=options.network_plugin, daemon=options.network_daemon)
    cards = {f"eth{number}": f"toy-{number}" for number in range(1, 5)}
    return Network(
        name="toy",
        node=NodeNetwork(name="toy", nccl_net="ToyNet", interfaces=("eth0", *cards), nccl_versions=pair.nccl),
        annotations=interface_annotations(cards),
        init_containers=({"name": "toy-daemon", "image": f"toy.example/daemon:{pair.daemon}"},),
        volumes=(host_path("toy-library", "/home/toy"),),
        mounts=(mount("toy-library", "/usr/local/toy"),),
        environment=(Variable(name="NCCL_TOY_LANES", value=str(options.toy_lanes), source=SOURCE),),
        pair=pair,
    )


def check(_choice: Choice, options: Options) -> Iterator[Finding]:
    """Yield lanes that no card has."""
    if options.toy_lanes > 4:
        yield Finding("error", "network.toy-lanes", f"platform.toy_lanes={options.toy_lanes}: a card has 4", "take 4")


PROFILE = Profile(
    name="toy",
    summary="a network of tests",
    options=Options,
    make=network,
    carried_by=(frozenset({NetworkCapability.POD_PARTS, NetworkCapability.POD_NETWORKS}),),
    machines=("a3-highgpu-8g",),
    pairs={"amd64": PAIRS},
    check=check,
)
