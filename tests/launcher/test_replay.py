"""A replay before it starts: refused where it is impossible, and begun as the step was trained."""

from pathlib import Path
from typing import Any

import pytest

from launcher.config import RunConfig
from launcher.replay import ReplayPlan, plan_replay
from launcher.reports.replays import html, is_equal, table, verdict, worst_samples
from launcher.runs.run import plan_script
from litgpt_demo.config import ModelConfig, TrainConfig, TrainingSpec
from litgpt_demo.documents import write_manifest
from litgpt_demo.errors import TrainLitgptError
from litgpt_demo.metrics import METRICS_MARK, to_log_line
from litgpt_demo.replays import DocumentPart, Replay, ReplayedSample, ReplayedStep
from litgpt_demo.runs import METRICS, RunDocument, write_document
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoints import CheckpointManifest, folder_of


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that two ranks trained to step 30, one rank to step 50, and that four ranks began to train again."""
    monkeypatch.setattr("launcher.replay.usable_cores", lambda: 2)
    monkeypatch.setattr("launcher.replay.gpu_names", list)
    storage = open_storage(str(tmp_path / "root" / "runs" / "gpt-1"))
    settings = {"max_steps": 100, "global_batch": 8, "micro_batch": 2, "log_every": 5, "warmup_steps": 0}
    names: dict[str, Any] = {"run": "gpt-1", "dataset": "none", "dataset_hash": "none"}
    train = TrainConfig.model_validate(settings)
    spec = TrainingSpec(**names, model=ModelConfig(), train=train, steps=100, world_size=4)
    platform = {"kind": "local", "nodes": 2, "processes_per_node": 2}
    config = RunConfig.model_validate({"platform": platform}).model_dump(mode="json")
    write_document(storage, RunDocument(run=config, training=spec))
    write_document(storage.within("attempts/2"), RunDocument(training=spec))
    for step in (20, 30, 50):
        names = {"format": 2, "run": "gpt-1", "dataset_hash": "none", "validation_loss": None, "versions": {}}
        manifest = CheckpointManifest(**names, step=step, tokens=0, world_size=1, files=())
        write_manifest(storage.within(folder_of(step)), manifest)
    rows: list[dict[str, Any]] = [{"kind": "start", "step": 0, "world_size": 2, "attempt": 1}]
    rows += [{"kind": "step", "step": step, "loss": 1.0} for step in range(5, 31, 5)]
    rows += [{"kind": "start", "step": 30, "world_size": 1, "attempt": 2, "threads": 3}]
    rows += [{"kind": "step", "step": step, "loss": 1.0} for step in range(35, 51, 5)]
    rows += [{"kind": "start", "step": 50, "world_size": 4, "attempt": 3}]
    storage.write(METRICS, "".join(f"{to_log_line(row).removeprefix(METRICS_MARK)}\n" for row in rows).encode())
    return Path(storage.root)


def planned(run: Path, steps: str, **options: Any) -> ReplayPlan:
    return plan_replay(open_storage(str(run)), steps, **options)


@pytest.mark.parametrize(
    ("steps", "options", "message"),
    [
        ("5-4", {}, "--steps=5-4 ends before it begins; give --steps=4-5"),
        ("0", {}, "--steps=0 is not a step"),
        ("1-", {}, "--steps=1- is not a step"),
        ("90-101", {}, "has no step 101, only steps up to 55"),
        ("54-56", {}, "has no step 56, only steps up to 55"),
        ("20-22", {}, r"no checkpoint before step 20 \(steps of its checkpoints: 20, 30, 50\); --from-start"),
        ("20-22", {}, "train.keep_every=N"),
        ("51", {}, "step 51 was trained by 4 ranks, but this machine has 2 .*--processes=2"),
        ("51", {"processes": 3}, "train.global_batch=8 does not split over 3 processes"),
    ],
)  # fmt: skip
def test_impossible_replay_is_refused(run: Path, steps: str, options: dict[str, Any], message: str) -> None:
    before = sorted(run.rglob("*"))
    with pytest.raises(TrainLitgptError, match=message):
        planned(run, steps, **options)
    assert sorted(run.rglob("*")) == before


def test_run_without_metrics_is_refused(run: Path) -> None:
    (run / METRICS).unlink()
    with pytest.raises(TrainLitgptError, match="has no metrics of a training to step 21; train it first"):
        planned(run, "21")


def test_replay_has_ranks_and_settings_of_the_attempt(run: Path) -> None:
    """Attempt 1 has no config of its own any more."""
    ranks = {steps: planned(run, steps) for steps in ("21-30", "31-50", "28-31")}
    sizes = [plan.script.platform.processes_per_node for plan in ranks.values()]
    assert sizes == [2, 1, 1]
    assert ["--attempt" in plan.script.args for plan in ranks.values()] == [False, True, True]
    assert ranks["31-50"].script.args[-4:] == ("--attempt", "2", "--threads", "3")
    assert ranks["31-50"].script.root == str(run.parents[1])
    own = planned(run, "51-55", on_own_platform=True).script.platform
    assert (own.nodes, own.processes_per_node) == (2, 2)
    assert plan_script(planned(run, "51-55", on_own_platform=True).script).job(attempt=1, image=None).stage == ("none",)
    assert planned(run, "51-55", processes=2).script.platform.processes_per_node == 2


def test_first_step_is_replayed_from_the_initial_weights(run: Path) -> None:
    assert planned(run, "1-3").script.args[-1] == "--from-start"
    assert planned(run, "7-9", from_start=True).script.args[-1] == "--from-start"
    assert planned(run, "21").script.args[-1] != "--from-start"
    assert planned(run, "21").path == "replays/21-21.json"


HOSTILE = "<script>alert(1)</script>"


def replay_of(*steps: ReplayedStep) -> Replay:
    part = DocumentPart(position=7, beginning=HOSTILE, tokens=3, loss=9.0)
    worst = ReplayedSample(id=5, loss=8.5, source=HOSTILE, text=HOSTILE, documents=(part,))
    samples = worst, ReplayedSample(id=6, loss=1.0)
    return Replay(run=HOSTILE, began_at=20, world_size=2, device="cpu", steps=steps, samples=samples)


def step_of(recorded: float | None, loss: float) -> ReplayedStep:
    return ReplayedStep(step=21, recorded_loss=recorded, loss=loss, recorded_grad_norm=recorded, grad_norm=loss)


@pytest.mark.parametrize(
    ("recorded", "loss", "equal", "text"),
    [
        (2.0, 2.0, True, "Equal bit for bit"),
        (2.0, 2.0001, True, "Equal within the tolerance 0.0001"),
        (2.0, 2.001, False, "Different beyond the tolerance 0.0001: a figure differs by 5.0e-04"),
        (2.0, float("nan"), False, "differs by inf"),
        (0.0, 1.0, False, "differs by inf"),
        (float("nan"), float("nan"), True, "Equal bit for bit"),
        (None, 2.0, True, "Not compared"),
    ],
)
def test_tolerance_decides_which_steps_are_equal(recorded: float | None, loss: float, equal: bool, text: str) -> None:
    found = replay_of(step_of(2.0, 2.0) if recorded is not None else step_of(None, loss), step_of(recorded, loss))
    assert is_equal(found, 1e-4) is equal
    assert text in verdict(found, 1e-4)
    assert Replay.model_validate_json(found.model_dump_json()).model_dump_json() == found.model_dump_json()


def test_replay_of_other_samples_is_different() -> None:
    same, unrecorded = (step_of(2.0, 2.0).model_copy(update={"recorded_batch_sha256": sha}) for sha in ("", None))
    changed = same.model_copy(update={"batch_sha256": "0" * 64})
    assert [is_equal(replay_of(step), 1e-4) for step in (same, unrecorded, changed)] == [True, True, False]
    assert [row["samples"] for row in table(replay_of(same, unrecorded, changed))] == [
        "same",
        "not recorded",
        "different",
    ]


def test_page_of_a_replay_has_only_text() -> None:
    found = replay_of(step_of(None, 3.0), step_of(2.5, 3.0))
    page = html(found, 1e-4)
    assert "<script" not in page
    assert page.count("&lt;script&gt;") >= 4
    assert "not recorded" in page
    assert [row["loss differs by"] for row in table(found)] == ["–", "0.2"]
    assert worst_samples(found) == [
        (
            f"sample 5 of {HOSTILE}: loss 8.5000",
            [f"document from token 7: loss 9.0000 on 3 tokens: {HOSTILE}"],
            HOSTILE,
        )
    ]
