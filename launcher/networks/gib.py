"""GPUDirect-RDMA with Google's gIB plugin, of A3 Ultra, A4 and A4X: ConnectX cards, RoCE, no daemon."""

from __future__ import annotations

from typing import Literal

from launcher.machines import AI_HYPERCOMPUTER, CEA, CTK
from launcher.networks import profile as net
from launcher.networks.profile import GR
from litgpt_demo.node.network import NodeNetwork

PLUGIN_IMAGE = "us-docker.pkg.dev/gce-ai-infra/gpudirect-gib/nccl-plugin-gib"

_CHART = f"{GR}/src/helm-charts/a3ultra/jobset/templates/workload-jobset.yaml"
_JOBSET = f"{CTK}/examples/gke-a3-ultragpu/nccl-jobset-example.yaml"
_SLURM = f"{CTK}/examples/machine-learning"
"""The script that sets these lies in the image; its values are those of CTK's A3 Ultra and A4 Slurm images."""

_INSTALLERS = {
    "amd64": f"{CEA}/gpudirect-rdma/nccl-rdma-installer.yaml",
    "arm64": f"{CEA}/gpudirect-rdma/nccl-rdma-installer-a4x.yaml",
}

_NCCL = f"{AI_HYPERCOMPUTER}/nccl"
"""Release notes for x86 and arm64; they name the NCCL that is bundled (v1.1.2: 2.30.4) and those that are supported."""

# The release that Google's installer puts on the nodes comes first. For x86 we have read v1.1.2's date, but not its
# row of the page's version table.
PAIRS = (
    net.ReleasePair("v1.1.1", None, "2026", _INSTALLERS["amd64"]),
    net.ReleasePair("v1.1.2", None, "2026-05-14", f"{_NCCL}/release-notes-x86"),
    net.ReleasePair("v1.1.0", None, "2025", _CHART),
    net.ReleasePair("v1.0.6", None, "", GR),
    net.ReleasePair("v1.0.5", None, "", GR),
    net.ReleasePair("v1.0.3", None, "", GR),
)
ARM_PAIRS = (
    net.ReleasePair("v1.1.0", None, "", _INSTALLERS["arm64"]),
    # The row of A4X; A4X Max, which we do not have, needs 2.28.9.
    net.ReleasePair("v1.1.2", None, "2026-05-14", f"{_NCCL}/release-notes-arm64", (">=2.25",), driver="580.95.05"),
    net.ReleasePair("v1.1.1", None, "", GR),
    net.ReleasePair("v1.0.7", None, "", GR),
    net.ReleasePair("v1.0.6", None, "", GR),
)

ROOT = "/usr/local/gib"
FOLDERS = (f"{ROOT}/lib64", net.LIBRARIES)

SCRIPTED = net.variables(
    {
        "NCCL_CROSS_NIC": "0",
        "NCCL_NET_GDR_LEVEL": "PIX",
        "NCCL_P2P_NET_CHUNKSIZE": "131072",
        "NCCL_NVLS_CHUNKSIZE": "524288",
        "NCCL_IB_ADAPTIVE_ROUTING": "1",
        "NCCL_IB_QPS_PER_CONNECTION": "4",
        "NCCL_IB_TC": "52",
        "NCCL_IB_FIFO_TC": "84",
    },
    source=_SLURM,
)

TUNERS = {"a4-highgpu-8g": "tuner_config_a4.txtpb", "a4x-highgpu-4g": "tuner_config_a3u.txtpb"}
"""A4's and A4X's recipes export theirs after the script; A3 Ultra's leave it to the script (GR)."""

# 0.6 of what was published for two nodes: A3 Ultra 326 GB/s all-gather (https://github.com/skypilot-org/skypilot),
# A4 683 GB/s all-reduce (https://github.com/dstackai/dstack). Nothing is published for A4X.
FLOORS = {"a3-ultragpu-8g": {2: 195.0}, "a4-highgpu-8g": {2: 410.0}}


class Options(net.PluginOptions):
    network_attach: Literal["networks", "dra"] = "networks"
    """The way in which pods get RDMA cards: Network objects and annotations, or a claim (GKE's managed DRA driver)."""
    extra_nic: bool = False
    """The nodes have a second gVNIC (network gvnic-1), which takes the name eth1."""


def network(context: net.NetworkContext, options: Options) -> net.Network:
    assert context.machine is not None  # it belongs to particular machines
    machine, cards, arm = context.machine.name, context.machine.nics, context.machine.arch == "arm64"
    image = PLUGIN_IMAGE
    pairs: tuple[net.ReleasePair, ...] = PAIRS
    claims = []
    if arm:
        image, pairs = f"{PLUGIN_IMAGE}-arm64", ARM_PAIRS
        claims.append("compute-domain")
    if options.network_attach == "dra":
        claims.append("rdma")
    release = net.released(options, pairs, name="gib", plugin=image, manifest=_INSTALLERS[context.machine.arch])
    in_pod = options.network_install == "pod"
    # eth1 is kept free for the second gVNIC, whether there is one or not.
    attached = {"eth1": "gvnic-1"} if options.extra_nic else {}
    attached |= {f"eth{number + 2}": f"rdma-{number}" for number in range(cards)}
    named = () if "rdma" in claims or context.host_network else ("eth0", *attached)
    recipe = f"{GR}/src/helm-charts/{machine.split('-')[0]}"
    tuned = {}
    if machine in TUNERS:
        tuned["NCCL_TUNER_CONFIG_PATH"] = f"{ROOT}/configs/{TUNERS[machine]}"
        # The recipes run on the host's network, where both are there; without a second gVNIC there is no eth1.
        tuned["NCCL_SOCKET_IFNAME"] = "eth0,eth1" if options.extra_nic else "eth0"
    # Brings the plugin and a matching NCCL into the pod (_CHART). Google's DaemonSets leave NCCL to the image.
    copies = [f"cp -R /var/lib/gib/lib64/. /target{ROOT}/lib64", f"cp -R /var/lib/gib/. /target{ROOT}"]
    target = net.mount("gib", f"/target{ROOT}")
    install = net.installer("nccl-plugin-installer", release.plugin, ["set -ex", net.INSTALL, *copies], target)
    return net.Network(
        node=NodeNetwork(
            name="gib",
            nccl_net="gIB",
            scripts=(f"{ROOT}/scripts/set_nccl_env.sh",),
            library_paths=FOLDERS,
            interfaces=named,
            shm_bytes=8 * net.GIB,
            floor_gbytes=FLOORS.get(machine, {}),
            **release.node,
        ),
        annotations=net.interface_annotations(attached) if named else {},
        init_containers=(install,) if in_pod else (),
        volumes=(
            net.volume("libraries", "/home/kubernetes/bin/nvidia"),
            net.volume("gib", None if in_pod else "/home/kubernetes/bin/gib"),
        ),
        mounts=(net.mount("libraries", "/usr/local/nvidia"), net.mount("gib", ROOT)),
        # RDMA pins memory. CTK's A4X Max JobSet adds it; CEA's test for the others gets by without. INFERRED for them.
        capabilities=("IPC_LOCK", net.OTHERS_FILES),
        privileged=context.host_network,
        claims=tuple(claims),
        # CEA requests the exact number, CTK's A4X node pools all of them.
        rdma_cards=None if arm else cards,
        environment=(
            net.Variable("NCCL_NET", "gIB", _JOBSET, net.STOPS, after=True),
            net.Variable("GLOO_SOCKET_IFNAME", "eth0", recipe, after=True),
            *net.variables(tuned, source=recipe, after=True),
            *net.reported(source=f"{_NCCL}/test-vms"),
        ),
        scripted=(*SCRIPTED, net.library_path(*FOLDERS, source=_CHART)),
        shm_bytes=250 * net.GIB,  # CEA's gpudirect-rdma/nccl-test.yaml
        **release.network,
    )


TYPE = net.NetworkType(
    "GPUDirect-RDMA of A3 Ultra, A4 and A4X",
    network,
    {net.Carrier.PODS: Options},
    machines=("a3-ultragpu-8g", "a4-highgpu-8g", "a4x-highgpu-4g"),
)
