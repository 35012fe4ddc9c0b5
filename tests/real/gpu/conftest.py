"""The tests of a GPU: their order, their device, what is made before them, and the figures that they leave.

`make test-gpu` runs them on a machine with NVIDIA's driver, a C compiler (Triton calls it) and the packages of
pyproject.toml. On Linux, torch from PyPI is the CUDA build. Any torch of 2.11 or newer will do, so a machine without a
network can run them with the torch that it has. Without a GPU each test is skipped.

`python tests/real/status.py gpu --on-cpu` rehearses them on a CPU: it runs every line but those that need CUDA, and
leaves the dataset in data/, so that no GPU waits for tokenization.

Tests come in the order of what they decide. A test's outcome, seconds and recorded figures are written when it ends.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import leaks
import pytest
import torch

from bench.__main__ import machine_name
from litgpt_demo.config import DataConfig
from litgpt_demo.data.dataset import plan_dataset
from litgpt_demo.data.preparation import prepare
from litgpt_demo.storage import open_storage
from litgpt_demo.training.saving import Saver

CHECKOUT, DATA = Path(__file__).parents[3], Path(__file__).with_name("data")
ORDER = ("test_results_of_a_gpu.py", "test_speed_of_a_gpu.py", "test_memory_of_a_gpu.py", "test_several_gpus.py")
COMPILER_CACHE = "TORCHINDUCTOR_CACHE_DIR"


RESULTS: dict[str, dict[str, Any]] = {}
"""What came of each test, by its name: outcome, seconds, and the figures of `record_property`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on-cpu", action="store_true", help="rehearse on a CPU what CPUs can do")


def pytest_configure(config: pytest.Config) -> None:
    # torch reads it when the first product is made, which belongs to another test than the deterministic one.
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    # Ranks import the package from here, whether it is installed or not.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH")]))
    # CUDA's libraries and torch's compiler keep threads and processes that nobody has listed yet: all are allowed.
    leaks.KEPT, leaks.KEPT_PROCESSES = ("",), ("",)
    if torch.cuda.is_available() and not config.getoption("--on-cpu"):
        config.pluginmanager.register(_Results())


class _Results:
    """Writes RESULTS after each test, so that a run which fails or is cut short has left what it saw."""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = report.nodeid.rpartition("/")[2]
        if report.when == "call" or not report.passed:
            RESULTS[name] = {"outcome": report.outcome, "seconds": round(report.duration, 2)}
            RESULTS[name] |= {"figures": dict(report.user_properties)} if report.user_properties else {}
            RESULTS[name] |= {"why": str(report.longrepr)[-2000:]} if not report.passed else {}
        device = torch.cuda.get_device_name()
        machine = machine_name(device)
        seen = {"machine": machine, "device": device, "gpus": torch.cuda.device_count(), "torch": torch.__version__}
        file = CHECKOUT / "bench" / "results" / f"gpu-{machine}.json"
        file.write_text(json.dumps({**seen, "tests": RESULTS}, indent=1) + "\n")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: ORDER.index(item.path.name) if item.path.name in ORDER else len(ORDER))


def pytest_report_header() -> str:
    return f"device: {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "device: no CUDA device"


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> torch.device:
    """The GPU, or the CPU of a rehearsal."""
    if pytestconfig.getoption("--on-cpu"):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device is here")
    return torch.device("cuda", 0)


@pytest.fixture(scope="session")
def gpu(device: torch.device) -> torch.device:
    """The GPU of a test that cannot be rehearsed."""
    if device.type != "cuda":
        pytest.skip("only a GPU does this")
    return device


@pytest.fixture(autouse=True)
def _as_in_a_new_process(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Undo what a training sets for its whole process, and what its first CUDA call adds to the environment."""
    environ = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(environ)
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.enable_mem_efficient_sdp(True)
    torch.backends.cuda.enable_cudnn_sdp(True)
    torch.set_float32_matmul_precision("highest")
    torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@pytest.fixture
def without_saves(monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkpoint of gigabytes is written."""
    monkeypatch.setattr(Saver, "save", lambda *_: 0.0)


@pytest.fixture(scope="session")
def one_thread(device: torch.device) -> None:
    """As many threads as there are cores, but in a rehearsal: no result is compared bit for bit with that of a CPU."""
    if device.type == "cpu":
        torch.set_num_threads(1)


@pytest.fixture(scope="session")
def tiny_dataset(corpus: Path, device: torch.device) -> Path:
    """The dataset of the other tests of training, which a rehearsal has left."""
    files = {"kind": "files", "paths": [str(corpus)], "separator": "\n\n"}
    tokenizer = {"kind": "train", "vocab_size": 300}
    data = DataConfig.model_validate({"corpus": files, "tokenizer": tokenizer, "validation_fraction": 0.05})
    made = sorted(DATA.glob("datasets/*/*/manifest.json"))
    if made:
        return made[-1].parent
    planned = plan_dataset(data)
    prepare(planned, open_storage(str(DATA)))
    return DATA / planned.path


def kill(process: subprocess.Popen[Any]) -> None:
    """End a process that was started in a session of its own, and those that it has started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


@pytest.fixture(scope="session", autouse=True)
def alone(device: torch.device, request: pytest.FixtureRequest) -> Iterator[Callable[[], None]]:
    """Compile what the comparison with LitGPT needs, in parallel with tests that measure no time.

    Those that do call this fixture, which ends the compiling process.
    """
    if device.type != "cuda" or not any("litgpt_pretrain" in item.name for item in request.session.items):
        yield lambda: None
        return
    with tempfile.TemporaryDirectory(prefix="compiled-") as cache:
        os.environ[COMPILER_CACHE] = cache
        command, sinks = [sys.executable, "-m", "bench.training"], {"stdout": subprocess.DEVNULL}
        process = subprocess.Popen(command, cwd=CHECKOUT, start_new_session=True, stderr=subprocess.STDOUT, **sinks)
        yield lambda: kill(process)
        kill(process)
    os.environ.pop(COMPILER_CACHE, None)
