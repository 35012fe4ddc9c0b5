"""The identity of a run's code: packages and commit of this environment, or the digest of an image."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import litgpt_demo
from launcher.events import Note, report

RECORDED = ("torch", "lightning", "litgpt", "gigatoken", "tokenizers", "numpy", "prefect", "train-litgpt")
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
        return f"commit {self.commit[:10]}{' with changes' if self.dirty else ''}" if self.commit else ""

    def listed(self, *names: str) -> list[str]:
        """Name and version of those of the packages that are known."""
        return [f"{name} {self.packages[name]}" for name in names if name in self.packages]


def software_identity(image: str | None = None, *, checkout: Path | None = None) -> SoftwareIdentity:
    """Return our identity: versions are read from the installed metadata, without importing anything.

    `checkout` is the folder whose commit counts; by default the one that litgpt_demo was imported from.
    """
    folder = checkout or Path(litgpt_demo.__file__).parents[1]
    # A site-packages folder lies in a repository too, if its .venv does; but nothing in it is tracked.
    commit = _git(folder, "rev-parse", "--quiet", "--verify", "HEAD") if _git(folder, "ls-files", ".") else None
    return SoftwareIdentity(
        image=image,
        packages={} if image else _package_versions(),
        commit=commit or None,
        dirty=bool(commit and _git(folder, "status", "--porcelain", "--untracked-files=no", ".")),
    )


def _package_versions() -> dict[str, str]:
    versions = {"python": platform.python_version()}
    for name in RECORDED:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


def _git(folder: Path, *arguments: str) -> str:
    """Return what git says in `folder`; nothing where there is no git, no repository or no commit."""
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
