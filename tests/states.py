"""What the tests of checkpoints share: small states, checkpoints of them, and trainings that are stepped by hand."""

import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeAlias

import torch
from litgpt.config import Config
from litgpt.model import GPT
from torch.optim import AdamW, Optimizer

from litgpt_demo.config import ModelConfig, TrainConfig, TrainingSpec
from litgpt_demo.data.dataset import TokenDataset, stage
from litgpt_demo.models.model import LossGPT, initialise
from litgpt_demo.optimizers import decay_groups
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training.checkpoint_reader import training_state
from litgpt_demo.training.checkpoints import CheckpointManifest, commit, prune, upload_files
from litgpt_demo.training.loop import scratch_of
from litgpt_demo.training.ranks import Ranks
from litgpt_demo.training.saving import ShardWriter
from litgpt_demo.training.setup import Training, open_data, open_fabric, set_up

Pair: TypeAlias = tuple[GPT, Optimizer]


def pair(seed: int, steps: int = 1, width: int = 32, device: str = "cpu") -> Pair:
    """A small model and its optimizer after a few steps."""
    model = GPT(Config(n_layer=2, n_embd=width, n_head=2, block_size=32, vocab_size=64, padding_multiple=64))
    initialise(model, seed=seed)
    model.to(device)
    optimizer = AdamW(decay_groups(model, 0.1), lr=1e-2, betas=(0.9, 0.95), fused=True)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        step((model, optimizer), generator)
    return model, optimizer


def step(trained: Pair, generator: torch.Generator) -> None:
    model, optimizer = trained
    ids = torch.randint(0, 64, (2, 32), generator=generator).to(model.cos.device)
    model(ids).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def model_with_loss(width: int = 32, device: str = "cpu") -> LossGPT:
    """A small model of three blocks, the same each time."""
    sizes = {"n_layer": 3, "n_embd": width, "n_head": 2, "padded_vocab_size": 96, "block_size": 24}
    made = LossGPT(Config.from_name("pythia-14m", intermediate_size=3 * width // 2, **sizes))
    initialise(made, seed=3)
    return made.to(device)


def loss_and_gradients(of: LossGPT) -> tuple[float, dict[str, torch.Tensor]]:
    """Those of one batch, the same each time; gradients by the names that weights have in a plain model."""
    tokens = torch.randint(96, (2, 25), generator=torch.Generator().manual_seed(0)).to(of.cos.device)
    loss = of(tokens[:, :-1], tokens[:, 1:])
    loss.backward()
    names = {name.replace("_checkpoint_wrapped_module.", ""): weight for name, weight in of.named_parameters()}
    return loss.item(), {name: weight.grad for name, weight in names.items() if weight.grad is not None}


def tensors(model: Any, optimizer: Any) -> list[torch.Tensor]:
    """All of a state, as references."""
    states = (value for state in optimizer.state.values() for value in state.values())
    return [*model.state_dict().values(), *states]


def same(first_pair: Pair, second_pair: Pair) -> bool:
    """Bit for bit, weights and optimizer."""
    return all(
        torch.equal(first, second) for first, second in zip(tensors(*first_pair), tensors(*second_pair), strict=True)
    )


def settings_of(optimizer: Any) -> list[dict[str, Any]]:
    """The settings of each parameter group but its learning rate, which every step sets."""
    return [
        {name: group[name] for name in ("betas", "weight_decay", "eps", "fused")} for group in optimizer.param_groups
    ]


def manifest_of(number: int, loss: float | None = None, **changes: Any) -> CheckpointManifest:
    values = {
        "format": 2, "run": "run", "step": number, "tokens": number * 100, "dataset_hash": "hash", "world_size": 1,
        "validation_loss": loss, "versions": {}, "files": (),
    }  # fmt: skip
    return CheckpointManifest.model_validate(values | changes)


def publish_pair(run: Storage, trained: Pair, number: int) -> CheckpointManifest:
    """All of a checkpoint but its manifest, which is returned."""
    shards, state = ShardWriter(Ranks(rank=0, world_size=1), torch.device("cpu")), training_state(*trained, {})
    shards.plan(state)
    shards.stage_to_host(state, None)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "shards")
        shards.write_index(folder, [shards.write(folder)])
        return manifest_of(number, files=tuple(upload_files(folder.iterdir(), run, number)))


def keep(
    run: Storage, trained: Pair, number: int, *, loss: float | None = None, last: int = 9, **retention: Any
) -> CheckpointManifest:
    """Commit a checkpoint of a pair as training does."""
    manifest = publish_pair(run, trained, number).model_copy(update={"validation_loss": loss})
    commit(run, manifest)
    prune(run, last=last, **{"best": 0} | retention)
    return manifest


def training_of(folder: Path, run: Storage | None = None) -> Training:
    """What train.main sets up for a run's folder, in this process; its checkpoints may go to another place, `run`."""
    own = open_storage(str(folder))
    spec = read_spec(own)
    scratch = scratch_of(own, int(os.environ.get("RANK", "0")))
    data = open_data(spec, stage(spec.dataset, scratch))
    return set_up(spec, data, open_fabric(spec.train), run or own, scratch)


def stepped_by_hand(folder: Path, fabric: Any, model: Any, optimizer: Any) -> Training:
    """A training without samples, of which only saving is asked."""
    spec = TrainingSpec(
        run="run", dataset="none", dataset_hash="none", model=ModelConfig(), train=TrainConfig(), steps=9, world_size=1
    )
    samples = TokenDataset(files=(), length=1)
    nothing: dict[str, Any] = {"data": SimpleNamespace(train=samples), "feed": None}
    run = open_storage(str(folder / "run"))
    return Training(
        spec=spec, fabric=fabric, model=model, optimizer=optimizer, run=run, scratch=folder / "scratch", **nothing
    )
