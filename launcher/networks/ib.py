"""InfiniBand by NCCL's own transport, on machines that see their cards themselves.

Ports of a native InfiniBand fabric are addressed by the LID that its subnet manager has given them; no GID index is to
be chosen (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html, NCCL_IB_GID_INDEX). The node takes every
port that is up, for which a user may name the cards.
"""

from __future__ import annotations

from pydantic import Field

from launcher.networks import profile as net
from litgpt_demo.config import Settings
from litgpt_demo.node.network import NodeNetwork

_NCCL = "https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"


class Options(Settings):
    ib_hca: str = Field("mlx5", pattern=r"^[A-Za-z0-9_]+$")
    """The beginning of the names of the InfiniBand cards that are used (`ibstat -l` on a node lists them)."""


def network(_context: net.NetworkContext, options: Options) -> net.Network:
    node = NodeNetwork(name="ib", nccl_net="IB", hca=options.ib_hca, infiniband=True, shm_bytes=net.GIB)
    return net.Network(node=node, environment=net.reported(source=_NCCL), shm_bytes=net.GIB)


TYPE = net.NetworkType("InfiniBand", network, {net.Carrier.MACHINES: Options}, unlisted=True)
