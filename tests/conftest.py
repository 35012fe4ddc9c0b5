"""What all tests share: an environment that nobody's settings reach, Prefect's throwaway server, tiny trainings."""

import contextlib
import fcntl
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest.mock import patch

import leaks
import psutil
import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

from launcher.config import RunConfig, overridden, validated
from launcher.images.settings import PrebuiltImage
from launcher.platforms.local.supervisor import JOB_TAG

pytest_plugins = ["places", "training_runs", "pipelines"]

_HOME = Path(tempfile.mkdtemp(prefix="train-litgpt-tests-"))


def pytest_configure(config: pytest.Config) -> None:
    """Before anything imports Prefect, which reads its settings then: no test may reach the user's server or files."""
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGTERM):
        if signal.getsignal(number) is signal.SIG_IGN:  # as under nohup; every process of the tests would inherit it
            signal.signal(number, signal.SIG_DFL)
    for name in [name for name in os.environ if name.startswith(("PREFECT_", "TRAIN_LITGPT_"))]:
        del os.environ[name]
    os.environ |= {
        "PREFECT_HOME": str(_HOME / "prefect"), "TRAIN_LITGPT_HOME": str(_HOME / "train-litgpt"), "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DISABLE_GCS_PYTHON_CLIENT_OTEL_BUCKET_METADATA": "true",  # as opening a bucket does
    }  # fmt: skip
    # Hundreds of processes are started; each would compile torch or Prefect anew, which is half of their start.
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    # Hypothesis' deadline of 0.2 s, and its wish for quick examples, would measure how busy the machine is.
    slow = [HealthCheck.too_slow]
    settings.register_profile("any", deadline=None, derandomize=True, database=None, suppress_health_check=slow)
    settings.load_profile("any")
    config.pluginmanager.register(_Shared())


_BEFORE = pytest.StashKey[leaks.Snapshot]()


class _Shared:
    """A plugin of its own: pytest asks the hooks of a folder's conftest about no fixture of the whole session."""

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef[Any]) -> Iterator[None]:
        """Remember the threads and processes of fixtures that outlive a test."""
        if fixturedef.scope == "function":
            return (yield)
        before = leaks.snapshot(_HOME)
        try:
            return (yield)
        finally:
            now = leaks.snapshot(_HOME)
            leaks.SHARED.update(now.threads - before.threads, now.children - before.children)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    item.stash[_BEFORE] = leaks.snapshot(_HOME)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[None]:
    """Fail the test that leaves something behind, whatever its fixtures did."""
    result = yield
    if leftovers := leaks.left_behind(item.stash[_BEFORE], _HOME):
        pytest.fail("this test left behind: " + "; ".join(leftovers), pytrace=False)
    return result


def pytest_collection_finish() -> None:
    """Keep the objects of all imports out of every later collection of garbage, which else takes half a second."""
    gc.freeze()


class _Together(LoadScopeScheduling):
    """Files run beside each other; those that share a server, or trainings, run one after the other."""

    def _split_scope(self, nodeid: str) -> str:
        file = Path(nodeid.partition("::")[0])
        shares = file.parts[1] in {"flows", "tasks", "deployments"} or file.name == "test_foreground.py"
        return "Prefect" if shares else str(file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> _Together:
    return _Together(config, log)


def pytest_unconfigure(config: pytest.Config) -> None:
    shutil.rmtree(_HOME, ignore_errors=True)


@pytest.fixture(scope="session")
def migrated(pytestconfig: pytest.Config) -> Path:
    """A database of Prefect's without a row, kept between runs: migrating one takes 15 s on two cores."""
    folder = pytestconfig.cache.mkdir(f"prefect-{version('prefect')}")
    database = folder / "prefect.db"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # of several workers one makes it
        if not database.exists():
            with tempfile.TemporaryDirectory(dir=folder) as home:
                command = [sys.executable, "-m", "prefect", "server", "database", "upgrade", "-y"]
                subprocess.run(command, env={**os.environ, "PREFECT_HOME": home}, check=True, capture_output=True)
                Path(home, database.name).replace(database)
    return database


@pytest.fixture(scope="session")
def prefect_home(migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Makes folders for PREFECT_HOME in which a server comes up in seconds."""
    return lambda: Path(shutil.copy(migrated, tmp_path_factory.mktemp("prefect"))).parent


@pytest.fixture(scope="session")
def prefect_api(migrated: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The one server for flows that run in the test's own process."""
    from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY, temporary_settings
    from prefect.testing.utilities import prefect_test_harness

    home = tmp_path_factory.mktemp("harness")
    shutil.copy(migrated, home / "prefect-test.db")  # where the harness would make one
    with (
        patch("prefect.testing.utilities.mkdtemp", lambda: str(home)),
        prefect_test_harness(server_startup_timeout=180),
        # Every flow would wait a second for its heartbeat's thread; only code can switch that off.
        temporary_settings({PREFECT_FLOWS_HEARTBEAT_FREQUENCY: None}),
    ):
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_job_outlives_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A test that failed in mid-training may have left one."""
    yield
    folder = str(tmp_path_factory.getbasetemp())
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(JOB_TAG, "").startswith(folder):
                process.kill()


@pytest.fixture(autouse=True)
def _prefect_where_marked(request: pytest.FixtureRequest) -> None:
    """Tests marked `prefect` get that server, except those that bring one of their own."""
    if request.node.get_closest_marker("prefect") and "served" not in request.fixturenames:
        request.getfixturevalue("prefect_api")


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The console script."""
    from console_script import Cli

    return Cli(capsys, monkeypatch)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of 200 documents, 160 kB of English-looking sentences."""
    chance = random.Random(7)
    vocabulary = ["".join(chance.choices("etaoinshrdlu", k=chance.randint(2, 7))) for _ in range(300)]
    documents = (" ".join(chance.choices(vocabulary, k=160)) for _ in range(200))
    path = tmp_path_factory.mktemp("corpus") / "english.txt"
    path.write_text("\n\n".join(documents))
    return path


@pytest.fixture(scope="session")
def tiny_under(corpus: Path) -> Callable[..., RunConfig]:
    """Makes configs of trainings under a folder, of a rank, a layer and two checkpoints: `tiny_under(folder, {…})`."""

    def make(root: Path, changes: dict[str, Any] | None = None) -> RunConfig:
        document = {
            "name": f"tiny-{os.getpid()}",  # ports follow from names: two suites may run on one machine
            "root": str(root),
            "data": {
                "corpus": {"kind": "files", "paths": [str(corpus)], "separator": "\n\n"},
                "tokenizer": {"kind": "train", "vocab_size": 300},
                "validation_fraction": 0.05,
            },
            "model": {
                "name": None,
                "config": {"n_layer": 1, "n_embd": 32, "n_head": 2, "padded_vocab_size": 320},
                "sequence_length": 32,
            },
            "train": {
                "global_batch": 4, "micro_batch": 4, "max_steps": 8, "warmup_steps": 1, "learning_rate": 0.01,
                "precision": "32-true", "evaluate_every": 4, "evaluation_samples": 8, "checkpoint_every": 4,
            },
            "platform": {"kind": "local", "nodes": 1, "processes_per_node": 1},
        }  # fmt: skip
        return validated(RunConfig, overridden(document, changes or {}), where="tiny")

    return make


@pytest.fixture
def tiny(tmp_path: Path, tiny_under: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
    """The same under this test's own folder: `tiny({"train.learning_rate": 0.1})`."""
    return partial(tiny_under, tmp_path)


@pytest.fixture(scope="session")
def pushed_image() -> Iterator[PrebuiltImage]:
    """One that its registry has, as the image step proves."""
    from registry_server import OCI_MANIFEST, registry

    with registry() as running:
        running.put("litgpt/train", "v1", {"schemaVersion": 2, "mediaType": OCI_MANIFEST, "layers": []})
        yield PrebuiltImage(kind="prebuilt", reference=f"{running.host}/litgpt/train:v1")
