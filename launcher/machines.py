"""Machine types: what they have, which networks, what they cost. Each value with where it was read."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from launcher.sources import AI_HYPERCOMPUTER, CEA, CTK

# https://docs.cloud.google.com/compute/docs/accelerator-optimized-machines (sizes), and for N1
# https://docs.cloud.google.com/compute/docs/gpus (which GPUs may be attached to it).
_SIZES = "https://docs.cloud.google.com/compute/docs/accelerator-optimized-machines"
_ATTACHED = "https://docs.cloud.google.com/compute/docs/gpus"


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One model of GPU."""

    name: str
    memory_gib: int
    label: str
    """Value of the node label cloud.google.com/gke-accelerator."""
    source: str
    """The source of memory."""


@dataclass(frozen=True, kw_only=True)
class ListPrice:
    """The on-demand price, in US dollars per hour of the whole machine."""

    usd: float
    region: str
    date: str
    """ISO date on which it was read."""
    source: str


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One machine type."""

    name: str
    gpu: Gpu
    gpus: int
    cpus: int
    memory_gib: int
    nics: int = 0
    """GPU network cards, besides eth0."""
    arch: str = "amd64"
    price: ListPrice | None = None
    """None where no list price was found that names its date; a cost is then not shown."""
    sources: tuple[str, ...] = ()
    """The source of sizes, cards and labels."""
    labels: dict[str, str] = field(default_factory=dict)
    """Node labels besides the accelerator's."""
    taints: tuple[str, ...] = ("nvidia.com/gpu",)
    """Keys of the taints that its nodes carry: GKE puts the GPU's on every GPU node, CTK's pools as `=present`
    (https://github.com/GoogleCloudPlatform/cluster-toolkit/blob/104708037/modules/compute/gke-node-pool)."""


_NVIDIA = "https://www.nvidia.com/en-us/data-center"
H100 = Gpu(name="H100", memory_gib=80, label="nvidia-h100-80gb", source=f"{_NVIDIA}/h100/")
H100_MEGA = Gpu(name="H100", memory_gib=80, label="nvidia-h100-mega-80gb", source=f"{_NVIDIA}/h100/")
H200 = Gpu(name="H200", memory_gib=141, label="nvidia-h200-141gb", source=f"{_NVIDIA}/h200/")
B200 = Gpu(name="B200", memory_gib=180, label="nvidia-b200", source=f"{_NVIDIA}/hgx/")
GB200 = Gpu(name="GB200", memory_gib=186, label="nvidia-gb200", source=f"{_NVIDIA}/gb200-nvl72/")
A100 = Gpu(name="A100", memory_gib=40, label="nvidia-tesla-a100", source=f"{_NVIDIA}/a100/")
A100_80 = Gpu(name="A100", memory_gib=80, label="nvidia-a100-80gb", source=f"{_NVIDIA}/a100/")
L4 = Gpu(name="L4", memory_gib=24, label="nvidia-l4", source=f"{_NVIDIA}/l4/")
T4 = Gpu(name="T4", memory_gib=16, label="nvidia-tesla-t4", source=f"{_NVIDIA}/tesla-t4/")
V100 = Gpu(name="V100", memory_gib=16, label="nvidia-tesla-v100", source=f"{_NVIDIA}/v100/")

_LABELS = "https://docs.cloud.google.com/kubernetes-engine/docs/how-to/gpus"


_LISTED = "https://github.com/Cyclenerd/google-cloud-pricing-cost-calculator/blob/0166a59/pricing.yml"
"""Google's catalogue of prices, as of 2025-03-06; machine with its GPUs and bundled SSDs."""
_CATALOGUE = "https://huggingface.co/datasets/tanod/cloud-gpu-list-prices"
"""Google's catalogue of prices, as of 2026-10-13, per GPU: 10.4365."""


def _listed(usd: float) -> ListPrice:
    return ListPrice(usd=usd, region="us-central1", date="2025-03-06", source=_LISTED)


def _small(name: str, gpu: Gpu, gpus: int, cpus: int, memory_gib: int, price: ListPrice | None = None) -> Machine:
    """A machine that people start on: one network, gVNIC or VirtIO."""
    where = _ATTACHED if name.startswith("n1") else _SIZES
    return Machine(
        name=name, gpu=gpu, gpus=gpus, cpus=cpus, memory_gib=memory_gib, price=price, sources=(where, _LABELS)
    )


_ALL = (
    Machine(
        name="a3-highgpu-8g",
        gpu=H100,
        gpus=8,
        cpus=208,
        memory_gib=1872,
        nics=4,
        price=_listed(88.49),
        sources=(_SIZES, f"{CEA}/gpudirect-tcpx/nccl-tcpx-installer.yaml", f"{CTK}/modules/compute/gke-node-pool"),
    ),
    Machine(
        name="a3-megagpu-8g",
        gpu=H100_MEGA,
        gpus=8,
        cpus=208,
        memory_gib=1872,
        nics=8,
        sources=(_SIZES, f"{CEA}/gpudirect-tcpxo/nccl-tcpxo-installer.yaml", f"{CTK}/modules/compute/gke-node-pool"),
    ),
    Machine(
        name="a3-ultragpu-8g",
        gpu=H200,
        gpus=8,
        cpus=224,
        memory_gib=2952,
        nics=8,
        price=ListPrice(usd=83.492, region="us-central1", date="2026-10-13", source=_CATALOGUE),
        sources=(_SIZES, f"{CEA}/gpudirect-rdma/nccl-rdma-installer.yaml"),
    ),
    Machine(
        name="a4-highgpu-8g",
        gpu=B200,
        gpus=8,
        cpus=224,
        memory_gib=3968,
        nics=8,
        sources=(_SIZES, f"{CEA}/gpudirect-rdma/nccl-rdma-installer.yaml"),
    ),
    Machine(
        name="a4x-highgpu-4g",
        gpu=GB200,
        gpus=4,
        cpus=140,
        memory_gib=884,
        nics=4,
        arch="arm64",
        # https://github.com/GoogleCloudPlatform/container-engine-accelerators/blob/992db812/gpudirect-rdma/nccl-rdma-installer-a4x.yaml
        labels={"kubernetes.io/arch": "arm64"},
        taints=("nvidia.com/gpu", "kubernetes.io/arch"),
        sources=(
            _SIZES,
            f"{CEA}/gpudirect-rdma/nccl-rdma-installer-a4x.yaml",
            f"{AI_HYPERCOMPUTER}",
        ),
    ),
    _small("a2-highgpu-1g", A100, 1, 12, 85, _listed(3.673385)),
    _small("a2-highgpu-2g", A100, 2, 24, 170, _listed(7.34677)),
    _small("a2-highgpu-4g", A100, 4, 48, 340, _listed(14.69354)),
    _small("a2-highgpu-8g", A100, 8, 96, 680, _listed(29.38708)),
    _small("a2-megagpu-16g", A100, 16, 96, 1360),
    _small("a2-ultragpu-1g", A100_80, 1, 12, 170),
    _small("a2-ultragpu-2g", A100_80, 2, 24, 340),
    _small("a2-ultragpu-4g", A100_80, 4, 48, 680),
    _small("a2-ultragpu-8g", A100_80, 8, 96, 1360),
    # Read for 12 and 16 vCPUs; the others follow, as Google prices each GPU and each vCPU with its memory alike.
    _small("g2-standard-4", L4, 1, 4, 16, _listed(0.7068)),
    _small("g2-standard-8", L4, 1, 8, 32, _listed(0.8536)),
    _small("g2-standard-12", L4, 1, 12, 48, _listed(1.0004)),
    _small("g2-standard-16", L4, 1, 16, 64, _listed(1.1472)),
    _small("g2-standard-24", L4, 2, 24, 96, _listed(2.0008)),
    _small("g2-standard-32", L4, 1, 32, 128, _listed(1.7344)),
    _small("g2-standard-48", L4, 4, 48, 192, _listed(4.0017)),
    _small("g2-standard-96", L4, 8, 96, 384, _listed(8.0033)),
    # N1 machines have no GPUs of their own; these are N1 sizes with GPUs attached, named so here.
    _small("n1-standard-8-t4", T4, 1, 8, 30),
    _small("n1-standard-32-t4x4", T4, 4, 32, 120),
    _small("n1-standard-8-v100", V100, 1, 8, 30),
    _small("n1-standard-32-v100x4", V100, 4, 32, 120),
)

MACHINES = MappingProxyType({machine.name: machine for machine in _ALL})


def machine_named(name: str) -> Machine:
    """The machine type of that name.

    Raises:
        ValueError: there is none; says which come close, and what to do about one that is not listed.
    """
    if name in MACHINES:
        return MACHINES[name]
    near = difflib.get_close_matches(name, MACHINES, n=3)
    meant = f"did you mean {' or '.join(near)}? " if near else f"there are {', '.join(MACHINES)}. "
    raise ValueError(
        f"platform.machine={name!r} is not in the table of machines; {meant}Any other machine: leave it out and give "
        "platform.gpus, and cpus and memory if they matter"
    )


def one_rank_per_gpu(given: Any) -> Any:
    """A `platform` section that does not say how many ranks a node has, with one for each of its GPUs."""
    if not isinstance(given, Mapping) or given.get("processes") is not None:
        return given
    machine = MACHINES.get(str(given.get("machine")))
    return {**given, "processes": machine.gpus or 1 if machine else given.get("gpus") or 1}


def require_gpus(name: str | None, *, gpus: int | None, processes: int) -> None:
    """
    Args:
        name: of the machine type, which may be one that is not in the table.
        gpus: what the config says that it has, if it does.

    Raises:
        ValueError: it has another number of GPUs, or fewer than ranks.
    """
    machine = MACHINES.get(name or "")
    if machine is not None and gpus not in (None, machine.gpus):
        raise ValueError(f"platform.gpus={gpus}, but a {name} has {machine.gpus}; leave platform.gpus out")
    there = machine.gpus if machine else gpus
    if there and processes > there:
        raise ValueError(
            f"platform.processes={processes}, but a {name or 'node'} has {there} GPUs, and ranks cannot share one; "
            "leave platform.processes out"
        )
