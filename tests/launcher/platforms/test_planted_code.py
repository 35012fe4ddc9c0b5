"""Shell code in the settings of a platform, which may be somebody else's file: it is refused, or stays text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from slurm_node import SlurmNode

from launcher.errors import LauncherError
from launcher.job import Job, Submission
from launcher.platforms import settings_classes
from launcher.platforms.settings import PlatformSettings

# In quotes of either kind, at the end of a comment's line, and without a blank.
CODE = (
    """'; touch {0}; '"; touch {0}; $(touch {0}); \"""",
    "\ntouch {0}\n",
    "'$(touch${{IFS}}{0})\"$(touch${{IFS}}{0})",
)
# What a value has to begin or end with to be taken for one of its kind.
PLACES = ("{}", "/{}", "~/{}", "/a:{}", "a/{}", "10.0.0.2:/{}", "projects/{}/secrets/a/versions/1", "--name={}", "{}@a")
# The least that a platform asks for, and what its other settings need beside them.
REQUIRED: dict[str, dict[str, Any]] = {
    "batch": {"project": "project", "location": "us-central1", "machine": "g2-standard-48", "nfs": "10.0.0.2:/a"},
    "runai": {"project": "project", "api": "cli", "cli_version": "v2", "interactive": True},
    "gke": {"cluster": "cluster", "location": "europe-west4", "pvc": "volume"},
    "kubernetes": {"pvc": "volume"},
}
BESIDE: tuple[dict[str, Any], ...] = ({}, {"container": "pyxis"}, {"container": "apptainer", "gpus": 1})
IMAGE = f"registry.example/litgpt@sha256:{'0' * 64}"


def taken(kind: type[PlatformSettings], code: str) -> Iterator[PlatformSettings]:
    """Yield plain settings, then some with the code in one of their texts, for each that they let in."""
    base: dict[str, Any] = {"kind": kind.model_fields["kind"].json_schema_extra["default"]}  # type: ignore[index]
    base |= REQUIRED.get(base["kind"], {})
    yield kind.model_validate(base)
    for field, about in kind.model_fields.items():
        shape = str(about.annotation)
        for text in (place.format(code) for place in PLACES if "str" in shape or "MountedPvc" in shape):
            values: tuple[Any, ...] = (text,)
            if "tuple" in shape:
                values = ([text], [{"name": text, "path": "/a"}], [{"name": "a", "path": text}])
            if "dict" in shape:
                values = ({"NAME": text}, {text: "/a"})
            for value in values:
                made = []
                for more in BESIDE if base["kind"] == "slurm" else BESIDE[:1]:
                    with suppress(ValidationError):
                        made.append(kind.model_validate({**base, **more, field: value}))
                yield from made[:1]


def jobs(code: str, folder: Path) -> Iterator[Job]:
    """Yield jobs that have the code in one of their texts."""
    plain: dict[str, Any] = {
        "name": "owt-1a2b", "attempt": 1, "nodes": 2, "processes": 1, "program": ("a.py",), "image": IMAGE,
        "directory": str(folder / "run"), "root": str(folder),
    }  # fmt: skip
    yield Job(**plain)
    for changes in (
        {"program": ("a.py", code)}, {"env": {"NAME": code}}, {"directory": f"{folder}/{code}", "root": f"/{code}"},
        {"directory": f"gs://bucket/{code}"}, {"code": code}, {"stage": (code,)},
    ):  # fmt: skip
        yield Job(**{**plain, **changes})


def scripts(found: Any) -> Iterator[str]:
    """Yield what a shell gets of a body: scripts of Batch and Slurm, commands of containers, lines to be pasted."""
    if isinstance(found, Mapping):
        yield from (found[name] for name in ("script", "text", "by_hand") if isinstance(found.get(name), str))
        for value in found.values():
            yield from scripts(value)
    elif isinstance(found, (list, tuple)):
        if "-c" in found:
            yield found[-1]
        for value in found:
            yield from scripts(value)


@pytest.mark.parametrize("kind", settings_classes(), ids=lambda kind: kind.__module__.split(".")[2])
def test_shell_code_in_a_setting_is_never_run(kind: type[PlatformSettings], tmp_path: Path) -> None:
    marker, node = tmp_path / "marker", SlurmNode(tmp_path / "node")
    submissions = list[Submission]()
    for code in (text.format(marker) for text in CODE):
        plain, *changed = taken(kind, code)
        job, *others = jobs(code, tmp_path)
        for settings, changed_job in [*product(changed, [job]), *product([plain], others)]:
            if "://" not in changed_job.directory:
                Path(changed_job.directory).mkdir(parents=True, exist_ok=True)
            with suppress(LauncherError):
                submissions.append(settings.open().render(changed_job))
    assert len(submissions) > len(CODE), "some texts are taken"
    for script in {text for sent in submissions for text in scripts(sent.body) if str(marker) in text}:
        assert kind.__module__.split(".")[2] in {"slurm", "runai"}, script
        node.run(script)
        assert not marker.exists(), script
