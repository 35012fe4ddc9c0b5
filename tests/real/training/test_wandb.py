"""The client of Weights & Biases records a training. An emulated service answers it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from echoing_server import echoing_server
from leaking import leaks
from training_runs import NewRun, TrainElsewhere, rows

KEY = "0123456789abcdef0123456789abcdef01234567"  # as long as theirs are
SHORT = {"max_steps": 3, "warmup_steps": 1}


def test_without_a_secret_its_records_stay_in_the_runs_folder(new_run: NewRun, train_elsewhere: TrainElsewhere) -> None:
    run = new_run("offline", wandb={"project": "pages", "secret": None}, **SHORT)
    assert train_elsewhere((run, 1, 0)) == [[0]]
    (records,) = run.glob("wandb/offline-run-*/*.wandb")
    assert b"step/loss" in records.read_bytes()


@pytest.mark.parametrize("status", [400, 401])
def test_a_service_that_repeats_a_request_leaks_no_key(new_run: NewRun, tmp_path: Path, status: int) -> None:
    run = new_run("echoed", wandb={"project": "pages", "secret": "MY_KEY"}, **SHORT)
    with echoing_server(status=status) as echo:
        environment = os.environ | {
            "MY_KEY": KEY, "WANDB_BASE_URL": echo.address, "WANDB_INIT_TIMEOUT": "2", "HOME": str(tmp_path),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        command = [sys.executable, "-m", "litgpt_demo", "train", "--run", str(run)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert leaks("".join(echo.requests), KEY) == [KEY]  # it came there
    assert "warning: Wandb gets no metrics" in done.stdout
    assert len(rows(run, "step")) == 3
    assert leaks(done.stdout + done.stderr, KEY) == []
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert "debug-internal.log" in {path.name for path in files}
    assert [path for path in files if leaks(path.read_bytes().decode("latin-1"), KEY)] == []
