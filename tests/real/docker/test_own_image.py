"""The product's own image: really built as it is shipped, pushed and looked into.

Needs a Docker engine that reaches Docker Hub, Debian and PyPI, docker-registry, and 30 GB of disk.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from docker_engine import docker, docker_registry, require_engine

from launcher.images.builders import prepare_image, recipes
from launcher.images.context import context_paths
from launcher.images.settings import DockerImage
from launcher.images.stacks import DEFAULT_STACK, LABELS

CHECKOUT = Path(__file__).parents[3]
PLANTED = {"WANDB_API_KEY": "planted-in-the-environment", "HF_TOKEN": "planted-in-another-variable"}
PASSWORD = "planted-in-pip-conf"


@dataclass
class Built:
    """An image that was built, and what its builder printed."""

    image: DockerImage
    reference: str
    lines: list[str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Built]:
    """The image, built by somebody with secrets around."""
    require_engine("docker-registry")
    folder = tmp_path_factory.mktemp("own-image")
    (folder / "pip.conf").write_text(f"[planted]\npassword = {PASSWORD}\n")
    with pytest.MonkeyPatch.context() as patch, docker_registry(folder) as host:
        for name, secret in PLANTED.items():
            patch.setenv(name, secret)
        image = DockerImage(
            kind="docker", repository=f"{host}/team/train", context=str(CHECKOUT), pip_config=str(folder / "pip.conf")
        )
        lines: list[str] = []
        reference = prepare_image(image, log=lines.append).image
        assert reference is not None
        yield Built(image, reference, lines)


def in_the_image(built: Built, *command: str) -> str:
    """What a command prints, confined as on Kubernetes."""
    rights = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=none"]
    return docker("run", "--rm", *rights, "--tmpfs=/tmp:exec", "--env=HOME=/tmp", built.reference, *command)


def test_the_image_runs_as_an_ordinary_user_imports_what_it_needs_and_says_what_it_holds(built: Built) -> None:
    assert in_the_image(built, "id", "-u") == "1000"
    imports = "import litgpt, lightning, torch, litgpt_demo.training.loop; print(torch.__version__)"
    assert in_the_image(built, "python", "-c", imports).startswith(DEFAULT_STACK.torch)
    said = docker("image", "inspect", "--format", f'{{{{index .Config.Labels "{LABELS}torch"}}}}', built.reference)
    assert said == DEFAULT_STACK.torch
    found = in_the_image(built, "find", "/opt/train-litgpt", "-not", "-type", "d", "-printf", "%P\\n").splitlines()
    sources = context_paths(CHECKOUT, recipes(built.image)[1].context.ignored)
    assert {path for path in found if not path.endswith(".pyc")} == set(sources)


def test_no_layer_holds_a_secret_or_a_path_of_the_builder(built: Built) -> None:
    docker("pull", "--quiet", built.reference)
    secrets = [PASSWORD, *PLANTED.values()]
    assert not any(secret in line for secret in secrets for line in built.lines), "the build's own output"
    needles = [needle.encode() for needle in (*secrets, str(CHECKOUT))]
    found, rest = set[bytes](), b""
    with subprocess.Popen(["docker", "save", built.reference], stdout=subprocess.PIPE) as saving:
        assert saving.stdout is not None
        while chunk := saving.stdout.read(1 << 24):
            text = rest + chunk
            found |= {needle for needle in needles if needle in text}
            rest = text[-200:]
    assert saving.returncode == 0
    assert found == set()
