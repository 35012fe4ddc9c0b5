"""Where metrics go besides metrics.jsonl, each read back with its own reader; and that no key is ever written down."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from base64 import b64encode
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias

import pytest
import torch
from echoing_server import echoing_server
from leaking import leaks
from states import training_of

from litgpt_demo.config import TrainConfig, TrainingSpec
from litgpt_demo.errors import UserError
from litgpt_demo.metrics import curve, rows_of
from litgpt_demo.models import estimates
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import open_storage
from litgpt_demo.training.loggers import COLUMNS, Table, asked_for, forget, scalars
from litgpt_demo.training.loop import main
from litgpt_demo.training.reporting import Reporter
from litgpt_demo.training.utilisation import device_name, held_bytes

NewRun: TypeAlias = Callable[..., Path]

KEY = "0123456789abcdef0123456789abcdef01234567"  # as long as theirs are


def rows(run: Path) -> list[dict[str, Any]]:
    return rows_of((run / "metrics.jsonl").read_text())


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def train_at(run: Path) -> None:
    assert main(["--run", str(run)]) == 0


# --- what a step tells ------------------------------------------------------------------------------------------------


def test_the_start_tells_what_the_rest_is_held_against(finished_copy: Path) -> None:
    start, training = rows(finished_copy)[0], training_of(finished_copy)
    config = training.model.module.config
    assert start["kind"] == "start"
    assert start["flops_per_token"] == estimates.flops_per_token(config, 32)
    assert start["parameters"] == estimates.parameters(config)
    assert start["device_name"] == device_name(torch.device("cpu"))
    assert 1e8 < start["peak_flops"] < 1e14
    assert start["memory_estimate"] > 16 * start["parameters"]


def test_mfu_is_the_models_arithmetic_as_a_share_of_the_peak(finished: Path) -> None:
    start, steps = rows(finished)[0], [row for row in rows(finished) if row["kind"] == "step"]
    for row in steps:
        flops = row["tokens_per_second"] * start["flops_per_token"]
        assert row["mfu"] == pytest.approx(flops / start["peak_flops"], rel=1e-2)
        assert 0 < row["mfu"] < 1
        assert 5e7 < row["memory"] < 1.1 * held_bytes(torch.device("cpu"))
    assert [row["tokens"] for row in steps] == [step * 8 * 32 for step in range(1, 13)]
    assert all(row["data_seconds"] >= 0 for row in steps)


def test_a_checkpoint_tells_how_long_training_stood_still(finished: Path) -> None:
    saved = [row for row in rows(finished) if row["kind"] == "checkpoint"]
    assert [row["step"] for row in saved] == [4, 8, 12]
    assert all(0 <= row["seconds"] < 5 for row in saved)


def test_a_step_that_beats_the_measured_peak_tells_no_mfu_until_the_peak_is_measured_again(new_run: NewRun) -> None:
    training = training_of(new_run("beaten"))
    report, began = Reporter(training, resumed_from=0), monotonic()

    def told(step: int, ended: float) -> dict[str, Any]:
        report.step(step, loss=2.0, grad_norm=1.0, rate=0.1, reading=0.0, ended=began + ended)
        return rows(Path(training.run.root))[-1]

    assert 0 < told(1, 10.0)["mfu"] < 1
    assert "mfu" not in told(2, 10.0)  # in no time at all
    assert "mfu" not in told(3, 20.0)  # a peak that was beaten is none
    report.pause(1.0)
    assert 0 < told(4, 40.0)["mfu"] < 1


# --- the table --------------------------------------------------------------------------------------------------------


def test_every_run_has_a_table_of_its_metrics(finished: Path) -> None:
    lines = table(finished / "metrics.csv")
    assert tuple(lines[0]) == COLUMNS
    losses = {int(line["step"]): float(line["loss"]) for line in lines if line["kind"] == "step"}
    assert losses == curve(rows(finished), "step", "loss")
    validation = {int(line["step"]): float(line["validation_loss"]) for line in lines if line["kind"] == "evaluation"}
    assert validation == curve(rows(finished), "evaluation", "validation_loss")
    assert {"mfu", "memory", "data_seconds", "learning_rate"} <= {name for name, value in lines[0].items() if value}


def test_a_resumed_table_has_each_step_once(new_run: NewRun) -> None:
    run = new_run("again", max_steps=6, checkpoint_every=3, evaluate_every=3)
    train_at(run)
    with (run / "metrics.csv").open("a") as file:
        file.write("step,7,cut sho")  # a kill in mid-line
    document = json.loads((run / "config.json").read_text())
    document["training"]["steps"] = document["training"]["train"]["max_steps"] = 9
    (run / "config.json").write_text(json.dumps(document))
    train_at(run)
    steps = [int(line["step"]) for line in table(run / "metrics.csv") if line["kind"] == "step"]
    assert steps == list(range(1, 10))


def test_a_value_with_commas_or_newlines_stays_in_its_cell(tmp_path: Path) -> None:
    Table(tmp_path / "metrics.csv", [{"kind": "step", "step": 1, "loss": 'a,"b"\nc'}]).close()
    assert table(tmp_path / "metrics.csv")[0]["loss"] == 'a,"b"\nc'


def test_only_numbers_of_steps_evaluations_and_checkpoints_are_curves() -> None:
    row = {"kind": "checkpoint", "step": 3, "seconds": 0.5, "path": "checkpoints/step-3"}
    assert scalars(row) == {"checkpoint/seconds": 0.5}
    assert scalars({"kind": "start", "step": 0, "steps": 9}) == {}
    assert math.isnan(scalars({"kind": "step", "step": 3, "loss": math.nan})["step/loss"])


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def test_tensorboard_shows_the_same_curves(new_run: NewRun) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = new_run("boarded", tensorboard=True, max_steps=4, evaluate_every=2, checkpoint_every=4)
    train_at(run)
    seen = EventAccumulator(str(run / "tensorboard")).Reload()
    losses = {event.step: event.value for event in seen.Scalars("step/loss")}
    assert losses == pytest.approx(curve(rows(run), "step", "loss"), rel=1e-6)
    validation = {event.step: event.value for event in seen.Scalars("evaluation/validation_loss")}
    assert validation == pytest.approx(curve(rows(run), "evaluation", "validation_loss"), rel=1e-6)
    assert "step/mfu" in seen.Tags()["scalars"]


def test_metrics_of_a_run_in_a_bucket_are_carried_there(
    new_run: NewRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = training_of(new_run("far", tensorboard=True))
    sent: dict[str, bytes] = {}

    class Bucket:
        root = "gs://bucket/runs/far"

        def local_path(self) -> None:
            return None

        def exists(self, path: str) -> bool:
            return path in sent

        def upload(self, path: Path, name: str) -> None:
            sent[name] = path.read_bytes()

    object.__setattr__(training, "run", Bucket())
    report = Reporter(training, resumed_from=0)
    report.step(1, loss=2.0, grad_norm=1.0, rate=0.1, reading=0.0)
    report.close(step=1)
    assert {"metrics.jsonl", "metrics.csv"} < set(sent)
    assert any(name.startswith("tensorboard/events.out") for name in sent)
    assert b"step,1,256,2.0" in sent["metrics.csv"]


# --- Weights & Biases -------------------------------------------------------------------------------------------------


def records(file: Path) -> Iterator[bytes]:
    """The records of a .wandb file: LevelDB's log format behind seven bytes of their own."""
    content, place, whole = file.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if 32_768 - place % 32_768 < 7:  # no record begins in the last bytes of a block
            place += 32_768 - place % 32_768
            continue
        size, kind = int.from_bytes(content[place + 4 : place + 6], "little"), content[place + 6]
        whole += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # all of a record, or the last part of one
            yield whole
            whole = b""


def history(folder: Path) -> list[dict[str, Any]]:
    """What an offline run of wandb has written down."""
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    found = []
    for data in records(file):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            found.append({item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in items})
    return found


@pytest.mark.long
def test_without_a_secret_weights_and_biases_keeps_its_records_in_the_runs_folder(new_run: NewRun) -> None:
    run = new_run("offline", wandb={"project": "pages", "secret": None}, max_steps=3, warmup_steps=1)
    train_at(run)
    losses = {item["step"]: item["step/loss"] for item in history(run) if "step/loss" in item}
    assert losses == pytest.approx(curve(rows(run), "step", "loss"))


@pytest.mark.long
def test_a_service_that_does_not_answer_costs_its_record_and_not_the_training(
    new_run: NewRun, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With a key, which is found in nothing that was printed or written."""
    run = new_run("unheard", wandb={"project": "pages", "secret": "MY_KEY"}, max_steps=3, warmup_steps=1)
    environment = os.environ | {
        "MY_KEY": KEY, "WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_INIT_TIMEOUT": "2", "HOME": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "litgpt_demo", "train", "--run", str(run)],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "warning: Weights & Biases is told no metrics" in done.stdout
    assert len(curve(rows(run), "step", "loss")) == 3
    assert KEY not in done.stdout + done.stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 5
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []


@pytest.mark.long
@pytest.mark.parametrize("status", [400, 401])
def test_a_service_that_repeats_what_it_was_sent_makes_no_key_known(
    new_run: NewRun, tmp_path: Path, status: int
) -> None:
    run = new_run("echoed", wandb={"project": "pages", "secret": "MY_KEY"}, max_steps=3, warmup_steps=1)
    with echoing_server(status=status) as echo:
        environment = os.environ | {
            "MY_KEY": KEY, "WANDB_BASE_URL": echo.address, "WANDB_INIT_TIMEOUT": "2", "HOME": str(tmp_path),
            "OMP_NUM_THREADS": "1",
        }  # fmt: skip
        done = subprocess.run(
            [sys.executable, "-m", "litgpt_demo", "train", "--run", str(run)],
            env=environment, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert leaks("".join(echo.asked), KEY) == [KEY]  # it came there
    assert len(curve(rows(run), "step", "loss")) == 3
    assert leaks(done.stdout + done.stderr, KEY) == []
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert "debug-internal.log" in {path.name for path in files}
    assert [path for path in files if leaks(path.read_bytes().decode("latin-1"), KEY)] == []


def test_the_key_is_taken_out_of_texts_and_nothing_else_is_changed(tmp_path: Path) -> None:
    sent = b64encode(f"api:{KEY}".encode()).decode()
    logs, records = tmp_path / "run-a" / "logs", tmp_path / "run-a" / "a.wandb"
    logs.mkdir(parents=True)
    records.write_bytes(b"\x00" + KEY.encode())
    (logs / "debug-internal.log").write_bytes(f'{{"msg": "{KEY} Basic {sent}"}}\r\n{KEY}'.encode() + b"\xff")
    (logs / "debug-internal.log").chmod(0o600)
    (logs / "long.log").write_text("x" * (1 << 20) + KEY + "\nnext\n")
    (logs / "other.log").write_text("a token: no key\n")
    (tmp_path / "latest").symlink_to(logs / "debug-internal.log")
    untouched = (logs / "other.log").stat().st_ino
    forget(tmp_path, KEY)
    assert (tmp_path / "latest").read_bytes() == b'{"msg": "[secure] Basic [secure]"}\r\n[secure]\xff'
    assert (logs / "debug-internal.log").stat().st_mode & 0o777 == 0o600
    assert (logs / "long.log").read_text() == "[secure]\nnext\n"
    assert (logs / "other.log").stat().st_ino == untouched
    assert KEY.encode() in records.read_bytes()
    assert {path.name for path in logs.iterdir()} == {"debug-internal.log", "long.log", "other.log"}


def spec_with(run: Path, **train: Any) -> TrainingSpec:
    spec = read_spec(open_storage(str(run)))
    return spec.model_copy(update={"train": TrainConfig.model_validate(spec.train.model_dump() | train)})


def test_a_secret_that_the_node_does_not_have_stops_the_training(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    with pytest.raises(UserError, match="MY_KEY names a variable that is not in this node's environment"):
        asked_for(spec_with(finished, wandb={"project": "p", "secret": "MY_KEY"}), tmp_path, resumed_from=0)


def test_a_key_where_its_name_belongs_is_refused_without_repeating_it() -> None:
    with pytest.raises(ValueError, match="not a name in capitals") as refused:
        TrainConfig.model_validate({"wandb": {"project": "p", "secret": KEY}})
    assert KEY not in str(refused.value)
