"""The moving average of the weights: of every step, whoever trains it, wherever it is resumed."""

import signal
from pathlib import Path

import pytest
import torch
from training_runs import NewRun, TrainElsewhere, train

from litgpt_demo.errors import UserError
from litgpt_demo.export.models import export
from litgpt_demo.export.weights import Weights
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoint_reader import AVERAGE
from litgpt_demo.training.checkpoints import folder_of


def stored(run: Path, step: int, *kind: str) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint, or their averages."""
    weights = Weights(run / folder_of(step), **({"kind": kind[0]} if kind else {}))
    return weights.read([*weights.forms])


def test_average_follows_the_weights_of_each_step(new_run: NewRun, train_elsewhere: TrainElsewhere) -> None:
    """Of all ranks together, also where each holds a shard."""
    every = {"weight_average": 0.3, "max_steps": 4, "checkpoint_every": 1, "keep_every": 1}
    alone, sharded = new_run("alone", **every), new_run("sharded", **every, world_size=2, strategy="fsdp")
    assert train_elsewhere((alone, 1, 0), (sharded, 2, 0)) == [[0], [0, 0]]
    for run in (alone, sharded):
        expected = stored(run, 1, AVERAGE)
        for step in (2, 3, 4):
            share = 1 - min(0.3, step / (9 + step))
            for name, weight in stored(run, step).items():
                expected[name] += share * (weight - expected[name])
        last, weights = stored(run, 4, AVERAGE), stored(run, 4)
        for name, average in last.items():
            torch.testing.assert_close(average, expected[name])
            assert not torch.equal(average, weights[name])


def test_average_resumes_bit_for_bit(new_run: NewRun, train_elsewhere: TrainElsewhere) -> None:
    run, killed = new_run("run", weight_average=0.9), new_run("killed", weight_average=0.9)
    train(run)
    assert train_elsewhere((killed, 1, 8)) == [[-signal.SIGKILL]]
    train(killed)
    expected = stored(run, 12, AVERAGE)
    assert all(torch.equal(average, expected[name]) for name, average in stored(killed, 12, AVERAGE).items())


def test_narrow_weights_have_a_precise_average(new_run: NewRun) -> None:
    """A step of a bfloat16 weight towards its average would be rounded away."""
    run = new_run("narrow", weight_average=0.999, precision="bf16-true", max_steps=2, warmup_steps=1)
    train(run)
    assert {tensor.dtype for tensor in stored(run, 2).values()} == {torch.bfloat16}
    assert {tensor.dtype for tensor in stored(run, 2, AVERAGE).values()} == {torch.float32}


def test_average_is_collected_beside_the_last_weights(new_run: NewRun, finished_copy: Path) -> None:
    run = new_run("averaged", weight_average=0.9)
    train(run)
    last, average = (export(open_storage(str(run)), average=kind) for kind in (False, True))
    assert average.average
    assert average.validation_loss != last.validation_loss
    assert average.huggingface is not None
    assert "a moving average, of which each step kept 0.9" in (run / "final-average/MODEL_CARD.md").read_text()
    assert {path.name for path in (run / "final-average").iterdir()} == {
        path.name for path in (run / "final").iterdir()
    }
    assert export(open_storage(str(run)), average=True) == average
    with pytest.raises(UserError, match=r"was trained without train\.weight_average; set it for"):
        export(open_storage(str(finished_copy)), average=True)
