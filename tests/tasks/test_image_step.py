"""The image step: an image that its network cannot use ends the run before anything is rented."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from registry_server import Running, registry

from launcher.config import ScriptConfig, validated
from launcher.errors import ConfigProblem, ImageUnreachable
from launcher.events import Event, Listener, Note
from launcher.images.identity import SoftwareIdentity
from launcher.images.stacks import STACKS

Step = Callable[..., SoftwareIdentity]


@pytest.fixture
def public(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "no-docker-config"))
    with registry() as running:
        yield running


@pytest.fixture
def step() -> Step:
    """Runs the step for a script on A3 Mega."""
    from tasks.image import build_image

    def run(reference: str, **changes: Any) -> SoftwareIdentity:
        platform = {"kind": "gke", "machine": "a3-megagpu-8g", "nodes": 2, "network": "tcpxo", **changes}
        given = {"script": "-m x", "image": {"kind": "prebuilt", "reference": reference}, "platform": platform}
        return asyncio.run(build_image.fn(validated(ScriptConfig, given, where="here")))

    return run


def test_a_tag_that_means_another_image_by_now_is_judged_by_what_it_means(public: Running, step: Step) -> None:
    """Preflight may have seen a better one."""
    tag = public.push_image("team/train", STACKS["tcpxo"].contents("amd64").labels)
    assert "@sha256:" in str(step(tag).image)
    public.push_image("team/train", STACKS["default"].contents("amd64").labels)
    with pytest.raises(ConfigProblem, match="the tcpxo plug-in is qualified for"):
        step(tag)
    assert step(tag, network="plain").image


def test_an_image_whose_registry_is_busy_after_the_build_is_told_of_and_ends_nothing(
    public: Running, step: Step, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: Any, **__: Any) -> None:
        raise ImageUnreachable("the registry does not answer: 429; wait, then try again")

    monkeypatch.setattr("launcher.images.fitness.read_config", busy)
    told: list[Event] = []
    with Listener(told.append):
        assert step(public.push_image("team/silent", {})).image
    assert [one.severity for one in told if isinstance(one, Note)] == ["warning"]
