"""Images without an engine: what may be written, hashes, digests from a registry, what the product's own one holds."""

import asyncio
import base64
import json
import os
import re
import subprocess
import sys
import tarfile
import traceback
from collections.abc import Iterator
from functools import partial
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from distributions import requirements
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from pydantic import ValidationError
from registry_server import Running, registry

from deployments.lock import constraints
from launcher.errors import ImageProblem, ImageUnreachable
from launcher.events import Listener
from launcher.images import docker, oci
from launcher.images.build import builds_of, prepare_image
from launcher.images.context import Build, Context
from launcher.images.docker import build_here, run_engine
from launcher.images.identity import SoftwareIdentity, bill_of_materials, software_identity
from launcher.images.oci import ImageReference, Login, resolve, stored_login
from launcher.images.settings import CloudBuildImage, DockerImage, PrebuiltImage
from launcher.images.stacks import STACKS, Stack
from litgpt_demo import timeouts

CHECKOUT = Path(__file__).parents[3]
DIGEST = "sha256:" + "ab" * 32
OWN = DockerImage(kind="docker", repository="gcr.io/train", context=str(CHECKOUT))


@pytest.fixture(autouse=True)
def docker_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where docker would store logins, which is nowhere yet; and no registry is waited for."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.delenv("REGISTRY_AUTH_FILE", raising=False)
    monkeypatch.setattr(oci, "_PAUSES", (0.0, 0.0))
    return tmp_path / "config.json"


@pytest.fixture(scope="module")
def public() -> Iterator[Running]:
    with registry() as running:
        yield running


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("python:3.11", ("docker.io", "python", "3.11", None)),
        ("team/train", ("docker.io", "team/train", None, None)),
        ("localhost/train:latest", ("localhost", "train", "latest", None)),
        (f"[::1]:5000/a/b:1@{DIGEST}", ("[::1]:5000", "a/b", "1", DIGEST)),
    ],
)
def test_mutable_reference_is_no_prebuilt_image(text: str, parts: tuple[str | None, ...]) -> None:
    """A reference is parsed into its parts."""
    reference = ImageReference.parse(text)
    assert str(reference) == text
    assert (reference.host, reference.path, reference.tag, reference.digest) == parts
    if reference.tag in (None, "latest"):
        with pytest.raises(ValidationError, match="tag"):
            PrebuiltImage(kind="prebuilt", reference=text)


def test_registry_that_returns_another_image_is_refused() -> None:
    with registry(swapped=True) as running:
        first, wanted = running.push("team/train", "old"), running.push("team/train", "new")
        assert resolve(f"{running.host}/team/train:old").endswith(first)
        with pytest.raises(ImageProblem, match="another image"):
            resolve(f"{running.host}/team/train@{wanted}")


AUTH = {"auth": base64.b64encode(b"ada:pass:word").decode()}
each_login = pytest.mark.parametrize("stored", [AUTH, {"identitytoken": "an-identity-token"}])


@each_login
def test_a_private_registry_takes_the_login_that_docker_stored(stored: dict[str, str], docker_config: Path) -> None:
    with registry(account="ada:pass:word") as running:
        digest = running.push("team/train", "1")
        with pytest.raises(ImageProblem, match=f"log in with `docker login {running.host}`"):
            resolve(f"{running.host}/team/train:1")
        docker_config.write_text(json.dumps({"auths": {f"https://{running.host}/v2/": stored}}))
        assert resolve(f"{running.host}/team/train:1").endswith(digest)


@each_login
def test_password_is_never_sent_to_a_foreign_plain_service(stored: dict[str, str], docker_config: Path) -> None:
    """0.0.0.0 leads to this machine, and is no name of it."""
    with registry(account="ada:pass:word", token_host="0.0.0.0") as running:
        running.push("team/train", "1")
        docker_config.write_text(json.dumps({"auths": {running.host: stored}}))
        with pytest.raises(ImageProblem, match=r"the password sent to .*, which is not encrypted"):
            resolve(f"{running.host}/team/train:1")
        assert [line for line in running.requests if "/token" in line] == []


def test_a_registrys_silence_may_pass_and_its_no_is_final(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timeouts, "REGISTRY", 1e9)
    with registry() as running:
        image, digest = f"{running.host}/team/train:1", running.push("team/train", "1")
        running.first = ["503", "cut"]
        assert resolve(image).endswith(digest)
        for fault, error in (("429", ImageUnreachable), ("cut", ImageUnreachable), ("418", ImageProblem)):
            running.first = [fault] * 3
            with pytest.raises(ImageProblem, match=running.host) as caught:
                resolve(image)
            assert type(caught.value) is error


def program(folder: Path, name: str, script: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put a shell script first on PATH, behind which /bin is."""
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/bin")


def test_logins_of_podman_and_of_credential_helpers_count(
    tmp_path: Path, docker_config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def helper(script: str) -> None:
        program(tmp_path, "docker-credential-fake", script, monkeypatch)

    (tmp_path / "containers").mkdir()
    (tmp_path / "containers" / "auth.json").write_text(json.dumps({"auths": {"reg.example.com": AUTH}}))
    assert stored_login("reg.example.com") == Login(username="ada", secret="pass:word")
    docker_config.write_text('{"credsStore": "fake"}')
    helper("""read address; echo "{\\"Username\\": \\"at $address\\", \\"Secret\\": \\"s\\"}" """)
    assert stored_login("docker.io") == Login(username="at https://index.docker.io/v1/", secret="s")
    helper("echo credentials not found in native keychain; exit 1")
    assert stored_login("gcr.io") is None
    helper('echo \'{"Secret": "hunter2"}\'')
    with pytest.raises(ImageProblem, match="gcloud auth") as caught:
        stored_login("gcr.io")
    assert "hunter2" not in "".join(traceback.format_exception(caught.value))


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def docker_image(context: Path, **changes: object) -> DockerImage:
    dockerfile = context.parent / "Dockerfile"
    if not dockerfile.exists():
        dockerfile.write_text("ARG BASE\nFROM ${BASE}\nCOPY . /\n")
    pattern = {"kind": "docker", "repository": "gcr.io/train", "context": str(context), "dockerfile": str(dockerfile)}
    return DockerImage.model_validate(pattern | changes)


def test_hash_of_an_image_depends_only_on_its_contents(tmp_path: Path) -> None:
    context, same = (write_files(tmp_path / name, {"run": b"x", "c/e f": b"y"}) for name in ("context", "same"))
    write_files(same, {".dockerignore": b"*.log\ntmp\n", "x.log": b"noise", "tmp/y": b"noise"})
    os.utime(same / "run", (1, 1))
    (same / "run").chmod(0o600)
    pattern = ({}, {"base": f"python@{DIGEST}"}, {"build_args": {"A": "1"}}, {"architecture": "arm64"})
    hashes = [builds_of(docker_image(context, **change))[-1].content_hash for change in pattern]
    assert builds_of(docker_image(same, repository="gcr.io/other"))[-1].content_hash == hashes[0]
    for change in (
        lambda: (context / "run").write_bytes(b"x!"),
        lambda: (context / "run").chmod(0o755),
        lambda: (context / "link").symlink_to("run"),
        lambda: (tmp_path / "Dockerfile").write_text("FROM scratch\n"),
    ):
        change()
        hashes.append(builds_of(docker_image(context))[-1].content_hash)
    assert len(set(hashes)) == len(hashes)


def test_a_base_counts_as_the_digest_that_its_tag_has_now(tmp_path: Path, public: Running) -> None:
    context = write_files(tmp_path / "context", {"a": b"x"})
    image = docker_image(context, base=f"{public.host}/team/base:1")
    hashes = []
    for _ in range(2):
        digest = public.push("team/base", "1")
        assert builds_of(image)[0].args["BASE"] == f"{public.host}/team/base@{digest}"
        hashes.append(builds_of(image)[-1].content_hash)
        assert hashes[-1] == builds_of(docker_image(context, base=f"{public.host}/team/base@{digest}"))[-1].content_hash
    assert hashes[0] != hashes[1]


def test_the_engine_gets_exactly_what_dockerignore_leaves(tmp_path: Path) -> None:
    files = {"a.py": b"a", "sub/b.py": b"b", "sub/c.log": b"c", "data/deep/d": b"d", "data/deep/e": b"e"}
    context = write_files(tmp_path / "context", files | {".dockerignore": b"**/*.log\ndata\n!data/deep/d\n"})
    (context / "link").symlink_to("a.py")
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    hashed = Context(context, tmp_path / "Dockerfile")
    names = ["a.py", "data/deep/d", "link", "sub/b.py", "Dockerfile.train-litgpt"]
    assert [(member.name, member.uid) for member in members(hashed)] == [(name, 0) for name in names]
    (context / "a.py").write_bytes(b"changed")
    with pytest.raises(ImageProblem, match=r"change while .* wait, then build again"):
        members(hashed)


def members(context: Context) -> list[tarfile.TarInfo]:
    with context.tar() as file, tarfile.open(fileobj=file) as tar:
        return list(tar)


def test_image_in_the_registry_is_not_built_again(
    public: Running, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = docker_image(write_files(tmp_path / "context", {"a": b"x"}), repository=f"{public.host}/team/built")
    monkeypatch.setenv("PATH", str(tmp_path))  # no docker here: a build would fail
    with pytest.raises(ImageProblem, match=r"image\.engine=auto"):
        prepare_image(image, log=print)
    digest = public.push("team/built", builds_of(image)[-1].content_hash)
    found = prepare_image(image, log=print)
    assert (found.image, found.packages) == (f"{public.host}/team/built@{digest}", {})


def test_interrupted_push_is_retried_but_not_a_refused_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    docker_image(write_files(tmp_path / "context", {"a": b"x"}))
    context = Context(tmp_path / "context", tmp_path / "Dockerfile")
    build = Build(tag="127.0.0.1:5000/team/train:0123", context=context, platform="linux/amd64")
    once = tmp_path / "once"
    make = partial(build_here, build, program="docker", log=lambda line: None, pause=lambda _: None)
    hung_up = "error parsing HTTP 503 response body: 503 Service Unavailable: unexpected EOF"
    cut = f'[ $1 = push ] || exit 0; [ -e {once} ] && echo "v: digest: {DIGEST} size: 1" && exit; : > {once}; '
    program(tmp_path, "docker", f'{cut} echo "{hung_up}"; exit 1', monkeypatch)
    assert make() == DIGEST
    refused = "denied: requested access to the resource is denied"
    for output, error, fix in ((hung_up, ImageUnreachable, "does not answer"), (refused, ImageProblem, "docker login")):
        program(tmp_path, "docker", f'[ $1 = push ] || exit 0; echo "{output}"; exit 1', monkeypatch)
        with pytest.raises(ImageProblem, match=f"{output}(.|\n)*{fix}") as caught:
            make()
        assert type(caught.value) is error


def test_engine_is_killed_when_the_step_is_cancelled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(docker, "_GRACE", 0.2)
    program(tmp_path, "docker", f"trap '' TERM\necho $$ > {tmp_path}/pid\nwhile :; do sleep 0.1; done", monkeypatch)

    def pause(seconds: float) -> None:
        if (tmp_path / "pid").exists() and (tmp_path / "pid").read_text():
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        run_engine("docker", ["push", "train:1"], subject="train:1", log=print, pause=pause)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_code_is_identified_by_commit_plus_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def git(*arguments: str) -> str:
        author = ["-c", "user.name=Ada", "-c", "user.email=ada@example.com", "-c", "commit.gpgsign=false"]
        return subprocess.check_output(["git", *author, *arguments], cwd=tmp_path, text=True).strip()

    assert software_identity(checkout=tmp_path).commit is None
    write_files(tmp_path, {"train.py": b""})
    git("init", "--quiet")
    git("add", ".")
    git("commit", "--quiet", "--message", "First")
    for file, dirty in (("untracked.txt", False), ("train.py", True)):
        found = software_identity(checkout=write_files(tmp_path, {file: b"print(1)\n"}))
        assert (found.commit, found.dirty) == (git("rev-parse", "HEAD"), dirty)
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")  # git's own way to test what containers do
    notes: list[Any] = []
    with Listener(notes.append):
        assert software_identity(checkout=tmp_path).commit is None
    assert [note.severity for note in notes] == ["warning"]
    assert "detected dubious ownership" in notes[0].what


def instructions(dockerfile: str) -> list[str]:
    return (CHECKOUT / "litgpt_demo" / dockerfile).read_text().replace("\\\n", " ").splitlines()


def test_the_products_image_is_pinned_by_digest_and_unprivileged() -> None:
    packages, own_image = instructions("stacks/Dockerfile"), instructions("Dockerfile")
    (base,) = [line.removeprefix("ARG BASE=") for line in packages if line.startswith("ARG BASE=")]
    assert ImageReference.parse(base).digest
    assert {line.partition(" AS ")[0] for line in packages + own_image if line.startswith("FROM")} == {"FROM ${BASE}"}
    assert [line for line in packages if line.startswith(("USER", "ENTRYPOINT"))] == ["USER 1000:1000"]
    last = own_image[own_image.index("FROM ${BASE}") :]
    assert not [line for line in last if line.startswith(("USER", "ENTRYPOINT", "RUN"))]
    (install,) = re.findall(r"python -m pip --python=\S+ install (.*?)(?: &&|$)", "\n".join(packages), re.MULTILINE)
    assert "--require-hashes" in install.split()


def locked(stack: Stack) -> dict[str, Requirement]:
    """The requirement of each distribution in a stack's lock, all of which have hashes."""
    text = (CHECKOUT / stack.lock).read_text()
    entries = re.findall(r"^(\S.*?)(?: \\\n +--hash=sha256:[0-9a-f]{64})+$", text, re.MULTILINE)
    assert len(entries) == len(re.findall(r"^[^\s#]", text, re.MULTILINE)), "an entry has no hash"
    return {canonicalize_name(entry.name): entry for entry in map(Requirement, entries)}


each_stack = pytest.mark.parametrize("stack", STACKS.values(), ids=lambda stack: stack.stack)


@each_stack
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_lock_has_a_hash_of_every_package_of_the_image(stack: Stack, machine: str) -> None:
    python = {"python_version": "3.11", "python_full_version": "3.11.15", "sys_platform": "linux", "extra": ""}
    image = {**python, "platform_system": "Linux", "platform_machine": machine}
    names = {name for name, entry in locked(stack).items() if not entry.marker or entry.marker.evaluate(image)}
    listed = requirements((CHECKOUT / "litgpt_demo" / "requirements.txt").read_text())
    wanted = {canonicalize_name(Requirement(line).name) for line in listed}
    assert wanted | {"nvidia-nccl-cu13", "nvidia-cudnn-cu13", "triton"} <= names
    assert "prefect" not in names


def test_whatever_the_nodes_import_is_in_their_image() -> None:
    sources = "\n".join(file.read_text() for file in (CHECKOUT / "litgpt_demo").glob("**/*.py"))
    imported = set(re.findall(r"^ *(?:import|from) (\w+)(?:\.[\w.]+)?(?: import .*| as .*)?$", sources, re.MULTILINE))
    locked_names, owners = locked(STACKS["default"]).keys(), packages_distributions()
    elsewhere = {"litgpt_demo", "_typeshed", "lm_eval"}  # the orchestrator alone evaluates (export/evaluation.py)
    packages = imported - sys.stdlib_module_names - elsewhere
    assert [name for name in packages if not locked_names & set(map(canonicalize_name, owners.get(name, [])))] == []


@each_stack
def test_lock_has_the_versions_of_constraints_plus_stack(stack: Stack) -> None:
    pins = constraints(stack, requirements((CHECKOUT / "constraints.txt").read_text()))
    pinned = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in pins)}
    versions = {name: str(entry.specifier).removeprefix("==") for name, entry in locked(stack).items()}
    differing = {name for name, version in versions.items() if pinned.get(name, version) != version}
    assert differing == set(), "run `make lock`"
    assert (versions["torch"], versions["nvidia-nccl-cu13"]) == (stack.torch, stack.nccl)
    assert versions["cuda-toolkit"].startswith(f"{stack.cuda}."), "the CUDA that torch's wheel asks for"


def test_pips_configuration_reaches_only_the_package_build(tmp_path: Path) -> None:
    """Nothing that is kept has it."""
    file = tmp_path / "pip.conf"
    file.write_text("[global]\nindex-url = https://ada:secret@mirror.example.com/\n")
    configured = OWN.model_copy(update={"pip_config": str(file)})
    assert builds_of(configured)[-1].content_hash == builds_of(OWN)[-1].content_hash
    packages, own_image = builds_of(configured)
    assert "pip.conf" in [member.name for member in members(packages.context)]
    assert "pip.conf" not in [member.name for member in members(own_image.context)]
    with pytest.raises(ValidationError, match="may hold a password"):
        CloudBuildImage.model_validate(configured.model_dump(exclude={"engine"}) | {"kind": "cloudbuild"})


@each_stack
def test_sbom_of_an_image_is_valid(stack: Stack) -> None:
    """It names the image and the packages of its stack."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    named, built = f"gcr.io/train@{DIGEST}", OWN.model_copy(update={"stack": stack.stack})
    identity = SoftwareIdentity(image=named, commit="70af7e1" * 5, dirty=False)
    text = bill_of_materials(identity, built)
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    image = json.loads(text)["metadata"]["component"]
    assert f"{image['name']}@{image['version']}" == named
    found = {part["name"]: part["version"] for part in json.loads(text)["components"]}
    assert (found["torch"], found["nvidia-nccl-cu13"]) == (stack.torch, stack.nccl)
    assert "colorama" not in found, "for Windows only"
    assert bill_of_materials(identity, built) == text
    assert bill_of_materials(identity, PrebuiltImage(kind="prebuilt", reference=named)) is None, "nobody knows"
