"""Checks of what a config says, against the objects that are made of it: findings that need no cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

from launcher.job import Object
from launcher.networks.profile import Network
from launcher.platforms.kubernetes import names
from launcher.platforms.kubernetes.settings import UID, GkePlatformConfig
from litgpt_demo.findings import Finding
from litgpt_demo.node.network import NETWORK
from litgpt_demo.storage import is_remote


@dataclass(frozen=True)
class Submitted:
    """The parts of a submission that checks look at."""

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
    def node(self) -> Object:
        """The container that trains."""
        return next((one for one in self.pod["containers"] if one["name"] == names.NODE), {})

    @property
    def environment(self) -> dict[str, str]:
        """Return the variables of the container that trains; those read from the pod's fields have no value here."""
        return {one["name"]: one.get("value", "") for one in self.node.get("env", ())}

    @cached_property
    def fabric(self) -> Network:
        """The network that the settings ask for."""
        return self.settings.fabric


def check_settings(submitted: Submitted) -> Iterator[Finding]:
    """Yield everything that cannot be, or is a risk, by what the config says alone."""
    yield from submitted.fabric.problems
    yield from _releases(submitted)
    yield from _named_interfaces(submitted)
    yield from _kept(submitted)
    yield from _risks(submitted)


def _releases(submitted: Submitted) -> Iterator[Finding]:
    """A plug-in works with the daemon that it was released with; other pairs are somebody's own risk."""
    chosen, pairs = submitted.fabric.pair, submitted.fabric.known
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


def _named_interfaces(submitted: Submitted) -> Iterator[Finding]:
    """Variables that name cards name cards that are there: `platform.overrides` may say others."""
    there = json.loads(submitted.environment.get(NETWORK, "{}")).get("interfaces", ())
    for variable in submitted.fabric.named_interfaces:
        named = [name for name in submitted.environment.get(variable, "").split(",") if name]
        if there and (missing := [name for name in named if name not in there]):
            what = f"{variable} names {', '.join(missing)}, which the pod has not got"
            yield Finding("error", "gke.interface-unknown", what, f"it has {', '.join(sorted(there))}")


def _kept(submitted: Submitted) -> Iterator[Finding]:
    """Logs, checkpoints and datasets are in a place that outlives the pods and that all nodes see."""
    command = submitted.node.get("command", ())
    addresses = [after for word, after in pairwise(command) if word in {"--log-uri", "--stage", "--code"}]
    claim = submitted.settings.claim_path.rstrip("/") if submitted.settings.claim else None
    for address in addresses:
        if not is_remote(address) and not (claim and f"{address}/".startswith(f"{claim}/")):
            what = f"{address} is a folder of the pod, which goes with it and which other nodes do not see"
            fix = "root: gs://bucket/prefix, or a folder in platform.claim_path with platform.claim"
            yield Finding("error", "gke.root-not-shared", what, fix)


def _risks(submitted: Submitted) -> Iterator[Finding]:
    """What may be wished for, and does not end well."""
    settings = submitted.settings
    if settings.host_network and settings.service_account is not None:
        what = "pods on the host's network may get the node's identity instead of platform.service_account's"
        fix = "give the node pool's service account access to the root, or leave platform.host_network out"
        yield Finding("warning", "gke.host-network-identity", what, fix)
    # https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms: 30 s from the notice to the end.
    if settings.spot and settings.grace > 25:
        what = f"ranks are given {settings.grace} s to save, and Spot VMs are gone 30 s after their notice"
        yield Finding("warning", "gke.spot-grace", what, "set platform.grace to 25 or less")
    if settings.uid == 0 and not submitted.fabric.root:  # what a network needs is no choice
        what = "platform.uid=0: the training is root in its container, and so is any script and package that it loads"
        fix = f"leave platform.uid out, with an image whose files user {UID} can read"
        yield Finding("warning", "gke.root", what, fix)
    for name in submitted.environment:
        if name.startswith("PET_"):
            what = f"{name} is a flag of torchrun, which the node sets itself and takes away"
            yield Finding("warning", "gke.torchrun-variable", what, "leave it out")
