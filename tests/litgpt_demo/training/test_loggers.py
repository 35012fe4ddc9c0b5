"""Where metrics go besides metrics.jsonl, each read back with its own reader; and that no key is ever written down."""

import csv
import re
from base64 import b64encode
from pathlib import Path
from threading import Lock

import pytest
from bucket_emulator import Answer, Request
from bucket_faults import FailureClass, FaultyBucket
from states import training_of
from training_runs import NewRun, rows, train

from litgpt_demo.config import TrainConfig
from litgpt_demo.errors import UserError
from litgpt_demo.metrics import COLUMNS, CSV_COLUMNS, curve, rows_of
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training.checkpoints import commit, folder_of, list_complete
from litgpt_demo.training.loop import fit
from litgpt_demo.training.reporting import Wandb, scrub_api_key

KEY = "0123456789abcdef0123456789abcdef01234567"  # as long as theirs are


def test_a_resumed_table_has_each_step_once(new_run: NewRun) -> None:
    often = {"checkpoint_every": 3, "evaluate_every": 3}
    run = new_run("again", max_steps=6, **often)
    train(run)
    with (run / "metrics.csv").open("a") as file:
        file.write("step,7,cut sho")  # a kill in mid-line
    train(new_run("again", max_steps=9, **often))
    lines = list(csv.DictReader((run / "metrics.csv").read_text().splitlines()))
    assert tuple(lines[0]) == CSV_COLUMNS
    losses = [(int(line["step"]), float(line["loss"])) for line in lines if line["kind"] == "step"]
    assert losses == [(step, loss) for step, loss in curve(rows(run), "step", "loss").items()]
    assert [step for step, _ in losses] == list(range(1, 10))


def test_the_table_of_columns_has_every_written_column(finished: Path) -> None:
    for row in rows(finished):
        for name in row.keys() - {"kind", "step"}:
            assert name in COLUMNS, f"add {name} to COLUMNS in litgpt_demo/metrics.py"
            kinds = COLUMNS[name].kinds.split()
            assert row["kind"] in kinds, f"add {row['kind']} to the kinds of {name} in litgpt_demo/metrics.py"


def test_the_page_explains_every_column_of_the_table() -> None:
    page = (Path(__file__).parents[3] / "docs/reference/metrics.md").read_text()
    unexplained = {*CSV_COLUMNS} - {*re.findall(r"`(\w+)`", page)}
    assert unexplained == set(), "explain them in that page, or set in_csv=False in litgpt_demo/metrics.py"


def test_metrics_are_uploaded_as_table_and_tensorboard(new_run: NewRun, bucket: Storage, tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    settings = {"max_steps": 4, "evaluate_every": 2, "checkpoint_every": 4}
    fit(training_of(new_run("far", tensorboard=True, **settings), bucket))
    assert b"step,4,1024," in bucket.read("metrics.csv")
    rows = rows_of(bucket.read("metrics.jsonl"))
    (events,) = [name for name in bucket.list() if name.startswith("tensorboard/events.out")]
    bucket.download(events, tmp_path / events)
    seen = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    for kind, name, steps in (("step", "loss", [1, 2, 3, 4]), ("evaluation", "validation_loss", [2, 4])):
        shown = {event.step: event.value for event in seen.Scalars(f"{kind}/{name}")}
        assert list(shown) == steps
        assert shown == pytest.approx(curve(rows, kind, name), rel=1e-6)


def test_a_committed_step_has_its_rows_wherever_a_kill_comes(
    new_run: NewRun, finished: Path, bucket: Storage, proxy: FaultyBucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket's state before each request is what a kill at that moment leaves."""
    states, lock, forward = list[dict[str, bytes]](), Lock(), proxy.forward

    def noted(request: Request) -> Answer:
        with lock:
            states.append(proxy.objects())
            return forward(request)

    monkeypatch.setattr(proxy, "forward", noted)
    fit(training_of(new_run("far"), bucket))
    left_at, known = dict[int, dict[str, bytes]](), [("step", "loss"), ("evaluation", "validation_loss")]
    for state in [*states, proxy.objects()]:
        newest = max([int(name.split("/")[1][5:]) for name in state if re.match("checkpoints/.*manifest", name)] or [0])
        left_at.setdefault(newest, state)
        for kind, name in known:
            kept = {step for step in curve(rows_of(state.get("metrics.jsonl", b"")), kind, name) if step <= newest}
            assert kept == {step for step in curve(rows(finished), kind, name) if step <= newest}
    assert sorted(left_at) == [0, 4, 8, 12]
    again = bucket.within("again")
    for name, content in left_at[8].items():
        again.write(name, content)
    fit(training_of(new_run("far"), again))
    made = rows_of(again.read("metrics.jsonl"))
    assert [row["step"] for row in made if row["kind"] == "start"] == [0, 8]
    for kind, name in known:
        assert curve(made, kind, name) == curve(rows(finished), kind, name)


def test_a_resumed_step_has_no_loss_without_its_row(new_run: NewRun, bucket: Storage, proxy: FaultyBucket) -> None:
    """Its validation loss, for which the attempt that saved it had no time, is a row and is in its manifest."""
    run, refuse = new_run("far"), FailureClass(on="upload", do="refuse", status=403, times=1)
    fit(training_of(run, bucket))
    bucket.remove(folder_of(12))
    last = list_complete(bucket)[0]
    commit(bucket, last.model_copy(update={"validation_loss": None}))
    kept = [line for line in bucket.read("metrics.jsonl").splitlines() if b'"evaluation"' not in line]
    bucket.write("metrics.jsonl", b"\n".join(kept))
    training = training_of(run, bucket)
    training.model.register_forward_pre_hook(lambda *_: proxy.arm(refuse) if not training.model.training else None)
    with pytest.raises(UserError, match=r"metrics\.jsonl"):
        fit(training)
    assert list_complete(bucket)[0].validation_loss is None
    proxy.arm()
    fit(training_of(run, bucket))
    made = rows_of(bucket.read("metrics.jsonl"))
    assert curve(made, "evaluation", "validation_loss")[8] == last.validation_loss


def test_the_key_is_removed_from_texts_and_only_the_key(tmp_path: Path) -> None:
    sent = b64encode(f"api:{KEY}".encode()).decode()
    logs, records = tmp_path / "run-a" / "logs", tmp_path / "run-a" / "a.wandb"
    logs.mkdir(parents=True)
    records.write_bytes(b"\x00" + KEY.encode())
    (logs / "debug-internal.log").write_bytes(f'{{"msg": "{KEY} Basic {sent}"}}\r\n{KEY}'.encode() + b"\xff")
    (logs / "debug-internal.log").chmod(0o600)
    (logs / "other.log").write_text("a token: no key\n")
    (tmp_path / "latest").symlink_to(logs / "debug-internal.log")
    untouched = (logs / "other.log").stat().st_ino
    scrub_api_key(tmp_path, KEY)
    assert (tmp_path / "latest").read_bytes() == b'{"msg": "[secure] Basic [secure]"}\r\n[secure]\xff'
    assert (logs / "debug-internal.log").stat().st_mode & 0o777 == 0o600
    assert (logs / "other.log").stat().st_ino == untouched
    assert KEY.encode() in records.read_bytes()
    assert {path.name for path in logs.iterdir()} == {"debug-internal.log", "other.log"}


def test_a_key_as_a_name_or_a_name_without_a_key_is_refused(new_run: NewRun, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not the name of a variable in capitals") as refused:
        TrainConfig.model_validate({"wandb": {"project": "p", "secret": KEY}})
    assert KEY not in str(refused.value)
    spec = read_spec(open_storage(str(new_run("run"))))
    settings = TrainConfig.model_validate(spec.train.model_dump() | {"wandb": {"project": "p", "secret": "MY_OWN_KEY"}})
    with pytest.raises(UserError, match="MY_OWN_KEY names a variable that is not in this node's environment"):
        Wandb(spec.model_copy(update={"train": settings}), tmp_path, resumed_from=0)
