"""GPUDirect-TCPX, of A3 High: NCCL's traffic goes from GPU memory to four gVNICs; a daemon sets the receive rules."""

from __future__ import annotations

from typing import Any

from launcher.machines import CEA
from launcher.networks import profile as net
from litgpt_demo.node.network import NodeNetwork

DAEMON = "tcpx-daemon"

# The same image names exist under gpudirect-tcpxo/, with other contents.
_REGISTRY = "us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpx"
PLUGIN_IMAGE = f"{_REGISTRY}/nccl-plugin-gpudirecttcpx-dev"
DAEMON_IMAGE = f"{_REGISTRY}/tcpgpudmarxd-dev"

_CEA = "https://github.com/GoogleCloudPlatform/container-engine-accelerators/blob"
_README = f"{_CEA}/98c85a6e/gpudirect-tcpx/README.md"
# Annotations, daemon, volumes, mounts and capabilities: CEA's gpudirect-tcpx/nccl-test-latest.yaml, and XPK's decorator
# (https://github.com/AI-Hypercomputer/xpk/blob/367c8382/src/xpk/core/workload_decorators/tcpx_decorator.py).
_INSTALLER = f"{CEA}/gpudirect-tcpx/nccl-tcpx-installer.yaml"
_CONFIG = f"{_CEA}/98c85a6e/gpudirect-tcpx/nccl-config.yaml"
_OLD_CONFIG = f"{_CEA}/09a75de6/gpudirect-tcpx/nccl-config.yaml"
_AIP = "https://github.com/GoogleCloudPlatform/ai-infra-cluster-provisioning"
_HELM = f"{_AIP}/blob/2ff9b95/sample_workloads/lit-gpt-demo"
_DEMO = f"{_AIP}/tree/v1.4.1/sample_workloads/lit-gpt-demo"

# v3.1.12 is for GKE from 1.34 on (COS 125, devmem TCP of kernel 6.12: messages of CEA's commits 21ed6613, e3ae253a).
# That older releases do not work there is INFERRED. But Google's installer has put it on every A3 High node since June
# 2026: what counts is what the nodes have.
_TRIED: dict[str, Any] = {
    # NCCL_NET=GPUDirectTCPX_v7: the plugin speaks version 7 of NCCL's API (INFERRED from that name), which 2.19.3 (v5
    # to v7), 2.28.7 and 2.29.7 (v6 to v11) hold; that those between them do is INFERRED.
    "nccl_loads": (">=2.19.3,<=2.29.7",),
    # With 2.21.5 one node worked and several did not, with 2.18.1 they did:
    # https://github.com/GoogleCloudPlatform/container-engine-accelerators/issues/414
    # The issue is from the time of v3.1.9; no source says that v3.1.12 fixes it.
    "nccl_fails": ("==2.21.5",),
}
PAIRS = (
    net.ReleasePair("v3.1.12", "v2.0.15", "2026-06-22", _README, (">=2.19,<2.20",), since=(1, 34), **_TRIED),
    net.ReleasePair("v3.1.9", "v2.0.12", "2024-02-15", _README, (">=2.19,<2.20",), **_TRIED),
    net.ReleasePair("v3.1.7", "v2.0.11", "2024", f"{_HELM}/helm/values.yaml"),
    net.ReleasePair("v3.1.6_2023_10_23", "v2.0.9", "2023-10", _DEMO, (">=2.18,<2.19",)),
    net.ReleasePair("v3.1.6_2023_10_06", "v2.0.7", "2023-10", _DEMO, (">=2.17.1,<2.19",)),
)

NETWORKS = {f"eth{number}": f"vpc{number}" for number in range(1, 5)}

SOCKETS = "/run/tcpx"

# Threads that send (TX) and receive (RX) have cores of their own: those of the NIC's side of the machine. The demo of
# 2023 has 124-139 for RX, which takes two cores of TX; CEA had it until 09a75de6 (2026-03-02).
TX = "eth1:8-21,112-125;eth2:8-21,112-125;eth3:60-73,164-177;eth4:60-73,164-177"
RX = "eth1:22-35,126-139;eth2:22-35,126-139;eth3:74-87,178-191;eth4:74-87,178-191"
FREE_CORES = "0-7,104-111,52-59,156-163"
"""The cores that are left for the ranks (`taskset` in CEA's nccl-config.yaml)."""

COMMON = net.variables(
    {
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_GPUDIRECTTCPX_CTRL_DEV": "eth0",
        "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME": "eth1,eth2,eth3,eth4",
        "NCCL_CROSS_NIC": "0",
        "NCCL_PROTO": "Simple",
        "NCCL_NET_GDR_LEVEL": "PIX",
        "NCCL_P2P_PXN_LEVEL": "0",
        "NCCL_DYNAMIC_CHUNK_SIZE": "524288",
        "NCCL_P2P_NET_CHUNKSIZE": "524288",
        "NCCL_P2P_PCI_CHUNKSIZE": "524288",
        "NCCL_P2P_NVL_CHUNKSIZE": "1048576",
        "NCCL_BUFFSIZE": "4194304",
        "NCCL_NSOCKS_PERTHREAD": "4",
        "NCCL_SOCKET_NTHREADS": "1",
        "NCCL_GPUDIRECTTCPX_TX_BINDINGS": TX,
        "NCCL_GPUDIRECTTCPX_RX_BINDINGS": RX,
        "NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS": "500000",
    },
    source=_CONFIG,
)
SINCE_JUNE_2026 = net.variables({"NCCL_ALGO": "Ring,Tree"}, source=_CONFIG)
BEFORE = net.variables(
    {
        "NCCL_ALGO": "Ring",
        "NCCL_MAX_NCHANNELS": "8",
        "NCCL_MIN_NCHANNELS": "8",
        "NCCL_GPUDIRECTTCPX_FORCE_ACK": "0",
        "NCCL_GPUDIRECTTCPX_TX_COMPLETION_NANOSLEEP": "1000",
    },
    source=_OLD_CONFIG,
)
_PREFIX = "where the daemon's socket is; the default is /tmp, which would hide the image's own"
_ENTRYPOINT = f"{_HELM}/scripts/litgpt_container_entrypoint.sh"
OURS = (
    net.Variable("NCCL_NET", "GPUDirectTCPX_v7", f"{_DEMO}/README.md", net.STOPS),
    net.Variable("NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX", SOCKETS, _ENTRYPOINT, _PREFIX),
    net.Variable("NCCL_NVLS_ENABLE", "0", f"{_HELM}/helm/templates/litgpt.yaml"),
    net.Variable("GLOO_SOCKET_IFNAME", "eth0", _CONFIG, "as NCCL_SOCKET_IFNAME, for gloo; INFERRED"),
)

# 66 GB/s is the least that was published for two nodes, plain gVNIC 20 to 24: a floor at 0.6 of it separates them.
# https://github.com/skypilot-org/skypilot/tree/master/examples/gcp_gpu_direct_tcpx
FLOOR = {2: 40.0}

# The trainer is tested from torch 2.11 on, whose wheels bring NCCL 2.28 and newer; torch 2.2 is the last with 2.19.
_WITHOUT_STACK = (
    "no torch wheel that our trainer runs on (2.11 or newer) has such an NCCL: set platform.network=tcp (20 to 24 GB/s "
    "between nodes instead of 66), take A3 Mega with platform.network=tcpxo, or give a prebuilt image: for your script "
    "one of torch 2.2, for our trainer one whose torch was built against NCCL 2.19 (docs/howto/own-image.md)"
)


class Options(net.DaemonOptions):
    disable_pmtu: bool = False
    """Keep TCP from probing for the MTU of its path (net.ipv4.tcp_mtu_probing=0), as the demo of 2023 did. A pod with
    its own network never does; with host_network its machine is set so."""


def network(context: net.NetworkContext, options: Options) -> net.Network:
    release = net.released(options, PAIRS, name="tcpx", plugin=PLUGIN_IMAGE, daemon=DAEMON_IMAGE, manifest=_INSTALLER)
    on_host = context.host_network
    # Before June 2026 there were several variables that were dropped then.
    former = release.pair.plugin in {known.plugin for known in PAIRS[1:]}
    sockets = net.mount("tcpx-socket", SOCKETS)
    # `--setup_param` is spelled as in CEA's manifest and CTK's, where the argument holds backslashes and quotes; XPK
    # has quotes only, the demo neither. Which of them the daemon needs is not documented.
    command = [
        "/tcpgpudmarxd/build/app/tcpgpudmarxd", "--gpu_nic_preset", "a3vm", "--gpu_shmem_type", "fd",
        "--uds_path", SOCKETS, "--setup_param", '\\"--verbose 128 2 0 \\"',
    ]  # fmt: skip
    daemon = net.daemon(DAEMON, release.daemon, command, sockets, rights=["NET_ADMIN"], privileged=on_host)
    folders, containers, volumes, mounts = [net.LIBRARIES], [daemon], [], []
    if options.network_install == "pod":
        # Brings plugin and NCCL into the pod, for nodes without Google's installer (AIP's helm).
        target, name = net.mount("tcpx-plugin", "/var/lib/tcpx"), "tcpx-nccl-plugin-installer"
        containers.insert(0, net.installer(name, release.plugin, [net.INSTALL], target, cpu="150m"))
        folders.insert(0, "/usr/local/tcpx/lib64")
        volumes, mounts = [net.volume("tcpx-plugin")], [net.mount("tcpx-plugin", "/usr/local/tcpx")]
    return net.Network(
        node=NodeNetwork(
            name="tcpx",
            nccl_net="GPUDirectTCPX_v7",
            library_paths=tuple(folders),
            interfaces=("eth0", *NETWORKS),
            socket=f"{SOCKETS}/rx_rule_manager",
            shm_bytes=8 * net.GIB,
            floor_gbytes=FLOOR,
            cpus=FREE_CORES,
            disable_pmtu=options.disable_pmtu,
            **release.node,
        ),
        annotations={} if on_host else net.interface_annotations(NETWORKS) | net.device_annotation(DAEMON, net.GPUS),
        init_containers=containers,
        volumes=[
            net.volume("libraries", "/home/kubernetes/bin/nvidia/lib64"),
            net.volume("tcpx-socket"),
            net.volume("sys", "/sys"),
            net.volume("proc-sys", "/proc/sys"),
            *volumes,
        ],
        mounts=[net.mount("libraries", net.LIBRARIES), sockets, *mounts],
        # GPU memory is pinned; the devices and the daemon's socket are root's.
        capabilities=("IPC_LOCK", net.OTHERS_FILES),
        privileged=on_host,
        environment=(*COMMON, *(BEFORE if former else SINCE_JUNE_2026), *OURS, *net.reported(source=_CONFIG)),
        scripted=(net.library_path(*folders, source=_README),),
        shm_bytes=128 * net.GIB,  # that of XPK's decorator
        without_stack=_WITHOUT_STACK,
        **release.network,
    )


TYPE = net.NetworkType("GPUDirect of A3 High", network, {net.Carrier.PODS: Options}, machines=("a3-highgpu-8g",))
