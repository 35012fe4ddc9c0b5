"""An image that its network cannot use is found before anything is rented: by its stack, or by its labels."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import httpx
import pytest
from labelled_images import MANIFEST, Running, registry

from launcher.config import RunConfig, ScriptConfig, validated
from launcher.errors import ConfigProblem, ImageProblem
from launcher.findings import require
from launcher.images.fitness import check_finished, check_fitness, image_of, stack_for
from launcher.images.oci import MOST_BYTES, read_config
from launcher.images.stacks import LABELS, STACKS, Contents
from launcher.machines import MACHINES
from launcher.networks import NETWORKS, open_network
from launcher.networks.profile import Choice, Network
from litgpt_demo.findings import Finding

HIGH, MEGA, ULTRA = MACHINES["a3-highgpu-8g"], MACHINES["a3-megagpu-8g"], MACHINES["a3-ultragpu-8g"]


def tcpxo(**options: Any) -> Network:
    return open_network("tcpxo", Choice(machine=MEGA), **options)


def built(**changes: Any) -> Image:
    return {"kind": "docker", "repository": "gcr.io/train", **changes}


Image = dict[str, Any]


def config(
    image: Image, network: str = "", *, kind: type[ScriptConfig | RunConfig] = ScriptConfig, **options: Any
) -> Any:
    """A job of two nodes on a network of Google's, or on GCP Batch, which has no choice of networks."""
    machine = {"tcpxo": MEGA, "gib": ULTRA}.get(network, HIGH).name
    batch = {"kind": "batch", "project": "my-project", "location": "us-central1", "machine": machine}
    on = {"kind": "gke", "machine": machine, "network": network} if network else batch
    job = {"script": "-m x"} if kind is ScriptConfig else {"train": {"global_batch": 128}}
    return validated(kind, {**job, "image": image, "platform": {**on, "nodes": 2, **options}}, where="here")


def only(image: Image, network: str = "", **options: Any) -> Finding:
    (finding,) = check_fitness(config(image, network, **options))
    return finding


# --- the stack that a network needs -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("network", "machine", "stack"), [("plain", HIGH, "default"), ("gib", ULTRA, "default"), ("tcpxo", MEGA, "tcpxo")]
)
def test_the_stack_is_the_first_that_the_plugin_is_qualified_for(network: str, machine: Any, stack: str) -> None:
    assert stack_for(open_network(network, Choice(machine=machine))) is STACKS[stack]
    assert image_of(config(built(), network)).stack == stack
    assert only(built(), network).severity == "info"


def test_an_older_plugin_needs_an_older_stack_which_there_is_not() -> None:
    assert stack_for(tcpxo(network_plugin="v1.0.14")) is STACKS["tcpxo"]
    assert stack_for(tcpxo(network_plugin="v1.0.12")) is None
    refused = only(built(), "tcpxo", network_plugin="v1.0.12")
    assert refused.severity == "error"
    assert "qualified for >=2.26.5,<2.27" in refused.what
    assert "network_plugin" in refused.fix


def test_a_named_stack_and_a_dockerfile_of_the_users_are_left_as_they_are() -> None:
    for image, stack in ((built(stack="default"), "default"), (built(dockerfile="mine"), None)):
        assert image_of(config(image, "tcpxo")).stack == stack


def test_a_stack_named_in_spite_of_its_network_is_refused_with_the_one_that_would_do() -> None:
    refused = only(built(stack="default"), "tcpxo")
    assert (refused.severity, refused.code) == ("error", "nccl.version")
    assert "stack default (torch 2.13.0) has NCCL 2.29.7" in refused.what
    assert refused.fix.startswith("leave image.stack out: stack tcpxo has NCCL 2.28.9")
    risked, told = check_fitness(config(built(stack="default"), "tcpxo", allow_unqualified_nccl=True))
    assert (risked.severity, told.severity) == ("warning", "info")
    assert "not qualified for tcpxo v1.0.15" in told.what


def test_no_stack_of_ours_is_for_tcpx_and_the_ways_out_are_named() -> None:
    refused = only(built(), "tcpx")
    assert refused == only(built(), "tcpx", kind=RunConfig)
    assert refused.severity == "error"
    for way in ("network=plain", "20 to 24 GB/s", "network=tcpxo", "torch 2.2", "docs/images.md", "allow_unqualified"):
        assert way in refused.fix


def test_a_plan_says_what_the_image_holds_and_which_driver_it_needs() -> None:
    told = only(built(), "tcpxo").what
    assert told.startswith("stack tcpxo: torch 2.11.0, NCCL 2.28.9, CUDA 13.0, Python 3.11.15, glibc 2.36")
    assert "qualified for tcpxo v1.0.15" in told
    assert "the nodes need GPU driver 580.65.06 or newer" in told
    assert "no NCCL plug-in is needed" in only(built(), "plain").what
    assert "no NCCL plug-in is needed" in only(built()).what


def test_what_a_dockerfile_of_the_users_installs_is_not_known_before_it_is_built() -> None:
    assert only(built(dockerfile="mine"), "tcpxo").code == "image.unknown"
    assert list(check_fitness(config(built(dockerfile="mine")))) == []


def test_a_single_node_needs_no_plugin() -> None:
    assert only(built(), "tcpx", nodes=1).severity == "info"
    assert image_of(config(built(), "tcpxo", nodes=1)).stack == "tcpxo", "one image, however many nodes"


@pytest.mark.parametrize("name", NETWORKS)
def test_every_release_of_every_network_is_held_against_every_stack(name: str) -> None:
    """Each is judged without an exception, and one that a publisher names is never called unstated."""
    profile = NETWORKS[name]
    for arch, pairs in profile.pairs.items():
        machines = [MACHINES[one] for one in profile.machines if MACHINES[one].arch == arch]
        for pair in pairs:
            made = open_network(name, Choice(machine=machines[0]), network_plugin=pair.plugin)
            for stack in STACKS.values():
                assert (made.node.nccl_fit(stack.nccl) == "not stated") is (not pair.nccl)


# --- labels in a registry ---------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_login(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "no-docker-config"))


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with registry(tmp_path_factory.mktemp("public"), "--storage") as running:
        yield running


def prebuilt(reference: str) -> Image:
    return {"kind": "prebuilt", "reference": reference}


OLD = Contents(torch="2.2.2", nccl="2.19.3", cuda="12.1", python="3.11.9", glibc="2.36", architecture="amd64")


def test_an_image_of_the_right_nccl_may_use_tcpx(public: Running) -> None:
    told = only(prebuilt(public.push("team/old-torch", OLD.labels)), "tcpx")
    assert told.severity == "info"
    assert "torch 2.2.2, NCCL 2.19.3" in told.what
    assert "qualified for tcpx v3.1.12" in told.what


def test_an_image_of_another_nccl_is_refused_by_its_labels(public: Running) -> None:
    reference = public.push("team/new", STACKS["default"].contents("amd64").labels)
    refused = only(prebuilt(reference), "tcpx")
    assert (refused.severity, refused.code) == ("error", "nccl.version")
    assert f"{reference} has NCCL 2.29.7" in refused.what


def test_an_image_without_labels_is_a_warning_that_says_what_to_run(public: Running) -> None:
    reference = public.push("team/silent", {"maintainer": "somebody"})
    told = only(prebuilt(reference), "tcpx")
    assert (told.severity, told.code) == ("warning", "image.unlabelled")
    assert f"docker run --rm {reference} python -c 'import torch; print(" in told.fix


def test_an_old_c_library_is_found_in_the_labels(public: Running) -> None:
    labels = {**STACKS["tcpxo"].contents("amd64").labels, "io.github.train-litgpt.glibc": "2.31"}
    refused = only(prebuilt(public.push("team/old-libc", labels)), "tcpxo")
    assert (refused.severity, refused.code) == ("error", "image.glibc")


def test_of_an_image_for_several_processors_that_of_the_machine_counts(public: Running) -> None:
    reference = public.push("team/both", OLD.labels, architectures=("arm64", "amd64"))
    assert read_config(reference, architecture="arm64").architecture == "arm64"
    assert only(prebuilt(reference), "tcpx").severity == "info"
    with pytest.raises(ImageProblem, match=r"is not for linux/riscv64, but for amd64, arm64"):
        read_config(reference, architecture="riscv64")


def test_an_image_for_another_processor_than_the_machines_is_found(public: Running) -> None:
    reference = public.push("team/arm", OLD.labels, architectures=("arm64",))
    assert "image.architecture" in {one.code for one in check_fitness(config(prebuilt(f"{reference}-arm64"), "tcpx"))}


def test_our_trainer_is_not_started_with_a_torch_that_it_cannot_use(public: Running) -> None:
    image = prebuilt(public.push("team/too-old", OLD.labels))
    refused = only(image, "tcpx", kind=RunConfig)
    assert (refused.severity, refused.code) == ("error", "image.torch")
    assert "has torch 2.2.2, and our trainer needs 2.11.0 or newer" in refused.what


def test_labels_that_are_no_versions_are_taken_for_none(public: Running) -> None:
    labels = {f"{LABELS}nccl": "newest", f"{LABELS}torch": "2.2\x1b[31m", f"{LABELS}stack": "a b"}
    assert Contents.of_labels(labels) == Contents()
    assert only(prebuilt(public.push("team/odd-labels", labels)), "tcpx").code == "image.unlabelled"


def test_a_network_without_a_plugin_asks_no_registry() -> None:
    told = only(prebuilt("registry.invalid/train:1"), "plain")
    assert (told.severity, told.code) == ("info", "image.stack")


def test_a_registry_that_is_out_of_sight_leaves_the_question_open() -> None:
    told = only(prebuilt("127.0.0.1:9/train:1"), "tcpx")
    assert (told.severity, told.code) == ("unknown", "image.unread")
    assert "which NCCL the image has is not known" in told.what


def test_the_login_of_a_registry_does_not_reach_the_storage_that_it_sends_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with registry(tmp_path, "--account", "ada:secret", "--storage") as private:
        reference = private.push("team/private", OLD.labels)
        auth = {"auths": {private.host: {"auth": base64.b64encode(b"ada:secret").decode()}}}
        (tmp_path / "config.json").write_text(json.dumps(auth))
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path))
        assert Contents.of_labels(read_config(reference).labels) == OLD
        monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "nobody"))
        with pytest.raises(ImageProblem, match="log in with"):
            read_config(reference)


def test_a_config_that_does_not_have_its_digest_is_not_believed(tmp_path: Path) -> None:
    with registry(tmp_path, "--swapped") as lying:
        reference = lying.push("team/train", OLD.labels)
        with pytest.raises(ImageProblem, match="do not use this registry"):
            read_config(reference)


def test_a_config_of_any_size_is_not_read(public: Running) -> None:
    reference = public.push("team/huge", {"story": "x" * MOST_BYTES})
    with pytest.raises(ImageProblem, match=r"sent more than 8,388,608 bytes"):
        read_config(reference)


def test_an_image_that_is_none_is_refused_in_words(public: Running) -> None:
    with pytest.raises(ImageProblem, match="no such image"):
        read_config(f"{public.host}/team/none:1")
    public.put("team/helm", "1", {"mediaType": MANIFEST, "layers": []})
    with pytest.raises(ImageProblem, match="names no config"):
        read_config(f"{public.host}/team/helm:1")
    public.put("team/odd", "1", {"mediaType": MANIFEST, "config": {"digest": "../../etc/passwd"}})
    with pytest.raises(ImageProblem, match="push the image anew"):
        read_config(f"{public.host}/team/odd:1")


# --- the image step ---------------------------------------------------------------------------------------------------


def test_an_image_that_a_dockerfile_has_made_is_judged_when_it_is_there(public: Running) -> None:
    bad = public.push("team/mine", STACKS["default"].contents("amd64").labels)
    digest = httpx.head(
        f"http://{public.host}/v2/team/mine/manifests/1", headers={"Accept": MANIFEST}, trust_env=False
    ).headers["Docker-Content-Digest"]
    pinned = f"{bad.removesuffix(':1')}@{digest}"
    with pytest.raises(ConfigProblem, match=r"nccl.version.*has NCCL 2\.29\.7"):
        require(check_finished(config(built(dockerfile="mine"), "tcpxo"), pinned))
    kept = "sha256:" + "0" * 64
    assert list(check_finished(config(built(dockerfile="mine"), "tcpxo"), kept)) == [], "in no registry"
    assert list(check_finished(config(built(dockerfile="mine")), pinned)) == []


def test_the_setting_of_a_platform_reaches_the_nodes() -> None:
    allowing = config(built(), "tcpxo", allow_unqualified_nccl=True)
    assert allowing.platform.fabric.node.allow_unqualified


# --- the tables of the documentation ----------------------------------------------------------------------------------

DOCS = Path(__file__).parents[3] / "docs"


def table(page: str, *, first: str) -> list[str]:
    """The rows of the table whose first column has this name."""
    lines = (DOCS / page).read_text().splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(f"| {first} |")) + 2
    return list(takewhile(lambda line: line.startswith("|"), lines[start:]))


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def usual_networks() -> Iterator[Network]:
    """Every network as a job gets it that names no release."""
    for name, profile in NETWORKS.items():
        yield open_network(name, Choice(machine=MACHINES[profile.machines[0]] if profile.machines else None))


def test_the_page_of_images_lists_the_stacks_and_the_networks_that_they_are_chosen_for() -> None:
    chosen = {
        stack.name: sorted(one.name for one in usual_networks() if stack_for(one) is stack) for stack in STACKS.values()
    }
    rows = [
        row(
            f"`{one.name}`", one.torch, one.cuda, one.nccl, one.python, one.glibc, one.driver,
            ", ".join(chosen[one.name]),
        )
        for one in STACKS.values()
    ]  # fmt: skip
    assert table("images.md", first="stack") == rows


def test_the_page_of_networks_lists_what_each_release_is_qualified_for() -> None:
    def ranges(bounds: tuple[str, ...]) -> str:
        return ", ".join(f"`{bound}`" for bound in bounds) or "–"

    rows = []
    for name, profile in NETWORKS.items():
        for arch, pairs in profile.pairs.items():
            machine = next(MACHINES[one] for one in profile.machines if MACHINES[one].arch == arch)
            for pair in pairs:
                if not pair.nccl and pair is not pairs[0]:
                    continue
                stack = stack_for(open_network(name, Choice(machine=machine), network_plugin=pair.plugin))
                cells = map(ranges, (pair.nccl, pair.nccl_loads, pair.nccl_fails))
                plugin = f"{pair.plugin}{' on ARM' if arch == 'arm64' else ''}"
                rows.append(row(f"`{name}`", plugin, *cells, f"`{stack.name}`" if stack else "none"))
    assert table("network.md", first="network") == rows


def test_the_page_of_images_names_every_label() -> None:
    text = (DOCS / "images.md").read_text()
    for label in STACKS["default"].contents("amd64").labels:
        name = label.removeprefix(LABELS)
        assert f"{label}=" in text or f"`{name}`" in text
