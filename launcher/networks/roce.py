"""RDMA over Converged Ethernet by NCCL's own InfiniBand transport: the cards are an extended resource, and their
interfaces come to the pod by Multus or are those of the host's network.
"""

from __future__ import annotations

from pydantic import Field

from launcher.job import drop_empty
from launcher.networks import profile as net
from litgpt_demo.config import Settings
from litgpt_demo.errors import Finding
from litgpt_demo.node.network import NodeNetwork

_EPFL = "https://github.com/epfml/getting-started/blob/5b3f69d/docs/multinode.md"

# The names on EPFL's clusters, and so on Run:ai's as far as we know. Other clusters have no such convention.
ATTACHMENT = "kube-system/roce"
RESOURCE = "rdma/rdma"

# NCCL_SOCKET_NTHREADS times NCCL_NSOCKS_PERTHREAD may be 64 at most; they are for what does not go by RDMA.
ENVIRONMENT = net.variables(
    {"NCCL_IB_HCA": "mlx5", "NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "8"}, source=_EPFL
)

# 122 Gbit/s on 2 nodes of 8, 76 on 4; without RDMA 29 to 30. 0.6 of it, in GB/s (EPFL's table).
FLOOR = {2: 9.2, 4: 5.7}

_LISTED = r"^{0}(,{0})*$"


class Interfaces(Settings):
    roce_interface: str | None = Field(None, pattern=_LISTED.format(r"[A-Za-z0-9_.-]+"))
    """The names of the RoCE interfaces on the nodes, joined by commas; empty is Multus' own (net1, net2, …) in pods,
    and every card that has an address on machines."""


class Options(Interfaces):
    """The settings of RoCE in pods.

    Examples of resources and attachments: `rdma/rdma_shared_device_a`, `nvidia.com/hostdev=8`
    (https://github.com/Mellanox/network-operator/tree/d725b15d/example), and a resource and an attachment per card.
    """

    roce_network: str | None = Field(None, pattern=_LISTED.format(r"[A-Za-z0-9_@%+=:./-]+"))
    """Multus networks of the RoCE cards, joined by commas (namespace/name, name@interface); on Run:ai empty is
    kube-system/roce. Not with host_network."""
    roce_resource: str | None = Field(None, pattern=_LISTED.format(r"[A-Za-z0-9_./-]+(=[1-9][0-9]*)?"))
    """Extended resources of the RoCE cards, joined by commas (rdma/shared, nvidia.com/hostdev=8); on Run:ai empty is
    rdma/rdma."""


def _parts(listed: str | None) -> list[str]:
    return [part for part in (listed or "").split(",") if part]


def network(context: net.NetworkContext, options: Options) -> net.Network:
    """The cards are mlx5_*; which GID index is RoCE v2 over IPv4 the node finds out, as it differs between pods
    (https://github.com/k8snetworkplumbingwg/multus-cni/issues/1100).

    On the host's network without attachments, as Oracle's clusters have it; a device plugin makes /dev/infiniband
    readable there without a privileged pod (INFERRED; Oracle's own pods are privileged):
    https://github.com/oracle-quickstart/oci-hpc-oke/blob/195792b7/docs/running-pytorch-jobs-on-oke-using-hostnetwork-with-rdma.md
    """
    named_interfaces = tuple(_parts(options.roce_interface))
    if context.carrier is net.Carrier.MACHINES:
        node = NodeNetwork(name="roce", nccl_net="IB", interfaces=named_interfaces, hca="mlx5", shm_bytes=net.GIB)
        return net.Network(node=node, environment=(*ENVIRONMENT, *net.reported(source=_EPFL)), shm_bytes=net.GIB)
    attached, requested = options.roce_network or "", options.roce_resource or ""
    floor: dict[int, float] = {}  # of one site's cards: the speed of others is not known
    if context.carrier is net.Carrier.MULTUS:
        floor = FLOOR
        attached, requested = attached or ATTACHMENT, requested or RESOURCE
    attachments: list[str] = []
    if not context.host_network:
        attachments = _parts(attached)
    resources = {}
    for request in _parts(requested):
        name, _, count = request.partition("=")
        resources[name] = int(count or 1)
    # Those that the user or the attachments name, else as Multus counts them from net1
    # (https://github.com/k8snetworkplumbingwg/multus-cni/blob/041e3ce4/docs/how-to-use.md). None on the host's network,
    # where the node takes every card that has an address.
    interfaces = named_interfaces or tuple(
        attachment.partition("@")[2] or f"net{number}" for number, attachment in enumerate(attachments, start=1)
    )
    # Names that only the cluster's administrator knows and that are missing, or that have no meaning.
    problems = []
    if context.host_network == bool(attached):
        shared = f"platform.host_network={context.host_network}"
        what = f"platform.roce_network={options.roce_network} with {shared}: pods reach the cards by one of the two"
        fix = "name one that kubectl get network-attachment-definitions -A lists, or leave out platform.roce_network"
        problems.append(Finding("error", "network.roce-network", what, f"{fix} and set platform.host_network"))
    if not resources or not all("/" in name for name in resources):
        what = f"platform.roce_resource={options.roce_resource} names no extended resource, so that pods get no card"
        fix = "name it as kubectl describe node does under Allocatable, with a domain before a slash: rdma/shared"
        problems.append(Finding("error", "network.roce-resource", what, fix))
    return net.Network(
        node=NodeNetwork(
            name="roce",
            nccl_net="IB",
            interfaces=interfaces,
            hca="mlx5",
            gpus=context.machine.gpus if context.machine else 0,
            shm_bytes=net.GIB,
            floor_gbytes=floor,
        ),
        annotations=drop_empty(**{net.MULTUS: ",".join(attachments)}),
        resources=resources,
        # RDMA pins memory (https://github.com/Mellanox/k8s-rdma-shared-dev-plugin/blob/2a8045c9/example/test-hca-pod.yaml).
        capabilities=("IPC_LOCK", net.OTHERS_FILES),
        environment=(*ENVIRONMENT, *net.reported(source=_EPFL)),
        shm_bytes=16 * net.GIB,
        problems=tuple(problems),
    )


TYPE = net.NetworkType(
    "RDMA over Ethernet",
    network,
    {net.Carrier.PODS: Options, net.Carrier.MULTUS: Options, net.Carrier.MACHINES: Interfaces},
    unlisted=True,
)
