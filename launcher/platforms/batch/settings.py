"""The `platform` section of a config for GCP Batch."""

from __future__ import annotations

import re
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from launcher.machines import require_gpus
from launcher.platforms.settings import ClusterSettings, without_default
from litgpt_demo.config import Count, WholeSeconds, discriminator

# In seconds. Batch takes more, and stops the job there all the same
# (https://docs.cloud.google.com/batch/docs/set-timeouts, TaskSpec.max_run_duration of google.cloud.batch_v1).
LONGEST = 14 * 86_400
# https://docs.cloud.google.com/compute/docs/instances/about-flex-start-vms
LONGEST_FLEX_START = 7 * 86_400


class BatchPlatformConfig(ClusterSettings, title="GCP Batch"):
    """VMs that GCP Batch makes for the job and takes away after it."""

    opens: ClassVar[str] = "launcher.platforms.batch.platform:BatchPlatform"

    kind: Literal["batch"] = discriminator("batch")

    # https://cloud.google.com/resource-manager/docs/creating-managing-projects (domain-scoped ones have a prefix)
    project: str = Field(pattern=r"^([a-z0-9.-]+:)?[a-z][a-z0-9-]{4,28}[a-z0-9]$")
    """Google Cloud project that runs and pays for the job."""
    location: str = Field(pattern=r"^[a-z]+(-[a-z]+)+[0-9]+$")
    """Region of the job and its VMs."""
    zones: tuple[Annotated[str, Field(pattern=r"^[a-z]+(-[a-z]+)+[0-9]+-[a-z]$")], ...] = ()
    """Only these zones of the region; empty is any."""
    machine: str
    """Machine type (g2-standard-48, a2-highgpu-8g, …)."""
    gpus: Count | None = Field(None, ge=0, le=16, json_schema_extra=without_default)
    """GPUs of a machine type that is not in the table of machines; 0 for a training on CPUs."""
    nodes: Count = Field(1, gt=0, le=1000)
    """The number of machines; Batch's list of hosts has room for 1,000."""
    spot: bool = False
    """Spot VMs: cheap, and taken away at any time with a notice of 30 seconds."""
    flex_start: bool = False
    """Dynamic Workload Scheduler: wait for all machines at once, for `flex_start_duration` of use."""
    flex_start_duration: WholeSeconds | None = Field(
        None, gt=0, le=LONGEST_FLEX_START, json_schema_extra=without_default
    )
    """The time that flex-start machines are used, such as 48h or 172800 seconds; 7 days at most."""
    reservation: str | None = Field(None, pattern=r"^projects/[^/]+/zones/[^/]+/reservations/[^/]+$")
    """Only machines of this Compute Engine reservation: projects/…/zones/…/reservations/…"""
    max_duration: WholeSeconds | None = Field(None, gt=0, le=LONGEST, json_schema_extra=without_default)
    """Longest that the job may run, at most 14 days. It is not started again, and its checkpoints are kept."""
    compact: bool = False
    """Place the machines close to each other."""
    priority: Count = Field(0, ge=0, lt=100)
    """Priority among the project's waiting jobs, from 0 to 99; higher is earlier."""
    os: Literal["debian", "cos"] = "debian"
    """The operating system of the VMs: Batch's Debian, or its Container-Optimized OS."""
    boot_image: str | None = None
    """Another boot image with that operating system: projects/…/global/images/…"""
    boot_disk_gb: Count = Field(250, ge=30, le=65_536)
    """Size of the boot disk, which holds the image and this node's copy of the dataset."""
    boot_disk_type: str = "pd-balanced"
    """Type of the boot disk; A4 and A3 Ultra take only hyperdisk-balanced."""
    gpu_driver: str | None = None
    """NVIDIA driver version to install; empty is Batch's choice."""
    service_account: str | None = Field(None, pattern=r"^[^@\s]+@[^@\s]+$")
    """The VMs' service account. It needs roles/batch.agentReporter, roles/logging.logWriter, the root and the image."""
    vpc: str | None = None
    """VPC network (projects/…/global/networks/…); it must let the VMs reach each other. Empty is the default one."""
    subnetwork: str | None = None
    """Subnetwork of `vpc` (projects/…/regions/…/subnetworks/…)."""
    external_ip: bool = True
    """VMs have external addresses; without, the subnetwork needs Private Google Access."""
    gvnic: bool = False
    """Use Google's virtual NIC, which the boot image must support; newer machine types do anyway."""
    tags: tuple[Annotated[str, Field(pattern=r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$")], ...] = ()
    """Network tags of the VMs, for firewall rules."""
    shm: str | None = Field(None, pattern=r"^[0-9]+(Mi|Gi|Ti|M|G|T)$")
    """Size of /dev/shm (`64Gi`), of which Docker would give 64 MB; empty is a quarter of the memory, 64 GiB at most."""
    nfs: str | None = Field(None, pattern=r"^[^:\s]+:/\S*$")
    """NFS export (`10.0.0.2:/data`) that all nodes mount, where the root is a folder."""
    nfs_path: str = Field("/mnt/disks/shared", pattern=r"^/\S+$")
    """The folder where the NFS export is mounted, which contains the root."""
    secrets: dict[str, str] = Field({}, json_schema_extra={"default": {}})
    """Environment variable to a secret of Secret Manager: projects/…/secrets/…/versions/latest."""
    registry_username: str | None = None
    """Secret of Secret Manager with the user name for a private registry, together with `registry_password`. Artifact
    Registry needs neither: the job's service account pulls from it."""
    registry_password: str | None = None
    """Secret of Secret Manager with the password for that registry: projects/…/secrets/…/versions/latest."""
    startup_timeout: WholeSeconds = Field(1800, ge=60, le=LONGEST)
    """Seconds that nodes which are up wait for the last one."""
    in_place_restarts: Count = Field(1, ge=0, le=10)
    """Restarts in place of a job with one node; more nodes can only start together, which is a new attempt."""

    @property
    def parent(self) -> str:
        return f"projects/{self.project}/locations/{self.location}"

    @field_validator("secrets", "registry_username", "registry_password")
    @classmethod
    def _are_names_of_secrets(cls, value: dict[str, str] | str | None) -> dict[str, str] | str | None:
        for name in value.values() if isinstance(value, dict) else [value]:
            if name is not None and not re.fullmatch(r"projects/[^/]+/secrets/[^/]+/versions/[^/]+", name):
                # The message does not repeat the value, which may be the secret itself.
                fix = "write projects/PROJECT/secrets/NAME/versions/latest, and put the value there"
                raise ValueError(f"is not the name of a secret; {fix}")
        return value

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        # VMs in other regions than the job's are refused since 2026-07-31 (https://cloud.google.com/batch/docs).
        foreign = [zone for zone in self.zones if zone.rpartition("-")[0] != self.location]
        if foreign:
            what = f"platform.zones has {foreign[0]}, which is not a zone of platform.location={self.location}"
            raise ValueError(f"{what}; name zones of it, or leave platform.zones out")
        if (self.registry_username is None) != (self.registry_password is None):
            raise ValueError("platform.registry_username and platform.registry_password make one login; set both")
        require_gpus(self.machine, gpus=self.gpus, processes=self.processes_per_node)
        ways = {"spot": self.spot, "flex_start": self.flex_start, "reservation": self.reservation is not None}
        chosen = [name for name, is_chosen in ways.items() if is_chosen]
        if len(chosen) > 1:
            raise ValueError(f"platform.{' and platform.'.join(chosen)} are different ways to buy a machine; keep one")
        if self.flex_start != (self.flex_start_duration is not None):
            raise ValueError("platform.flex_start=true needs platform.flex_start_duration, and the reverse; set both")
        if self.flex_start and self.max_duration is not None:
            raise ValueError("platform.max_duration and platform.flex_start_duration are both set; keep the latter")
        return self
