"""What the tests of training share: one tiny dataset, runs on it, and one run that is trained to its end."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
from corpora import corpus_in, prepared

from bench import training
from litgpt_demo.config import DataConfig, ModelConfig
from litgpt_demo.data.dataset import DatasetManifest, plan_dataset
from litgpt_demo.data.preparation import prepare
from litgpt_demo.metrics import curve, rows_of
from litgpt_demo.storage import open_storage

NewRun: TypeAlias = Callable[..., Path]
TrainElsewhere: TypeAlias = Callable[..., list[list[int]]]

MODEL = ModelConfig(name=None, config={"n_layer": 2, "n_embd": 32, "n_head": 2}, sequence_length=32)
TRAIN: dict[str, Any] = {
    "global_batch": 8, "micro_batch": 2, "max_steps": 12, "warmup_steps": 2, "learning_rate": 0.02,
    "precision": "32-true", "evaluate_every": 4, "evaluation_samples": 7, "checkpoint_every": 4,
}  # fmt: skip


@pytest.fixture(scope="session")
def tiny_dataset(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished dataset of 300 ids; read only."""
    files = {"kind": "files", "paths": [str(corpus)], "separator": "\n\n"}
    tokenizer = {"kind": "train", "vocab_size": 300}
    data = DataConfig.model_validate({"corpus": files, "tokenizer": tokenizer, "validation_fraction": 0.05})
    root, planned = tmp_path_factory.mktemp("tiny"), plan_dataset(data)
    prepare(planned, open_storage(str(root)))
    return root / planned.path


@pytest.fixture(scope="session")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> tuple[DatasetManifest, Path]:
    """The dataset of `corpora.TEXTS`; read only."""
    folder = tmp_path_factory.mktemp("dataset")
    return prepared(corpus_in(folder / "corpus"), folder / "root")


@pytest.fixture
def copied(dataset: tuple[DatasetManifest, Path], tmp_path: Path) -> Path:
    """The same, for tests that spoil it."""
    return Path(shutil.copytree(dataset[1], tmp_path / dataset[1].name))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 2 MB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"file systems cannot be mounted here: {mounted.stderr.strip()}")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


@pytest.fixture(scope="session")
def one_thread() -> None:
    """As many as runs in processes of their own get here, so that sums are added in the same order."""
    before = set(os.environ)
    import torch

    import litgpt_demo.training.loop  # noqa: F401

    for name in set(os.environ) - before:  # torch's compiler and lightning set some when they are imported
        del os.environ[name]
    torch.set_num_threads(1)


def write_run(folder: Path, dataset: Path, *, model: ModelConfig = MODEL, **train: Any) -> Path:
    """A run's folder as the launcher leaves it before training; see `bench.training.write_run`."""
    places = {name: train.pop(name) for name in ("world_size", "origin") if name in train}
    training.write_run(folder, dataset, model=model, train=TRAIN | train, **places)
    return folder


def train(run: Path) -> None:
    """Train a run to its end in this process."""
    from litgpt_demo.training.loop import main

    assert main(["--run", str(run)]) == 0


def rows(run: Path, *kinds: str) -> list[dict[str, Any]]:
    """The metrics of a run: all rows, or those of some kinds."""
    found = rows_of((run / "metrics.jsonl").read_text())
    return [row for row in found if not kinds or row["kind"] in kinds]


def ends(run: Path) -> list[dict[str, Any]]:
    """What each rank of a run that was trained elsewhere had in the end: types of tables, settings of the optimizer."""
    return [json.loads(path.read_text()) for path in sorted(run.parent.glob(f"{run.name}.rank-*.json"))]


def alike(first_run: Path, second_run: Path) -> None:
    """Two runs of the same 12 steps differ by rounding at most."""
    for kind, name, count in [("step", "loss", 12), ("step", "grad_norm", 12), ("evaluation", "validation_loss", 3)]:
        first, second = (curve(rows(run), kind, name) for run in (first_run, second_run))
        assert len(first) == count
        assert first == pytest.approx(second, rel=1e-4)


# A process that has imported what a rank needs, and forks ranks until its standard input is closed.
_RANKS = """
import json, os, signal, sys
from multiprocessing import get_context
from litgpt_demo.imports import importing
with importing(hidden={"transformers", "matplotlib"}):
    from litgpt_demo.training import checkpoints, loop, replaying, reporting, saving  # with torch, once for all ranks

reporting._LONG_ENOUGH = 0.001  # most of a small training's time would be the measurement of its processor
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)

def memory(part):
    if isinstance(part, dict):
        return {name: memory(value) for name, value in part.items()}
    tensor = part.to_local() if hasattr(part, "to_local") else part
    return tensor.data_ptr() if hasattr(tensor, "data_ptr") else tensor

def checked(references, collect=saving.StateReferences.collect):
    state, new = collect(references), collect(saving.StateReferences(references._training))
    assert memory(state) == memory(new), "the references to a state are out of date"
    return state

saving.StateReferences.collect = checked

def train(run, rank, world, dies_saving, replays):
    local = world // int(os.environ["GROUP_WORLD_SIZE"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank % local), GROUP_RANK=str(rank // local))
    os.environ.update(WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(local))
    if replays:
        replaying.main(["--run", run, "--steps", replays, "--out", f"{run}/replays/{replays}.json"])
        return
    commit = checkpoints.commit

    def mortal(place, manifest):
        if manifest.step == dies_saving:
            os.kill(os.getpid(), signal.SIGKILL)
        commit(place, manifest)

    trainings, set_up = [], loop.set_up
    loop.set_up = lambda *parts: trainings.append(set_up(*parts)) or trainings[0]
    checkpoints.commit = mortal
    loop.main(["--run", run])
    if not run.startswith("gs://"):
        gpt, groups = trainings[0].model.module, trainings[0].optimizer.param_groups
        settings = [{name: group[name] for name in ("weight_decay", "betas", "eps", "fused")} for group in groups]
        with open(f"{run}.rank-{rank}.json", "w") as file:
            json.dump({"tables": [str(gpt.cos.dtype), str(gpt.sin.dtype)], "optimizer": settings}, file)

for line in sys.stdin:
    environment, runs, replays = json.loads(line)
    os.environ.clear()
    os.environ.update(environment)
    codes = []
    for run, world, dies_saving in runs:
        fork = get_context("fork").Process
        ranks = [fork(target=train, args=(run, n, world, dies_saving, replays)) for n in range(world)]
        for rank in ranks:
            rank.start()
        for rank in ranks:
            rank.join()
        codes.append([rank.exitcode for rank in ranks])
    print(json.dumps(codes), file=answers, flush=True)
"""


@pytest.fixture(scope="session")
def train_elsewhere() -> Iterator[TrainElsewhere]:
    """Train runs, one after the other, in processes as torchrun starts them; returns the exit codes of their ranks.

    Of each run: folder, ranks, and the step in whose save a rank kills itself before the manifest is there, or 0.
    At each save, each rank checks its references to the state against those of a new walk.
    Beside the folder each rank leaves what it had in the end; see `ends`. With `replays`, they replay these steps, and
    the result is in the folder `replays` of the run.
    """
    from launcher.platforms.local.supervisor import reserved_ports

    def train(*runs: tuple[Path | str, int, int], nodes: int = 1, replays: str = "") -> list[list[int]]:
        requests = [(str(run), world, dies_saving) for run, world, dies_saving in runs]
        with reserved_ports() as port:
            environment = os.environ | {
                "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCHELASTIC_RUN_ID": "r",
                "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GROUP_WORLD_SIZE": str(nodes),
            }  # fmt: skip
            print(json.dumps([environment, requests, replays]), file=to_them, flush=True)
            return json.loads(from_them.readline())  # type: ignore[no-any-return]

    command, pipe = [sys.executable, "-c", _RANKS], subprocess.PIPE
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, env=environment, stdin=pipe, stdout=pipe, text=True) as process:
        to_them, from_them = process.stdin, process.stdout
        yield train


@pytest.fixture
def new_run(tmp_path: Path, tiny_dataset: Path, one_thread: None, monkeypatch: pytest.MonkeyPatch) -> NewRun:
    """Makes runs on the tiny dataset: `new_run("name", learning_rate=0.1)`."""
    for name in ("LITGPT_DATASET", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    # Most of a small training's time would be the measurement of its processor.
    monkeypatch.setattr("litgpt_demo.training.reporting._LONG_ENOUGH", 0.001)

    def make(name: str, *, dataset: Path = tiny_dataset, **changes: Any) -> Path:
        return write_run(tmp_path / name, dataset, **changes)

    return make


@pytest.fixture(scope="session")
def finished(tiny_dataset: Path, one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of 12 steps, trained in this process without interruption; read only, which is checked in the end."""
    assert "LOCAL_WORLD_SIZE" not in os.environ
    folder = write_run(tmp_path_factory.mktemp("runs") / "finished", tiny_dataset)
    train(folder)
    written = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    yield folder
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == written


@pytest.fixture
def finished_copy(finished: Path, tmp_path: Path) -> Path:
    """The same, for tests that change it."""
    return Path(shutil.copytree(finished, tmp_path / "finished"))
