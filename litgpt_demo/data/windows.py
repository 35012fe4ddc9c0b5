"""The samples of one step, as text: what the model was shown when its loss was no number.

    python -m litgpt_demo windows --run runs/owt-1a2b3c4d5e --step 1200

A sample is a window of the training split; windows of another split or length would have other numbers.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from litgpt_demo.config import TrainingSpec
from litgpt_demo.data.batches import numbers_of, open_split
from litgpt_demo.data.dataset import open_dataset, stage
from litgpt_demo.errors import UserError
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import open_storage


def main(argv: Sequence[str]) -> int:
    """`python -m litgpt_demo windows`: prints number and text of every sample of a step."""
    parser = argparse.ArgumentParser(prog="python -m litgpt_demo windows", description="Show the samples of one step.")
    parser.add_argument("--run", required=True, help="address of the run's folder")
    parser.add_argument("--step", required=True, type=int, help="the step, as the metrics count, from 1")
    parser.add_argument("--characters", type=int, default=400, help="of each sample (default: 400)")
    parser.add_argument("windows", nargs="*", type=int, help="only these, by number")
    args = parser.parse_args(argv)
    spec = read_spec(open_storage(args.run))
    if not 1 <= args.step <= spec.steps:
        raise UserError(f"--step={args.step} is no step of {args.run}; it has the steps 1 to {spec.steps}")
    with tempfile.TemporaryDirectory() as scratch:
        folder = open_storage(spec.dataset).local_path() or stage(spec.dataset, Path(scratch))
        for number, text in texts(spec, folder, step=args.step, only=args.windows):
            print(f"--- window {number}, {len(text)} characters\n{text[: args.characters]}")
    return 0


def texts(spec: TrainingSpec, dataset: Path, *, step: int, only: Sequence[int] = ()) -> Iterator[tuple[int, str]]:
    """Number and text of the samples of step `step`, from 1; of those in `only`, if any are given.

    Raises:
        UserError: one of `only` is none of that step's.
    """
    from tokenizers import Tokenizer

    manifest = open_dataset(str(dataset))
    windows = open_split(dataset, manifest, manifest.train, length=spec.model.sequence_length)
    numbers = numbers_of(spec, windows, step - 1)
    if strangers := set(only) - {int(number) for number in numbers}:
        raise UserError(f"step {step} has no window {min(strangers)}; it has {', '.join(map(str, numbers))}")
    tokenizer = Tokenizer.from_file(str(dataset / "tokenizer" / "tokenizer.json"))
    inputs, _ = windows.read(numbers)
    for number, tokens in zip(numbers, inputs, strict=True):
        if not only or int(number) in only:
            yield int(number), tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
