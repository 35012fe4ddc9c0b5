"""Checks of a submission for what Batch would refuse, or run other than meant: findings before anything is sent."""

from __future__ import annotations

from collections.abc import Iterator

from launcher.job import Submission
from launcher.machines import MACHINES
from launcher.networks import DEFAULT, networks_of
from launcher.platforms.batch.render import container_of, group_of
from launcher.platforms.batch.settings import BatchPlatformConfig
from litgpt_demo.findings import Finding
from litgpt_demo.storage import is_remote

_HYPERDISK_ONLY = ("a4-", "a4x-", "a3-ultragpu")


def lint(submission: Submission, settings: BatchPlatformConfig) -> Iterator[Finding]:
    """All that is wrong with it."""
    yield from _machine(settings)
    yield from _operating_system(settings)
    yield from _root(submission, settings)
    yield from _network(settings)
    for name, value in group_of(submission.body)["taskSpec"]["environment"]["variables"].items():
        if "\n" in value:
            # INFERRED: variables reach the container through a file of lines.
            yield _error("environment", f"{name} has more than one line", "put the text into a file")


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


def _operating_system(settings: BatchPlatformConfig) -> Iterator[Finding]:
    image = settings.boot_image or f"batch-{settings.os}"
    cos = image == "batch-cos" or "cos-cloud" in image or "/cos-" in image
    if cos and settings.os == "debian" and settings.node_gpus:
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


def _root(submission: Submission, settings: BatchPlatformConfig) -> Iterator[Finding]:
    commands = container_of(submission.body)["commands"]
    folder = commands[commands.index("--log-uri") + 1]
    inside = f"{settings.nfs_path.rstrip('/')}/"
    if is_remote(folder):
        return
    if settings.nfs is None:
        yield _error(
            "root",
            f"the run's folder {folder} is on this machine, where VMs do not see it",
            "set root to gs://bucket/prefix, or mount a file server that has it: platform.nfs",
        )
    elif not folder.startswith(inside):
        yield _error("root", f"the run's folder {folder} is not in platform.nfs_path={inside}", "set root below it")


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
