"""Plain TCP over the only interface of a node.

It needs only /dev/shm: data loaders and NCCL outgrow the 64 MB that a container has by default
(https://github.com/NVIDIA/nccl/issues/290).
"""

from __future__ import annotations

from launcher.machines import MACHINES
from launcher.networks import profile as net
from litgpt_demo.config import Settings
from litgpt_demo.node.network import NodeNetwork


def network(context: net.NetworkContext, _options: Settings) -> net.Network:
    machine = context.machine
    shm = 8 * net.GIB
    if machine is not None:
        shm = min(64 * net.GIB, machine.memory_gib * net.GIB // 4)
    node = NodeNetwork(name="tcp", gpus=machine.gpus if machine else 0, shm_bytes=min(shm, net.GIB))
    return net.Network(node=node, shm_bytes=shm)


TYPE = net.NetworkType(
    "TCP, which every cluster has", network, dict.fromkeys(net.Carrier, Settings), tuple(MACHINES), unlisted=True
)
