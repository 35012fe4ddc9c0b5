"""The bill of materials beside a run: valid CycloneDX, the same for the same code, and true."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path

import pytest

from launcher.images.identity import SoftwareIdentity, bill_of_materials
from launcher.images.settings import DockerImage, NoImage, PrebuiltImage
from launcher.images.stacks import STACKS, Stack

BUILT = DockerImage(kind="docker", repository="gcr.io/team/train", context=str(Path(__file__).parents[3]))
IMAGE = f"gcr.io/team/train@sha256:{'ab' * 32}"


@pytest.mark.parametrize("stack", STACKS.values(), ids=lambda stack: stack.name)
def test_the_bill_of_an_image_is_valid_and_names_it_and_the_packages_of_its_stack(stack: Stack) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    identity = SoftwareIdentity(image=IMAGE, commit="70af7e1" * 5, dirty=False)
    text = bill_of_materials(identity, BUILT.model_copy(update={"stack": stack.name}))
    assert text is not None
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    image = json.loads(text)["metadata"]["component"]
    assert f"{image['name']}@{image['version']}" == IMAGE
    found = {part["name"]: part["version"] for part in json.loads(text)["components"]}
    assert (found["torch"], found["nvidia-nccl-cu13"]) == (stack.torch, stack.nccl)
    assert "colorama" not in found, "for Windows only"
    assert bill_of_materials(identity, BUILT.model_copy(update={"stack": stack.name})) == text
    assert bill_of_materials(identity, PrebuiltImage(kind="prebuilt", reference=IMAGE)) is None, "nobody knows"


def test_without_an_image_the_bill_has_what_is_installed_here() -> None:
    text = bill_of_materials(SoftwareIdentity(image=None, commit=None, dirty=False), NoImage(kind="none"))
    parts = {part["name"]: part["version"] for part in json.loads(str(text))["components"]}
    assert parts["litgpt"] == version("litgpt")
