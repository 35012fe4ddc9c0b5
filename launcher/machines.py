"""Machine types: what they have, which networks, what they cost. Each value with where it was read."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

# At the commits that were read; networks take values from them too.
CEA = "https://github.com/GoogleCloudPlatform/container-engine-accelerators/blob/992db812"
CTK = "https://github.com/GoogleCloudPlatform/cluster-toolkit/blob/104708037"
AI_HYPERCOMPUTER = "https://docs.cloud.google.com/ai-hypercomputer/docs"
# Sizes, and for N1 which GPUs may be attached to it.
_SIZES = "https://docs.cloud.google.com/compute/docs/accelerator-optimized-machines"
_LABELS = "https://docs.cloud.google.com/kubernetes-engine/docs/how-to/gpus"
_N1 = ("https://docs.cloud.google.com/compute/docs/gpus", _LABELS)


@dataclass(frozen=True, kw_only=True)
class ListPrice:
    """The on-demand price, in US dollars per hour of the whole machine."""

    usd: float
    region: str
    date: str
    """ISO date on which it was read."""
    source: str


@dataclass(frozen=True)
class Machine:
    name: str
    gpu: str
    """Value of the node label cloud.google.com/gke-accelerator."""
    gpus: int
    cpus: int
    memory_gib: int
    nics: int = 0
    """GPU network cards, in addition to eth0."""
    arch: str = "amd64"
    price: ListPrice | None = None
    """None if no list price with a date was found. Then no cost is shown."""
    sources: tuple[str, ...] = (_SIZES, _LABELS)
    """The source of sizes, cards and labels."""
    labels: dict[str, str] = field(default_factory=dict)
    """Node labels in addition to the accelerator's."""


A100 = "nvidia-tesla-a100"
A100_80 = "nvidia-a100-80gb"
L4 = "nvidia-l4"
T4 = "nvidia-tesla-t4"
V100 = "nvidia-tesla-v100"

_LISTED = "https://github.com/Cyclenerd/google-cloud-pricing-cost-calculator/blob/0166a59/pricing.yml"
"""Google's catalogue of prices, as of 2025-03-06; machine with its GPUs and bundled SSDs."""
_CATALOGUE = "https://huggingface.co/datasets/tanod/cloud-gpu-list-prices"
"""Google's catalogue of prices, as of 2026-10-13, per GPU: 10.4365."""


def _listed(usd: float) -> ListPrice:
    return ListPrice(usd=usd, region="us-central1", date="2025-03-06", source=_LISTED)


_POOLS = f"{CTK}/modules/compute/gke-node-pool"
_TCPX = (_SIZES, f"{CEA}/gpudirect-tcpx/nccl-tcpx-installer.yaml", _POOLS)
_TCPXO = (_SIZES, f"{CEA}/gpudirect-tcpxo/nccl-tcpxo-installer.yaml", _POOLS)
_RDMA = (_SIZES, f"{CEA}/gpudirect-rdma/nccl-rdma-installer.yaml")
_A4X = (_SIZES, f"{CEA}/gpudirect-rdma/nccl-rdma-installer-a4x.yaml", AI_HYPERCOMPUTER)
_ARM: dict[str, Any] = {"arch": "arm64", "labels": {"kubernetes.io/arch": "arm64"}}
_OCTOBER = ListPrice(usd=83.492, region="us-central1", date="2026-10-13", source=_CATALOGUE)

# Name, GPU, number of GPUs, vCPUs, GiB. Machines without GPU network cards have gVNIC or VirtIO.
_ALL = (
    Machine("a3-highgpu-8g", "nvidia-h100-80gb", 8, 208, 1872, nics=4, price=_listed(88.49), sources=_TCPX),
    Machine("a3-megagpu-8g", "nvidia-h100-mega-80gb", 8, 208, 1872, nics=8, sources=_TCPXO),
    Machine("a3-ultragpu-8g", "nvidia-h200-141gb", 8, 224, 2952, nics=8, price=_OCTOBER, sources=_RDMA),
    Machine("a4-highgpu-8g", "nvidia-b200", 8, 224, 3968, nics=8, sources=_RDMA),
    Machine("a4x-highgpu-4g", "nvidia-gb200", 4, 140, 884, nics=4, sources=_A4X, **_ARM),
    Machine("a2-highgpu-1g", A100, 1, 12, 85, price=_listed(3.673385)),
    Machine("a2-highgpu-2g", A100, 2, 24, 170, price=_listed(7.34677)),
    Machine("a2-highgpu-4g", A100, 4, 48, 340, price=_listed(14.69354)),
    Machine("a2-highgpu-8g", A100, 8, 96, 680, price=_listed(29.38708)),
    Machine("a2-megagpu-16g", A100, 16, 96, 1360),
    Machine("a2-ultragpu-1g", A100_80, 1, 12, 170),
    Machine("a2-ultragpu-2g", A100_80, 2, 24, 340),
    Machine("a2-ultragpu-4g", A100_80, 4, 48, 680),
    Machine("a2-ultragpu-8g", A100_80, 8, 96, 1360),
    # Read for 12 and 16 vCPUs; the others follow, as Google prices each GPU and each vCPU with its memory alike.
    Machine("g2-standard-4", L4, 1, 4, 16, price=_listed(0.7068)),
    Machine("g2-standard-8", L4, 1, 8, 32, price=_listed(0.8536)),
    Machine("g2-standard-12", L4, 1, 12, 48, price=_listed(1.0004)),
    Machine("g2-standard-16", L4, 1, 16, 64, price=_listed(1.1472)),
    Machine("g2-standard-24", L4, 2, 24, 96, price=_listed(2.0008)),
    Machine("g2-standard-32", L4, 1, 32, 128, price=_listed(1.7344)),
    Machine("g2-standard-48", L4, 4, 48, 192, price=_listed(4.0017)),
    Machine("g2-standard-96", L4, 8, 96, 384, price=_listed(8.0033)),
    # N1 machines have no GPUs of their own; these are N1 sizes with GPUs attached, named so here.
    Machine("n1-standard-8-t4", T4, 1, 8, 30, sources=_N1),
    Machine("n1-standard-32-t4x4", T4, 4, 32, 120, sources=_N1),
    Machine("n1-standard-8-v100", V100, 1, 8, 30, sources=_N1),
    Machine("n1-standard-32-v100x4", V100, 4, 32, 120, sources=_N1),
)

MACHINES = MappingProxyType({machine.name: machine for machine in _ALL})


def require_gpus(name: str | None, *, gpus: int | None, processes: int) -> None:
    """Refuse a number of GPUs that a known machine type does not have, and more ranks than GPUs."""
    machine = MACHINES.get(name or "")
    if machine is not None and gpus not in (None, machine.gpus):
        raise ValueError(f"platform.gpus={gpus}, but a {name} has {machine.gpus}; leave platform.gpus out")
    available = machine.gpus if machine else gpus
    if available and processes > available:
        setting = "platform.processes_per_node"
        what = f"{setting}={processes}, but a {name or 'node'} has {available} GPUs, and ranks cannot share one"
        raise ValueError(f"{what}; leave {setting} out")
