"""Plain TCP over the pod's own interface: every cluster has it."""

from __future__ import annotations

from launcher.machines import MACHINES
from launcher.networks.profile import GIB, Choice, Network, NoOptions, Profile
from launcher.sources import K8S
from litgpt_demo.node.network import NodeNetwork

SHM = 8 * GIB
"""A container has 64 MB by default (https://github.com/NVIDIA/nccl/issues/290): data loaders and NCCL outgrow it."""

SOURCE = f"{K8S}/concepts/services-networking/"


def network(choice: Choice, _options: NoOptions) -> Network:
    """Nothing to set up: NCCL and gloo take the interface that the default route has, which is the only one."""
    gpus = choice.machine.gpus if choice.machine else 0
    quarter = choice.machine.memory_gib * GIB // 4 if choice.machine else SHM
    shm = min(64 * GIB, quarter)
    return Network(name="plain", node=NodeNetwork(name="plain", gpus=gpus, shm_bytes=min(shm, GIB)), shm_bytes=shm)


PROFILE = Profile(
    name="plain",
    summary="TCP, which every cluster has",
    options=NoOptions,
    make=network,
    carried_by=(frozenset(),),
    machines=tuple(MACHINES),
    unlisted=True,
)
