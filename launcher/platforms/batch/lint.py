"""Checks of a submission for what Batch would refuse, or run other than meant: findings before anything is sent."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

from launcher.job import UNBUILT, Object, Submission
from launcher.machines import MACHINES
from launcher.networks import DEFAULT, networks_of
from launcher.platforms.batch import zones
from launcher.platforms.batch.render import JOB_ID
from launcher.platforms.batch.settings import REGION, ZONE, BatchPlatformConfig
from litgpt_demo.findings import Finding
from litgpt_demo.storage import is_remote

# google.cloud.batch_v1: Job.labels, AllocationPolicy.tags
_LABEL = re.compile(r"[a-z][a-z0-9_-]{0,62}")
_LABEL_VALUE = re.compile(r"[a-z0-9_-]{0,63}")
_TAG = re.compile(r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?")
_SECRET = re.compile(r"projects/[^/]+/secrets/[^/]+/versions/[^/]+")
_RESERVATION = re.compile(r"projects/[^/]+/zones/[^/]+/reservations/[^/]+")
_HYPERDISK_ONLY = ("a4-", "a4x-", "a3-ultragpu")


def group_of(body: Object) -> Object:
    """The one task group of a submission's job."""
    group: Object = body["job"]["taskGroups"][0]
    return group


def container_of(body: Object) -> Object:
    """The container that trains."""
    runnables = group_of(body)["taskSpec"]["runnables"]
    container: Object = next(one["container"] for one in runnables if "container" in one)
    return container


def lint(submission: Submission, settings: BatchPlatformConfig) -> Iterator[Finding]:
    """All that is wrong with it."""
    yield from _machine(settings)
    yield from _places(settings)
    yield from _name_and_labels(submission.body)
    yield from _gang(submission.body)
    yield from _operating_system(submission.body, settings)
    yield from _container(submission.body, settings)
    yield from _names(settings)
    yield from _network(settings)


def _error(code: str, what: str, fix: str) -> Finding:
    return Finding("error", f"batch.{code}", what, fix)


def _warning(code: str, what: str, fix: str) -> Finding:
    return Finding("warning", f"batch.{code}", what, fix)


def _machine(settings: BatchPlatformConfig) -> Iterator[Finding]:
    machine = settings.machine_type
    if machine is None and settings.gpus is None:
        yield _error(
            "machine",
            f"platform.machine={settings.machine} is no machine type with GPUs that we know",
            f"take one of {', '.join(MACHINES)}; or say how many it has: platform.gpus (0 trains on CPUs)",
        )
    if machine is not None and machine.arch != "amd64":
        yield _error(
            "machine",
            f"platform.machine={machine.name} is {machine.arch}, for which Batch has no images",
            "take platform.kind=gke",
        )
    if machine is not None and settings.nodes > 1 and (best := networks_of(machine)[0]) != DEFAULT:
        yield _warning(
            "network",
            f"{machine.name} has {best}, which Batch does not set up: its nodes talk over plain TCP",
            "for the full speed take platform.kind=gke",
        )
    if settings.machine.startswith(_HYPERDISK_ONLY) and not settings.boot_disk_type.startswith("hyperdisk"):
        yield _error(
            "boot-disk",
            f"platform.boot_disk_type={settings.boot_disk_type} does not go with {settings.machine}",
            "take hyperdisk-balanced",
        )


def _places(settings: BatchPlatformConfig) -> Iterator[Finding]:
    where = settings.location
    if where not in zones.LOCATIONS:
        near = [one for one in sorted(zones.LOCATIONS) if one.split("-")[0] == where.split("-")[0]]
        yield _error(
            "location",
            f"platform.location={where} is no region of Batch ({zones.LOCATIONS_SOURCE})",
            f"take one of {', '.join(near or sorted(zones.LOCATIONS))}",
        )
        return
    known = zones.zones_of(settings.machine)
    regions = sorted({zones.region_of(zone) for zone in known or ()})
    for zone in settings.zones:
        if not re.fullmatch(ZONE, zone) or zones.region_of(zone) != where:
            # https://cloud.google.com/batch/docs: VMs in other regions than the job's are refused since 2026-07-31.
            yield _error(
                "zone",
                f"platform.zones has {zone}, which is no zone of platform.location={where}",
                f"name zones of {where}, or leave platform.zones out",
            )
        elif known is not None and zone not in known:
            yield _warning(
                "zone",
                f"{zone} is not known to have {settings.machine} ({zones.ZONES_SOURCE})",
                f"known zones: {', '.join(known)}",
            )
    if known is not None and not settings.zones and where not in regions:
        yield _error(
            "region",
            f"platform.location={where} is not known to have {settings.machine} ({zones.ZONES_SOURCE})",
            f"take {' or '.join(regions)}; if it is there by now, name the zone in platform.zones",
        )


def _name_and_labels(body: Object) -> Iterator[Finding]:
    if not JOB_ID.fullmatch(body["jobId"]):
        yield _error("name", f"{body['jobId']!r} is no name of a Batch job", "choose another name for the run")
    if not re.fullmatch(REGION, body["parent"].rpartition("/")[2]):
        yield _error("location", f"{body['parent']} is no place for a job", "give a region in platform.location")
    job = body["job"]
    for labels in (job["labels"], job["allocationPolicy"]["labels"]):
        for key, value in labels.items():
            if key.startswith(("goog-", "google-")):
                yield _error("label", f"the label {key} is Google's own", "choose another name for it")
            elif not _LABEL.fullmatch(key) or not _LABEL_VALUE.fullmatch(value):
                fix = "use lower-case letters, digits, dashes and underscores, 63 at most"
                yield _error("label", f"{key}={value} cannot be a label of a Batch job", fix)


def _gang(body: Object) -> Iterator[Finding]:
    group = group_of(body)
    count = group["taskCount"]
    if group["parallelism"] != count or group["taskCountPerNode"] != 1:
        what = f"{count} nodes with parallelism {group['parallelism']}, {group['taskCountPerNode']} on a VM"
        yield _error("gang", f"{what}: the first would wait for the others forever", "one task per VM, all at once")
    if count > 1 and not group.get("requireHostsFile"):
        yield _error("hosts", "several nodes, and no list of them", "set requireHostsFile")
    if count > 1 and group["taskSpec"]["maxRetryCount"]:
        yield _error(
            "retries",
            f"maxRetryCount={group['taskSpec']['maxRetryCount']} with {count} nodes: a node that is restarted alone "
            "cannot join its peers again",
            "set it to 0; the launcher starts a new attempt",
        )


def _operating_system(body: Object, settings: BatchPlatformConfig) -> Iterator[Finding]:
    texts = [one["script"]["text"] for one in group_of(body)["taskSpec"]["runnables"] if "script" in one]
    options = shlex.split(container_of(body)["options"])
    image = body["job"]["allocationPolicy"]["instances"][0]["policy"]["bootDisk"]["image"]
    cos = image == "batch-cos" or "cos-cloud" in image or "/cos-" in image
    debian_only = any("nvidia-ctk" in text for text in texts) or "--runtime=nvidia" in options
    if cos and debian_only:
        yield _error(
            "cos",
            f"the boot image {image} is Container-Optimized OS, which has no nvidia-ctk, and whose root cannot be "
            "written: the way of Debian's images does not go there",
            "set platform.os=cos, which mounts the driver instead",
        )
    if not cos and settings.os == "cos":
        yield _error("cos", f"platform.os=cos, and the boot image is {image}", "set platform.os=debian")
    if settings.gvnic and not cos and not settings.boot_image:
        what = "platform.gvnic with Batch's Debian image, which may not support it"
        yield _warning("gvnic", what, "leave it out, or name a platform.boot_image that does")


def _container(body: Object, settings: BatchPlatformConfig) -> Iterator[Finding]:
    container = container_of(body)
    for word in shlex.split(container["options"]):
        if word.startswith(("--shm-size=", "--ipc=")):
            break
    else:
        yield _error("shm", "/dev/shm would be Docker's 64 MB", "set platform.shm")
    if container["imageUri"] != UNBUILT and "@sha256:" not in container["imageUri"]:
        what = f"the image {container['imageUri']} is not named by its digest and may be another one on each node"
        yield _warning("image", what, "name it as …@sha256:…")
    for name, value in group_of(body)["taskSpec"]["environment"]["variables"].items():
        if "\n" in value:
            # INFERRED: variables reach the container through a file of lines.
            yield _error("environment", f"{name} has more than one line", "put the text into a file")
    keep = _keep(container["commands"])
    if not is_remote(keep):
        inside = f"{settings.nfs_path.rstrip('/')}/"
        if settings.nfs is None:
            yield _error(
                "root",
                f"the run's folder {keep} is on this machine, where VMs do not see it",
                "set root to gs://bucket/prefix, or mount a file server that has it: platform.nfs",
            )
        elif not keep.startswith(inside):
            yield _error("root", f"the run's folder {keep} is not in platform.nfs_path={inside}", "set root below it")


def _keep(commands: list[str]) -> str:
    return commands[commands.index("--log-uri") + 1]


def _names(settings: BatchPlatformConfig) -> Iterator[Finding]:
    for name, secret in settings.secrets.items():
        if not _SECRET.fullmatch(secret):
            yield _error(
                "secret",
                f"platform.secrets has for {name} something that is no secret's name",
                "write projects/PROJECT/secrets/NAME/versions/latest; the value itself stays in Secret Manager",
            )
    if settings.reservation and not _RESERVATION.fullmatch(settings.reservation):
        what = f"platform.reservation={settings.reservation} is no reservation's name"
        yield _error("reservation", what, "write projects/PROJECT/zones/ZONE/reservations/NAME")
    for tag in settings.tags:
        if not _TAG.fullmatch(tag):
            yield _error("tag", f"{tag!r} cannot be a network tag", "use lower-case letters, digits and dashes")


def _network(settings: BatchPlatformConfig) -> Iterator[Finding]:
    if settings.nodes > 1 and (settings.vpc or settings.subnetwork):
        yield Finding(
            "info",
            "batch.firewall",
            f"the VMs of {settings.subnetwork or settings.vpc} have to reach each other on all TCP ports",
            "as default-allow-internal does in the default network: gcloud compute firewall-rules create …",
        )
    if settings.subnetwork and f"/regions/{settings.location}/" not in f"/{settings.subnetwork}":
        yield _error(
            "subnetwork",
            f"platform.subnetwork={settings.subnetwork} is not in platform.location={settings.location}",
            f"name one of {settings.location}: projects/…/regions/{settings.location}/subnetworks/…",
        )
    if not settings.external_ip and not settings.subnetwork:
        yield _warning(
            "external-ip",
            "VMs without external addresses reach Google's services through Private Google Access only",
            "turn it on for the subnetwork, and name that in platform.subnetwork",
        )
