"""Checks of a submission for what Batch would refuse, or run other than meant: findings before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.job import Submission
from launcher.machines import MACHINES
from launcher.networks import DEFAULT, networks_of
from launcher.platforms.batch.render import container_of, group_of
from launcher.platforms.batch.settings import BatchPlatformConfig
from litgpt_demo.findings import Finding, Severity
from litgpt_demo.storage import is_remote

_HYPERDISK_ONLY = ("a4-", "a4x-", "a3-ultragpu")


def lint(submission: Submission, settings: BatchPlatformConfig) -> Iterator[Finding]:
    """All that is wrong with it."""

    def found(code: str, what: str, fix: str, severity: Severity = "error") -> Finding:
        return Finding(severity, f"batch.{code}", what, fix)

    machine = settings.machine_type
    if machine is None and settings.gpus is None:
        what = f"platform.machine={settings.machine} is no machine type with GPUs that we know"
        fix = f"take one of {', '.join(MACHINES)}; or say how many it has: platform.gpus (0 trains on CPUs)"
        yield found("machine", what, fix)
    if machine is not None and machine.arch != "amd64":
        what = f"platform.machine={machine.name} is {machine.arch}, for which Batch has no images"
        yield found("machine", what, "take platform.kind=gke")
    if machine is not None and settings.nodes > 1 and (best := networks_of(machine)[0]) != DEFAULT:
        what = f"{machine.name} has {best}, which Batch does not set up: its nodes talk over plain TCP"
        yield found("network", what, "for the full speed take platform.kind=gke", "warning")
    if settings.machine.startswith(_HYPERDISK_ONLY) and not settings.boot_disk_type.startswith("hyperdisk"):
        what = f"platform.boot_disk_type={settings.boot_disk_type} does not go with {settings.machine}"
        yield found("boot-disk", what, "take hyperdisk-balanced")

    image = settings.boot_image or f"batch-{settings.os}"
    cos = image == "batch-cos" or "cos-cloud" in image or "/cos-" in image
    if cos and settings.os == "debian" and settings.node_gpus:
        what = (
            f"the boot image {image} is Container-Optimized OS, which has no nvidia-ctk, and whose root cannot be "
            "written: the way of Debian's images does not go there"
        )
        yield found("cos", what, "set platform.os=cos, which mounts the driver instead")
    if not cos and settings.os == "cos":
        yield found("cos", f"platform.os=cos, and the boot image is {image}", "set platform.os=debian")
    if settings.gvnic and not cos and not settings.boot_image:
        what = "platform.gvnic with Batch's Debian image, which may not support it"
        yield found("gvnic", what, "leave it out, or name a platform.boot_image that does", "warning")

    commands = container_of(submission.body)["commands"]
    folder, inside = commands[commands.index("--log-uri") + 1], f"{settings.nfs_path.rstrip('/')}/"
    if not is_remote(folder) and settings.nfs is None:
        what = f"the run's folder {folder} is on this machine, where VMs do not see it"
        yield found("root", what, "set root to gs://bucket/prefix, or mount a file server that has it: platform.nfs")
    elif not is_remote(folder) and not folder.startswith(inside):
        yield found("root", f"the run's folder {folder} is not in platform.nfs_path={inside}", "set root below it")

    if settings.nodes > 1 and (settings.vpc or settings.subnetwork):
        what = f"the VMs of {settings.subnetwork or settings.vpc} have to reach each other on all TCP ports"
        fix = "as default-allow-internal does in the default network: gcloud compute firewall-rules create …"
        yield found("firewall", what, fix, "info")
    if settings.subnetwork and f"/regions/{settings.location}/" not in f"/{settings.subnetwork}":
        what = f"platform.subnetwork={settings.subnetwork} is not in platform.location={settings.location}"
        yield found(
            "subnetwork", what, f"name one of {settings.location}: projects/…/regions/{settings.location}/subnetworks/…"
        )
    if not settings.external_ip and not settings.subnetwork:
        what = "VMs without external addresses reach Google's services through Private Google Access only"
        fix = "turn it on for the subnetwork, and name that in platform.subnetwork"
        yield found("external-ip", what, fix, "warning")

    for name, value in group_of(submission.body)["taskSpec"]["environment"]["variables"].items():
        if "\n" in value:
            # INFERRED: variables reach the container through a file of lines.
            yield found("environment", f"{name} has more than one line", "put the text into a file")
