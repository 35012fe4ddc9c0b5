"""The image step: an image that its network cannot use ends the run before anything is rented."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from prefect import flow
from registry_server import Running, registry

from launcher.config import ScriptConfig, validated
from launcher.errors import ConfigProblem, ImageUnreachable
from launcher.images.identity import SoftwareIdentity
from launcher.images.stacks import STACKS
from tasks.image import build_image

pytestmark = [pytest.mark.prefect]

A3_MEGA = {"kind": "gke", "machine": "a3-megagpu-8g", "nodes": 2, "network": "tcpxo"}


@pytest.fixture
def public(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "no-docker-config"))
    with registry(tmp_path) as running:
        yield running


@pytest.fixture
def step() -> Callable[..., SoftwareIdentity]:
    """Runs the step in a flow, for a script on A3 Mega."""

    @flow(name="scene")
    async def scene(config: Any) -> SoftwareIdentity:
        return await build_image(config)

    def run(image: dict[str, str], **changes: Any) -> SoftwareIdentity:
        given = {"script": "-m x", "image": image, "platform": {**A3_MEGA, **changes}}
        return asyncio.run(scene(validated(ScriptConfig, given, where="here")))

    return run


def test_a_tag_that_means_another_image_by_now_is_judged_by_what_it_means(
    public: Running, step: Callable[..., SoftwareIdentity]
) -> None:
    """Preflight may have seen a better one."""
    image = {"kind": "prebuilt", "reference": public.push_image("team/train", STACKS["tcpxo"].contents("amd64").labels)}
    assert "@sha256:" in str(step(image).image)
    public.push_image("team/train", STACKS["default"].contents("amd64").labels)
    with pytest.raises(ConfigProblem, match=r"has NCCL 2\.29\.7, and the tcpxo plug-in is qualified for"):
        step(image)
    assert step(image, allow_unqualified_nccl=True).image
    assert step(image, network="plain").image


def test_a_built_image_gets_the_stack_of_its_network(public: Running, step: Callable[..., SoftwareIdentity]) -> None:
    """An image that is there under the key of the right stack is found; without an engine, no other would be."""
    from launcher.images.builders import build_key
    from launcher.images.settings import DockerImage

    image = {"kind": "docker", "repository": f"{public.host}/team/built"}
    key = build_key(DockerImage.model_validate({**image, "stack": "tcpxo"}))
    public.put("team/built", key, {"mediaType": "application/vnd.oci.image.manifest.v1+json", "layers": []})
    assert str(step(image).image).startswith(f"{public.host}/team/built@sha256:")


def test_what_may_not_work_is_told_when_the_image_is_there(
    public: Running, step: Callable[..., SoftwareIdentity], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []
    monkeypatch.setattr("tasks.image.emit", told.append)
    assert step({"kind": "prebuilt", "reference": public.push_image("team/silent", {"maintainer": "somebody"})}).image
    assert [note.severity for note in told if "image.unlabelled" in getattr(note, "what", "")] == ["warning"]


def test_a_registry_that_is_busy_after_the_build_ends_nothing(
    public: Running, step: Callable[..., SoftwareIdentity], monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: Any, **__: Any) -> None:
        raise ImageUnreachable("the registry does not answer: 429; wait, then try again")

    told: list[Any] = []
    monkeypatch.setattr("tasks.image.emit", told.append)
    monkeypatch.setattr("launcher.images.fitness.read_config", busy)
    assert step({"kind": "prebuilt", "reference": public.push_image("team/busy", {})}).image
    assert [note.severity for note in told if "is not known" in getattr(note, "what", "")] == ["warning"]
