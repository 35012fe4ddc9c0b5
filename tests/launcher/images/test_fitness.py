"""An image that its network cannot use is found before anything is rented: by its stack, or by its labels."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from registry_server import OCI_MANIFEST, Running, registry

from launcher.config import RunConfig, ScriptConfig, validated
from launcher.errors import ConfigProblem, ImageOutOfSight, ImageProblem
from launcher.findings import require
from launcher.images.fitness import check_finished, check_fitness, chosen_image, stack_for
from launcher.images.oci import MOST_BYTES, read_config
from launcher.images.stacks import LABELS, STACKS, Contents
from launcher.machines import MACHINES
from launcher.networks import open_network
from launcher.networks.profile import Choice
from litgpt_demo.findings import Finding

HIGH, MEGA, ULTRA = MACHINES["a3-highgpu-8g"], MACHINES["a3-megagpu-8g"], MACHINES["a3-ultragpu-8g"]
OLD = Contents(torch="2.2.2", nccl="2.19.3", cuda="12.1", python="3.11.9", glibc="2.36", architecture="amd64")
NEW, TCPXO = (STACKS[name].contents("amd64") for name in ("default", "tcpxo"))

Settings = dict[str, Any]


def built(**changes: Any) -> Settings:
    return {"kind": "docker", "repository": "gcr.io/train", **changes}


def prebuilt(reference: str) -> Settings:
    return {"kind": "prebuilt", "reference": reference}


def config(image: Settings, network: str = "", *, kind: type = ScriptConfig, **options: Any) -> Any:
    """A job of two nodes on a network of Google's, or on GCP Batch, which has no choice of networks."""
    machine = {"tcpxo": MEGA, "gib": ULTRA}.get(network, HIGH).name
    batch = {"kind": "batch", "project": "my-project", "location": "us-central1", "machine": machine}
    on = {"kind": "gke", "machine": machine, "network": network} if network else batch
    job = {"script": "-m x"} if kind is ScriptConfig else {"train": {"global_batch": 128}}
    return validated(kind, {**job, "image": image, "platform": {**on, "nodes": 2, **options}}, where="here")


def only(image: Settings, network: str = "", **options: Any) -> Finding:
    (finding,) = check_fitness(config(image, network, **options))
    return finding


# --- the stack that a network needs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(("network", "stack"), [("plain", "default"), ("gib", "default"), ("tcpxo", "tcpxo")])
def test_the_stack_is_the_first_that_the_plugin_is_qualified_for(network: str, stack: str) -> None:
    assert chosen_image(config(built(), network)).stack == stack
    assert chosen_image(config(built(stack="default"), network)).stack == "default", "a named one stays"
    assert only(built(), network).severity == "info"
    assert stack_for(open_network("tcpxo", Choice(machine=MEGA), network_plugin="v1.0.12")) is None


def test_a_stack_named_in_spite_of_its_network_is_refused_with_the_one_that_would_do() -> None:
    refused = only(built(stack="default"), "tcpxo")
    assert (refused.severity, refused.code) == ("error", "nccl.version")
    assert refused.fix.startswith("leave image.stack out: stack tcpxo has NCCL 2.28.9")
    risked, _ = check_fitness(config(built(stack="default"), "tcpxo", allow_unqualified_nccl=True))
    newer, _ = check_fitness(config(built(), "tcpx", network_plugin="v3.1.7"))
    assert (risked.severity, newer.severity) == ("warning", "warning")
    none_of_ours = only(built(), "tcpx", kind=RunConfig)
    assert none_of_ours.severity == "error"
    assert "network=plain" in none_of_ours.fix
    assert [one.severity for one in check_fitness(config(built(), "tcpx", nodes=1))] == ["warning", "info"]


def test_what_a_dockerfile_of_the_users_installs_is_judged_once_it_is_built() -> None:
    mine = built(dockerfile="mine")
    assert only(mine, "tcpxo").code == "image.unknown"
    claimed, _ = check_fitness(config(built(dockerfile="mine", stack="tcpxo"), "tcpxo"))
    assert (claimed.severity, claimed.code) == ("warning", "image.unproved")
    with registry() as public:
        there = public.push_image("team/mine", NEW.labels)
        with pytest.raises(ConfigProblem, match=r"nccl\.version"):
            require(check_finished(config(mine, "tcpxo"), there))
        assert list(check_finished(config(mine), there)) == []


def test_a_driver_that_is_too_old_for_the_image_is_refused() -> None:
    refused, _ = check_fitness(config(built(), gpu_driver="550.90.07"))
    assert (refused.severity, refused.code) == ("error", "image.driver")
    assert only(built(), gpu_driver="580.95.05").severity == "info"


# --- labels in a registry ---------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_login_and_no_hurry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("launcher.images.fitness.PATIENCE", 600.0)
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "no-docker-config"))


@pytest.fixture(scope="module")
def public() -> Iterator[Running]:
    with registry(storage="signed") as running:
        yield running


@pytest.mark.parametrize(
    ("labels", "kind", "network", "severity", "code"),
    [
        (OLD.labels, ScriptConfig, "tcpx", "info", "image.stack"),
        (OLD.labels, RunConfig, "tcpx", "error", "image.torch"),
        (NEW.labels, ScriptConfig, "tcpx", "error", "nccl.version"),
        ({f"{LABELS}nccl": "newest\x1b[31m"}, ScriptConfig, "tcpx", "warning", "image.unlabelled"),
        ({**TCPXO.labels, f"{LABELS}glibc": "2.31"}, ScriptConfig, "tcpxo", "error", "image.glibc"),
    ],
)
def test_a_prebuilt_image_is_judged_by_its_labels(
    labels: dict[str, str], kind: type, network: str, severity: str, code: str, public: Running
) -> None:
    found = only(prebuilt(public.push_image("team/ready", labels)), network, kind=kind)
    assert (found.severity, found.code) == (severity, code)


def test_of_an_image_for_several_processors_that_of_the_machine_counts(public: Running) -> None:
    reference = public.push_image("team/both", OLD.labels, architectures=("arm64", "amd64"))
    assert read_config(reference, architecture="arm64").architecture == "arm64"
    assert only(prebuilt(reference), "tcpx").severity == "info"
    with pytest.raises(ImageProblem, match=r"is not for linux/riscv64, but for linux/amd64, linux/arm64"):
        read_config(reference, architecture="riscv64")
    found = check_fitness(config(prebuilt(f"{reference}-arm64"), "tcpx"))
    assert "image.architecture" in {one.code for one in found}


@pytest.mark.parametrize("how", [{"first": ["429"] * 9}, {"first": ["cut"] * 9}, {"account": "ada:secret"}])
def test_what_this_machine_could_not_see_is_not_known(how: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.images.oci._PAUSES", (0.0,))
    with registry(**how) as away:
        told = only(prebuilt(f"{away.host}/team/train:1"), "tcpx")
    assert (told.severity, told.code) == ("unknown", "image.unread")


def test_a_login_reaches_the_registry_and_not_the_storage_that_it_sends_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))

    def log_in(host: str) -> None:
        auth = {"auths": {host: {"auth": base64.b64encode(b"ada:secret").decode()}}}
        (tmp_path / "config.json").write_text(json.dumps(auth))

    with registry(account="ada:secret", storage="signed") as private:
        log_in(private.host)
        reference = private.push_image("team/private", {**OLD.labels, "read": "by nobody yet"})
        assert Contents.of_labels(read_config(reference).labels) == OLD
    with registry(storage="asks") as leading:
        log_in(leading.host)
        with pytest.raises(ImageOutOfSight, match="answered 401"):
            read_config(leading.push_image("team/led", {"read": "never"}))
        assert "/token" not in " ".join(leading.asked), "nobody asked its storage for a token"


@pytest.mark.parametrize("how", [{"swapped": True}, {}])
def test_a_config_that_is_not_what_its_digest_says_or_of_any_size_is_not_read(how: Settings) -> None:
    with registry(**how) as lying:
        reference = lying.push_image("team/train", {"story": "x" * (9 if how else MOST_BYTES)})
        with pytest.raises(ImageProblem, match="do not use this registry"):
            read_config(reference)


@pytest.mark.parametrize(
    "manifest",
    [
        {"layers": []},
        {"config": {"digest": "../../etc/passwd"}},
        {"manifests": [{"digest": f"sha256:{'0' * 64}", "platform": {"architecture": "\x1b]0;pwned\x07"}}]},
    ],
)
def test_a_manifest_that_is_none_is_refused_and_steers_no_terminal(manifest: Settings, public: Running) -> None:
    public.put("team/odd", "1", {"mediaType": OCI_MANIFEST, **manifest})
    with pytest.raises(ImageProblem, match=r"names no config|push the image anew") as refused:
        read_config(f"{public.host}/team/odd:1")
    assert "\x1b" not in str(refused.value)
