"""The regions of Batch, and the zones with Google's GPU machines: as the pages named here had them when read."""

from __future__ import annotations

from types import MappingProxyType

LOCATIONS_SOURCE = "https://docs.cloud.google.com/batch/docs/locations"

_LOCATIONS = (
    "northamerica-northeast1", "northamerica-northeast2", "southamerica-east1", "southamerica-west1", "us-central1",
    "us-east1", "us-east4", "us-east5", "us-south1", "us-west1", "us-west2", "us-west3", "us-west4",
    "europe-central2", "europe-north1", "europe-southwest1", "europe-west1", "europe-west2", "europe-west3",
    "europe-west4", "europe-west6", "europe-west8", "europe-west9", "europe-west10", "europe-west12", "me-central1",
    "me-central2", "me-west1", "asia-east1", "asia-east2", "asia-northeast1", "asia-northeast2", "asia-northeast3",
    "asia-south1", "asia-south2", "asia-southeast1", "asia-southeast2", "australia-southeast1",
    "australia-southeast2",
)  # fmt: skip
LOCATIONS = frozenset(_LOCATIONS)
"""Regions that can be a job's location."""

ZONES_SOURCE = "https://github.com/skypilot-org/skypilot-catalog/blob/006059e/catalogs/v8/gcp/vms.csv"


def _zones(text: str) -> tuple[str, ...]:
    """`us-central1-abc europe-west4-b`: letters of zones behind their region."""
    found = []
    for word in text.split():
        region, _, letters = word.rpartition("-")
        found += [f"{region}-{letter}" for letter in letters]
    return tuple(found)


ZONES = MappingProxyType(
    {
        "a2-ultragpu": _zones("asia-southeast1-c europe-west4-a us-central1-ac us-east4-c us-east5-ab"),
        "a3-highgpu-8g": _zones(
            "asia-east1-c asia-northeast1-b asia-south1-c asia-south2-b asia-southeast1-bc australia-southeast1-c "
            "europe-north1-c europe-west1-bc europe-west3-c europe-west4-bc europe-west9-c "
            "us-central1-abc us-east4-abc us-east5-a us-west1-ab us-west4-a"
        ),
        "a3-megagpu-8g": _zones(
            "asia-east1-c asia-northeast1-b asia-southeast1-bc australia-southeast1-c "
            "europe-north1-c europe-west1-bc europe-west3-c europe-west4-bc "
            "us-central1-abc us-east4-abc us-east5-a us-west1-ab us-west4-a"
        ),
        "a3-ultragpu-8g": _zones(
            "asia-south1-b asia-south2-c europe-west1-b europe-west4-a us-central1-b us-east4-b us-east5-a us-south1-b "
            "us-west1-c"
        ),
        "a4-highgpu-8g": _zones(
            "asia-northeast1-b asia-southeast1-b europe-north1-b europe-west4-b "
            "us-central1-b us-east1-b us-east4-b us-south1-b us-west2-c us-west3-bc"
        ),
        # a2-highgpu-1g's; the larger ones are in a part of them.
        "a2-highgpu": _zones(
            "asia-northeast1-ac asia-northeast3-ab asia-southeast1-abc europe-west4-ab me-west1-ac us-central1-abcf "
            "us-east1-b us-west1-b us-west3-b us-west4-b"
        ),
    }
)
"""Zones by the longest matching prefix of the machine type's name. Machines that are not listed are not checked."""


def region_of(zone: str) -> str:
    return zone.rpartition("-")[0]


def zones_of(machine: str) -> tuple[str, ...] | None:
    """Return the zones that have this machine type; None if they are not known here."""
    known = [name for name in ZONES if machine.startswith(name)]
    return ZONES[max(known, key=len)] if known else None
