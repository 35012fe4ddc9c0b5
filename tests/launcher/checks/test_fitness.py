"""An image that its network cannot use is found before anything is rented: by its stack, or by its labels."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from registry_server import OCI_MANIFEST, Running, registry

from launcher.checks.fitness import check_fitness, chosen_image
from launcher.config import RunConfig, ScriptConfig, validated
from launcher.errors import ConfigProblem, ImageOutOfSight, ImageProblem, raise_on_errors
from launcher.images.oci import MOST_BYTES, read_config
from launcher.images.stacks import LABELS, STACKS, Contents
from litgpt_demo.errors import Finding

OLD = Contents(torch="2.2.2", nccl="2.19.3", cuda="12.1", python="3.11.9", glibc="2.36", architecture="amd64")
NEW, TCPXO = (STACKS[name].contents("amd64") for name in ("default", "tcpxo"))

Settings = dict[str, Any]


def built(**changes: Any) -> Settings:
    return {"kind": "docker", "repository": "gcr.io/train", **changes}


def prebuilt(reference: str) -> Settings:
    return {"kind": "prebuilt", "reference": reference}


def config(image: Settings, network: str = "", *, kind: type = ScriptConfig, **options: Any) -> Any:
    """A job of two nodes on a network of Google's, or on GCP Batch, which has no choice of networks."""
    machine = {"tcpxo": "a3-megagpu-8g", "gib": "a3-ultragpu-8g"}.get(network, "a3-highgpu-8g")
    batch = {"kind": "batch", "project": "my-project", "location": "us-central1"}
    on = {"kind": "kubernetes", "network": network} if network else batch
    job = {"script": "-m x"} if kind is ScriptConfig else {"train": {"global_batch": 128}}
    platform = {**on, "machine": machine, "nodes": 2, **options}
    return validated(kind, {**job, "image": image, "platform": platform}, where="here")


def first(image: Settings, network: str = "", **options: Any) -> Finding:
    return next(check_fitness(config(image, network, **options)))


@pytest.mark.parametrize(("network", "stack"), [("tcp", "default"), ("gib", "default"), ("tcpxo", "tcpxo")])
def test_the_stack_is_the_first_that_the_plugin_is_qualified_for(network: str, stack: str) -> None:
    assert chosen_image(config(built(), network)).stack == stack
    assert chosen_image(config(built(stack="default"), network)).stack == "default", "a named one stays"
    assert first(built(), network).severity == "info"


@pytest.mark.parametrize(
    ("image", "network", "options", "severity", "code"),
    [
        (built(stack="default"), "tcpxo", {}, "error", "nccl.version"),
        (built(stack="default"), "tcpxo", {"allow_unqualified_nccl": True}, "warning", "nccl.version"),
        (built(), "tcpx", {"network_plugin": "v3.1.7"}, "warning", "nccl.version"),
        (built(), "tcpx", {"nodes": 1}, "warning", "nccl.version"),
        (built(dockerfile="mine", stack="tcpxo"), "tcpxo", {}, "warning", "image.unproved"),
        (built(), "", {"gpu_driver": "550.90.07"}, "error", "image.driver"),
    ],
)
def test_stack_is_refused_when_nodes_would_be_lost(
    image: Settings, network: str, options: Settings, severity: str, code: str
) -> None:
    """A stack that only does not suit its network or driver is a warning."""
    finding = first(image, network, **options)
    assert (finding.severity, finding.code) == (severity, code)


def test_the_fix_names_the_stack_or_the_network_that_would_do() -> None:
    assert first(built(stack="default"), "tcpxo").fix.startswith("leave image.stack out: stack tcpxo has NCCL 2.28.9")
    assert "network=tcp" in first(built(), "tcpx", kind=RunConfig).fix, "no stack of ours is for it"


def test_image_of_a_dockerfile_is_checked_once_it_is_built() -> None:
    image = built(dockerfile="mine")
    assert first(image, "tcpxo").code == "image.unknown"
    with registry() as public:
        pushed = public.push_image("team/mine", NEW.labels)
        with pytest.raises(ConfigProblem, match=r"nccl\.version"):
            raise_on_errors(check_fitness(config(image, "tcpxo"), pushed))
        assert list(check_fitness(config(image), pushed)) == []


@pytest.fixture(autouse=True)
def _no_login_and_no_hurry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("litgpt_demo.timeouts.INTERACTIVE", 600.0)
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
    found = first(prebuilt(public.push_image("team/ready", labels)), network, kind=kind)
    assert (found.severity, found.code) == (severity, code)


def test_manifest_of_the_machines_architecture_is_checked(public: Running) -> None:
    reference = public.push_image("team/both", OLD.labels, architectures=("arm64", "amd64"))
    assert read_config(reference, architecture="arm64").architecture == "arm64"
    assert first(prebuilt(reference), "tcpx").severity == "info"
    with pytest.raises(ImageProblem, match=r"is not for linux/riscv64, but for linux/amd64, linux/arm64"):
        read_config(reference, architecture="riscv64")
    found = check_fitness(config(prebuilt(f"{reference}-arm64"), "tcpx"))
    assert "image.architecture" in {finding.code for finding in found}


@pytest.mark.parametrize("how", [{"first": ["429"] * 9}, {"first": ["cut"] * 9}, {"account": "ada:secret"}])
def test_image_is_unknown_when_it_cannot_be_read(how: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.images.oci._PAUSES", (0.0,))
    with registry(**how) as away:
        finding = first(prebuilt(f"{away.host}/team/train:1"), "tcpx")
    assert (finding.severity, finding.code) == ("unknown", "image.unread")


def test_login_reaches_the_registry_but_not_its_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
    auth = {"auth": base64.b64encode(b"ada:secret").decode()}
    with registry(account="ada:secret", storage="signed") as private, registry(storage="asks") as leading:
        (tmp_path / "config.json").write_text(json.dumps({"auths": {private.host: auth, leading.host: auth}}))
        reference = private.push_image("team/private", {**OLD.labels, "read": "by nobody yet"})
        assert Contents.of_labels(read_config(reference).labels) == OLD
        with pytest.raises(ImageOutOfSight, match="answered 401"):
            read_config(leading.push_image("team/led", {"read": "never"}))
        assert "/token" not in " ".join(leading.requests), "nobody asked its storage for a token"


def test_image_config_is_refused_by_its_digest_or_size(public: Running) -> None:
    with registry(swapped=True) as lying:
        for host, story in ((lying, "short"), (public, "x" * MOST_BYTES)):
            with pytest.raises(ImageProblem, match="do not use this registry"):
                read_config(host.push_image("team/story", {"story": story}))


@pytest.mark.parametrize(
    "manifest",
    [
        {"layers": []},
        {"config": {"digest": "../../etc/passwd"}},
        {"manifests": [{"digest": f"sha256:{'0' * 64}", "platform": {"architecture": "\x1b]0;pwned\x07"}}]},
    ],
)
def test_malformed_manifest_is_refused_as_harmless_text(manifest: Settings, public: Running) -> None:
    public.put("team/odd", "1", {"mediaType": OCI_MANIFEST, **manifest})
    with pytest.raises(ImageProblem, match=r"names no config|push the image again") as refused:
        read_config(f"{public.host}/team/odd:1")
    assert "\x1b" not in str(refused.value)
