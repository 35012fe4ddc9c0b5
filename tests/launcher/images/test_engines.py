"""Which program builds, what it is told, and what `image.kind: auto` chooses, without any engine."""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from launcher.errors import ImageProblem, ImageUnreachable
from launcher.images import docker
from launcher.images.build import Build, Site
from launcher.images.builders import builder_of, prepare_image
from launcher.images.choice import AtHand, choose, planned
from launcher.images.context import Context
from launcher.images.docker import Engine, answering_engine, build_command, engine_named, run_engine
from launcher.images.settings import (
    KANIKO,
    AutoImage,
    CloudBuildImage,
    ClusterImage,
    DockerImage,
    Image,
    artifact_project,
)

DIGEST = "sha256:" + "ab" * 32
IN_GOOGLE = "europe-west4-docker.pkg.dev/my-project/litgpt/train"


def programs(folder: Path, monkeypatch: pytest.MonkeyPatch, **scripts: str) -> Path:
    """A PATH with these programs before /bin, which has no engine's name."""
    for name, script in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))
    return folder


@pytest.fixture
def build(tmp_path: Path) -> Build:
    (tmp_path / "context").mkdir()
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    return Build(
        tag="127.0.0.1:5000/team/train:0123", context=Context.of(tmp_path / "context", tmp_path / "Dockerfile"),
        platform="linux/amd64", target="ours", args={"BASE": f"127.0.0.1:5000/team/base@{DIGEST}", "A": "b c"},
        labels={"stack": "default"},
    )  # fmt: skip


# --- what a config may say --------------------------------------------------------------------------------------------


def read(**settings: Any) -> Any:
    return TypeAdapter(Image).validate_python({"repository": IN_GOOGLE, **settings})


def test_an_old_config_means_what_it_meant() -> None:
    image = read(kind="docker")
    assert isinstance(image, DockerImage)
    assert (image.engine, image.push, image.platform) == ("auto", True, "linux/amd64")


def test_cloud_build_takes_its_project_from_the_repository_or_asks_for_it() -> None:
    assert read(kind="cloudbuild").billed == "my-project"
    assert read(kind="cloudbuild", project="another").billed == "another"
    with pytest.raises(ValidationError, match=r"not in Artifact Registry.*set image\.project"):
        read(kind="cloudbuild", repository="registry.example.com/team/train")
    with pytest.raises(ValidationError):
        read(kind="cloudbuild", timeout=100_000)


def test_the_builder_in_the_cluster_is_pinned_by_digest() -> None:
    assert read(kind="cluster").builder == KANIKO
    with pytest.raises(ValidationError, match="has no digest"):
        read(kind="cluster", builder="ghcr.io/osscontainertools/kaniko:v1.27.6")


@pytest.mark.parametrize(
    ("repository", "project"),
    [
        (IN_GOOGLE, "my-project"),
        ("eu.gcr.io/my-project/train", "my-project"),
        ("ghcr.io/team/train", None),
        ("evil-gcr.io/team/train", None),
    ],
)
def test_the_project_of_a_repository_is_in_its_name(repository: str, project: str | None) -> None:
    assert artifact_project(repository) == project


# --- engines ----------------------------------------------------------------------------------------------------------


def test_docker_is_told_everything_of_a_build(build: Build) -> None:
    assert build_command("docker", build) == [
        "build", "--force-rm", "--platform=linux/amd64", "--tag=127.0.0.1:5000/team/train:0123",
        "--file=Dockerfile.train-litgpt", "--target=ours",
        f"--build-arg=BASE=127.0.0.1:5000/team/base@{DIGEST}", "--build-arg=A=b c", "--label=stack=default",
    ]  # fmt: skip


@pytest.mark.parametrize("engine", ["podman", "buildah"])
def test_podman_and_buildah_are_told_the_same_and_speak_to_this_machines_registry(engine: str, build: Build) -> None:
    command = build_command(engine, build)
    assert command[:5] == ["build", "--format=oci", "--timestamp=315619200", "--layers", "--tls-verify=false"]
    assert command[5:] == build_command("docker", build)[2:]


@pytest.mark.parametrize("line", ['SHELL ["bash", "-c"]', "healthcheck NONE"])
def test_a_dockerfile_that_needs_dockers_own_format_gets_it(line: str, build: Build) -> None:
    build.context.dockerfile.write_text(f"FROM scratch\n{line}\n")
    assert "--format=docker" in build_command("buildah", build)


@pytest.mark.parametrize(
    ("there", "asked", "found"),
    [
        (("docker", "podman"), "auto", "docker"),
        (("buildah", "podman"), "auto", "podman"),
        (("docker", "buildah"), "buildah", "buildah"),
    ],
)
def test_the_engine_is_found_by_its_name(
    there: tuple[str, ...], asked: str, found: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(tmp_path, monkeypatch, **dict.fromkeys(there, "true"))
    assert engine_named(asked) == found


def test_an_engine_that_is_not_installed_is_named_with_the_ways_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(tmp_path, monkeypatch, docker="true")
    with pytest.raises(ImageProblem, match=r"(?s)no podman command here.*apt install podman.*cloudbuild or cluster"):
        engine_named("podman")


def test_the_first_engine_that_answers_counts_and_not_the_first_that_is_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs(tmp_path, monkeypatch, docker="exit 1", podman="true")
    assert answering_engine() == "podman"


@pytest.mark.parametrize(("plug_in", "told"), [("true", "1"), ("false", "")])
def test_an_old_docker_builds_with_buildkit_where_the_plug_in_is_installed(
    plug_in: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = f'if [ "$1" = buildx ]; then {plug_in}; else echo "BuildKit: $DOCKER_BUILDKIT"; fi'
    programs(tmp_path, monkeypatch, docker=script)
    monkeypatch.delenv("DOCKER_BUILDKIT", raising=False)
    lines: list[str] = []
    run_engine("docker", ["build"], subject="a.example/b:1", log=lines.append)
    assert lines == [f"BuildKit: {told}".rstrip()]


# What docker 20.10 and podman 4.3 print, word for word.
CUT = "error parsing HTTP 503 response body: 503 Service Unavailable: unexpected EOF"


def test_a_push_that_is_cut_is_tried_again_and_ends_as_a_registry_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Build
) -> None:
    tries = tmp_path / "tries"
    programs(tmp_path, monkeypatch, docker=f'case $1 in push) echo x >> {tries}; echo "{CUT}"; exit 1;; esac')
    waited: list[float] = []
    with pytest.raises(ImageUnreachable, match="the registry does not answer"):
        Engine(asked="docker", pause=waited.append).build(build, log=lambda line: None)
    assert len(tries.read_text().split()) == 3
    assert waited == [2, 10]


def test_a_push_that_is_cut_once_goes_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Build) -> None:
    once = tmp_path / "once"
    script = f'[ $1 = push ] || exit 0; [ -e {once} ] && echo "v: digest: {DIGEST} size: 1" && exit; : > {once}; '
    programs(tmp_path, monkeypatch, docker=script + f'echo "{CUT}"; exit 1')
    assert Engine(asked="docker", pause=lambda _: None).build(build, log=lambda line: None) == DIGEST


def test_a_push_that_is_refused_ends_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, build: Build) -> None:
    tries = tmp_path / "tries"
    script = f'[ $1 = push ] || exit 0; echo x >> {tries}; echo "unauthorized: authentication required"; exit 1'
    programs(tmp_path, monkeypatch, podman=script)
    with pytest.raises(ImageProblem, match="log in with `podman login 127") as caught:
        Engine(asked="podman").build(build, log=lambda line: None)
    assert not isinstance(caught.value, ImageUnreachable)
    assert len(tries.read_text().split()) == 1


# --- the choice -------------------------------------------------------------------------------------------------------

ALL = {"engine": None, "cluster": True, "bucket": True, "google": True}


@pytest.mark.parametrize(
    ("hand", "repository", "kind", "why"),
    [
        ({"engine": "podman"}, IN_GOOGLE, DockerImage, "podman answers on this machine"),
        ({}, IN_GOOGLE, CloudBuildImage, "the repository is in Artifact Registry and there are credentials for my-"),
        ({"google": False}, IN_GOOGLE, ClusterImage, "the platform's cluster can build"),
        ({}, "ghcr.io/team/train", ClusterImage, "no container engine answers here"),
    ],
)
def test_auto_takes_what_is_nearest_and_says_why(hand: dict[str, Any], repository: str, kind: type, why: str) -> None:
    image = AutoImage(kind="auto", repository=repository, build_args={"A": "1"}, base=f"python@{DIGEST}")
    chosen, reason = choose(image, AtHand(**{**ALL, **hand}))
    assert isinstance(chosen, kind)
    assert why in reason
    common = image.model_dump(exclude={"kind"})
    assert chosen.model_dump(include=set(common)) == common
    assert getattr(chosen, "engine", None) == hand.get("engine")


def test_auto_that_finds_nothing_says_what_each_builder_lacks() -> None:
    image = AutoImage(kind="auto", repository="ghcr.io/team/train")
    with pytest.raises(ImageProblem) as caught:
        choose(image, AtHand(engine=None, cluster=True, bucket=False, google=False))
    message = str(caught.value)
    assert "cloudbuild: needs a repository in Artifact Registry and a root in a bucket and credentials" in message
    assert "cluster: needs a root in a bucket" in message
    assert "kind: prebuilt" in message


def test_a_password_for_pip_goes_through_no_bucket(tmp_path: Path) -> None:
    image = AutoImage(kind="auto", repository=IN_GOOGLE, pip_config="pip.conf")
    with pytest.raises(
        ImageProblem, match=r"(?s)cloudbuild: needs no image\.pip_config\n.*cluster: needs no image\.pip"
    ):
        choose(image, AtHand(**ALL))
    assert isinstance(choose(image, AtHand(**{**ALL, "engine": "podman"}))[0], DockerImage)
    for kind in ("cloudbuild", "cluster"):
        with pytest.raises(ValidationError, match="may hold a password"):
            read(kind=kind, pip_config="pip.conf")


def test_a_plan_does_not_wait_for_engines_that_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(tmp_path, monkeypatch, docker="exec sleep 9", podman="exec sleep 9", buildah="exec sleep 9")
    began = time.monotonic()
    assert planned(read(kind="auto"), Site(root="/runs")) == "by what is at hand: nothing is"
    assert time.monotonic() - began < 9


def test_a_plan_names_the_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs(tmp_path, monkeypatch, podman="true")
    site = Site(root="gs://bucket/runs")
    assert planned(read(kind="auto"), site) == "by podman (podman answers on this machine)"
    assert planned(read(kind="docker"), site) == "by the engine on this machine"
    assert planned(read(kind="cloudbuild"), site) == "by Cloud Build in my-project"
    assert planned(read(kind="cluster"), site) == "by a Job in the cluster"


@pytest.mark.parametrize("kind", ["cloudbuild", "cluster"])
def test_a_builder_elsewhere_needs_a_place_for_its_files(kind: str) -> None:
    with pytest.raises(ImageProblem, match=r"is none; set root to gs://|needs a platform whose cluster takes Jobs"):
        builder_of(read(kind=kind), Site(root="output"))


def test_the_lines_of_auto_begin_with_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "context").mkdir()
    (tmp_path / "Dockerfile").write_text("FROM scratch\n")
    programs(tmp_path, monkeypatch, docker='[ $1 = images ] || { echo "denied: no"; exit 1; }')
    monkeypatch.setattr("launcher.images.builders.find_digest", lambda reference: None)
    lines: list[str] = []
    image = AutoImage(
        kind="auto", repository="a.example/train", context=str(tmp_path / "context"),
        dockerfile=str(tmp_path / "Dockerfile"),
    )  # fmt: skip
    with pytest.raises(ImageProblem, match="denied"):
        prepare_image(image, log=lines.append)
    assert lines[0] == "image.kind=auto builds with docker: docker answers on this machine"
    assert os.environ["PATH"] == str(tmp_path)


@pytest.mark.parametrize("trapped", ["", "trap '' TERM\n"], ids=["ends", "ignores the signal"])
def test_a_silent_engine_ends_soon_after_the_step_is_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trapped: str
) -> None:
    """It has a while to remove its working container; then it is killed."""
    monkeypatch.setattr(docker, "_GRACE", 1.0)
    folder = programs(
        tmp_path, monkeypatch, docker=f"{trapped}echo $$ > {tmp_path}/pid\nwhile :; do /bin/sleep 0.2; done"
    )

    def pause(seconds: float) -> None:
        if (folder / "pid").exists():
            raise asyncio.CancelledError

    begun = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        run_engine("docker", ["push", "train:1"], subject="train:1", log=print, pause=pause)
    assert time.monotonic() - begun < 15
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "pid").read_text()), 0)


def test_an_engine_that_is_stopped_may_clean_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = "trap 'echo removed > {0}/cleaned; exit 1' TERM; echo started\nwhile :; do /bin/sleep 0.2; done"
    programs(tmp_path, monkeypatch, podman=clean.format(tmp_path))

    def log(line: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_engine("podman", ["push", "train:1"], subject="train:1", log=log)
    assert (tmp_path / "cleaned").read_text() == "removed\n"
