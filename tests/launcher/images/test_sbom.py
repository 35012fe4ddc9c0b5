"""The bill of materials beside a run: valid CycloneDX, the same for the same code, and true."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from launcher.images.identity import SoftwareIdentity
from launcher.images.sbom import bill_of_materials, locked_packages
from launcher.images.settings import DockerImage, NoImage, PrebuiltImage
from launcher.images.stacks import STACKS, Stack

CHECKOUT = Path(__file__).parents[3]
DIGEST = "sha256:" + "ab" * 32
IN_AN_IMAGE = SoftwareIdentity(image=f"gcr.io/team/train@{DIGEST}", commit="70af7e1" * 5, dirty=False)
each_stack = pytest.mark.parametrize("stack", STACKS.values(), ids=lambda stack: stack.name)


def bill(identity: SoftwareIdentity, **image: Any) -> dict[str, Any]:
    """The bill of a built image, or of none, after CycloneDX's own validation."""
    built = DockerImage(kind="docker", repository="gcr.io/team/train", context=str(CHECKOUT), **image)
    text = bill_of_materials(identity, built if identity.image else NoImage(kind="none"))
    assert text is not None
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    return dict(json.loads(text))


def versions(parts: dict[str, Any]) -> dict[str, str]:
    return {part["name"]: part["version"] for part in parts["components"]}


@each_stack
def test_the_bill_of_an_image_names_it_its_code_and_the_packages_of_its_stack(stack: Stack) -> None:
    parts = bill(IN_AN_IMAGE, stack=stack.name)
    assert parts["metadata"]["component"]["name"] == "gcr.io/team/train"
    assert parts["metadata"]["component"]["version"] == DIGEST
    assert parts["components"][0]["properties"] == [{"name": "commit", "value": "commit 70af7e170a"}]
    found = versions(parts)
    assert (found["torch"], found["nvidia-nccl-cu13"]) == (stack.torch, stack.nccl)
    assert "colorama" not in found, "for Windows only"


def test_the_bill_of_an_image_for_arm_has_what_that_processor_gets() -> None:
    lock = (
        "a==1 ; platform_machine == 'aarch64' \\\n    --hash=sha256:00\n"
        "b==2 ; sys_platform == 'linux' \\\n    --hash=sha256:00\n# c==3\nd==4 --hash=sha256:00\n"
    )
    stack = STACKS["default"]
    assert locked_packages(lock, stack, stack.contents("arm64")) == {"a": "1", "b": "2", "d": "4"}
    assert locked_packages(lock, stack, stack.contents("amd64", own_base=False)) == {"b": "2", "d": "4"}


def test_without_an_image_the_bill_has_what_is_installed_here() -> None:
    parts = bill(SoftwareIdentity(image=None, commit=None, dirty=False))
    assert parts["metadata"]["component"]["name"] == "train-litgpt"
    found = versions(parts)
    assert found["litgpt"] == version("litgpt")
    assert "train-litgpt" not in found


def test_the_same_code_has_the_same_bill_and_other_code_another() -> None:
    assert bill(IN_AN_IMAGE) == bill(IN_AN_IMAGE)
    other = SoftwareIdentity(image=f"gcr.io/team/train@sha256:{'cd' * 32}", commit=IN_AN_IMAGE.commit, dirty=False)
    assert bill(other)["serialNumber"] != bill(IN_AN_IMAGE)["serialNumber"]
    assert "timestamp" not in bill(IN_AN_IMAGE)["metadata"]


def test_no_bill_is_made_up_for_an_image_whose_packages_we_do_not_know(tmp_path: Path) -> None:
    assert bill_of_materials(IN_AN_IMAGE, PrebuiltImage(kind="prebuilt", reference=str(IN_AN_IMAGE.image))) is None
    own = DockerImage(kind="docker", repository="gcr.io/team/train", dockerfile=str(tmp_path / "Dockerfile"))
    assert bill_of_materials(IN_AN_IMAGE, own) is None
