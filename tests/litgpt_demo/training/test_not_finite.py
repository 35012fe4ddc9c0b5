"""A loss that is no number stops a training with the samples it came of, or costs it that step's batch.

The bad batch of these tests is one that holds a certain sample: the model's loss of it is made no number, every time.
"""

from __future__ import annotations

import math
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from states import training_of
from training_runs import NewRun, rows

from litgpt_demo.__main__ import main as litgpt_demo
from litgpt_demo.data import windows
from litgpt_demo.data.batches import numbers_of
from litgpt_demo.data.dataset import stage
from litgpt_demo.errors import UserError
from litgpt_demo.runs import read_skipped, read_spec
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoints import committed, folder_of
from litgpt_demo.training.feed import open_data
from litgpt_demo.training.loop import fit, scratch_of
from litgpt_demo.training.setup import Training, set_up
from litgpt_demo.training.step import train_step


def numbers(training: Training, step: int) -> list[int]:
    """The samples of a step, counted from 1."""
    return [int(number) for number in numbers_of(training.spec, training.data.train, step - 1)]


def poison(training: Training, sample: int) -> None:
    """From now on no batch with that sample has a loss."""
    import numpy as np

    inputs, _ = training.data.train.read(np.array([sample], dtype=np.uint64))
    bad = torch.from_numpy(inputs[0])

    def spoil(_module: object, given: tuple[torch.Tensor, ...], loss: torch.Tensor) -> torch.Tensor:
        return loss * math.nan if (given[0] == bad).all(dim=1).any() else loss

    training.model.register_forward_hook(spoil)


def weights(training: Training) -> list[torch.Tensor]:
    return list(training.model.module.state_dict().values())


def by_hand(run: Path, *, without: int) -> list[torch.Tensor]:
    """The weights after all steps but one."""
    training = training_of(run)
    for step in range(training.spec.steps):
        if step + 1 != without:
            train_step(training, step)
    training.feed.close()
    return weights(training)


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other)) and all(weight.isfinite().all() for weight in one)


# --- stop -------------------------------------------------------------------------------------------------------------


def test_it_stops_with_the_windows_and_a_command_that_shows_their_text(
    new_run: NewRun, capsys: pytest.CaptureFixture[str]
) -> None:
    training = training_of(new_run("run"))
    samples = numbers(training, 7)
    poison(training, samples[3])
    with pytest.raises(UserError, match="the loss of step 7 is nan") as stopped:
        fit(training)
    assert f"its samples are the windows {', '.join(map(str, samples))} of the training split" in str(stopped.value)
    assert [found.step for found in committed(training.run)] == [4]
    assert not training.run.exists("skipped.json")

    command = re.search(r"`python -m litgpt_demo (.*?)`", str(stopped.value))
    assert command is not None
    capsys.readouterr()
    assert litgpt_demo(shlex.split(command[1])) == 0
    shown = capsys.readouterr().out
    assert [int(number) for number in re.findall(r"^--- window (\d+), ", shown, re.MULTILINE)] == samples
    corpus = next(line for line in shown.splitlines() if not line.startswith("---"))
    assert re.fullmatch(r"[etaoinshrdlu\s]+", corpus)


def test_the_text_of_a_window_is_that_of_its_tokens(new_run: NewRun, tiny_dataset: Path) -> None:
    import numpy as np
    from tokenizers import Tokenizer

    spec = read_spec(open_storage(str(new_run("run"))))
    tokenizer = Tokenizer.from_file(str(tiny_dataset / "tokenizer" / "tokenizer.json"))
    tokens = np.memmap(tiny_dataset / "train.bin", dtype="<u2", mode="r")
    for number, text in windows.texts(spec, tiny_dataset, step=5):
        assert text == tokenizer.decode(tokens[number * 32 : number * 32 + 32].tolist(), skip_special_tokens=False)


# --- skip -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [2, 12])
def test_its_batch_is_left_out_in_this_and_every_later_attempt(new_run: NewRun, bad: int) -> None:
    """Before the first checkpoint, and in the last step."""
    run = new_run("run", on_not_finite="skip")
    training = training_of(run)
    samples = numbers(training, bad)
    poison(training, samples[0])
    fit(training)
    expected = by_hand(new_run("by-hand"), without=bad)
    assert same(weights(training), expected)
    told = read_skipped(open_storage(str(run)))
    assert [(left_out.step, sorted(left_out.windows)) for left_out in told.steps] == [(bad, sorted(samples))]
    assert {row["why"] for row in rows(run, "skip")} == {f"the loss of step {bad} is nan"}
    assert {row["step"] for row in rows(run, "step")} == set(range(1, 13)) - {bad}
    for step in (8, 12):
        shutil.rmtree(run / folder_of(step))
    again = training_of(run)  # whose samples are all sound
    fit(again)
    assert same(weights(again), expected)


def test_gradients_that_overflow_where_losses_are_scaled_are_no_failure(new_run: NewRun) -> None:
    run = open_storage(str(new_run("run", precision="16-mixed")))
    spec, scratch = read_spec(run), scratch_of(open_storage(run.root), 0)
    precision = MixedPrecision("16-mixed", device="cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**40))
    fabric = Fabric(accelerator="cpu", devices=1, plugins=[precision])
    fit(set_up(spec, open_data(spec, stage(spec.dataset, scratch)), fabric, run, scratch))
    norms = [float(row["grad_norm"]) for row in rows(Path(run.root), "step")]
    assert len(norms) == 12
    assert not all(map(math.isfinite, norms))
    assert committed(run)[0].step == 12
