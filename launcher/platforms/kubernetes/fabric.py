"""Checks of a cluster's setup for a GPU network: its Network objects, and what DaemonSets have put on the nodes."""

from __future__ import annotations

import json
from collections.abc import Iterator

from launcher.networks.profile import DEVICES, INTERFACES, MULTUS
from launcher.platforms.kubernetes import cluster as api
from launcher.platforms.kubernetes.checks import Survey
from launcher.platforms.kubernetes.cluster import ApiObject
from launcher.sources import CEA, GKE
from litgpt_demo.findings import Finding

INJECTOR = "nri-device-injector"
_INJECTOR_MANIFEST = f"{CEA}/nri_device_injector/nri-device-injector.yaml"
_NETWORKS = f"{GKE}/how-to/gpu-bandwidth-gpudirect-tcpx"


def networks(survey: Survey) -> Iterator[Finding]:
    """Check the Network objects that the pods are attached to, and their parameters."""
    rows = json.loads(survey.annotations.get(INTERFACES, "[]"))
    wanted = [row["network"] for row in rows if row["network"] != "default"]
    found = {name: survey.cluster.get(api.NETWORKS, None, name) for name in wanted}
    if lacking := [name for name, thing in found.items() if thing is None]:
        there = [name for name, thing in found.items() if thing is not None]
        what = f"the Network objects {', '.join(lacking)} are missing (there are {', '.join(there) or 'none of them'})"
        fix = f"create them with their VPCs, or see that the cluster has multi-networking: {_NETWORKS}"
        yield Finding("error", "gke.networks", what, fix)
    for name, thing in found.items():
        reference = ((thing or {}).get("spec") or {}).get("parametersRef") or {}
        parameters = reference.get("name")
        if parameters and survey.cluster.get(api.NETWORK_PARAMETERS, None, parameters) is None:
            what = f"Network {name} names the GKENetworkParamSet {parameters}, which is not there"
            yield Finding("error", "gke.networks", what, f"create it: {_NETWORKS}")
    if wanted and not lacking:
        yield Finding("info", "gke.networks", f"the networks {', '.join(wanted)}")


def attachments(survey: Survey) -> Iterator[Finding]:
    """Check that the NetworkAttachmentDefinitions are there that Multus attaches the pods to."""
    wanted = [one.partition("@")[0] for one in survey.annotations.get(MULTUS, "").split(",") if one]
    places = [(one.rpartition("/")[0] or survey.namespace, one.rpartition("/")[2]) for one in wanted]
    if lacking := [place for place in places if survey.cluster.get(api.ATTACHMENTS, *place) is None]:
        what = f"the NetworkAttachmentDefinitions {', '.join(map('/'.join, lacking))} are missing, or Multus is"
        fix = "name those of kubectl get network-attachment-definitions -A; a name alone is one of platform.namespace"
        yield Finding("error", "gke.networks", what, fix)
    elif wanted:
        yield Finding("info", "gke.networks", f"the attachments {', '.join(wanted)}")


def release(survey: Survey) -> Iterator[Finding]:
    """Check that the plug-in fits nodes of this Kubernetes version. `daemon_sets` reads what nodes really have."""
    made, pairs = survey.fabric, survey.fabric.known
    needed = next((place for place, pair in enumerate(pairs) if pair.since and survey.version >= pair.since), None)
    if needed is None or made.pair is None or made.pair.plugin in {pair.plugin for pair in pairs[: needed + 1]}:
        return
    least, since = pairs[needed].plugin, ".".join(map(str, pairs[needed].since or ()))
    what = f"{made.name} {made.pair.plugin} is older than what Kubernetes from {since} on is made for ({least})"
    fix = f"upgrade the DaemonSet that installs it; network_plugin={least}"
    yield Finding("warning", f"gke.{made.name}-release", what, fix)


def daemon_sets(survey: Survey) -> Iterator[Finding]:
    """Check that the nodes have the plug-in that the pods' daemon and variables are made for."""
    network, fabric = survey.settings.network, survey.fabric
    installer, wanted = fabric.installer, fabric.pair.plugin if fabric.pair is not None else None
    injected = any(key.startswith(DEVICES) for key in survey.annotations)
    if installer is None and not injected:
        return
    listed, _ = survey.cluster.list(api.DAEMON_SETS, None)
    if installer is not None:
        tags = {}
        for one in listed:
            for image in _images(one):
                name, _, tag = image.partition("@")[0].rpartition(":")
                if name in installer.images:
                    tags[one["metadata"]["name"]] = tag
        if not tags:
            what = f"no DaemonSet installs the plug-in of {network} on the nodes"
            fix = f"kubectl apply -f {_raw(installer.manifest)}, or set platform.network_install=pod"
            yield Finding("error", "gke.installer", what, fix)
        elif wanted not in tags.values():
            name, tag = next(iter(tags.items()))
            what = f"the nodes have {network} {tag} (DaemonSet {name}), and the job is made for {wanted}"
            yield Finding(
                "error", "gke.installer", what, f"set platform.network_plugin={tag}, or upgrade the DaemonSet"
            )
        else:
            yield Finding("info", "gke.installer", f"the nodes have {network} {wanted}")
        yield from _unready([one for one in listed if one["metadata"]["name"] in tags], "gke.installer")
    if injected:
        injectors = [one for one in listed if any(INJECTOR in image for image in _images(one))]
        if not injectors:
            what = "the DaemonSet device-injector is missing: pods would not get the GPUs' devices they ask for"
            yield Finding("error", "gke.device-injector", what, f"kubectl apply -f {_raw(_INJECTOR_MANIFEST)}")
        yield from _unready(injectors, "gke.device-injector")


def _unready(sets: list[ApiObject], code: str) -> Iterator[Finding]:
    for one in sets:
        status = one.get("status", {})
        ready, wanted = status.get("numberReady", 0), status.get("desiredNumberScheduled", 0)
        if ready < wanted:
            what = f"DaemonSet {one['metadata']['name']} is ready on {ready} of {wanted} nodes"
            yield Finding("warning", code, what, "kubectl describe it; jobs on the other nodes fail their checks")


def _images(daemon_set: ApiObject) -> list[str]:
    pod = daemon_set["spec"]["template"]["spec"]
    return [one.get("image", "") for one in (*pod.get("initContainers", ()), *pod.get("containers", ()))]


def _raw(address: str) -> str:
    return address.replace("github.com", "raw.githubusercontent.com").replace("/blob/", "/")
