"""Checks of what a config says, against the objects that are made of it: findings that need no cluster."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from launcher.networks import known_pairs, network_findings
from launcher.platforms.kubernetes.pods import NODE
from launcher.platforms.kubernetes.settings import UID, GkePlatformConfig
from launcher.platforms.kubernetes.states import job_of
from litgpt_demo.findings import Finding
from litgpt_demo.node.network import NETWORK
from litgpt_demo.storage import is_remote


class Submitted:
    """The parts of a submission that checks look at."""

    def __init__(self, items: Sequence[dict[str, Any]], settings: GkePlatformConfig) -> None:
        self.items, self.settings, self.fabric = items, settings, settings.fabric
        self.workload = next(item for item in items if item["kind"] in {"JobSet", "Job"})
        self.job = job_of(self.workload)
        """The specification of the Indexed Job."""
        self.template: dict[str, Any] = self.job["template"]
        self.annotations: dict[str, str] = self.template["metadata"].get("annotations", {})
        self.pod: dict[str, Any] = self.template["spec"]
        self.node: dict[str, Any] = next(one for one in self.pod["containers"] if one["name"] == NODE)
        """The container that trains."""


def check_settings(submitted: Submitted) -> Iterator[Finding]:
    """Yield everything that cannot be, or is a risk, by what the config says alone."""
    settings, fabric = submitted.settings, submitted.fabric
    yield from network_findings(settings, host_network=settings.host_network)
    # A plug-in works with the daemon that it was released with; other pairs are somebody's own risk.
    if (chosen := fabric.pair) is not None:
        pairs = known_pairs(settings)
        known = {pair.plugin: pair.daemon for pair in pairs}
        if chosen.plugin not in known:
            what = f"platform.network_plugin={chosen.plugin} is no release that we know"
            what += ", so that nothing says what it needs"
            fix = f"the newest that we know is {pairs[0].plugin}"
            yield Finding("warning", "gke.network-release", what, fix)
        elif chosen.daemon != (expected := known[chosen.plugin]):
            what = f"plug-in {chosen.plugin} expects the daemon {expected}, and platform.network_daemon={chosen.daemon}"
            yield Finding("warning", "gke.network-pair", what, "leave platform.network_daemon out")
    # Variables that name cards name cards that are there: `platform.overrides` may say others. Variables that are read
    # from the pod's fields have no value here.
    environment = {one["name"]: one.get("value", "") for one in submitted.node["env"]}
    there = json.loads(environment.get(NETWORK, "{}")).get("interfaces", ())
    for variable in fabric.named_interfaces:
        named = [name for name in environment.get(variable, "").split(",") if name]
        if there and (missing := [name for name in named if name not in there]):
            what = f"{variable} names {', '.join(missing)}, which the pod has not got"
            yield Finding("error", "gke.interface-unknown", what, f"it has {', '.join(sorted(there))}")
    # Logs, checkpoints and datasets are in a place that outlives the pods and that all nodes see.
    claim = settings.claim_path.rstrip("/") if settings.claim else None
    for word, address in pairwise(submitted.node["command"]):
        if word not in {"--log-uri", "--stage", "--code"}:
            continue
        if not is_remote(address) and not (claim and f"{address}/".startswith(f"{claim}/")):
            what = f"{address} is a folder of the pod, which goes with it and which other nodes do not see"
            fix = "root: gs://bucket/prefix, or a folder in platform.claim_path with platform.claim"
            yield Finding("error", "gke.root-not-shared", what, fix)
    # What may be wished for, and does not end well.
    if settings.host_network and settings.service_account is not None:
        what = "pods on the host's network may get the node's identity instead of platform.service_account's"
        fix = "give the node pool's service account access to the root, or leave platform.host_network out"
        yield Finding("warning", "gke.host-network-identity", what, fix)
    # https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms: 30 s from the notice to the end.
    if settings.spot and settings.grace > 25:
        what = f"ranks are given {settings.grace} s to save, and Spot VMs are gone 30 s after their notice"
        yield Finding("warning", "gke.spot-grace", what, "set platform.grace to 25 or less")
    if settings.uid == 0 and not fabric.root:  # what a network needs is no choice
        what = "platform.uid=0: the training is root in its container, and so is any script and package that it loads"
        fix = f"leave platform.uid out, with an image whose files user {UID} can read"
        yield Finding("warning", "gke.root", what, fix)
    for name in environment:
        if name.startswith("PET_"):
            what = f"{name} is a flag of torchrun, which the node sets itself and takes away"
            yield Finding("warning", "gke.torchrun-variable", what, "leave it out")
