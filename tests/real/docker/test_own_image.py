"""The product's own image: really built, pushed and looked into.

Needs a Docker engine, docker-registry and debootstrap (see docker_engine); the first run takes some minutes.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from docker_engine import docker, docker_registry, require_engine
from own_image import CHECKOUT, PASSWORD, checkout_for, cpu_stack, debian_base, package_mirror, wheels_of

from launcher.images import settings
from launcher.images.builders import prepare_image, recipes
from launcher.images.context import context_paths
from launcher.images.settings import DockerImage
from launcher.images.stacks import LABELS, STACKS, Stack

PLANTED = {"WANDB_API_KEY": "planted-in-the-environment", "HF_TOKEN": "planted-in-another-variable"}
LOGIN = "cGxhbnRlZDppbi1kb2NrZXItbG9naW4="


@dataclass
class Built:
    """An image that was built, and what its builder printed."""

    image: DockerImage
    stack: Stack
    reference: str
    lines: list[str]


@pytest.fixture(scope="module", params=STACKS.values(), ids=lambda stack: str(stack.name))
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """The image of each stack that has wheels for CPUs here, built by somebody with secrets around."""
    require_engine("docker-registry", "debootstrap")
    wheels = wheels_of(request.param, request.config.cache.mkdir("wheels"))
    stack, folder = cpu_stack(request.param), tmp_path_factory.mktemp("own-image")
    (folder / "docker").mkdir()
    (folder / "docker" / "config.json").write_text(f'{{"auths": {{"registry.example.com": {{"auth": "{LOGIN}"}}}}}}')
    checkout = checkout_for(stack, wheels, folder / "checkout")
    with (
        pytest.MonkeyPatch.context() as patch,
        docker_registry(folder) as host,
        package_mirror(wheels, folder) as pip_config,
    ):
        patch.setattr(settings, "STACKS", {**STACKS, stack.name: stack})
        for name, secret in {**PLANTED, "DOCKER_CONFIG": str(folder / "docker")}.items():
            patch.setenv(name, secret)
        image = DockerImage(
            kind="docker", repository=f"{host}/team/train", context=str(checkout), base=debian_base(),
            pip_config=str(pip_config), stack=stack.name,
        )  # fmt: skip
        lines: list[str] = []
        reference = prepare_image(image, log=lines.append).image
        assert reference is not None
        yield Built(image, stack, reference, lines)


def in_the_image(built: Built, *command: str) -> str:
    """What a command prints, confined as on Kubernetes."""
    rights = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=none"]
    return docker("run", "--rm", *rights, "--tmpfs=/tmp:exec", "--env=HOME=/tmp", built.reference, *command)


def test_the_image_runs_as_an_ordinary_user_imports_what_it_needs_and_says_what_it_holds(built: Built) -> None:
    assert in_the_image(built, "id", "-u") == "1000"
    imports = "import litgpt, lightning, torch, litgpt_demo.training.loop; print(torch.__version__)"
    assert in_the_image(built, "python", "-c", imports) == f"{built.stack.torch}+cpu"
    said = docker("image", "inspect", "--format", f'{{{{index .Config.Labels "{LABELS}torch"}}}}', built.reference)
    assert said == built.stack.torch


def test_the_image_holds_the_files_of_its_context_with_their_bytecode_and_no_other(built: Built) -> None:
    found = set(in_the_image(built, "find", "/opt/train-litgpt", "-not", "-type", "d", "-printf", "%P\\n").splitlines())
    sources = set(context_paths(Path(built.image.context), recipes(built.image)[1].context.ignored))
    assert {path for path in found if not path.endswith(".pyc")} == sources


def test_what_was_built_is_not_built_again(built: Built) -> None:
    lines: list[str] = []
    assert prepare_image(built.image, log=lines.append).image == built.reference
    assert len(lines) == 1


def test_no_layer_holds_a_secret_or_a_path_of_the_builder(built: Built) -> None:
    docker("pull", "--quiet", built.reference)
    secrets = [PASSWORD, LOGIN, *PLANTED.values()]
    assert not any(secret in line for secret in secrets for line in built.lines), "the build's own output"
    needles = [needle.encode() for needle in (*secrets, str(CHECKOUT), built.image.context)]
    found, rest = set[bytes](), b""
    with subprocess.Popen(["docker", "save", built.reference], stdout=subprocess.PIPE) as saving:
        assert saving.stdout is not None
        while chunk := saving.stdout.read(1 << 24):
            text = rest + chunk
            found |= {needle for needle in needles if needle in text}
            rest = text[-200:]
    assert saving.returncode == 0
    assert found == set()
