"""InfiniBand by NCCL's own transport, on nodes that are the machines themselves: the node finds its cards."""

from __future__ import annotations

from launcher.networks.profile import Choice, Network, NetworkCapability, NoOptions, Profile, reported
from litgpt_demo.node.infiniband import LINK
from litgpt_demo.node.network import NodeNetwork

_NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"


def network(choice: Choice, _options: NoOptions) -> Network:
    """Nothing is named here: a node's active InfiniBand ports become NCCL_IB_HCA on the node.

    Partition keys and SHARP are the site's to set, as `overrides`; so is a floor, which depends on the cards.
    """
    gpus = choice.machine.gpus if choice.machine else 0
    node = NodeNetwork(name="ib", nccl_net="IB", hca="", link=LINK, gpus=gpus)
    return Network(name="ib", node=node, environment=reported(source=_NCCL))


PROFILE = Profile(
    name="ib",
    summary="InfiniBand",
    options=NoOptions,
    make=network,
    carried_by=(frozenset({NetworkCapability.MACHINES}),),
    unlisted=True,
)
