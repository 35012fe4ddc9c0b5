"""GPUDirect-TCPXO (FasTrak), of A3 Mega: eight gVNICs whose transport runs in the cards; a daemon feeds them."""

from __future__ import annotations

import re
from typing import Any

from launcher.job import Object
from launcher.machines import CEA
from launcher.networks import profile as net
from litgpt_demo.node.network import NodeNetwork

DAEMON = "tcpxo-daemon"

_REGISTRY = "us-docker.pkg.dev/gce-ai-infra/gpudirect-tcpxo"
PLUGIN_IMAGE = f"{_REGISTRY}/nccl-plugin-gpudirecttcpx-dev"
DAEMON_IMAGE = f"{_REGISTRY}/tcpgpudmarxd-dev"

_README = f"{CEA}/gpudirect-tcpxo/README.md"
_INSTALLER = f"{CEA}/gpudirect-tcpxo/nccl-tcpxo-installer.yaml"
_MANIFEST = f"{CEA}/gpudirect-tcpxo/nccl-test-latest.yaml"
_CHART = f"{net.GR}/src/helm-charts/a3mega/jobset/templates/workload-jobset.yaml"
_NPX = "https://github.com/google/nccl-plugin-gpudirect-tcpxo/blob/04815d1"
_PROFILE = f"{_NPX}/tcpxo_scripts/nccl-env-profile.sh"
_PRACTICE = f"{CEA}/gpudirect-tcpxo/best-practice.md"

# The open plugin exports only ncclNetPlugin_v7 (fastrak_plugin.cc:358 in _NPX), which 2.19.3 (v5 to v7), 2.28.7 and
# 2.29.7 (v6 to v11) hold. INFERRED: the NCCL releases between them do, and older plugins export v7 too.
_LOADS = (">=2.19.3,<=2.29.7",)
PAIRS = (
    net.ReleasePair("v1.0.15", "v1.0.21", "2026-01-09", _README, (">=2.28.7,<2.29",), _LOADS),
    net.ReleasePair("v1.0.14", "v1.0.20", "2025-11-19", _README, (">=2.28.7,<2.29",), _LOADS),
    net.ReleasePair("v1.0.12", "v1.0.18", "2025-08-21", _README, (">=2.26.5,<2.27",), _LOADS),
    net.ReleasePair("v1.0.11", "v1.0.17", "2025-06-27", _README, (">=2.23.4,<2.24",), _LOADS),
    net.ReleasePair("v1.0.9-1", "v1.0.15", "2025-05-01", _README, (">=2.21.5,<2.24",), _LOADS),
    net.ReleasePair("v1.0.8-1", "v1.0.14", "2025-02-06", _README, (">=2.21.5,<2.24",), _LOADS),
    net.ReleasePair("v1.0.7", "v1.0.13_1", "2024-11-27", _README, (), _LOADS),
    net.ReleasePair("v1.0.6", "v1.0.12", "2024-10-18", _README, (), _LOADS),
    net.ReleasePair("v1.0.5", "v1.0.11", "2024-09-19", _README, (), _LOADS),
    net.ReleasePair("v1.0.4", "v1.0.10", "2024-08-06", _README, (), _LOADS),
    net.ReleasePair("v1.0.3", "v1.0.9", "2024-06-27", _README, (), _LOADS),
    net.ReleasePair("v1.0.2", "v1.0.8", "2024-05-30", _README, (), _LOADS),
    net.ReleasePair("v1.0.1", "v1.0.8", "2024-05-20", _README, (), _LOADS),
    net.ReleasePair("v1.0.0", "v1.0.6-sctp", "2024-04-17", _README, (), _LOADS),
)

NETWORKS = {f"eth{number}": f"vpc{number}" for number in range(1, 9)}
DEVICES = [*net.GPUS, "/dev/dmabuf_import_helper"]
APERTURES = "/dev/aperture_devices"
OWN = "/usr/local/nccl-plugin"

# Exports of nccl-env-profile.sh, which prepends NCCL_LIB_DIR to LD_LIBRARY_PATH, and finds the cards by PCI slot.
SCRIPTED = net.variables(
    {
        "NCCL_FASTRAK_IFNAME": "eth1,eth2,eth3,eth4,eth5,eth6,eth7,eth8",
        "NCCL_FASTRAK_CTRL_DEV": "eth0",
        "NCCL_SOCKET_IFNAME": "eth0",
        "NCCL_CROSS_NIC": "0",
        "NCCL_PROTO": "Simple,LL128",
        "NCCL_MIN_NCHANNELS": "4",
        "NCCL_NVLSTREE_MAX_CHUNKSIZE": "131072",
        "NCCL_P2P_NET_CHUNKSIZE": "524288",
        "NCCL_P2P_PCI_CHUNKSIZE": "524288",
        "NCCL_P2P_NVL_CHUNKSIZE": "1048576",
        "NCCL_FASTRAK_NUM_FLOWS": "2",
        "NCCL_FASTRAK_ENABLE_CONTROL_CHANNEL": "0",
        "NCCL_BUFFSIZE": "8388608",
        "NCCL_FASTRAK_USE_SNAP": "1",
        "NCCL_FASTRAK_USE_LLCM": "1",
        "CUDA_VISIBLE_DEVICES": "0,1,2,3,4,5,6,7",
        "NCCL_NET_GDR_LEVEL": "PIX",
        "NCCL_FASTRAK_ENABLE_HOTPATH_LOGGING": "0",
        "NCCL_TUNER_PLUGIN": "libnccl-tuner.so",
        "NCCL_TUNER_CONFIG_PATH": "$NCCL_LIB_DIR/a3plus_tuner_config.textproto",
        "NCCL_SHIMNET_GUEST_CONFIG_CHECKER_CONFIG_FILE": "$NCCL_LIB_DIR/a3plus_guest_config.textproto",
        "NCCL_FASTRAK_PLUGIN_ACCEPT_TIMEOUT_MS": "600000",
    },
    source=_PROFILE,
)

# Measured: 318 GB/s all-reduce on 16 GPUs (https://github.com/elideng-sg/hypercomputer-internode-deepdive/tree/main/labs/
# lab-18), 338 to 340 (https://github.com/NVIDIA/aicr/pull/1565). 0.6 of the least; plain TCP has 4 GB/s there. NVIDIA's
# own fixed floor of 300 fails good nodes (https://github.com/NVIDIA/aicr/issues/1256).
FLOOR = {2: 190.0}

HEALTH = "/run/health-check"
"""The file that the daemon creates when it is ready, after 30 s. Its name must have no underscore (_PRACTICE)."""


def network(context: net.NetworkContext, options: net.DaemonOptions) -> net.Network:
    # Without gib's extra_nic: on A3 Mega a second gVNIC would take the place of a GPU's card (NVIDIA's docs of AICR,
    # gke-tcpxo-networking).
    release = net.released(options, PAIRS, name="tcpxo", plugin=PLUGIN_IMAGE, daemon=DAEMON_IMAGE, manifest=_INSTALLER)
    on_host = context.host_network
    folders, containers = [net.LIBRARIES], [_daemon(release, privileged=on_host)]
    volumes = [
        net.volume("libraries", "/home/kubernetes/bin/nvidia/lib64"),
        net.volume("sys", "/sys"),
        net.volume("proc-sys", "/proc/sys"),
    ]
    mounts, variables, annotations = [net.mount("libraries", net.LIBRARIES)], [], {}
    if not on_host:  # where the cards are seen as they are
        annotations = net.interface_annotations(NETWORKS) | net.device_annotation(DAEMON, DEVICES)
        volumes.append(net.volume("aperture-devices", APERTURES))
        mounts.append(net.mount("aperture-devices", APERTURES))
        variables.append(net.Variable("NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY", APERTURES, _MANIFEST))
    if options.network_install == "pod":
        folders.insert(0, f"{OWN}/lib64")
        volumes.append(net.volume("nccl-plugin"))
        mounts.append(own := net.mount("nccl-plugin", OWN))
        # Brings plugin and NCCL into the pod (_CHART). The released installers have no flag --nccl-buildtype.
        commands = ["set -ex", f"chmod 755 {net.ENTRY}", net.INSTALL, f"cp -r /var/lib/tcpxo/* {OWN}/"]
        containers.insert(0, net.installer("nccl-plugin-installer", release.plugin, commands, own))
    return net.Network(
        node=NodeNetwork(
            name="tcpxo",
            # `Using network FasTrak`: tcpdirect_plugin/fastrak_offload/fastrak_plugin.cc of the plugin's source.
            nccl_net="FasTrak",
            # Its variants ll128 and nvlstree are links into /var/lib/tcpxo, which dangle in a pod.
            scripts=(f"{folders[0]}/nccl-env-profile.sh",),
            library_paths=tuple(folders),
            interfaces=("eth0", *NETWORKS),
            socket="127.0.0.1:7332",
            glibc="2.35" if _version(release.pair.plugin) >= (1, 0, 9) else None,
            shm_bytes=8 * net.GIB,
            floor_gbytes=FLOOR,
            **release.node,
        ),
        annotations=annotations,
        labels={"tcpxo": "daemon"},
        anti_affinity={"tcpxo": "daemon"},
        init_containers=containers,
        volumes=volumes,
        mounts=mounts,
        # The script, the aperture devices and the daemon's socket are root's; neither XPK nor CTK adds a capability.
        capabilities=(net.OTHERS_FILES,),
        privileged=on_host,
        # Variables that the script needs, and must not overwrite.
        environment=(
            net.Variable("NCCL_LIB_DIR", folders[0], _PROFILE, "the script stops without it"),
            *variables,
            net.Variable("GLOO_SOCKET_IFNAME", "eth0", _PROFILE, "as NCCL_SOCKET_IFNAME; INFERRED"),
            *net.reported(source=_PROFILE),
        ),
        scripted=(*SCRIPTED, net.library_path(*folders, source=_MANIFEST)),
        shm_bytes=250 * net.GIB,  # GR's chart (_CHART)
        **release.network,
    )


def _version(tag: str) -> tuple[int, ...]:
    # `v1.0.13_1` as (1, 0, 13): the part that distinguishes releases comes before the dash or underscore.
    found = re.match(r"v?(\d+(?:\.\d+)*)", tag)
    return tuple(int(number) for number in found[1].split(".")) if found else ()


def _daemon(release: net.Released, *, privileged: bool) -> Object:
    """Return the daemon. Its entry point forwards SIGTERM, and so must be the container's process."""
    script, version = "/fts/entrypoint_rxdm_container.sh", _version(release.pair.daemon or "")
    # Flags that were retired are reported as errors (_NPX's README).
    flags = ["--num_hops=2"]
    if version < (1, 0, 20):
        flags.append("--num_nics=8")
    if version < (1, 0, 18):
        flags += ["--uid=", "--alsologtostderr"]
    health: dict[str, Any] = {}
    if version >= (1, 0, 11):
        health["variables"] = {"HEALTH_CHECK_LOG_FILE": HEALTH}
        health["probe"] = {
            "exec": {"command": ["cat", HEALTH]},
            "initialDelaySeconds": 1,
            "periodSeconds": 5,
            "timeoutSeconds": 1,
            "successThreshold": 1,
            # Google's example has 6, which is 30 s: as long as the start takes. INFERRED that two minutes are better.
            "failureThreshold": 24,
        }
    command = ["/bin/sh", "-c", f"set -ex; chmod 755 {script}; exec {script} {' '.join(flags)}"]
    rights = ["NET_ADMIN", "NET_BIND_SERVICE"]
    return net.daemon(DAEMON, release.daemon, command, rights=rights, privileged=privileged, **health)


TYPE = net.NetworkType(
    "GPUDirect of A3 Mega", network, {net.Carrier.PODS: net.DaemonOptions}, machines=("a3-megagpu-8g",)
)
