"""The product's own image: really built, pushed, looked into, and trained in by two containers.

Needs a Docker engine, docker-registry and debootstrap (see docker_engine); the first run takes some minutes.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from bucket_emulator import bucket_emulator
from docker_engine import docker, docker_registry, remove_images, require_engine
from kubernetes_cluster import Cluster, running_cluster
from kubernetes_cluster.containers import Containers
from own_image import CHECKOUT, PASSWORD, checkout_for, cpu_stack, debian_base, package_mirror, wheels_of

from launcher.config import RunConfig
from launcher.errors import ImageProblem
from launcher.events import StepDone
from launcher.images import settings
from launcher.images.builders import build_key, prepare_image, recipes
from launcher.images.context import context_paths
from launcher.images.oci import ImageReference, find_digest
from launcher.images.sbom import SBOM
from launcher.images.settings import DockerImage
from launcher.images.stacks import LABELS, STACKS, Stack
from launcher.runs.run import plan_run

pytestmark = [
    pytest.mark.docker,
    pytest.mark.long,
    pytest.mark.prefect,
    pytest.mark.training,
    pytest.mark.timeout(1800),
]

PLANTED = {"WANDB_API_KEY": "planted-in-the-environment", "HF_TOKEN": "planted-in-another-variable"}
LOGIN = "cGxhbnRlZDppbi1kb2NrZXItbG9naW4="


@dataclass
class Built:
    """An image that was built, and how."""

    image: DockerImage
    stack: Stack
    reference: str
    seconds: float
    lines: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def patched() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture(scope="module", params=STACKS.values(), ids=lambda stack: str(stack.name))
def built(
    request: pytest.FixtureRequest, patched: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Built]:
    """The image of each stack that has wheels for CPUs here, built by somebody with secrets around."""
    require_engine("docker-registry", "debootstrap")
    wheels = wheels_of(request.param, request.config.cache.mkdir("wheels"))
    stack, folder = cpu_stack(request.param), tmp_path_factory.mktemp("own-image")
    patched.setattr(settings, "STACKS", {**STACKS, stack.name: stack})
    for name, secret in PLANTED.items():
        patched.setenv(name, secret)
    (folder / "docker").mkdir()
    (folder / "docker" / "config.json").write_text(f'{{"auths": {{"registry.example.com": {{"auth": "{LOGIN}"}}}}}}')
    patched.setenv("DOCKER_CONFIG", str(folder / "docker"))
    checkout = checkout_for(stack, wheels, folder / "checkout")
    with docker_registry(folder) as host, package_mirror(wheels, folder) as pip_config:
        image = DockerImage(
            kind="docker",
            repository=f"{host}/team/train",
            context=str(checkout),
            base=debian_base(),
            pip_config=str(pip_config),
            stack=stack.name,
        )
        lines: list[str] = []
        started = time.monotonic()
        reference = prepare_image(image, log=lines.append).image
        assert reference is not None
        yield Built(image, stack, reference, time.monotonic() - started, lines)


def manifest(reference: str) -> dict[str, Any]:
    """The registry's own, with each layer's digest and size."""
    known = ImageReference.parse(reference)
    headers = {"Accept": "application/vnd.docker.distribution.manifest.v2+json"}
    return dict(httpx.get(known.manifest_url, headers=headers, trust_env=False).raise_for_status().json())


def layers(reference: str) -> list[str]:
    return [str(layer["digest"]) for layer in manifest(reference)["layers"]]


def test_the_image_is_two_in_one_repository_the_packages_and_our_code_upon_them(built: Built) -> None:
    packages, ours = recipes(built.image)
    assert find_digest(ImageReference.parse(ours.tag)) == built.reference.partition("@")[2]
    below = manifest(packages.tag)["layers"]
    above = manifest(built.reference)["layers"]
    assert above[: len(below)] == below
    [code] = above[len(below) :]
    assert code["size"] < 2_000_000
    assert sum(layer["size"] for layer in below) > 200_000_000


def test_what_was_built_is_not_built_again(built: Built) -> None:
    lines: list[str] = []
    assert prepare_image(built.image, log=lines.append).image == built.reference
    assert lines == [f"{built.image.repository}:{build_key(built.image)} was built before; nothing has changed since"]


def test_a_change_of_our_code_ships_one_small_layer(built: Built, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    subprocess.run(["cp", "-r", built.image.context, str(changed)], check=True)
    (changed / "litgpt_demo" / "new.py").write_text("NEW = True\n")
    lines: list[str] = []
    started = time.monotonic()
    other = prepare_image(built.image.model_copy(update={"context": str(changed)}), log=lines.append).image
    assert other is not None
    assert layers(other)[:-1] == layers(built.reference)[:-1]
    assert layers(other)[-1] != layers(built.reference)[-1]
    assert lines[0].endswith("was built before; nothing has changed since"), "its packages"
    assert time.monotonic() - started < 60


def test_the_same_code_is_the_same_layer_whoever_builds_it_and_whenever(built: Built, tmp_path: Path) -> None:
    """From another folder, with other times, and nothing cached."""
    again = tmp_path / "another checkout"
    subprocess.run(["cp", "-r", "--no-preserve=timestamps", built.image.context, str(again)], check=True)
    command = ["docker", "build", "--no-cache", "--quiet", f"--build-arg=BASE={recipes(built.image)[0].tag}"]
    files = [f"--file={CHECKOUT / 'litgpt_demo' / 'Dockerfile'}", str(again)]
    # .dockerignore leaves other stacks in, which our own context leaves out.
    for stack in STACKS.values():
        (again / stack.lock).unlink()
    for name in ("Dockerfile", "installed.py"):
        (again / "litgpt_demo" / "stacks" / name).unlink()
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=True)
    made = done.stdout.split()[-1]
    of = ["image", "inspect", "--format", "{{json .RootFS.Layers}}"]
    docker("pull", "--quiet", built.reference)
    try:
        assert docker(*of, made) == docker(*of, built.reference)
    finally:
        docker("image", "rm", made)


def in_the_image(built: Built, *command: str) -> str:
    """What a command prints, confined as on Kubernetes."""
    rights = ["--read-only", "--cap-drop=ALL", "--security-opt=no-new-privileges", "--network=none"]
    return docker("run", "--rm", *rights, "--tmpfs=/tmp:exec", "--env=HOME=/tmp", built.reference, *command)


def test_the_image_holds_the_files_of_its_context_with_their_bytecode_and_no_other(built: Built) -> None:
    found = set(in_the_image(built, "find", "/opt/train-litgpt", "-not", "-type", "d", "-printf", "%P\\n").splitlines())
    sources = set(context_paths(Path(built.image.context), recipes(built.image)[1].context.ignored))
    assert {path for path in found if not path.endswith(".pyc")} == sources
    compiled = {path.replace("__pycache__/", "").replace(".cpython-311.pyc", ".py") for path in found - sources}
    assert compiled == {path for path in sources if path.endswith(".py")}


def test_the_image_runs_as_an_ordinary_user_and_imports_what_it_needs(built: Built) -> None:
    assert in_the_image(built, "id", "-u") == "1000"
    assert "commands: node, train" in in_the_image(built)
    imports = (
        "import litgpt, lightning, torch, litgpt_demo.training.loop; print(torch.__version__, litgpt_demo.__file__)"
    )
    said = in_the_image(built, "python", "-c", imports)
    assert said == f"{built.stack.torch}+cpu /opt/train-litgpt/litgpt_demo/__init__.py"


def test_the_image_says_what_it_holds(built: Built) -> None:
    said = docker("image", "inspect", "--format", f'{{{{index .Config.Labels "{LABELS}torch"}}}}', built.reference)
    assert said == built.stack.torch


def test_a_label_that_is_not_true_stops_the_build(built: Built, patched: pytest.MonkeyPatch) -> None:
    """The stack says NCCL 2.29.7, and a wheel for CPUs brings none."""
    lying = replace(built.stack, nccl="2.29.7")
    with patched.context() as patch:
        patch.setattr(settings, "STACKS", {lying.name: lying})
        with pytest.raises(ImageProblem, match=r"the label nccl says '2\.29\.7', but the image has ''"):
            prepare_image(built.image, log=print)


def test_no_layer_holds_a_secret_or_a_path_of_the_builder(built: Built) -> None:
    docker("pull", "--quiet", built.reference)
    secrets = [
        PASSWORD,
        LOGIN,
        *PLANTED.values(),
        str(CHECKOUT),
        str(built.image.context),
        str(Path.home() / ".docker"),
    ]
    needles = [secret.encode() for secret in secrets]
    found: set[bytes] = set()
    with subprocess.Popen(["docker", "save", built.reference], stdout=subprocess.PIPE) as saving:
        assert saving.stdout is not None
        seen, rest = 0, b""
        while chunk := saving.stdout.read(1 << 24):
            text = rest + chunk
            found |= {needle for needle in needles if needle in text}
            rest, seen = text[-200:], seen + len(chunk)
    assert saving.returncode == 0
    assert seen > 1_000_000_000, "layers are saved uncompressed"
    assert found == set()
    assert not any(secret in line for secret in secrets[:4] for line in built.lines), "the build's own output"


@pytest.fixture
def cluster(built: Built, patched: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Two machines whose pods are containers of the engine, and a bucket that they and the launcher reach."""
    with bucket_emulator("training") as address, running_cluster(nodes=2, isolation=Containers(debian_base())) as made:
        reached = f"http://{made.check_access(int(address.rpartition(':')[2]))}"
        patched.setenv("STORAGE_EMULATOR_HOST", reached)
        made.options.image_environment["STORAGE_EMULATOR_HOST"] = reached
        yield made


def test_two_containers_train_and_the_checkpoints_are_collected(
    built: Built, cluster: Cluster, tiny: Callable[..., RunConfig], run_again: Callable[[RunConfig], Any]
) -> None:
    """The pods that GKE would get, non-root with a read-only root, each in a real container that pulls the image."""
    remove_images(built.image.repository.partition("/")[0])
    platform = {
        "kind": "gke", "kubeconfig": str(cluster.kubeconfig), "nodes": 2, "processes": 1, "grace": 5, "gate": 0,
        "workload": "jobset",
    }  # fmt: skip
    image = built.image.model_dump(mode="json", exclude_none=True)
    config = tiny({"root": "gs://training/runs", "platform": platform, "train.micro_batch": 2, "image": image})
    done = run_again(config)
    steps = {event.step: event.what for event in done.events if isinstance(event, StepDone)}
    assert steps["image"] == built.reference
    assert done.final.step == 8
    nodes = [one for one in cluster.started if one.container == "node"]
    assert {one.image for one in nodes} == {built.reference}
    assert {one.environment["LITGPT_HOST"] for one in nodes} == {"node-0", "node-1"}
    storage = plan_run(config).storage
    assert {"attempts/1/node-0.json", "attempts/1/node-1.json", SBOM} <= set(storage.list())
    assert built.reference.partition("@")[2] in storage.read(SBOM).decode()
