"""The pod of a node: one container that runs `python -m litgpt_demo node`, and what its network adds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.environment import Entry, combined, literal
from launcher.errors import ConfigProblem
from launcher.job import UNBUILT, Job
from launcher.networks.profile import Network, mount
from launcher.platforms.kubernetes import names
from launcher.platforms.kubernetes.settings import UID, GkePlatformConfig
from litgpt_demo.node.network import NETWORK, NodeNetwork
from litgpt_demo.storage import bucket_path

PORT = 29500
DIRECTORY = "/run/litgpt"
"""A node's own logs, error files and staged data; an emptyDir, so that it goes with the pod."""
TEMPORARY = "/tmp"
"""An emptyDir where the image cannot be written: temporary files, and the home of a user without any."""
BUCKETS = "/gcs"
"""The folder where buckets are mounted for `stage: fuse`."""
RESTART_ATTEMPT = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"

# What Google's own launchers tolerate (https://github.com/AI-Hypercomputer/gpu-recipes/blob/2e1fd5e/src/helm-charts/
# a3ultra/jobset, https://github.com/AI-Hypercomputer/xpk/blob/367c8382/src/xpk/core/workload_decorators).
_TOLERATIONS = (
    {"key": "nvidia.com/gpu", "operator": "Exists"},
    {"key": "cloud.google.com/impending-node-termination", "operator": "Exists"},
    {"key": "user-workload", "operator": "Equal", "value": "true", "effect": "NoSchedule"},
)


@dataclass(frozen=True, kw_only=True)
class Pod:
    """The parts of a pod's template, and what its variables mean."""

    metadata: Mapping[str, Any]
    spec: Mapping[str, Any]
    environment: tuple[Entry, ...]
    network: Network

    def template(self) -> dict[str, Any]:
        return {"metadata": dict(self.metadata), "spec": dict(self.spec)}


def pod(job: Job, settings: GkePlatformConfig, workload: str) -> Pod:
    """The pod that every node of the job has.

    Raises:
        ConfigProblem: the job's environment clashes with its network's or with what launching needs.
    """
    network = settings.fabric
    environment = tuple(_environment(job, settings, network, workload))
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": settings.grace + 20,  # torchrun's last kill, and the logs' way to the bucket
        **_identity(settings, network),
        **_pull_secrets(settings),
        "enableServiceLinks": False,  # a variable for every Service of the namespace, otherwise
        # Cluster names resolve on the host's network only by this policy.
        **({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if settings.host_network else {}),
        **_placement(job, settings, network),
        **({"priorityClassName": settings.priority} if settings.priority and not settings.queue else {}),
        **({"initContainers": [dict(one) for one in network.init_containers]} if network.init_containers else {}),
        "containers": [_container(job, settings, network, workload, environment)],
        "volumes": list(_volumes(job, settings, network)),
        **_claims(job, network),
    }
    return Pod(metadata=_metadata(job, settings, network), spec=spec, environment=environment, network=network)


def _pull_secrets(settings: GkePlatformConfig) -> dict[str, Any]:
    """A secret that is not there keeps no pod from being created: the pull is tried without it."""
    return (
        {"imagePullSecrets": [{"name": name} for name in settings.image_pull_secrets]}
        if (settings.image_pull_secrets)
        else {}
    )


def _metadata(job: Job, settings: GkePlatformConfig, network: Network) -> dict[str, Any]:
    annotations = {"kubectl.kubernetes.io/default-container": names.NODE, **network.annotations}
    if settings.stage == "fuse":
        # Without limits of its own the sidecar is killed for memory, and the mount is gone for good:
        # https://github.com/GoogleCloudPlatform/gcs-fuse-csi-driver/blob/5fcdc04a/docs/troubleshooting.md
        annotations["gke-gcsfuse/volumes"] = "true"
        annotations |= {f"gke-gcsfuse/{what}-limit": "0" for what in ("cpu", "memory", "ephemeral-storage")}
    if settings.topology is not None:
        how = "required" if settings.topology_required else "preferred"
        annotations[f"kueue.x-k8s.io/podset-{how}-topology"] = _topology_label(settings.topology)
    if settings.slice_nodes is not None:
        annotations["kueue.x-k8s.io/podset-slice-required-topology"] = _topology_label("subblock")
        annotations["kueue.x-k8s.io/podset-slice-size"] = str(settings.slice_nodes)
    if settings.flex_start is not None and settings.queue is not None:
        annotations["provreq.kueue.x-k8s.io/maxRunDurationSeconds"] = str(settings.flex_start)
    return {"labels": {**job.all_labels, **network.labels}, "annotations": annotations}


def _topology_label(level: str) -> str:
    """https://docs.cloud.google.com/ai-hypercomputer/docs/workloads/schedule-gke-workloads-tas"""
    return f"cloud.google.com/gce-topology-{level}" if level in {"block", "subblock", "host"} else level


# --- environment ------------------------------------------------------------------------------------------------------


def _environment(job: Job, settings: GkePlatformConfig, network: Network, workload: str) -> list[Entry]:
    fast = network.node.nccl_net is not None
    node = network.node.model_copy(
        update={
            "gpus": settings.node_gpus,
            "environment": {one.name: one.value for one in network.environment if one.after and network.node.scripts},
            # What the user and the job set has to win over the scripts, which the node sources later than the pod
            # sets anything.
            "overrides": {**job.env, **settings.overrides} if network.scripted else dict(settings.overrides),
            "allow_sockets": settings.allow_sockets,
            # Kueue's topology-aware scheduling numbers pods by place; otherwise ranks are sorted on the nodes. That a
            # pod may ask the metadata server where its machine is, is INFERRED; where it may not, nothing changes.
            # Machines that we do not know may be nobody's cloud.
            "place": "gce" if fast and settings.machine and settings.topology is None and job.nodes > 2 else None,
            # Plain TCP has no figure that it could be held to.
            "gate_seconds": settings.gate if job.nodes > 1 and fast else 0,
        }
    )
    return combined(
        [
            *_own(job, workload, node, fuse=settings.stage == "fuse"),
            *_of_user(job, settings, network),
            *_secrets(settings),
        ],
        profile=network.environment,
        scripted=network.scripted,
        overrides=settings.overrides,
        job=job.env,
    )


def _own(job: Job, workload: str, node: NodeNetwork, *, fuse: bool) -> Iterator[Entry]:
    """Yield the variables for launching. JOB_COMPLETION_INDEX, the node's rank, is set by the Job controller."""

    def entry(name: str, value: str, why: str, **more: Any) -> Entry:
        return Entry(name=name, value=value, origin="platform", why=why, **more)

    yield entry("LITGPT_HOST", "", "machine that this node is, for verdicts and exclusions", field="spec.nodeName")
    why = "one per life of the job: no node of the last one can join (pytorch#116974)"
    if workload == "jobset":
        yield entry("LITGPT_RESTART", "", "how often JobSet has restarted the job", field=RESTART_ATTEMPT)
        yield entry("LITGPT_ATTEMPT", f"{job.attempt_name}-$(LITGPT_RESTART)", why, expands=True)
    else:
        yield entry("LITGPT_ATTEMPT", job.attempt_name, why)
    told = {"name": node.name, **node.model_dump(mode="json", exclude_defaults=True)}
    yield entry(NETWORK, json.dumps(told, separators=(",", ":")), "what the node has to know of its network")
    yield entry("PYTHONUNBUFFERED", "1", "log lines appear when they are printed")
    if fuse:
        for address in job.stage[:1]:
            yield entry("LITGPT_DATASET", mounted(address), "where the dataset's bucket is mounted")


def _of_user(job: Job, settings: GkePlatformConfig, network: Network) -> Iterator[Entry]:
    """Yield USER and HOME for a user id that the image does not know, unless the config sets them."""
    values = {}
    if _unprivileged(settings, network):
        values["USER"] = "trainer", "torch.compile asks for the user's name (getpass), and the image may not know one"
    if _read_only(job, settings, network):
        values["HOME"] = TEMPORARY, "caches (triton, Hugging Face) need a folder that can be written"
    for name, (value, why) in values.items():
        if name not in {**job.env, **settings.overrides, **settings.secrets}:
            yield Entry(name=name, value=value, origin="platform", why=why)


def _secrets(settings: GkePlatformConfig) -> Iterator[Entry]:
    for name, entry in settings.secrets.items():
        yield Entry(name=name, value="", origin="user", why=f"platform.secrets: {entry}", secret=entry)


def mounted(address: str) -> str:
    """Return the path of an address in a bucket, in a pod that mounts the bucket."""
    return f"{BUCKETS}/{bucket_path(address)}"


# --- the container ----------------------------------------------------------------------------------------------------


def _container(
    job: Job, settings: GkePlatformConfig, network: Network, workload: str, environment: Sequence[Entry]
) -> dict[str, Any]:
    return {
        "name": names.NODE,
        "image": job.image or UNBUILT,
        "command": [literal(word) for word in node_command(job, settings, workload)],
        "env": [entry.as_object() for entry in environment if entry.origin != "script"],
        "resources": _resources(settings, network),
        "securityContext": _security(job, settings, network),
        "volumeMounts": list(_mounts(job, settings, network)),
    }


def node_command(job: Job, settings: GkePlatformConfig, workload: str) -> list[str]:
    """One command line for all nodes: what differs between them is in the environment."""
    arguments = job.node_command(
        node_rank="env:JOB_COMPLETION_INDEX",
        master=names.master(workload, job.attempt_name, PORT),
        run_id="env:LITGPT_ATTEMPT",
        directory=DIRECTORY,
        log_flags=("--log-uri", job.directory),
        grace=settings.grace,
        stage=job.stage if settings.stage == "copy" else (),
    )
    return ["python", *arguments]


def _resources(settings: GkePlatformConfig, network: Network) -> dict[str, Any]:
    asked = {name: value for name, value in (("cpu", settings.cpus), ("memory", settings.memory)) if value is not None}
    limits = {**({"nvidia.com/gpu": settings.node_gpus} if settings.node_gpus else {}), **network.resources}
    claims = {"claims": [{"name": claim} for claim in network.claims]} if network.claims else {}
    return {**({"requests": asked} if asked else {}), **({"limits": limits} if limits else {}), **claims}


def _unprivileged(settings: GkePlatformConfig, network: Network) -> bool:
    return settings.uid != 0 and not network.root and not network.privileged


def _read_only(job: Job, settings: GkePlatformConfig, network: Network) -> bool:
    """Return True if nothing of the container writes into its image: our own programs write where their volumes are.

    A script of the user's may write next to itself, and the scripts of networks that need root write as they like.
    """
    return _unprivileged(settings, network) and job.program[:2] == ("-m", "litgpt_demo")


def _security(job: Job, settings: GkePlatformConfig, network: Network) -> dict[str, Any]:
    """Return the narrowest security context that the network allows: each profile says what it needs, and why."""
    if network.privileged:
        return {"privileged": True, "runAsUser": 0}
    rights: dict[str, Any]
    if network.root:
        rights = {"runAsUser": 0, "capabilities": {"drop": ["ALL"], "add": list(network.capabilities)}}
    elif settings.uid == 0:  # an image that needs root needs the capabilities of root too (chown, reading any file)
        rights = {"runAsUser": 0}
    else:
        rights = {"capabilities": {"drop": ["ALL"]}}
    return {
        "allowPrivilegeEscalation": False,
        **rights,
        "seccompProfile": {"type": "RuntimeDefault"},
        **({"readOnlyRootFilesystem": True} if _read_only(job, settings, network) else {}),
    }


def _mounts(job: Job, settings: GkePlatformConfig, network: Network) -> Iterator[Mapping[str, Any]]:
    yield mount("scratch", DIRECTORY)
    yield mount("shared-memory", "/dev/shm")
    if _read_only(job, settings, network):
        yield mount("temporary", TEMPORARY)
    yield from network.mounts
    if settings.claim is not None:
        yield mount("claim", settings.claim_path)
    if settings.stage == "fuse":
        yield from (mount(f"bucket-{number}", f"{BUCKETS}/{name}", read_only=True) for number, name in _buckets(job))


# --- the pod ----------------------------------------------------------------------------------------------------------


def _identity(settings: GkePlatformConfig, network: Network) -> dict[str, Any]:
    """Return who the pod is. Workload Identity needs the service account's name, not its token.

    A network's daemons run as their images say, so that such a pod has no user of its own. The group makes volumes,
    a claim's files among them, the trainer's to write.
    """
    account = {"serviceAccountName": settings.service_account} if settings.service_account else {}
    group = {"fsGroup": settings.uid or UID, "fsGroupChangePolicy": "OnRootMismatch"}
    if _unprivileged(settings, network):
        user = {"runAsNonRoot": True, "runAsUser": settings.uid, "runAsGroup": settings.uid}
        security = {"securityContext": {**user, **group}}
    else:
        security = {"securityContext": group} if settings.claim else {}
    return {**account, "automountServiceAccountToken": False, **security}


def _placement(job: Job, settings: GkePlatformConfig, network: Network) -> dict[str, Any]:
    machine = settings.machine_type
    selector = dict(settings.node_selector)
    if machine is not None:
        selector |= {"cloud.google.com/gke-accelerator": machine.gpu, **machine.labels}
    selector |= _capacity(settings)
    tolerations = [*_TOLERATIONS, *_more_tolerations(settings)]
    affinity = _affinity(network, exclude=[*dict.fromkeys((*settings.exclude_nodes, *job.exclude_nodes))])
    return {
        **({"nodeSelector": selector} if selector else {}),
        **({"affinity": affinity} if affinity else {}),
        "tolerations": tolerations,
    }


def _capacity(settings: GkePlatformConfig) -> dict[str, str]:
    """Return the labels by how the nodes were bought, as GKE's own documentation has them, at docs.cloud.google.com/
    kubernetes-engine/docs: how-to/spot-vms, how-to/consuming-reservations, how-to/dws-flex-start-training,
    how-to/persistent-volumes/local-ssd. Of these only gke-spot was seen in a manifest; the others are INFERRED."""
    chosen = {
        "cloud.google.com/gke-nodepool": settings.node_pool,
        "cloud.google.com/gke-spot": "true" if settings.spot else None,
        "cloud.google.com/reservation-name": settings.reservation,
        "cloud.google.com/gke-flex-start": "true" if settings.flex_start and not settings.queue else None,
        "cloud.google.com/gke-ephemeral-storage-local-ssd": "true" if settings.local_ssd else None,
    }
    return {label: value for label, value in chosen.items() if value is not None}


def _more_tolerations(settings: GkePlatformConfig) -> Iterator[dict[str, Any]]:
    machine = settings.machine_type
    if machine is not None and machine.arch == "arm64":
        yield {"key": "kubernetes.io/arch", "operator": "Equal", "value": "arm64", "effect": "NoSchedule"}
    if settings.spot:
        yield {"key": "cloud.google.com/gke-spot", "operator": "Equal", "value": "true", "effect": "NoSchedule"}
    if settings.flex_start is not None:
        # https://github.com/GoogleCloudPlatform/cluster-toolkit/blob/104708037/examples/gke-a3-ultragpu/nccl-jobset-example.yaml
        yield {"key": "cloud.google.com/gke-queued", "operator": "Equal", "value": "true", "effect": "NoSchedule"}


def _affinity(network: Network, *, exclude: list[str]) -> dict[str, Any]:
    affinity: dict[str, Any] = {}
    if exclude:
        rule = {"key": "kubernetes.io/hostname", "operator": "NotIn", "values": exclude}
        terms = {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}
        affinity["nodeAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": terms}
    if network.alone:
        term = {"labelSelector": {"matchLabels": dict(network.alone)}, "topologyKey": "kubernetes.io/hostname"}
        affinity["podAntiAffinity"] = {"requiredDuringSchedulingIgnoredDuringExecution": [term]}
    return affinity


def _volumes(job: Job, settings: GkePlatformConfig, network: Network) -> Iterator[Mapping[str, Any]]:
    yield {"name": "scratch", "emptyDir": {}}
    size = settings.shm or f"{network.shm_bytes // 2**30}Gi"
    # 64 MB is what a container has otherwise: https://github.com/NVIDIA/nccl/issues/290
    yield {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": size}}
    if _read_only(job, settings, network):
        yield {"name": "temporary", "emptyDir": {}}
    yield from network.volumes
    if settings.claim is not None:
        yield {"name": "claim", "persistentVolumeClaim": {"claimName": settings.claim}}
    if settings.stage == "fuse":
        yield from (_bucket_volume(number, name, settings) for number, name in _buckets(job))


def _buckets(job: Job) -> list[tuple[int, str]]:
    """The buckets that datasets are in, numbered.

    Raises:
        ConfigProblem: a dataset is in no bucket.
    """
    found: dict[str, None] = {}
    for address in job.stage:
        if (place := bucket_path(address)) is None:
            raise ConfigProblem(
                f"platform.stage=fuse mounts buckets, and {address} is in none; take platform.stage=copy, "
                "or a root of gs://bucket/prefix"
            )
        found[place.split("/")[0]] = None
    return list(enumerate(found))


def _bucket_volume(number: int, bucket: str, settings: GkePlatformConfig) -> dict[str, Any]:
    """https://github.com/GoogleCloudPlatform/gcs-fuse-csi-driver/blob/5fcdc04a/docs: known-issues, authentication"""
    attributes = {
        "bucketName": bucket,
        "mountOptions": "implicit-dirs",  # folders without an object of their own are missing otherwise
        # What was read is kept on the node's disk, without a limit: windows are read in random order. INFERRED.
        "fileCacheCapacity": "-1",
        "fileCacheForRangeRead": "true",
        # Pods on the host's network have no identity of their own unless asked for; needs driver 1.17.2.
        **({"hostNetworkPodKSA": "true"} if settings.host_network else {}),
    }
    csi = {"driver": "gcsfuse.csi.storage.gke.io", "readOnly": True, "volumeAttributes": attributes}
    return {"name": f"bucket-{number}", "csi": csi}


def claim_name(job: Job, claim: str) -> str:
    """The name of the ResourceClaimTemplate that a pod's claim is made from."""
    return f"{job.attempt_name}-{claim}"


def _claims(job: Job, network: Network) -> dict[str, Any]:
    if not network.claims:
        return {}
    return {
        "resourceClaims": [
            {"name": claim, "resourceClaimTemplateName": claim_name(job, claim)} for claim in network.claims
        ]
    }
