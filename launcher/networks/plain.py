"""Plain TCP over the pod's own interface: every cluster has it."""

from __future__ import annotations

from launcher.machines import MACHINES
from launcher.networks import profile as net
from launcher.sources import K8S
from litgpt_demo.config import Settings
from litgpt_demo.node.network import NodeNetwork

SHM = 8 * net.GIB
"""A container has 64 MB by default (https://github.com/NVIDIA/nccl/issues/290): data loaders and NCCL outgrow it."""

SOURCE = f"{K8S}/concepts/services-networking/"


def network(choice: net.Choice, _options: Settings) -> net.Network:
    """Nothing to set up: NCCL and gloo take the interface that the default route has, which is the only one."""
    gpus = choice.machine.gpus if choice.machine else 0
    quarter = choice.machine.memory_gib * net.GIB // 4 if choice.machine else SHM
    shm = min(64 * net.GIB, quarter)
    node = NodeNetwork(name="plain", gpus=gpus, shm_bytes=min(shm, net.GIB))
    return net.Network(node=node, shm_bytes=shm)


PROFILE = net.Profile(
    name="plain",
    summary="TCP, which every cluster has",
    options=Settings,
    make=network,
    machines=tuple(MACHINES),
    unlisted=True,
)
