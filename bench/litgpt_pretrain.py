"""`litgpt pretrain` with the settings of one of our runs, on the same batches in the same order.

    python -m bench.litgpt_pretrain RUN OUT

Its own `litgpt.pretrain.setup` runs: only the data module is ours. It writes OUT/logs/csv/version_0/metrics.csv.
"""

from __future__ import annotations

import sys
from pathlib import Path

import litgpt.pretrain
import numpy as np
import torch
from litgpt.args import EvalArgs, TrainArgs
from litgpt.data import DataModule
from litgpt.model import GPT
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from litgpt_demo.config import TrainingSpec
from litgpt_demo.data.batches import sample_ids_at
from litgpt_demo.models.model import initialise, litgpt_config
from litgpt_demo.runs import read_spec
from litgpt_demo.schedules import warmup_and_decay_steps
from litgpt_demo.storage import open_storage
from litgpt_demo.training.setup import Data, open_data


class OurData(DataModule, Dataset[Tensor]):
    """The data module that litgpt asks for its batches. Sample i is the i-th of our run, with the token behind it."""

    def __init__(self, spec: TrainingSpec, data: Data) -> None:
        super().__init__()
        self.spec, self.windows, self.batch_size = spec, data.train, 1

    def connect(self, tokenizer: object = None, batch_size: int = 1, max_seq_length: int | None = None) -> None:
        self.batch_size = batch_size

    def __len__(self) -> int:
        return self.spec.samples_after(self.spec.steps)

    def __getitem__(self, index: int) -> Tensor:
        position = np.array([index], dtype=np.uint64)
        inputs, targets = self.windows.read(sample_ids_at(self.windows, position, seed=self.spec.train.seed))
        return torch.cat([torch.from_numpy(inputs[0]), torch.from_numpy(targets[0, -1:])])

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(self, batch_size=self.batch_size)

    val_dataloader = train_dataloader


def pretrain(run: Path, out: Path, *, comparable: bool = False) -> None:
    """Train as the run's folder says; `comparable` losses come from our initial weights and a constant rate, as its
    schedule and ours differ by a step in both their parts."""
    spec = read_spec(open_storage(str(run)))
    data, train = open_data(spec, Path(spec.dataset)), spec.train
    config, initial = litgpt_config(spec.model, vocab_size=data.manifest.vocab_size), out / "initial"
    if comparable:
        model = GPT(config)
        initialise(model, seed=train.seed)
        initial.mkdir(parents=True)
        torch.save(model.state_dict(), initial / "lit_model.pth")
    matrices = {"lr": train.learning_rate, "weight_decay": train.weight_decay, "betas": list(train.betas)}
    sys.argv[1:] = [config.name]  # it parses the command line once more when it saves its settings
    litgpt.pretrain.setup(
        model_name=config.name,
        model_config=config,
        out_dir=out,
        precision=train.precision,
        initial_checkpoint_dir=initial.absolute() if comparable else None,
        data=OurData(spec, data),
        train=TrainArgs(
            global_batch_size=train.batch_sizes[-1],
            micro_batch_size=train.micro_batch,
            max_tokens=spec.tokens_after(spec.steps),
            max_seq_length=spec.model.sequence_length,
            max_norm=train.clip_norm,
            min_lr=train.learning_rate if comparable else train.learning_rate / 10,
            lr_warmup_steps=0 if comparable else warmup_and_decay_steps(train, spec.steps)[0],
            save_interval=None,
            log_interval=1,
        ),
        eval=EvalArgs(interval=10**9, max_iters=1, final_validation=False),
        optimizer={"class_path": "torch.optim.AdamW", "init_args": matrices},
        devices=1,
        logger_name="csv",
    )


if __name__ == "__main__":
    pretrain(Path(sys.argv[1]), Path(sys.argv[2]))
