"""Checks that the objects of a submission agree with each other: findings that a schema cannot give.

The linter reads what will be sent, not what it was made from: it also finds mistakes of our own, and of overrides.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import yaml

from launcher.job import Object
from launcher.machines import MACHINES, Machine
from launcher.networks import known_pairs, network_findings
from launcher.networks.profile import DEVICES, INTERFACES, MULTUS, Network
from launcher.platforms.dns import LONGEST, RFC_1035
from launcher.platforms.kubernetes import names
from launcher.platforms.kubernetes.settings import UID, GkePlatformConfig
from litgpt_demo.findings import Finding
from litgpt_demo.node.network import NETWORK
from litgpt_demo.storage import is_remote


@dataclass(frozen=True)
class Submitted:
    """The parts of a submission that the rules look at."""

    items: Sequence[Object]
    settings: GkePlatformConfig

    @property
    def workload(self) -> Object:
        """The JobSet or Job."""
        return next(item for item in self.items if item["kind"] in {"JobSet", "Job"})

    @property
    def job(self) -> Object:
        """The specification of the Indexed Job."""
        spec: Object = self.workload["spec"]
        return spec["replicatedJobs"][0]["template"]["spec"] if self.workload["kind"] == "JobSet" else spec

    @property
    def template(self) -> Object:
        template: Object = self.job["template"]
        return template

    @property
    def annotations(self) -> Mapping[str, str]:
        found: Mapping[str, str] = self.template["metadata"].get("annotations", {})
        return found

    @property
    def pod(self) -> Object:
        spec: Object = self.template["spec"]
        return spec

    @property
    def containers(self) -> list[Object]:
        return [*self.pod.get("initContainers", ()), *self.pod["containers"]]

    @property
    def node(self) -> Object:
        """The container that trains."""
        return next((one for one in self.pod["containers"] if one["name"] == names.NODE), {})

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of the container that trains; those read from the pod's fields have no value here."""
        return {one["name"]: one.get("value", "") for one in self.node.get("env", ())}

    @property
    def network(self) -> Mapping[str, Any]:
        told: Mapping[str, Any] = json.loads(self.environment.get(NETWORK, "{}"))
        return told

    @cached_property
    def fabric(self) -> Network:
        """The network that the settings ask for."""
        return self.settings.fabric

    @property
    def machine(self) -> Machine | None:
        """Return the machine by the accelerator that the pod selects."""
        label = self.pod.get("nodeSelector", {}).get("cloud.google.com/gke-accelerator")
        return next((one for one in MACHINES.values() if one.gpu.label == label), None)


def lint(items: Sequence[Object], settings: GkePlatformConfig) -> list[Finding]:
    """Everything that does not fit together, all at once."""
    submitted = Submitted(items, settings)
    rules = (
        pod_names, labels, gang, containers, images, network_options, devices, interfaces, host_network, volumes,
        claims, environment, tolerations, releases, bindings, named_interfaces, batches, time_to_leave, kept,
        bucket_mounts, user,
    )  # fmt: skip
    return [finding for rule in rules for finding in rule(submitted)]


def _error(code: str, what: str, fix: str) -> Finding:
    return Finding("error", f"gke.{code}", what, fix)


# --- names ------------------------------------------------------------------------------------------------------------


def pod_names(submitted: Submitted) -> Iterator[Finding]:
    """Pods are named after the job, and their names have to be host names."""
    name, kind = submitted.workload["metadata"]["name"], submitted.workload["kind"]
    longest = names.longest_pod(kind.lower(), name, nodes=submitted.job["completions"])
    if longest > LONGEST:
        what = f"pods of {name} would have names of {longest} characters, and {LONGEST} are allowed"
        yield _error("name-length", what, f"make the run's name {longest - LONGEST} characters shorter")
    if not RFC_1035.fullmatch(name):
        yield _error("name", f"{name!r} cannot be a host name", "lower-case letters, digits and dashes")


def labels(submitted: Submitted) -> Iterator[Finding]:
    """Labels have a narrow alphabet and 63 characters."""
    for key, value in {**submitted.workload["metadata"]["labels"], **submitted.template["metadata"]["labels"]}.items():
        if not names.LABEL_KEY.fullmatch(key) or not names.LABEL_VALUE.fullmatch(value):
            what = f"{key}={value} cannot be a label"
            yield _error("label", what, "at most 63 letters, digits, dots, dashes and underscores")


# --- the gang ---------------------------------------------------------------------------------------------------------


def gang(submitted: Submitted) -> Iterator[Finding]:
    """All pods live and die together; a fault is seen at once and for what it is."""
    wanted = {"completionMode": "Indexed", "backoffLimit": 0, "podReplacementPolicy": "Failed"}
    for field, value in wanted.items():
        if submitted.job.get(field) != value:
            what = f"{field}={submitted.job.get(field)} lets a pod be replaced while its peers wait for the old one"
            yield _error("gang", what, f"{field}: {value}")
    if submitted.job["parallelism"] != submitted.job["completions"]:
        yield _error("gang", "parallelism and completions differ, so that not all pods run", "make them equal")
    if submitted.pod.get("restartPolicy") != "Never":
        what = (
            f"restartPolicy={submitted.pod.get('restartPolicy')}: JobSet takes OnFailure for none, and hides failures"
        )
        yield _error("restart-policy", what, "restartPolicy: Never")
    spec = submitted.workload["spec"]
    if submitted.workload["kind"] == "JobSet" and spec["failurePolicy"].get("restartStrategy") != "BlockingRecreate":
        what = "pods of two lives of the job can meet (jobset#665)"
        yield _error("restart-strategy", what, "restartStrategy: BlockingRecreate")
    if "ttlSecondsAfterFinished" not in spec:
        yield _error("ttl", "ended jobs would stay in the cluster forever", "set platform.ttl")
    if spec.get("suspend") and "kueue.x-k8s.io/queue-name" not in submitted.workload["metadata"]["labels"]:
        yield _error("suspended", "nothing would ever start the job", "give platform.queue")


def containers(submitted: Submitted) -> Iterator[Finding]:
    """Names are unique, and those that rules and annotations speak of are there."""
    there = [one["name"] for one in submitted.containers]
    for name in sorted({name for name in there if there.count(name) > 1}):
        yield _error("container", f"two containers are called {name}", "rename one")
    for rule in submitted.job.get("podFailurePolicy", {}).get("rules", ()):
        named = rule.get("onExitCodes", {}).get("containerName", names.NODE)
        if named not in there:
            what = f"podFailurePolicy watches the exit code of {named}, which is no container"
            yield _error("container", what, f"there are {', '.join(there)}")


def images(submitted: Submitted) -> Iterator[Finding]:
    """Images stay what they are: a digest or a tag that is a release."""
    for one in submitted.containers:
        name = one["image"].rsplit("/", 1)[-1]
        if one["name"] == names.NODE and "@" not in name and ":" not in name:
            continue  # not built yet
        if "@" not in name and (":" not in name or name.endswith(":latest")):
            what = f"container {one['name']} runs {one['image']}, which is another build tomorrow"
            yield _error("image-tag", what, "name a release, or better a digest")


# --- the network ------------------------------------------------------------------------------------------------------


def network_options(submitted: Submitted) -> Iterable[Finding]:
    """The network has the settings that it needs."""
    return network_findings(submitted.settings, host_network=submitted.settings.host_network)


def devices(submitted: Submitted) -> Iterator[Finding]:
    """The device injector goes by the container's name; a wrong one is ignored without a word."""
    there = [one["name"] for one in submitted.containers]
    for key, text in submitted.annotations.items():
        if not key.startswith(DEVICES):
            continue
        if key.removeprefix(DEVICES) not in there:
            what = f"annotation {key} has no container {key.removeprefix(DEVICES)}"
            yield _error("annotation-container", what, f"there are {', '.join(there)}")
        listed = yaml.safe_load(text)
        if not isinstance(listed, list) or not all(isinstance(one, Mapping) and "path" in one for one in listed):
            yield _error("annotation-devices", f"annotation {key} is no list of paths", "- path: /dev/nvidia0 …")


def interfaces(submitted: Submitted) -> Iterator[Finding]:
    """Check that as many cards are attached as the machine has, under names that the node will look for."""
    text, machine = submitted.annotations.get(INTERFACES), submitted.machine
    if text is None:
        return
    try:
        attached = {one["interfaceName"]: one["network"] for one in json.loads(text)}
    except (ValueError, KeyError, TypeError) as error:
        yield _error("interfaces", f"annotation {INTERFACES} cannot be read: {error}", 'a list of {"interfaceName", …}')
        return
    if attached.get("eth0") != "default":
        yield _error("interfaces", f"eth0 is attached to {attached.get('eth0')}", "eth0 belongs to the default network")
    cards = attached.keys() - {"eth0", *submitted.fabric.no_cards}
    if machine is not None and len(cards) != machine.nics:
        what = f"the pod has {len(cards)} GPU network cards, and a {machine.name} has {machine.nics}"
        yield _error("interfaces", what, "attach each card to a network of its own")
    if len(set(attached.values())) < len(attached):
        yield _error("interfaces", "two interfaces are attached to one network", "give each a network of its own")
    missing = [name for name in submitted.network.get("interfaces", ()) if name not in attached]
    if missing:
        yield _error("interfaces", f"the node expects {', '.join(missing)}", f"add them to {INTERFACES}")


def host_network(submitted: Submitted) -> Iterator[Finding]:
    """Check the host's network: nothing can be attached there, and cluster names need another DNS policy."""
    if not submitted.pod.get("hostNetwork"):
        return
    if submitted.pod.get("dnsPolicy") != "ClusterFirstWithHostNet":
        what = "the host's network resolves no names of the cluster, so that node 0 is not found"
        yield _error("dns-policy", what, "dnsPolicy: ClusterFirstWithHostNet")
    if submitted.annotations.keys() & {INTERFACES, MULTUS}:
        yield _error("host-network", "the pod asks for interfaces of its own on the host's network", "keep one")
    if submitted.settings.service_account is not None:
        what = "pods on the host's network may get the node's identity instead of platform.service_account's"
        fix = "give the node pool's service account access to the root, or leave platform.host_network out"
        yield Finding("warning", "gke.host-network-identity", what, fix)


def tolerations(submitted: Submitted) -> Iterator[Finding]:
    """A pod that does not tolerate its machines' taints waits forever."""
    there = {one["key"] for one in submitted.pod.get("tolerations", ())}
    for key in submitted.machine.taints if submitted.machine else ():
        if key not in there:
            what = f"nodes have the taint {key}, and the pod does not tolerate it"
            yield _error("toleration", what, f"key: {key}, operator: Exists")


def releases(submitted: Submitted) -> Iterator[Finding]:
    """A plug-in works with the daemon that it was released with; other pairs are somebody's own risk."""
    chosen, pairs = submitted.fabric.pair, known_pairs(submitted.settings)
    if chosen is None:
        return
    known = {pair.plugin: pair.daemon for pair in pairs}
    if chosen.plugin not in known:
        what = f"platform.network_plugin={chosen.plugin} is no release that we know, so that nothing says what it needs"
        yield Finding("warning", "gke.network-release", what, f"the newest that we know is {pairs[0].plugin}")
    elif chosen.daemon != known[chosen.plugin]:
        expected = known[chosen.plugin]
        what = f"plug-in {chosen.plugin} expects the daemon {expected}, and platform.network_daemon={chosen.daemon}"
        yield Finding("warning", "gke.network-pair", what, "leave platform.network_daemon out")


def bindings(submitted: Submitted) -> Iterator[Finding]:
    """A core has one thread of the network: TX and RX must not share any. The demo of 2023 did: RX 124-139."""
    taken: dict[tuple[str, int], str] = {}
    for variable in submitted.fabric.bound_cores:
        text = submitted.environment.get(variable, "")
        try:
            parsed = parse_bindings(text)
        except ValueError as error:
            yield _error("bindings", f"{variable}={text} cannot be read: {error}", "eth1:8-21,112-125;eth2:…")
            continue
        for interface, cores in parsed.items():
            shared = sorted(core for core in cores if taken.setdefault((interface, core), variable) != variable)
            if shared:
                what = (
                    f"{variable} gives {interface} the cores {_ranges(shared)}, which {taken[interface, shared[0]]} has"
                )
                fix = "the cores of both have to be disjoint; the demo of 2023 has 124-139 where 126-139 is right"
                yield _error("bindings-overlap", what, fix)
            beyond = [core for core in cores if submitted.machine and core >= submitted.machine.cpus]
            if beyond and submitted.machine:
                what = f"{variable} gives {interface} the cores {_ranges(beyond)}"
                yield _error("bindings", what, f"a {submitted.machine.name} has {submitted.machine.cpus}, from 0")


def parse_bindings(text: str) -> dict[str, list[int]]:
    """`eth1:8-21,112-125;eth2:…` as interface to cores.

    Raises:
        ValueError: it is written otherwise.
    """
    found: dict[str, list[int]] = {}
    for part in filter(None, text.split(";")):
        interface, colon, ranges = part.partition(":")
        if not colon:
            raise ValueError(f"{part!r} names no interface")
        for one in ranges.split(","):
            first, _, last = one.partition("-")
            found.setdefault(interface, []).extend(range(int(first), int(last or first) + 1))
    return found


def _ranges(cores: Sequence[int]) -> str:
    parts: list[list[int]] = []
    for core in cores:
        if parts and core == parts[-1][1] + 1:
            parts[-1][1] = core
        else:
            parts.append([core, core])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def named_interfaces(submitted: Submitted) -> Iterator[Finding]:
    """Variables that name cards name cards that are there. The demo's `enp12s` was one that was not."""
    there = set(submitted.network.get("interfaces", ()))
    for variable in submitted.fabric.named_interfaces:
        named = [name for name in submitted.environment.get(variable, "").split(",") if name]
        if there and (missing := [name for name in named if name not in there]):
            what = f"{variable} names {', '.join(missing)}, which the pod has not got"
            yield _error("interface-unknown", what, f"it has {', '.join(sorted(there))}")


# --- the pod ----------------------------------------------------------------------------------------------------------


def volumes(submitted: Submitted) -> Iterator[Finding]:
    """Every mount has its volume, every volume its mount, every path one mount."""
    there = {one["name"] for one in submitted.pod["volumes"]}
    used = {one["name"] for container in submitted.containers for one in container.get("volumeMounts", ())}
    for name in sorted(there ^ used):
        what = f"volume {name} is " + ("mounted nowhere" if name in there else "mounted and does not exist")
        yield _error("volume", what, "both have to be there")
    for container in submitted.containers:
        paths = [one["mountPath"] for one in container.get("volumeMounts", ())]
        if len(set(paths)) < len(paths):
            yield _error("volume", f"container {container['name']} mounts two volumes at one path", "move one")
        # Ours is for a root that cannot be written, which holds nothing that anybody looks for in /tmp.
        if "/tmp" in paths and not container.get("securityContext", {}).get("readOnlyRootFilesystem"):
            what = f"container {container['name']} has a volume over its /tmp, which hides the image's"
            yield _error("volume", what, "mount it elsewhere, and set NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX")


def user(submitted: Submitted) -> Iterator[Finding]:
    """Tell of a training that is root by the user's wish alone. What a network needs is no choice."""
    if submitted.settings.uid == 0 and not submitted.fabric.root:
        what = "platform.uid=0: the training is root in its container, and so is any script and package that it loads"
        fix = f"leave platform.uid out, with an image whose files user {UID} can read"
        yield Finding("warning", "gke.root", what, fix)


def claims(submitted: Submitted) -> Iterator[Finding]:
    """A container's resource claims are the pod's, and the pod's come from objects of the submission."""
    pods = {one["name"]: one["resourceClaimTemplateName"] for one in submitted.pod.get("resourceClaims", ())}
    made = {one["metadata"]["name"] for one in submitted.items if one["kind"] == "ResourceClaimTemplate"}
    made |= {
        one["spec"]["channel"]["resourceClaimTemplate"]["name"]
        for one in submitted.items
        if one["kind"] == "ComputeDomain"
    }
    asked = {
        one["name"] for container in submitted.containers for one in container.get("resources", {}).get("claims", ())
    }
    for name in sorted(asked ^ pods.keys()):
        yield _error("claim", f"resource claim {name} is not both the pod's and a container's", "name it in both")
    for name, template in pods.items():
        if template not in made:
            yield _error("claim", f"resource claim {name} comes from {template}, which nothing makes", "add it")


def environment(submitted: Submitted) -> Iterator[Finding]:
    """Names are unique, what a value refers to comes before it, and torchrun's own variables are left to it."""
    seen: set[str] = set()
    for one in submitted.node.get("env", ()):
        if one["name"] in seen:
            yield _error("environment", f"{one['name']} is set twice", "keep one")
        for name in re.findall(r"\$\(([^)]+)\)", one.get("value", "").replace("$$", "")):
            if name not in seen:
                what = f"{one['name']} refers to {name}, which is not set before it"
                yield _error("environment", what, "set it first, or write $$ for a literal dollar")
        seen.add(one["name"])
        if one["name"].startswith("PET_"):
            what = f"{one['name']} is a flag of torchrun, which the node sets itself and takes away"
            yield Finding("warning", "gke.torchrun-variable", what, "leave it out")


def batches(submitted: Submitted) -> Iterator[Finding]:
    """The demo's README has them swapped: BATCH_SIZE 5, MICRO_BATCH_SIZE 125, which leaves no accumulation step."""
    batch, micro = (submitted.environment.get(name, "") for name in ("BATCH_SIZE", "MICRO_BATCH_SIZE"))
    if batch.isdecimal() and micro.isdecimal() and int(batch) < int(micro):
        what = f"BATCH_SIZE={batch} is smaller than MICRO_BATCH_SIZE={micro}, so that no step accumulates anything"
        yield _error("batch-sizes-swapped", what, "swap them: the demo's README has 5 and 125 the wrong way round")


def time_to_leave(submitted: Submitted) -> Iterator[Finding]:
    """Kubernetes kills the pod after its grace period, whatever the ranks were promised."""
    grace, period = submitted.settings.grace, submitted.pod["terminationGracePeriodSeconds"]
    if grace >= period:
        what = f"ranks are given {grace} s to save, and their pod {period} s to leave"
        yield _error("grace", what, "terminationGracePeriodSeconds has to be longer")
    # https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms: 30 s from the notice to the end.
    if submitted.settings.spot and grace > 25:
        what = f"ranks are given {grace} s to save, and Spot VMs are gone 30 s after their notice"
        yield Finding("warning", "gke.spot-grace", what, "set platform.grace to 25 or less")


def kept(submitted: Submitted) -> Iterator[Finding]:
    """Logs, checkpoints and datasets are in a place that outlives the pods and that all nodes see."""
    command = submitted.node.get("command", ())
    addresses = [after for word, after in pairwise(command) if word in {"--log-uri", "--stage", "--code"}]
    claim = submitted.settings.claim_path.rstrip("/") if submitted.settings.claim else None
    for address in addresses:
        if not is_remote(address) and not (claim and f"{address}/".startswith(f"{claim}/")):
            what = f"{address} is a folder of the pod, which goes with it and which other nodes do not see"
            fix = "root: gs://bucket/prefix, or a folder in platform.claim_path with platform.claim"
            yield _error("root-not-shared", what, fix)


def bucket_mounts(submitted: Submitted) -> Iterator[Finding]:
    """GCS FUSE works through a sidecar that an annotation asks for."""
    mounted = [one for one in submitted.pod["volumes"] if one.get("csi", {}).get("driver", "").startswith("gcsfuse.")]
    if mounted and submitted.annotations.get("gke-gcsfuse/volumes") != "true":
        yield _error("fuse", "buckets are mounted without GCS FUSE's sidecar", 'annotation gke-gcsfuse/volumes: "true"')
    for one in mounted:
        options = one["csi"]["volumeAttributes"]
        if submitted.pod.get("hostNetwork") and options.get("hostNetworkPodKSA") != "true":
            what = f"bucket {options['bucketName']} cannot be mounted on the host's network"
            yield _error("fuse", what, 'hostNetworkPodKSA: "true", which needs driver 1.17.2')
