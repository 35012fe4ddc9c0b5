"""The identity of a run's code: packages and commit of this environment, or the digest of an image.

And its software bill of materials, in CycloneDX (https://cyclonedx.org/docs/1.6/json/). Its parts are the packages of
the image's lock, or those installed here where no image runs. The same code has the same bill, byte for byte: it has no
time, and its serial number is made from its parts.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import litgpt_demo
from launcher.events import Note, report
from launcher.images.settings import BuiltImage, Image

SBOM = "sbom.cdx.json"
"""The bill's name in a run's folder; the ending is the one that CycloneDX recommends."""

OURS = "train-litgpt"

RECORDED = ("torch", "lightning", "litgpt", "gigatoken", "tokenizers", "numpy", "prefect", OURS)
"""Distributions whose versions are kept with a run that has no image."""


@dataclass(frozen=True, kw_only=True)
class SoftwareIdentity:
    """The identity of a run's code; recorded with every run."""

    image: str | None
    """`repository@sha256:…`; None where nothing is containerised."""
    packages: Mapping[str, str] = field(default_factory=dict)
    """Name and version of what matters in this environment, where there is no image that says so."""
    commit: str | None
    """git commit of the checkout; None outside a repository."""
    dirty: bool
    """The checkout had uncommitted changes to tracked files."""

    @property
    def revision(self) -> str:
        """The commit as people name it; empty outside a repository."""
        if not self.commit:
            return ""
        return f"commit {self.commit[:10]}{' with changes' if self.dirty else ''}"

    def listed(self, *names: str) -> list[str]:
        return [f"{name} {self.packages[name]}" for name in names if name in self.packages]


def software_identity(image: str | None = None, *, checkout: Path | None = None) -> SoftwareIdentity:
    """Return our identity. `checkout` is the folder whose commit counts; else the one that has litgpt_demo."""
    folder = checkout or Path(litgpt_demo.__file__).parents[1]
    packages: dict[str, str] = {}
    if image is None:
        packages["python"] = platform.python_version()
        for name in RECORDED:
            with suppress(metadata.PackageNotFoundError):
                packages[name] = metadata.version(name)
    # A site-packages folder lies in a repository too, if its .venv does; but nothing in it is tracked.
    commit = _git(folder, "rev-parse", "--quiet", "--verify", "HEAD") if _git(folder, "ls-files", ".") else None
    dirty = bool(commit and _git(folder, "status", "--porcelain", "--untracked-files=no", "."))
    return SoftwareIdentity(image=image, packages=packages, commit=commit or None, dirty=dirty)


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "--no-optional-locks", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, env=os.environ | {"LC_ALL": "C"})
    except FileNotFoundError:
        return ""
    if done.returncode == 0:
        return done.stdout.strip()
    if "not a git repository" not in done.stderr:  # another user's checkout, as containers mount them, or a broken one
        report(Note(what=f"the commit of {folder} is not recorded: git says {done.stderr.strip()}", severity="warning"))
    return ""


def bill_of_materials(identity: SoftwareIdentity, image: Image) -> str | None:
    """Return the bill as JSON; None for an image whose packages we do not know: prebuilt, or of another Dockerfile."""
    if identity.image is None:
        described = [package.metadata for package in metadata.distributions()]  # parsed once: 0.1 s of hundreds
        packages: dict[str, str] = {canonicalize_name(found["Name"]): found["Version"] for found in described}
    elif isinstance(image, BuiltImage) and image.dockerfile is None and image.installed is not None:
        # The packages that pip takes from a lock of `make lock` for an image with these contents.
        lock, contents = (Path(image.context) / image.installed.lock).read_text("utf-8"), image.contents
        python, processor = contents.python or image.installed.python, contents.architecture
        place = {
            "python_version": ".".join(python.split(".")[:2]),
            "python_full_version": python,
            "sys_platform": "linux",
            "platform_system": "Linux",
            # The processor by Python's name, where contents have Docker's.
            "platform_machine": {"amd64": "x86_64", "arm64": "aarch64"}.get(processor, processor),
        }
        lines = re.findall(r"^([^\s#].*?)(?:\s+--hash.*|\s*\\)?$", lock, re.MULTILINE)
        wanted = [entry for entry in map(Requirement, lines) if entry.marker is None or entry.marker.evaluate(place)]
        packages = {canonicalize_name(entry.name): next(iter(entry.specifier)).version for entry in wanted}
    else:
        return None
    # Imported here, for they take a while and most commands write no bill.
    from cyclonedx.model import Property
    from cyclonedx.model.bom import Bom
    from cyclonedx.model.component import Component, ComponentType
    from cyclonedx.output.json import JsonV1Dot6
    from packageurl import PackageURL

    commit = [Property(name="commit", value=identity.revision)] if identity.revision else []
    root = code = Component(
        name=OURS, version=litgpt_demo.__version__, type=ComponentType.APPLICATION, bom_ref=OURS, properties=commit
    )
    packages.pop(OURS, None)
    components = [
        Component(name=name, version=version, bom_ref=f"{name}@{version}", purl=PackageURL("pypi", None, name, version))
        for name, version in sorted(packages.items())
    ]
    if identity.image is not None:
        name, _, digest = identity.image.rpartition("@")
        root = Component(name=name or OURS, version=digest, type=ComponentType.CONTAINER, bom_ref="image")
        components.insert(0, code)
    content = json.dumps([identity.image, identity.revision, *(str(part.bom_ref) for part in components)])
    bill = Bom(components=components, serial_number=uuid.uuid5(uuid.NAMESPACE_OID, content))
    bill.metadata.timestamp = None  # type: ignore[assignment]  # optional in the format
    bill.metadata.component = root
    bill.register_dependency(root, components)
    return str(JsonV1Dot6(bill).output_as_string(indent=1))
