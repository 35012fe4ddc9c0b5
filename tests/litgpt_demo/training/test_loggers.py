"""Where metrics go besides metrics.jsonl, each read back with its own reader; and that no key is ever written down."""

from __future__ import annotations

import csv
import json
from base64 import b64encode
from pathlib import Path

import pytest
from bucket_emulator import bucket_emulator
from states import training_of
from training_runs import NewRun, rows, train

from litgpt_demo.config import TrainConfig
from litgpt_demo.errors import UserError
from litgpt_demo.metrics import curve, rows_of
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import open_storage
from litgpt_demo.training.loggers import COLUMNS, asked_for, forget
from litgpt_demo.training.loop import fit

KEY = "0123456789abcdef0123456789abcdef01234567"  # as long as theirs are


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


# --- the table --------------------------------------------------------------------------------------------------------


def test_a_resumed_table_has_each_step_once(new_run: NewRun) -> None:
    run = new_run("again", max_steps=6, checkpoint_every=3, evaluate_every=3)
    train(run)
    with (run / "metrics.csv").open("a") as file:
        file.write("step,7,cut sho")  # a kill in mid-line
    document = json.loads((run / "config.json").read_text())
    document["training"]["steps"] = document["training"]["train"]["max_steps"] = 9
    (run / "config.json").write_text(json.dumps(document))
    train(run)
    lines = table(run / "metrics.csv")
    assert tuple(lines[0]) == COLUMNS
    losses = [(int(line["step"]), float(line["loss"])) for line in lines if line["kind"] == "step"]
    assert losses == [(step, loss) for step, loss in curve(rows(run), "step", "loss").items()]
    assert [step for step, _ in losses] == list(range(1, 10))


# --- TensorBoard ------------------------------------------------------------------------------------------------------


def test_tensorboard_shows_the_same_curves(new_run: NewRun) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = new_run("boarded", tensorboard=True, max_steps=4, evaluate_every=2, checkpoint_every=4)
    train(run)
    seen = EventAccumulator(str(run / "tensorboard")).Reload()
    losses = {event.step: event.value for event in seen.Scalars("step/loss")}
    assert losses == pytest.approx(curve(rows(run), "step", "loss"), rel=1e-6)
    validation = {event.step: event.value for event in seen.Scalars("evaluation/validation_loss")}
    assert validation == pytest.approx(curve(rows(run), "evaluation", "validation_loss"), rel=1e-6)


def test_metrics_of_a_run_in_a_bucket_are_carried_there(new_run: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    with bucket_emulator("metrics") as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        run = open_storage("gs://metrics/far")
        fit(training_of(new_run("far", tensorboard=True, max_steps=3), run))
        assert b"step,3,768," in run.read("metrics.csv")
        assert [row["step"] for row in rows_of(run.read("metrics.jsonl")) if row["kind"] == "step"] == [1, 2, 3]
        assert any(name.startswith("tensorboard/events.out") for name in run.list())


# --- Weights & Biases -------------------------------------------------------------------------------------------------


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


def test_a_secret_that_the_node_does_not_have_stops_the_training(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MY_KEY", raising=False)
    spec = read_spec(open_storage(str(finished)))
    asked = TrainConfig.model_validate(spec.train.model_dump() | {"wandb": {"project": "p", "secret": "MY_KEY"}})
    with pytest.raises(UserError, match="MY_KEY names a variable that is not in this node's environment"):
        asked_for(spec.model_copy(update={"train": asked}), tmp_path, resumed_from=0)


def test_a_key_where_its_name_belongs_is_refused_without_repeating_it() -> None:
    with pytest.raises(ValueError, match="not a name in capitals") as refused:
        TrainConfig.model_validate({"wandb": {"project": "p", "secret": KEY}})
    assert KEY not in str(refused.value)
