"""Every shipped config can be used as it stands."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from flows.cli import read_config
from launcher.attempts import claim_of
from launcher.benchmark import BenchmarkConfig
from launcher.config import RunConfig, ScriptConfig, SweepConfig
from launcher.plan import findings_of
from launcher.sweeps import trials

CHECKOUT = Path(__file__).parents[1]
CONFIGS = sorted((CHECKOUT / "deployments" / "configs").glob("*.yaml"))

# Those for a cluster: their platform's part is in tests/launcher/. Their corpora are downloads.
CLUSTER = {path for path in CONFIGS if path.name.startswith(("batch", "gke", "runai"))}
NO_DOWNLOAD = ["data={corpus: {kind: stdlib, max_bytes: 100_000}, tokenizer: {kind: train}}"]

# A config is a training unless it stands here.
KINDS = {
    "pi.yaml": ScriptConfig, "sweep.yaml": SweepConfig, "network.yaml": BenchmarkConfig,
    "runai-pi.yaml": ScriptConfig, "runai-benchmark.yaml": ScriptConfig,
}  # fmt: skip

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


def test_its_job_can_be_rendered(config: AnyKind) -> None:
    one = trials(config)[-1].config if isinstance(config, SweepConfig) else config
    claim = claim_of(one)
    submission = claim.platform.render(claim.make_job(1))
    assert yaml.safe_load(str(submission)) == submission.body
    assert one.name in submission.job_id


@pytest.mark.parametrize("path", [path for path in CONFIGS if path not in CLUSTER], ids=lambda path: path.name)
def test_nothing_in_it_stands_in_the_way(config: AnyKind) -> None:
    """A port may be taken on this machine just now; everything else is the config's own."""
    errors = [finding for finding in findings_of(config) if finding.severity == "error"]
    assert [str(finding) for finding in errors if finding.code != "local.port"] == []
