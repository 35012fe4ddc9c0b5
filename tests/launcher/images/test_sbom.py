"""The bill of materials beside a run: valid CycloneDX, the same for the same code, and true."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from launcher.images.identity import SoftwareIdentity
from launcher.images.sbom import bill_of_materials
from launcher.images.settings import DockerImage, NoImage, PrebuiltImage
from launcher.images.stacks import STACKS, Stack

DIGEST = "sha256:" + "ab" * 32
BUILT = DockerImage(kind="docker", repository="gcr.io/team/train", context=str(Path(__file__).parents[3]))
IN_AN_IMAGE = SoftwareIdentity(image=f"gcr.io/team/train@{DIGEST}", commit="70af7e1" * 5, dirty=False)


def bill(identity: SoftwareIdentity, stack: str = "default") -> dict[str, Any]:
    """The bill of a built image, or of none, after CycloneDX's own validation."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    image = BUILT.model_copy(update={"stack": stack}) if identity.image else NoImage(kind="none")
    text = bill_of_materials(identity, image)
    assert text is not None
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    return dict(json.loads(text))


def versions(parts: dict[str, Any]) -> dict[str, str]:
    return {part["name"]: part["version"] for part in parts["components"]}


@pytest.mark.parametrize("stack", STACKS.values(), ids=lambda stack: stack.name)
def test_the_bill_of_an_image_names_it_its_code_and_the_packages_of_its_stack(stack: Stack) -> None:
    parts = bill(IN_AN_IMAGE, stack.name)
    image = parts["metadata"]["component"]
    assert f"{image['name']}@{image['version']}" == IN_AN_IMAGE.image
    found = versions(parts)
    assert (found["torch"], found["nvidia-nccl-cu13"]) == (stack.torch, stack.nccl)
    assert "colorama" not in found, "for Windows only"
    assert bill(IN_AN_IMAGE, stack.name) == parts, "the same for the same code"


def test_without_an_image_the_bill_has_what_is_installed_here_and_none_is_made_up_for_an_unknown_one() -> None:
    assert versions(bill(SoftwareIdentity(image=None, commit=None, dirty=False)))["litgpt"] == version("litgpt")
    assert bill_of_materials(IN_AN_IMAGE, PrebuiltImage(kind="prebuilt", reference=str(IN_AN_IMAGE.image))) is None
    assert bill_of_materials(IN_AN_IMAGE, BUILT.model_copy(update={"dockerfile": "mine"})) is None
