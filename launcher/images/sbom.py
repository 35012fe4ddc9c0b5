"""The software bill of materials of a run's code, in CycloneDX (https://cyclonedx.org/docs/1.6/json/).

Its parts are the packages of the image's lock, or those installed here where no image runs. The same code has the same
bill, byte for byte: it has no time, and its serial number is made from its parts.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import litgpt_demo
from launcher.images.identity import SoftwareIdentity
from launcher.images.settings import BuiltImage, Image
from launcher.images.stacks import Contents, Stack

SBOM = "sbom.cdx.json"
"""The bill's name in a run's folder; the ending is the one that CycloneDX recommends."""

OURS = "train-litgpt"
"""The name of our distribution."""

Versions = Mapping[str, str]
"""Name and version of packages."""

_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
"""The processors by Docker's name and by Python's."""


def bill_of_materials(identity: SoftwareIdentity, image: Image) -> str | None:
    """Return the bill as JSON; None for an image whose packages we do not know: prebuilt, or of another Dockerfile."""
    if identity.image is None:
        return _bill(identity, installed_packages())
    if not isinstance(image, BuiltImage) or image.dockerfile is not None or image.installed is None:
        return None
    lock = (Path(image.context) / image.installed.lock).read_text("utf-8")
    return _bill(identity, locked_packages(lock, image.installed, image.contents))


def installed_packages() -> Versions:
    """Return the packages of this environment."""
    return {canonicalize_name(found.name): found.version for found in metadata.distributions()}


def locked_packages(lock: str, stack: Stack, contents: Contents) -> Versions:
    """Return the packages that pip takes from a lock of `make lock` for an image with these contents."""
    version = contents.python or stack.python
    image = {
        "python_version": ".".join(version.split(".")[:2]),
        "python_full_version": version,
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "platform_machine": _MACHINES.get(contents.architecture, contents.architecture),
    }
    lines = re.findall(r"^([^\s#].*?)(?:\s+--hash.*|\s*\\)?$", lock, re.MULTILINE)
    wanted = [entry for entry in map(Requirement, lines) if entry.marker is None or entry.marker.evaluate(image)]
    return {canonicalize_name(entry.name): next(iter(entry.specifier)).version for entry in wanted}


def _bill(identity: SoftwareIdentity, packages: Versions) -> str:
    # Imported here, for they take a while and most commands write no bill.
    from cyclonedx.model import Property
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL

    commit = [Property(name="commit", value=identity.revision)] if identity.revision else []
    code = Component(
        name=OURS, version=litgpt_demo.__version__, type=ComponentType.APPLICATION, bom_ref=OURS, properties=commit
    )
    parts = [
        Component(name=name, version=version, bom_ref=f"{name}@{version}", purl=PackageURL("pypi", None, name, version))
        for name, version in sorted(packages.items())
        if name != OURS
    ]
    code_in_image = [] if identity.image is None else [code]
    whole = code
    if identity.image is not None:
        name, _, digest = identity.image.rpartition("@")
        whole = Component(name=name or OURS, version=digest, type=ComponentType.CONTAINER, bom_ref="image")
    components = [*code_in_image, *parts]
    content = json.dumps([identity.image, identity.revision, *map(str, (part.bom_ref for part in components))])
    bill = Bom(components=components, serial_number=uuid.uuid5(uuid.NAMESPACE_OID, content))
    bill.metadata.timestamp = None  # type: ignore[assignment]  # optional in the format
    bill.metadata.component = whole
    bill.register_dependency(whole, components)
    return str(JsonV1Dot6(bill).output_as_string(indent=1))
