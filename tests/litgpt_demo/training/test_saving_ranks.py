"""Saving and resuming by several processes, and by one that is killed while it saves."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from waiting import free_port

from litgpt_demo.export import export
from litgpt_demo.metrics import curve, rows_of
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training.checkpoints import committed, folder_of, open_checkpoint
from litgpt_demo.training.loop import main
from litgpt_demo.training.reading import load_weights

sys.path.append(str(Path(__file__).parents[2] / "fakes"))
from bucket_emulator import bucket_emulator
from bucket_faults import Fault, FaultyBucket, faulty_bucket

NewRun = Callable[..., Path]


def two_ranks(*program: str) -> str:
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--master-addr=127.0.0.1",
        f"--master-port={free_port()}", *program,
    ]  # fmt: skip
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def steps_kept(run: Storage) -> list[int]:
    return [found.step for found in committed(run)]


def rows(run: Path) -> list[dict[str, Any]]:
    return rows_of((run / "metrics.jsonl").read_text())


# --- on another number of ranks ---------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.training
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_training_goes_on_on_two_ranks_and_again_on_one(finished: Path, new_run: NewRun, strategy: str) -> None:
    settings: dict[str, Any] = {"strategy": strategy, "keep_last": 9}
    run = new_run("moving", world_size=1, **settings)
    assert main(["--run", str(run)]) == 0
    forget(run, 8, 12)
    new_run("moving", world_size=2, **settings)
    two_ranks("-m", "litgpt_demo", "--", "train", "--run", str(run))
    assert [found.world_size for found in committed(open_storage(str(run)))] == [2, 2, 1]
    shares = [path.stat().st_size for path in (run / folder_of(12)).glob("*.distcp")]
    assert len(shares) == 2
    assert max(shares) < 0.7 * sum(shares)  # nobody writes what another one does
    collected = export(open_storage(str(run)))  # one process suffices
    assert collected.logits_difference == 0
    assert collected.huggingface is not None
    forget(run, 12)
    new_run("moving", world_size=1, **settings)
    assert main(["--run", str(run)]) == 0
    assert [row["step"] for row in rows(run) if row["kind"] == "start"] == [0, 4, 8]
    for kind, name in [("step", "loss"), ("step", "grad_norm"), ("evaluation", "validation_loss")]:
        assert curve(rows(run), kind, name) == pytest.approx(curve(rows(finished), kind, name), rel=1e-4)


def forget(run: Path, *steps: int) -> None:
    for step in steps:
        shutil.rmtree(run / folder_of(step))


# --- an error of one rank ---------------------------------------------------------------------------------------------

ONE_DISK_IS_FULL = """
import json, resource, sys
from pathlib import Path
from states import training_of
from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.training.resuming import resume
from litgpt_demo.training.saving import Saver
from litgpt_demo.training.step import train_step

run, place = map(Path, sys.argv[1:])
training = training_of(run)
rank, told = training.fabric.global_rank, []
print("scratch", rank, training.scratch)
with Saver(training, tell=told.append) as saver:
    train_step(training, 0)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, resource.RLIM_INFINITY))
    saver.save(1, None)
    train_step(training, 1)
    try:
        saver.finish()
    except TrainLitgptError as error:
        (place / f"{rank}.json").write_text(json.dumps([type(error).__name__, str(error)]))
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    train_step(training, 2)
    saver.save(3, None)
if rank == 0:
    (place / "told.json").write_text(json.dumps([[saved.step, saved.warning] for saved in told]))
else:
    assert told == []
assert resume(training, tell=print) == 3
"""


@pytest.mark.long
@pytest.mark.training
def test_a_full_disk_of_one_rank_costs_all_of_them_one_save(new_run: NewRun, tmp_path: Path) -> None:
    run, script, place = new_run("run", world_size=2), tmp_path / "script.py", tmp_path / "place"
    script.write_text(ONE_DISK_IS_FULL)
    place.mkdir()
    two_ranks(str(script), str(run), str(place))
    errors = [json.loads((place / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert errors[0] == errors[1]
    assert errors[0][0] == "DiskFull"
    assert "rank-1/step-1: File too large" in errors[0][1]
    (first, warning), last = json.loads((place / "told.json").read_text())
    assert (first, last) == (1, [3, None])
    assert "the checkpoint of step 1 was not saved" in warning
    assert steps_kept(open_storage(str(run))) == [3]
    assert not (run / folder_of(1)).exists()


# --- killed in the middle ---------------------------------------------------------------------------------------------


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultyBucket]:
    with bucket_emulator("checkpoints") as address, faulty_bucket(address) as proxy:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", proxy.url)
        yield proxy


@pytest.mark.long
@pytest.mark.training
def test_a_save_in_which_the_process_is_killed_is_none(
    finished: Path, new_run: NewRun, bucket: FaultyBucket, tmp_path: Path
) -> None:
    run = open_storage("gs://checkpoints/killed")
    run.write("config.json", (new_run("killed") / "config.json").read_bytes())
    process = start_training(run)
    while not steps_kept(run):
        assert process.poll() is None
        time.sleep(0.02)
    bucket.arm(Fault(on="upload", do="stall", skip=2))  # of a save before the last one: its manifest or a file
    while bucket.seen.count("upload") < 3:
        assert process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    bucket.arm()
    reached = steps_kept(run)
    assert 12 not in reached
    assert main(["--run", run.root]) == 0
    assert steps_kept(run) == [12, 8]
    assert {path.split("/")[0] for path in run.within("checkpoints").list()} == {"step-00000008", "step-00000012"}
    starts = [row["step"] for row in rows_of(run.read("metrics.jsonl").decode()) if row["kind"] == "start"]
    assert starts[-1] == reached[0]
    ours, theirs = weights(run, tmp_path), weights(open_storage(str(finished)), tmp_path)
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def start_training(run: Storage) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "litgpt_demo", "train", "--run", run.root]
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"})


def weights(run: Storage, scratch: Path) -> dict[str, torch.Tensor]:
    from litgpt.model import GPT

    from litgpt_demo.data.dataset import open_dataset
    from litgpt_demo.models.model import litgpt_config
    from litgpt_demo.runs import read_spec

    spec = read_spec(run)
    state = GPT(litgpt_config(spec.model, vocab_size=open_dataset(spec.dataset).vocab_size)).state_dict()
    load_weights(open_checkpoint(run, committed(run)[0], lambda: scratch / "fetched"), state)
    return state
