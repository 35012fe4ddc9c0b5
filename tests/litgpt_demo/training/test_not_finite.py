"""A loss that is no number stops a training with the samples it came of, or costs it that step's update.

The bad batch of these tests is one that holds a certain sample: the model's loss of it is made no number, every time.
"""

import math
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from states import same, training_of
from training_runs import NewRun, rows

from litgpt_demo.__main__ import main as litgpt_demo
from litgpt_demo.data.batches import sample_ids_for_step
from litgpt_demo.data.dataset import stage
from litgpt_demo.errors import UserError
from litgpt_demo.replays import Replay
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoints import list_complete
from litgpt_demo.training.loop import fit, scratch_of
from litgpt_demo.training.replaying import replay
from litgpt_demo.training.resuming import resume
from litgpt_demo.training.setup import Training, open_data, set_up
from litgpt_demo.training.step import train_step


def numbers(training: Training, step: int) -> list[int]:
    """The samples of a step, counted from 1."""
    return [int(number) for number in sample_ids_for_step(training.spec, training.data.train, step - 1)]


def poison(training: Training, samples: Sequence[int], *, by: float = 0.0, to: float = 0.0) -> None:
    """From now on no batch with one of these samples has a loss that is a number."""
    inputs, _ = training.data.train.read(np.array(samples, dtype=np.uint64))
    bad = torch.from_numpy(inputs)

    def spoil(_module: object, arguments: tuple[torch.Tensor, ...], loss: torch.Tensor) -> torch.Tensor:
        is_bad = (arguments[0][:, None] == bad[None]).all(dim=2).any()
        return loss * by + to if is_bad else loss

    training.model.register_forward_hook(spoil)


def test_it_stops_with_the_windows_and_how_to_see_them(
    new_run: NewRun, tiny_dataset: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from tokenizers import Tokenizer

    training = training_of(new_run("run"))
    samples = numbers(training, 7)
    poison(training, [samples[3]], by=math.nan)
    with pytest.raises(UserError, match="the loss of step 7 is nan") as stopped:
        fit(training)
    assert f"its samples have the ids {', '.join(map(str, samples))} in the training split" in str(stopped.value)
    assert [found.step for found in list_complete(training.run)] == [4]

    command = re.search(r"`python -m litgpt_demo (.*?)`", str(stopped.value))
    capsys.readouterr()
    assert litgpt_demo(shlex.split(command[1])) == 0
    tokenizer = Tokenizer.from_file(str(tiny_dataset / "tokenizer" / "tokenizer.json"))
    tokens = np.memmap(tiny_dataset / "train.bin", dtype="<u2", mode="r")
    expected = ""
    for number in samples:
        text = tokenizer.decode(tokens[32 * number : 32 * number + 32].tolist(), skip_special_tokens=False)
        expected += f"--- sample {number}, {len(text)} characters\n{text}\n"
    assert capsys.readouterr().out == expected


def test_a_step_is_saved_after_its_loss_is_known(new_run: NewRun) -> None:
    training = training_of(new_run("run", evaluate_every=12))
    poison(training, [numbers(training, 8)[3]], by=math.nan)
    with pytest.raises(UserError, match="the loss of step 8 is nan"):
        fit(training)
    assert [found.step for found in list_complete(training.run)] == [4]


@pytest.mark.parametrize(("bad", "loss"), [(2, {"by": math.nan}), (12, {"by": 1.0, "to": math.inf})])
def test_its_update_is_left_out_and_training_goes_on(new_run: NewRun, bad: int, loss: dict[str, float]) -> None:
    run = new_run("run", on_nonfinite="skip")
    training, by_hand = training_of(run), training_of(new_run("by-hand"))
    samples = numbers(training, bad)
    poison(training, [samples[0]], **loss)
    fit(training)
    for step in range(12):
        if step + 1 != bad:
            train_step(by_hand, step)
    by_hand.feed.close()
    ended, expected = ((trained.model.module, trained.optimizer.optimizer) for trained in (training, by_hand))
    assert same(ended, expected)
    skips = rows(run, "skip")
    assert [(row["step"], sorted(row["windows"])) for row in skips] == [(bad, sorted(samples))]
    assert f"the loss of step {bad} is " in skips[0]["why"]
    assert {row["step"] for row in rows(run, "step")} == set(range(1, 13)) - {bad}


def test_the_tenth_skip_in_a_row_ends_the_training(new_run: NewRun) -> None:
    training = training_of(new_run("run", on_nonfinite="skip"))
    poison(training, [numbers(training, step)[0] for step in (1, *range(3, 13))], by=math.nan)
    with pytest.raises(UserError, match=r"the loss of step 12 is nan.* step 10 in a row without an update"):
        fit(training)


def test_an_overflow_of_scaled_losses_is_no_failure(new_run: NewRun) -> None:
    """The scale is resumed."""
    run = open_storage(str(new_run("run", precision="16-mixed")))
    spec, scratch = read_spec(run), scratch_of(open_storage(run.root), 0)
    data = open_data(spec, stage(spec.dataset, scratch))

    def scaled() -> Training:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)
        precision = MixedPrecision("16-mixed", device="cpu", scaler=scaler)
        return set_up(spec, data, Fabric(accelerator="cpu", devices=1, plugins=[precision]), run, scratch)

    training, again = scaled(), scaled()
    fit(training)
    norms = [float(row["grad_norm"]) for row in rows(Path(run.root), "step")]
    assert len(norms) == 12
    assert not all(map(math.isfinite, norms))
    assert resume(again, on_warning=pytest.fail) == 12
    assert again.scaler.state_dict() == training.scaler.state_dict()
    assert again.scaler.get_scale() < 2.0**40
    again.feed.close()


@pytest.mark.parametrize("precision", ["16-mixed", "32-true"])
def test_without_clipping_the_update_is_as_below_the_limit(new_run: NewRun, precision: str) -> None:
    """Scaled gradients are divided by the scale once."""
    weights, norms = [], []
    for limit in (None, 1e9):
        run = open_storage(str(new_run(f"limit-{limit}", precision=precision, clip_norm=limit)))
        spec, plugins = read_spec(run), list[MixedPrecision]()
        if precision == "16-mixed":
            scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
            plugins.append(MixedPrecision("16-mixed", device="cpu", scaler=scaler))
        scratch = scratch_of(run, 0)
        data, fabric = (
            open_data(spec, stage(spec.dataset, scratch)),
            Fabric(accelerator="cpu", devices=1, plugins=plugins),
        )
        training = set_up(spec, data, fabric, run, scratch)
        stats = [train_step(training, step) for step in range(3)]
        training.feed.close()
        norms.append([float(each.norm) for each in stats if each is not None])
        weights.append(list(training.model.parameters()))
    assert norms[0] == norms[1]
    assert all(map(torch.equal, *weights))


@pytest.mark.parametrize(("policy", "replays"), [("stop", [7]), ("skip", [7, 8, 9])])
def test_replay_ends_where_a_bad_step_ended_the_run(new_run: NewRun, policy: str, replays: list[int]) -> None:
    run = new_run("run", on_nonfinite=policy, keep_every=4)
    training = training_of(run)
    bad = numbers(training, 7)[3]
    poison(training, [bad], by=math.nan)
    if policy == "stop":
        with pytest.raises(UserError, match="the loss of step 7 is nan"):
            fit(training)
    else:
        fit(training)
    again = training_of(run)
    poison(again, [bad], by=math.nan)
    found = replay(again, 7, 9)
    again.feed.close()
    assert found is not None
    assert [step.step for step in found.steps] == replays
    assert math.isnan(found.steps[0].loss)
    assert found.steps[0].recorded_loss is None
    assert not any(difference for step in found.steps for difference in step.differences)
    assert math.isnan(Replay.model_validate_json(found.model_dump_json()).steps[0].loss)
