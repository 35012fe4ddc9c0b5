"""The image step: an image that its network cannot use ends the run before anything is rented."""

import asyncio
from pathlib import Path

import pytest
from registry_server import registry

from launcher.config import ScriptConfig, validated
from launcher.errors import ConfigProblem
from launcher.events import Event, Listener, StepDone
from launcher.images.identity import SoftwareIdentity
from launcher.images.stacks import STACKS


def identity(reference: str, network: str = "tcpxo") -> SoftwareIdentity:
    """What the step says of a script on A3 Mega."""
    from tasks.preflight import build_image

    platform = {"kind": "kubernetes", "machine": "a3-megagpu-8g", "nodes": 2, "network": network}
    config = {"script": "-m x", "image": {"kind": "prebuilt", "reference": reference}, "platform": platform}
    return asyncio.run(build_image.fn(validated(ScriptConfig, config, where="here")))


def test_changed_tag_is_checked_by_its_present_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Preflight may have seen a better one."""
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "no-docker-config"))
    with registry() as public:
        tag = public.push_image("team/train", STACKS["tcpxo"].contents("amd64").labels)
        assert "@sha256:" in str(identity(tag).image)
        public.push_image("team/train", STACKS["default"].contents("amd64").labels)
        with pytest.raises(ConfigProblem, match="the tcpxo plugin is qualified for"):
            identity(tag)
        assert identity(tag, network="tcp").image


@pytest.mark.parametrize(
    ("kind", "message"),
    [("local", "nodes run this environment (torch "), ("slurm", "nodes run the environment of section platform")],
)
def test_image_step_says_which_environment_nodes_run(kind: str, message: str) -> None:
    from tasks.preflight import build_image

    events: list[Event] = []
    with Listener(events.append):
        config = validated(ScriptConfig, {"script": "-m x", "platform": {"kind": kind}}, where="here")
        asyncio.run(build_image.fn(config))
    [done] = [event for event in events if isinstance(event, StepDone)]
    assert f"nothing to build on {kind}: {message}" in done.what
