"""Every shipped config can be used as it stands, on a machine without network, accounts and programs of clouds."""

import errno
import os
import re
import socket
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml

from launcher.platforms import settings_classes

CHECKOUT = Path(__file__).parents[1]
CONFIGS = sorted((CHECKOUT / "deployments" / "configs").glob("*.yaml"))
# Those for a cluster: their registries, buckets and corpora cannot be asked from here.
CLUSTER = [path for path in CONFIGS if path.name.startswith(("batch", "gke", "kubernetes", "runai", "slurm"))]
# A config is a training unless it stands here.
KINDS = {
    "pi.yaml": "ScriptConfig", "sweep.yaml": "SweepConfig", "network.yaml": "BenchmarkConfig",
    "sweep-search.yaml": "SweepConfig",
    "gke-tcpx.yaml": "ScriptConfig", "runai-pi.yaml": "ScriptConfig", "runai-benchmark.yaml": "ScriptConfig",
}  # fmt: skip


@pytest.fixture(autouse=True)
def _cut_off(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without network, accounts and programs of clouds, whose user has downloaded nothing yet."""
    from launcher.platforms.kubernetes.connection import _gke_cluster
    from litgpt_demo.storage import bucket

    def unreachable(*_address: Any, **_options: Any) -> Any:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    for name in list(os.environ):
        if name.startswith(("GOOGLE_", "CLOUDSDK_", "HF_", "RUNAI_", "KUBE", "STORAGE_")):
            monkeypatch.delenv(name)
    monkeypatch.chdir(CHECKOUT)  # paths in them are relative to it, as the README's commands are
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DOCKER_CONFIG", str(tmp_path / "no-docker-config"))
    monkeypatch.setenv("NO_GCE_CHECK", "true")  # else google-auth asks an address of Google's machines, three times
    monkeypatch.setattr("launcher.images.oci._PAUSES", ())
    monkeypatch.setattr("litgpt_demo.timeouts.INTERACTIVE", 0.1)
    monkeypatch.setattr(socket, "getaddrinfo", unreachable)
    monkeypatch.setattr(socket.socket, "connect", unreachable)
    _gke_cluster.cache_clear()
    bucket._client.cache_clear()  # an earlier test may have had credentials


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.name)
def test_config_is_planned_without_a_network(path: Path, cli: Any) -> None:
    """Rendered too; unknown facts are named."""
    from cli.main import read_config

    config = read_config(path, [])
    kind = KINDS.get(path.name, "RunConfig")
    assert type(config).__name__ == kind
    needs_the_hub = path in CLUSTER and kind == "RunConfig"

    done = cli("render", str(path))
    assert done.code == 0, done
    assert [job for job in yaml.safe_load_all(done.out) if job]
    assert (f"{config.name}-unknown" in done.out) is needs_the_hub
    comments = [line for line in done.out.splitlines() if line.startswith("# ")]
    assert len(comments[1:]) == done.err.count("? not known here"), "told at the top, and on stderr"
    assert done.out.startswith("# Do not submit this as it is: ") == bool(comments)

    done = cli("plan", str(path))
    assert done.code == 0, done
    assert ("datasets/openwebtext-unknown" in done.out) is needs_the_hub
    assert ("nothing that is known blocks it" in done.out) == (path in CLUSTER)
    if path in CLUSTER and config.platform.in_containers:
        (image,) = [line for line in done.out.splitlines() if " image." in line]
        fits = r"✓ stack \w+: torch 2\.\d+\.\d, NCCL 2\.\d+\.\d|no particular version|NCCL version of .* is not known"
        assert re.search(fits, image)


PLATFORMS = [get_args(settings.model_fields["kind"].annotation)[0] for settings in settings_classes()]


@pytest.mark.parametrize("kind", PLATFORMS)
def test_init_writes_a_valid_config_but_never_over_another(kind: str, cli: Any, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    assert cli("init", kind, str(file)).code == 0
    done = cli("plan", str(file))
    assert (done.code, "blocks it" in done.out) == (0, True), done
    before = file.read_text()
    assert before.count("#") > 2
    assert "File exists" in cli("init", kind, str(file)).err
    assert file.read_text() == before


@pytest.mark.parametrize("kind", PLATFORMS)
def test_training_is_the_same_run_on_every_platform_file(kind: str, cli: Any) -> None:
    from cli.main import read_config
    from launcher.checks.plan import previews

    platform_file = CHECKOUT / "deployments" / "configs" / "platforms" / f"{kind}.yaml"
    jobs = []
    for sent_by in (None, platform_file):
        jobs += previews(read_config(CHECKOUT / "deployments/configs/local.yaml", [], sent_by)).values()
    assert jobs[1].platform == kind
    local, elsewhere = (re.search(r"stdlib-gpt-[0-9a-f]{10}", job.job_id) for job in jobs)
    assert local[0] == elsewhere[0]
    done = cli("plan", "deployments/configs/local.yaml", "--platform", str(platform_file))
    assert done.code == 0, done
    assert ("nothing blocks it" in done.out) == (kind == "local")
