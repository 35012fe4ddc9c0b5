"""Rendering of a job as Kubernetes objects: a JobSet, or an Indexed Job with its headless Service, and what they need.

A JobSet is one Indexed Job of all nodes, which the cluster restarts as a unit. Clusters without JobSet get a plain Job,
which the launcher's next attempt replaces. Each pod has one container that runs `python -m litgpt_demo node`, and those
of its network. Pure: no cluster, no clock, no disk.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from launcher.environment import Entry, as_rows, literal, node_environment
from launcher.errors import ConfigProblem
from launcher.job import JOB_LABEL, UNBUILT, Job, JobId, Submission, drop_empty
from launcher.networks.profile import Network, mount
from launcher.platforms.kubernetes import cluster as api
from launcher.platforms.kubernetes.settings import UID, KubernetesSettings
from launcher.platforms.settings import LONGEST_LABEL
from litgpt_demo.errors import EXIT_CODES, FailureClass
from litgpt_demo.storage import bucket_path

WorkloadObjects = Literal["jobset", "job"]

_PERMANENT = ("UNKNOWN", "USER", "DATA", "OUT_OF_MEMORY", "DISK_FULL")
HOPELESS = (*sorted(EXIT_CODES[FailureClass[name]] for name in _PERMANENT), 137)
"""The exit codes of failures that a restart does not change. 137 is SIGKILL, mostly for memory: a cluster's rules do
not see the reason (OOMKilled), but the launcher sees it and decides."""

# The objects behind a network's claims. The controller of a ComputeDomain creates the claim template.
_CLAIM_KINDS: Mapping[str, api.Resource] = {"compute-domain": api.COMPUTE_DOMAINS, "rdma": api.CLAIM_TEMPLATES}

_POD_SUFFIX = 6
"""Controllers append a dash and five characters to a pod's name."""
_ATTEMPT_DIGITS = 3
"""Room for the numbers of a run's attempts."""
NODES = "nodes"
"""The one replicated job of our JobSets."""
NODE = "node"
"""The container of a pod that runs `python -m litgpt_demo node`."""
PORT = 29500
DIRECTORY = "/run/litgpt"
"""A node's own logs, error files and staged data: an emptyDir, which is deleted with the pod."""
TEMPORARY = "/tmp"
"""An emptyDir if the image is read-only: temporary files, and the home of a user without one."""
BUCKETS = "/gcs"
"""The folder where buckets are mounted for `dataset_access: fuse`."""

_HOSTNAME = "kubernetes.io/hostname"
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def job_name(name: str) -> str:
    """Return the name of the one Job that JobSet makes for our JobSet."""
    return f"{name}-{NODES}-0"


def pod_host(workload: str, name: str, index: int) -> str:
    return f"{job_name(name)}-{index}" if workload == "jobset" else f"{name}-{index}"


def render(job: Job, settings: KubernetesSettings, workload: WorkloadObjects) -> Submission:
    """Return the submission: a Kubernetes List, which `kubectl apply -f -` accepts as printed."""
    name = job.attempt_name
    # JobSet's webhook would refuse too long names of pods, and a Job's pods would never appear. The room for a longer
    # number of a later attempt is reserved now: it must not end a run that has trained for days.
    number = max(0, _ATTEMPT_DIGITS - len(str(job.attempt)))
    longest = len(pod_host(workload, name, job.nodes - 1)) + number + _POD_SUFFIX
    if longest > LONGEST_LABEL:
        what = f"pods of {name} would have names of {longest} characters, and Kubernetes takes {LONGEST_LABEL}"
        raise ConfigProblem(what, fix=f"make the run's `name` {longest - LONGEST_LABEL} characters shorter")
    network = settings.fabric
    template, environment = _pod(job, settings, network, workload)
    labels, queue = job.all_labels, settings.queue
    # https://github.com/kubernetes-sigs/kueue/blob/ff69552e79/site/content/en/docs/tasks/run
    kueue = {"kueue.x-k8s.io/queue-name": queue, "kueue.x-k8s.io/priority-class": settings.priority} if queue else {}
    metadata = {"name": name, "namespace": settings.namespace, "labels": {**labels, **drop_empty(**kueue)}}
    plain = {**metadata, "labels": labels}
    items: list[dict[str, Any]] = []
    if settings.isolated:
        # Only pods of the attempt connect to its pods, because rank 0's store and gloo have no password. The policy has
        # all ports, because NCCL and gloo listen on any free one. Outgoing connections (DNS, buckets) stay open. It
        # holds on eth0 of clusters with network policy enforcement (GKE: Dataplane V2 or Calico), but not on the
        # further interfaces of TCPX, TCPXO and RDMA, which are networks of the GPUs' own:
        # https://docs.cloud.google.com/kubernetes-engine/docs/how-to/setup-multinetwork-support-for-pods
        attempt = {"matchLabels": {JOB_LABEL: name}}
        ingress = [{"from": [{"podSelector": attempt}]}]
        policy = {"podSelector": attempt, "policyTypes": ["Ingress"], "ingress": ingress}
        version = "networking.k8s.io/v1"
        items.append({"apiVersion": version, "kind": "NetworkPolicy", "metadata": plain, "spec": policy})
    items += [_claim(claim, job, plain, network) for claim in network.claims]
    # Only Kueue starts the jobs in its queues.
    spec = {**drop_empty(suspend=queue is not None), "ttlSecondsAfterFinished": settings.ttl}
    if workload == "jobset":
        # JobSet creates the headless Service. Pods are `<name>-nodes-0-<index>.<name>`. By its failure policy a
        # permanent failure ends it. Any other failure, preemptions included, restarts it and counts. The cluster knows
        # no checkpoints, does not pause between restarts, and counts a pod's eviction from a full machine as a
        # preemption. The launcher, which starts the next attempt, distinguishes these.
        # A disrupted pod and an exit code are both `PodFailurePolicy` to JobSet. Only the Job controller's message
        # differs (https://github.com/kubernetes-sigs/jobset/tree/08dfbdfd/keps/262-ConfigurableFailurePolicy):
        # `Container … for pod … failed with exit code 42 matching …`.
        hopeless = {
            "name": "hopeless",
            "action": "FailJobSet",
            "onJobFailureReasons": ["PodFailurePolicy"],
            "onJobFailureMessagePatterns": [f".*failed with exit code ({'|'.join(map(str, HOPELESS))}) matching.*"],
            "targetReplicatedJobs": [NODES],
        }
        # BlockingRecreate: no pod of the next life starts before the last of this one is gone (jobset#665, #684).
        how = {"maxRestarts": settings.in_place_restarts, "restartStrategy": "BlockingRecreate", "rules": [hopeless]}
        made = {"metadata": {"labels": labels}, "spec": _gang(job, template)}
        spec |= {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True},
            "successPolicy": {"operator": "All"},
            "failurePolicy": how,
            "replicatedJobs": [{"name": NODES, "replicas": 1, "template": made}],
        }
        version = "jobset.x-k8s.io/v1alpha2"
        items.append({"apiVersion": version, "kind": "JobSet", "metadata": metadata, "spec": spec})
    else:
        # Pods get names before they are ready, which is when they look for node 0.
        selector = {"batch.kubernetes.io/job-name": name}
        service = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": selector}
        items.append({"apiVersion": "v1", "kind": "Service", "metadata": plain, "spec": service})
        spec |= _gang(job, {**template, "spec": {"subdomain": name, **template["spec"]}})
        items.append({"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec})
    job_id, body = job_id_of(settings, name), {"apiVersion": "v1", "kind": "List", "items": items}
    return Submission(platform=settings.kind, job_id=job_id, body=body, environment=as_rows(environment))


def job_id_of(settings: KubernetesSettings, attempt_name: str) -> JobId:
    return JobId(f"{settings.namespace}/{attempt_name}")


def made_of(settings: KubernetesSettings) -> tuple[api.Resource, ...]:
    """Return the kinds of all objects that a job with these settings may have, as a JobSet or as a Job."""
    kinds = [api.JOBSETS, api.JOBS, api.SERVICES, api.PODS]
    if settings.isolated:
        kinds.append(api.NETWORK_POLICIES)
    return (*kinds, *(_CLAIM_KINDS[claim] for claim in settings.fabric.claims))


def _gang(job: Job, template: Mapping[str, Any]) -> dict[str, Any]:
    """All pods or none: two pods of one index must never live at the same time (kubernetes#115844). There is no
    replacement, which would have to wait for the end of the old pod (jobset#574)."""
    # This rule is first, because the exit code of a disrupted pod means nothing.
    disrupted = {"action": "FailJob", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}
    codes = {"containerName": NODE, "operator": "In", "values": list(HOPELESS)}
    return {
        "completionMode": "Indexed",
        "parallelism": job.nodes,
        "completions": job.nodes,
        "backoffLimit": 0,
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": [disrupted, {"action": "FailJob", "onExitCodes": codes}]},
        "template": dict(template),
    }


def _claim(claim: str, job: Job, metadata: Mapping[str, Any], network: Network) -> dict[str, Any]:
    """Return the object behind a claim of the pods (dynamic resource allocation).

    `compute-domain`: memory shared over NVLink between the nodes of a GB200 rack; its controller makes the claim
    template. `rdma`: the node's RDMA cards, by GKE's managed DRA driver.
    https://github.com/GoogleCloudPlatform/container-engine-accelerators/blob/992db812/gpudirect-rdma:
    nccl-test-imex-a4x.yaml, nccl-test-managed-rdma.yaml
    """
    name = f"{job.attempt_name}-{claim}"
    if claim == "compute-domain":
        domain = {"numNodes": job.nodes, "channel": {"resourceClaimTemplate": {"name": name}}}
        version = "resource.nvidia.com/v1beta1"
        return {"apiVersion": version, "kind": "ComputeDomain", "metadata": metadata, "spec": domain}
    cards = network.rdma_cards
    amount = {"allocationMode": "All"} if cards is None else {"allocationMode": "ExactCount", "count": cards}
    request = {"name": "rdma", "exactly": {"deviceClassName": "mrdma.google.com", **amount}}
    named, spec = {**metadata, "name": name}, {"spec": {"devices": {"requests": [request]}}}
    return {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaimTemplate", "metadata": named, "spec": spec}


def _pod(job: Job, settings: KubernetesSettings, network: Network, workload: str) -> tuple[dict[str, Any], list[Entry]]:
    unprivileged = settings.uid != 0 and not network.root and not network.privileged
    # Our own programs write only to their volumes. A user's script may write next to itself, and the scripts of
    # networks that need root write anywhere.
    read_only = unprivileged and job.program[:2] == ("-m", "litgpt_demo")
    environment = _environment(job, settings, network, workload, unprivileged=unprivileged, read_only=read_only)
    volumes, mounts = _volumes(job, settings, network, read_only=read_only)
    arguments = job.node_command(
        node_rank="env:JOB_COMPLETION_INDEX",
        # Node 0 by its host name within the headless Service, which has the name of the job.
        master=f"{pod_host(workload, job.attempt_name, 0)}.{job.attempt_name}:{PORT}",
        run_id="env:LITGPT_ATTEMPT",
        directory=DIRECTORY,
        log_flags=("--log-uri", job.directory),
        grace=settings.grace_period,
        stage=job.stage if settings.dataset_access == "copy" else (),
    )
    container = {
        "name": NODE,
        "image": job.image or UNBUILT,
        "command": [literal(word) for word in ("python", *arguments)],
        "env": [entry.as_object() for entry in environment if entry.origin != "script"],
        "resources": drop_empty(
            requests=drop_empty(cpu=settings.cpus, memory=settings.memory),
            limits={**drop_empty(**{"nvidia.com/gpu": settings.node_gpus}), **network.resources},
            claims=[{"name": claim} for claim in network.claims],
        ),
        "securityContext": _security(settings, network, read_only=read_only),
        "volumeMounts": mounts,
    }
    annotations = {"kubectl.kubernetes.io/default-container": NODE, **network.annotations}
    if settings.dataset_access == "fuse":
        # Without own limits the sidecar is killed for memory, and the mount does not come back:
        # https://github.com/GoogleCloudPlatform/gcs-fuse-csi-driver/blob/5fcdc04a/docs/troubleshooting.md
        annotations["gke-gcsfuse/volumes"] = "true"
        annotations |= {f"gke-gcsfuse/{what}-limit": "0" for what in ("cpu", "memory", "ephemeral-storage")}
    # https://docs.cloud.google.com/ai-hypercomputer/docs/workloads/schedule-gke-workloads-tas
    label = "cloud.google.com/gce-topology-"
    if settings.topology is not None:
        how = "required" if settings.topology_required else "preferred"
        prefix = label if settings.topology in {"block", "subblock", "host"} else ""
        annotations[f"kueue.x-k8s.io/podset-{how}-topology"] = f"{prefix}{settings.topology}"
    if settings.slice_nodes is not None:
        annotations["kueue.x-k8s.io/podset-slice-required-topology"] = f"{label}subblock"
        annotations["kueue.x-k8s.io/podset-slice-size"] = str(settings.slice_nodes)
    if settings.flex_start and settings.queue is not None:
        annotations["provreq.kueue.x-k8s.io/maxRunDurationSeconds"] = str(settings.flex_start_duration)
    # With the group, the trainer can write to volumes and to a PVC's files. Such a pod has no user if the daemons of
    # its network run as their images say.
    security: dict[str, Any] = {}
    if unprivileged:
        security = {"runAsNonRoot": True, "runAsUser": settings.uid, "runAsGroup": settings.uid}
    if unprivileged or settings.pvc:
        security |= {"fsGroup": settings.uid or UID, "fsGroupChangePolicy": "OnRootMismatch"}
    claims = [{"name": claim, "resourceClaimTemplateName": f"{job.attempt_name}-{claim}"} for claim in network.claims]
    spec = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": settings.grace_period
        + 20,  # torchrun's last kill, and the logs' way to the bucket
        **drop_empty(serviceAccountName=settings.service_account),  # Workload Identity needs its name, not its token
        "automountServiceAccountToken": False,
        **drop_empty(securityContext=security),
        # A pod is created without a missing secret too: the pull is then tried without it.
        **drop_empty(imagePullSecrets=[{"name": name} for name in settings.image_pull_secrets]),
        "enableServiceLinks": False,  # a variable for every Service of the namespace, otherwise
        # Cluster names resolve on the host's network only by this policy.
        **({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"} if settings.host_network else {}),
        **_placement(job, settings, network),
        **drop_empty(priorityClassName=None if settings.queue else settings.priority),
        **drop_empty(initContainers=list(map(dict, network.init_containers))),
        "containers": [container],
        "volumes": volumes,
        **drop_empty(resourceClaims=claims),
    }
    metadata = {"labels": {**job.all_labels, **network.labels}, "annotations": annotations}
    return {"metadata": metadata, "spec": spec}, environment


def _environment(
    job: Job, settings: KubernetesSettings, network: Network, workload: str, *, unprivileged: bool, read_only: bool
) -> list[Entry]:
    """Return the variables of a node. The Job controller sets JOB_COMPLETION_INDEX, its rank."""
    own: list[Entry] = []

    def add(name: str, value: str, why: str, **more: Any) -> None:
        own.append(Entry(name=name, value=value, origin="platform", why=why, **more))

    add("LITGPT_HOST", "", "machine that this node is, for diagnoses and exclusions", field="spec.nodeName")
    why = "one per life of the job: no node of the last one can join (pytorch#116974)"
    if workload == "jobset":
        restart = "metadata.labels['jobset.sigs.k8s.io/restart-attempt']"
        add("LITGPT_RESTART", "", "how often JobSet has restarted the job", field=restart)
        add("LITGPT_ATTEMPT", f"{job.attempt_name}-$(LITGPT_RESTART)", why, expands=True)
    else:
        add("LITGPT_ATTEMPT", job.attempt_name, why)
    first = len(own)
    if settings.dataset_access == "fuse" and job.stage:
        add("LITGPT_DATASET", f"{BUCKETS}/{bucket_path(job.stage[0])}", "where the dataset's bucket is mounted")
    users = {**job.env, **settings.env, **settings.secrets}
    if unprivileged and "USER" not in users:  # a user id that the image does not know
        add("USER", "trainer", "torch.compile queries the user's name (getpass), and the image may not know one")
    if read_only and "HOME" not in users:
        add("HOME", TEMPORARY, "caches (triton, Hugging Face) need a folder that can be written")
    for name, entry in settings.secrets.items():
        own.append(Entry(name=name, value="", origin="user", why=f"platform.secrets: {entry}", secret=entry))
    # Without Kueue's topology-aware scheduling, the nodes sort the ranks by location. That a pod may query the metadata
    # server for it is INFERRED; if not, nothing changes. A machine without a known type may be in no cloud.
    sorts_ranks = network.node.nccl_net and settings.machine and settings.topology is None and job.nodes > 2
    location, sockets = "gce" if sorts_ranks else None, settings.allow_tcp_fallback
    return node_environment(
        job, settings, network, own[first:], before=own[:first], allow_tcp_fallback=sockets, location_source=location
    )


def _security(settings: KubernetesSettings, network: Network, *, read_only: bool) -> dict[str, Any]:
    if network.privileged:
        return {"privileged": True, "runAsUser": 0}
    rights: dict[str, Any] = {"capabilities": {"drop": ["ALL"]}}
    if network.root:
        rights = {"runAsUser": 0, "capabilities": {"drop": ["ALL"], "add": list(network.capabilities)}}
    elif settings.uid == 0:  # an image that needs root needs the capabilities of root too (chown, reading any file)
        rights = {"runAsUser": 0}
    return {
        "allowPrivilegeEscalation": False,
        **rights,
        "seccompProfile": {"type": "RuntimeDefault"},
        **drop_empty(readOnlyRootFilesystem=read_only),
    }


def _placement(job: Job, settings: KubernetesSettings, network: Network) -> dict[str, Any]:
    """Return which machines the pods take: their labels, the excluded ones, and the tolerated taints.

    The labels of spot, reserved, flex-start and local SSD nodes are those of docs.cloud.google.com/
    kubernetes-engine/docs: how-to/spot-vms, how-to/consuming-reservations, how-to/dws-flex-start-training,
    how-to/persistent-volumes/local-ssd. Only gke-spot was seen in a manifest; the others are INFERRED.
    """
    machine = settings.machine_type
    selector = dict(settings.node_selector)
    if machine is not None:
        selector |= {"cloud.google.com/gke-accelerator": machine.gpu, **machine.labels}
    taints = {"user-workload": "true"}
    if machine is not None and machine.arch == "arm64":
        taints["kubernetes.io/arch"] = "arm64"
    if settings.node_pool:
        selector["cloud.google.com/gke-nodepool"] = settings.node_pool
    if settings.spot:
        selector["cloud.google.com/gke-spot"] = taints["cloud.google.com/gke-spot"] = "true"
    if settings.reservation:
        selector["cloud.google.com/reservation-name"] = settings.reservation
    if settings.flex_start:
        # https://github.com/GoogleCloudPlatform/cluster-toolkit/blob/104708037/examples/gke-a3-ultragpu/nccl-jobset-example.yaml
        taints["cloud.google.com/gke-queued"] = "true"
        if settings.queue is None:
            selector["cloud.google.com/gke-flex-start"] = "true"
    if settings.local_ssd:
        selector["cloud.google.com/gke-ephemeral-storage-local-ssd"] = "true"
    # The taints that Google's own launchers tolerate (https://github.com/AI-Hypercomputer/gpu-recipes/blob/2e1fd5e/src/helm-charts/
    # a3ultra/jobset, https://github.com/AI-Hypercomputer/xpk/blob/367c8382/src/xpk/core/workload_decorators).
    always = ("nvidia.com/gpu", "cloud.google.com/impending-node-termination")
    tolerations = [{"key": key, "operator": "Exists"} for key in always]
    for key, value in taints.items():
        tolerations.append({"key": key, "operator": "Equal", "value": value, "effect": "NoSchedule"})
    affinity: dict[str, Any] = {}
    excluded = [*dict.fromkeys((*settings.exclude_nodes, *job.exclude_nodes))]
    if excluded:
        rule = {"key": _HOSTNAME, "operator": "NotIn", "values": excluded}
        affinity["nodeAffinity"] = {_REQUIRED: {"nodeSelectorTerms": [{"matchExpressions": [rule]}]}}
    if network.anti_affinity:
        term = {"labelSelector": {"matchLabels": dict(network.anti_affinity)}, "topologyKey": _HOSTNAME}
        affinity["podAntiAffinity"] = {_REQUIRED: [term]}
    return drop_empty(nodeSelector=selector, affinity=affinity, tolerations=tolerations)


def _volumes(
    job: Job, settings: KubernetesSettings, network: Network, *, read_only: bool
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    # Without it a container has 64 MB: https://github.com/NVIDIA/nccl/issues/290
    size = settings.shm or f"{network.shm_bytes // 2**30}Gi"
    volumes: list[Mapping[str, Any]] = [
        {"name": "scratch", "emptyDir": {}},
        {"name": "shared-memory", "emptyDir": {"medium": "Memory", "sizeLimit": size}},
    ]
    mounts = [mount("scratch", DIRECTORY), mount("shared-memory", "/dev/shm")]
    if read_only:
        volumes.append({"name": "temporary", "emptyDir": {}})
        mounts.append(mount("temporary", TEMPORARY))
    volumes += network.volumes
    mounts += network.mounts
    if settings.pvc is not None:
        volumes.append({"name": "pvc", "persistentVolumeClaim": {"claimName": settings.pvc}})
        mounts.append(mount("pvc", settings.pvc_path))
    places = [bucket_path(address) for address in (job.stage if settings.dataset_access == "fuse" else ())]
    if None in places:
        fix = "take platform.dataset_access=copy, or a root of gs://bucket/prefix"
        what = f"platform.dataset_access=fuse mounts buckets, and {', '.join(job.stage)} is in none"
        raise ConfigProblem(what, fix=fix)
    for number, bucket in enumerate(dict.fromkeys(str(place).split("/")[0] for place in places)):
        # https://github.com/GoogleCloudPlatform/gcs-fuse-csi-driver/blob/5fcdc04a/docs: known-issues, authentication
        attributes = {
            "bucketName": bucket,
            "mountOptions": "implicit-dirs",  # folders without an object of their own are missing otherwise
            # The node's disk caches what was read, without a limit, because samples are read in random order. INFERRED.
            "fileCacheCapacity": "-1",
            "fileCacheForRangeRead": "true",
            # Pods on the host's network have no own identity without it. It needs driver 1.17.2.
            **({"hostNetworkPodKSA": "true"} if settings.host_network else {}),
        }
        csi = {"driver": "gcsfuse.csi.storage.gke.io", "readOnly": True, "volumeAttributes": attributes}
        volumes.append({"name": f"bucket-{number}", "csi": csi})
        mounts.append(mount(f"bucket-{number}", f"{BUCKETS}/{bucket}", read_only=True))
    return volumes, mounts
