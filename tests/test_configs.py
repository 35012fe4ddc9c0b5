"""Every shipped config can be used as it stands."""

from __future__ import annotations

import errno
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from typer.testing import CliRunner

from cli.main import app, read_config
from launcher.benchmark import BenchmarkConfig
from launcher.checks.plan import findings_of
from launcher.checks.preview import previews
from launcher.config import RunConfig, ScriptConfig, SweepConfig
from launcher.images.fitness import check_fitness
from launcher.job import UNBUILT
from launcher.platforms import settings_classes
from launcher.platforms.kubernetes.connection import google_way
from launcher.runs.sweeps import trials
from litgpt_demo.storage import objects

CHECKOUT = Path(__file__).parents[1]
CONFIGS = sorted((CHECKOUT / "deployments" / "configs").glob("*.yaml"))

# Those for a cluster: their platform's part is in tests/launcher/. Their corpora are downloads.
CLUSTER = {path for path in CONFIGS if path.name.startswith(("batch", "gke", "runai"))}
NO_DOWNLOAD = ["data={corpus: {kind: stdlib, max_bytes: 100_000}, tokenizer: {kind: train}}"]

# A config is a training unless it stands here.
KINDS = {
    "pi.yaml": ScriptConfig, "sweep.yaml": SweepConfig, "network.yaml": BenchmarkConfig,
    "gke-tcpx.yaml": ScriptConfig, "runai-pi.yaml": ScriptConfig, "runai-benchmark.yaml": ScriptConfig,
}  # fmt: skip

# What was shipped once: torch 2.13 for networks that are qualified for NCCL 2.19 and 2.28.
OLD_PAIRS = [
    ("gke-tcpxo.yaml", ["image.stack=default"]),
    ("gke-tcpxo.yaml", ["platform.machine=a3-highgpu-8g", "platform.network=tcpx"]),
]

AnyKind = RunConfig | ScriptConfig | SweepConfig | BenchmarkConfig


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths in them are relative to the checkout, as the README's commands are."""
    monkeypatch.chdir(CHECKOUT)


@pytest.fixture(params=CONFIGS, ids=lambda path: path.name)
def path(request: pytest.FixtureRequest) -> Path:
    shipped: Path = request.param
    return shipped


@pytest.fixture
def config(path: Path, tmp_path: Path) -> AnyKind:
    downloads = path in CLUSTER and path.name not in KINDS
    return read_config(path, [f"root={tmp_path}", *(NO_DOWNLOAD if downloads else [])])


def test_configs_are_shipped() -> None:
    assert {path.name for path in CONFIGS} >= {"local.yaml", *KINDS}


def test_it_is_of_the_kind_that_its_sections_say(path: Path) -> None:
    assert type(read_config(path, [])) is KINDS.get(path.name, RunConfig)


def test_it_says_what_it_is_for(path: Path) -> None:
    assert path.read_text().startswith("# ")


def test_its_jobs_can_be_rendered(config: AnyKind) -> None:
    shown = list(previews(config))
    assert len(shown) == (len(trials(config)) if isinstance(config, SweepConfig) else 1)
    for preview in shown:
        assert yaml.safe_load(str(preview.submission)) == preview.submission.body
        assert config.name in preview.submission.job_id


@pytest.mark.parametrize("path", [path for path in CONFIGS if path not in CLUSTER], ids=lambda path: path.name)
def test_nothing_in_it_stands_in_the_way(config: AnyKind) -> None:
    """A port may be taken on this machine just now; everything else is the config's own."""
    errors = [finding for finding in findings_of(config) if finding.severity == "error"]
    assert [str(finding) for finding in errors if finding.code != "local.port"] == []


# --- the image and the network ----------------------------------------------------------------------------------------

FOR_ANY_NCCL = {"gke.yaml", "batch.yaml", "batch-one.yaml", "runai.yaml", "runai-pi.yaml", "runai-benchmark.yaml"}
"""Configs whose network loads no plug-in."""


@pytest.mark.usefixtures("cut_off")
@pytest.mark.parametrize("path", sorted(CLUSTER), ids=lambda path: path.name)
def test_its_image_fits_its_network(path: Path, config: AnyKind) -> None:
    """A prebuilt one is looked up in its registry, and this one has a made-up name."""
    assert isinstance(config, RunConfig | ScriptConfig)
    (found,) = check_fitness(config)
    looked_up = path.name == "gke-tcpx.yaml"
    wanted = ("unknown", "image.unread") if looked_up else ("info", "image.stack")
    assert (found.severity, found.code) == wanted, str(found)


@pytest.mark.parametrize("path", sorted(CLUSTER), ids=lambda path: path.name)
def test_its_plan_says_which_stack_which_nccl_and_that_it_fits(cut_off: None, path: Path) -> None:
    done = CliRunner().invoke(app, ["plan", str(path)])
    (line,) = [line for line in done.output.splitlines() if " image." in line]
    if path.name == "gke-tcpx.yaml":
        assert "which NCCL the image has is not known" in line
    elif path.name.startswith(("runai-pi", "runai-benchmark")):
        assert "its network asks for none in particular" in line
    else:
        fits = "no NCCL plug-in is needed" if path.name in FOR_ANY_NCCL else "qualified for|names no NCCL"
        assert re.search(rf"✓ stack \w+: torch 2\.\d+\.\d, NCCL 2\.\d+\.\d.*({fits})", line)


@pytest.mark.parametrize(("file", "changes"), OLD_PAIRS)
def test_the_pairs_that_could_never_train_are_refused_at_plan_within_three_seconds(
    cut_off: None, file: str, changes: list[str]
) -> None:
    began = time.process_time()  # others use this machine's cores, too
    done = CliRunner().invoke(app, ["plan", f"deployments/configs/{file}", *changes])
    assert time.process_time() - began < 3
    assert done.exit_code == 40
    assert "stack default (torch 2.13.0) has NCCL 2.29.7" in done.output


# --- profiles ---------------------------------------------------------------------------------------------------------

PROFILES = sorted((CHECKOUT / "deployments" / "configs" / "profiles").glob("*.yaml"))


@pytest.fixture(params=PROFILES, ids=lambda path: path.name)
def profile(request: pytest.FixtureRequest) -> Path:
    shipped: Path = request.param
    return shipped


def test_there_is_a_profile_for_every_platform() -> None:
    assert {path.stem for path in PROFILES} == {
        get_args(one.model_fields["kind"].annotation)[0] for one in settings_classes()
    }


def test_the_local_training_is_the_same_run_wherever_a_profile_sends_it(profile: Path) -> None:
    (here,) = previews(read_config(CHECKOUT / "deployments/configs/local.yaml", []))
    (there,) = previews(read_config(CHECKOUT / "deployments/configs/local.yaml", [], profile))
    assert there.submission.platform == profile.stem
    assert run_in(there.submission.job_id) == run_in(here.submission.job_id)


def run_in(job_id: str) -> str:
    found = re.search(r"stdlib-gpt-[0-9a-f]{10}", job_id)
    assert found, job_id
    return found[0]


@pytest.mark.usefixtures("cut_off")
def test_the_local_training_is_planned_with_every_profile(profile: Path) -> None:
    """A bucket and a control plane cannot be asked here, which a plan says; nothing that is known stands in the way."""
    done = CliRunner().invoke(app, ["plan", "deployments/configs/local.yaml", "--platform", str(profile)])
    assert done.exit_code == 0, done.output
    assert ("nothing blocks it" in done.stdout) == (profile.stem == "local")


# --- without a network and without credentials ------------------------------------------------------------------------


def unreachable(*_address: Any, **_options: Any) -> Any:
    raise OSError(errno.ENETUNREACH, "Network is unreachable")


@pytest.fixture
def cut_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without network, accounts and programs of clouds, whose user has downloaded nothing yet."""
    for name in [
        name for name in os.environ if name.startswith(("GOOGLE_", "CLOUDSDK_", "HF_", "RUNAI_", "KUBE", "STORAGE_"))
    ]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "no-docker-config"))
    monkeypatch.setattr("launcher.images.fitness.PATIENCE", 0.1)
    monkeypatch.setenv("NO_GCE_CHECK", "true")  # else google-auth asks an address of Google's machines, three times
    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    monkeypatch.setattr(socket.socket, "connect", unreachable)
    monkeypatch.setattr("launcher.checks.preview._PATIENCE", 0.1)
    google_way.cache_clear()
    objects._client.cache_clear()  # an earlier test may have had credentials


@pytest.mark.usefixtures("cut_off")
def test_it_is_rendered_without_a_network_and_what_is_unknown_is_named(path: Path) -> None:
    done = CliRunner().invoke(app, ["render", str(path)])
    assert done.exit_code == 0, done.output
    jobs = [job for job in yaml.safe_load_all(done.stdout) if job]
    assert jobs
    if needs_the_hub(path):
        assert f"{read_config(path, []).name}-unknown" in done.stdout
        assert "? not known from here: the files of the dataset openwebtext" in done.stderr
        assert "# - the files of the dataset openwebtext" in done.stdout
    else:
        assert "-unknown" not in done.stdout
    told = [line for line in done.stdout.splitlines() if line.startswith("# ")]
    assert len(told[1:]) == done.stderr.count("? not known from here"), "told at the top, and on stderr"
    assert done.stdout.startswith("# Not to be sent as it is: ") == bool(told)
    assert any(UNBUILT in line for line in told) == (f": {UNBUILT}\n" in done.stdout)
    assert any("(id of its cluster)" in line for line in told) == ("(id of its cluster)" in str(jobs))


OFFLINE = """
import sys, time
from typer.testing import CliRunner
from cli.main import app
for path in sys.argv[1:]:
    begun = time.monotonic()
    done = CliRunner().invoke(app, ["render", path])
    print(path, done.exit_code, "in time" if time.monotonic() - begun < 10 else "late", repr(done.exception))
"""


def test_all_are_rendered_by_a_process_that_has_no_network_no_home_and_no_credentials() -> None:
    apart = ["unshare", "--map-root-user", "--net"]
    if subprocess.run([*apart, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine gives no process a network of its own")
    configs = [str(path) for path in CONFIGS]
    done = subprocess.run(
        [*apart, sys.executable, "-c", OFFLINE, *configs],
        env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stdout.splitlines() == [f"{path} 0 in time None" for path in configs]


@pytest.mark.usefixtures("cut_off")
def test_it_is_planned_without_a_network_and_what_is_unknown_is_named(path: Path) -> None:
    done = CliRunner().invoke(app, ["plan", str(path)])
    assert done.exit_code == 0, done.output
    if needs_the_hub(path):
        assert "datasets/openwebtext-unknown" in done.stdout
        assert "? the files of the dataset openwebtext, and with them the run's key, are not known" in done.stdout
        assert "FLOPs in all" in done.stdout, "what follows from the config alone is told all the same"
    assert ("? " in done.stdout) == (path in CLUSTER)
    assert ("nothing that is known blocks it" in done.stdout) == (path in CLUSTER)


def needs_the_hub(path: Path) -> bool:
    return path in CLUSTER and path.name not in KINDS
