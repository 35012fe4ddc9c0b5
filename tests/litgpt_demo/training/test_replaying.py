"""Steps that are trained again: the same bits, the same samples, and the document behind a spike."""

from pathlib import Path

from training_runs import rows

from litgpt_demo.replays import Replay, read_replay
from litgpt_demo.storage import open_storage
from litgpt_demo.training.replaying import main


def replayed(run: Path, steps: str, *options: str) -> Replay:
    out = run.parent / "replay.json"
    assert main(["--run", str(run), "--steps", steps, "--out", str(out), *options]) == 0
    return read_replay(open_storage(str(out.parent)), out.name)


def test_replayed_steps_have_the_bits_of_the_recorded_ones(finished: Path) -> None:
    found = replayed(finished, "9-11")
    assert (found.began_at, found.world_size, [step.step for step in found.steps]) == (8, 1, [9, 10, 11])
    recorded = {row["step"]: row for row in rows(finished, "step")}
    for step in found.steps:
        assert step.loss == step.recorded_loss == recorded[step.step]["loss"]
        assert step.grad_norm == step.recorded_grad_norm == recorded[step.step]["grad_norm"]
    assert found.largest_difference == 0
