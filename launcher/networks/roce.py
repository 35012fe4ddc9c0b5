"""RDMA over Converged Ethernet by NCCL's own InfiniBand transport, as Run:ai clusters have it: a second interface by
Multus, and the cards as an extended resource.
"""

from __future__ import annotations

from launcher.networks.profile import GIB, Choice, Network, reported, variables
from litgpt_demo.node.network import NodeNetwork

_EPFL = "https://github.com/epfml/getting-started/blob/5b3f69d/docs/multinode.md"

NETWORKS = "k8s.v1.cni.cncf.io/networks"
"""Multus' annotation: which networks a pod is attached to besides the cluster's own."""
ATTACHMENT = "kube-system/roce"
RESOURCE = "rdma/rdma"
INTERFACE = "net1"
"""The name that Multus gives a pod's first interface after eth0."""

# NCCL_SOCKET_NTHREADS times NCCL_NSOCKS_PERTHREAD may be 64 at most; they are for what does not go by RDMA.
ENVIRONMENT = variables(
    {"NCCL_IB_HCA": "mlx5", "NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "8"}, source=_EPFL
)

# 122 Gbit/s on 2 nodes of 8, 76 on 4; without RDMA 29 to 30. 0.6 of it, in GB/s (EPFL's table).
FLOOR = {2: 9.2, 4: 5.7}


def network(choice: Choice) -> Network:
    """The cards are mlx5_*; which GID index is RoCE v2 over IPv4 the node finds out, as it differs between pods
    (https://github.com/k8snetworkplumbingwg/multus-cni/issues/1100)."""
    gpus = choice.machine.gpus if choice.machine else 0
    return Network(
        name="roce",
        node=NodeNetwork(
            name="roce",
            nccl_net="IB",
            interfaces=(INTERFACE,),
            hca="mlx5",
            gpus=gpus,
            shm_bytes=GIB,
            floor_gbytes=FLOOR,
        ),
        annotations={NETWORKS: ATTACHMENT},
        resources={RESOURCE: 1},
        capabilities=("IPC_LOCK",),
        environment=(*ENVIRONMENT, *reported(source=_EPFL)),
        shm_bytes=16 * GIB,
    )
