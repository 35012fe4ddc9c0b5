"""Muon updates matrices by their orthogonalised momentum, alike on any ranks, and resumes bit for bit."""

import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from states import loss_and_gradients, model_with_loss, training_of
from training_runs import NewRun, TrainElsewhere, alike, rows, train, write_run

from litgpt_demo.config import TrainConfig
from litgpt_demo.errors import UserError
from litgpt_demo.muon import Muon, orthogonalised
from litgpt_demo.optimizers import OPTIMIZERS, block_matrices, set_learning_rate
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoints import commit, folder_of, list_complete
from litgpt_demo.training.origins import find_initial_weights, optimizer_problem
from litgpt_demo.training.setup import apply_float8_ac_compile
from litgpt_demo.training.starting import start_from

MUON: dict[str, Any] = {"optimizer": "muon", "muon_learning_rate": 0.03}


def shards(run: Path) -> list[bytes]:
    return [path.read_bytes() for path in sorted((run / folder_of(12)).glob("*.distcp"))]


@given(rows=st.integers(2, 48), columns=st.integers(2, 48), seed=st.integers(0, 99), scale=st.sampled_from([1e-6, 1e4]))
def test_updates_turn_as_the_momentum_with_adamws_size(rows: int, columns: int, seed: int, scale: float) -> None:
    """Singular vectors stay, and singular values become about 1 before the update is scaled."""
    before, after = (
        torch.linalg.qr(torch.randn(size, size, generator=torch.Generator().manual_seed(seed)))[0]
        for size in (rows, columns)
    )
    rank = min(rows, columns)
    values = torch.linspace(1.0, 0.1, rank)
    update = orthogonalised(scale * before[:, :rank] * values @ after[:rank])
    inner = before[:, :rank].T @ update @ after[:rank].T
    size = 0.2 * max(rows, columns) ** 0.5
    assert (inner - inner.diag().diag()).abs().max() < 1e-3 * size
    assert 0.6 * size < inner.diag().min() <= inner.diag().max() < 1.25 * size


def test_queries_keys_and_values_are_orthogonalised_apart() -> None:
    direction = torch.randn(24, 16, generator=torch.Generator().manual_seed(0))
    parts = [orthogonalised(part) for part in direction.split([16, 4, 4])]
    assert torch.equal(orthogonalised(direction, (16, 4, 4)), torch.cat(parts))
    groups = OPTIMIZERS["muon"].build(model_with_loss(), TrainConfig(optimizer="muon"), False).param_groups
    assert [group["row_blocks"] for group in groups] == [(32, 32, 32), (), None, None]


def test_weights_outside_the_matrices_of_blocks_get_adamw(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the same bits as from torch's own."""
    train = TrainConfig.model_validate({"optimizer": "muon", "muon_learning_rate": 1e-9})
    models = [model_with_loss(), model_with_loss()]
    optimizers = [kind.build(model, train, False) for kind, model in zip(OPTIMIZERS.values(), models, strict=True)]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            loss_and_gradients(model)
            for weight in block_matrices(model).values():
                weight.grad = None  # they stay the same in both
            if step == 0:
                set_learning_rate(optimizer, 0.01)
            optimizer.step()
            optimizer.zero_grad()
    states = [model.state_dict() for model in models]
    assert all(torch.equal(states[0][name], weight) for name, weight in states[1].items())
    names = block_matrices(models[0])
    wrapped = TrainConfig(compile="blocks", activation_checkpointing="full")
    monkeypatch.setenv("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", "")  # which the compiler sets
    apply_float8_ac_compile(models[1], wrapped, torch.device("cpu"))
    assert len(block_matrices(models[1])) == len(names) == 12
    assert {name.split(".", 3)[3] for name in names} == {
        "attn.qkv.weight", "attn.proj.weight", "mlp.fc.weight", "mlp.proj.weight",
    }  # fmt: skip


def test_nothing_changes_if_the_gradient_is_not_finite() -> None:
    model = model_with_loss()
    optimizer = OPTIMIZERS["muon"].build(model, TrainConfig(optimizer="muon"), False)
    assert isinstance(optimizer, Muon)
    loss_and_gradients(model)
    optimizer.step()
    values = [*model.parameters(), *(value for state in optimizer.state.values() for value in state.values())]
    before = [value.detach().clone() for value in values]
    for weight in model.parameters():
        weight.grad = torch.full_like(weight, torch.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(first, second) for first, second in zip(before, values, strict=True))


@pytest.fixture(scope="module")
def alone(tiny_dataset: Path, one_thread: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process; read only."""
    run = write_run(tmp_path_factory.mktemp("muon") / "alone", tiny_dataset, **MUON)
    train(run)
    return run


def test_a_killed_run_with_muon_ends_with_the_same_bits(
    alone: Path, new_run: NewRun, train_elsewhere: TrainElsewhere
) -> None:
    run = new_run("run", **MUON)
    assert train_elsewhere((run, 1, 8)) == [[-signal.SIGKILL]]
    train(run)
    assert [row["step"] for row in rows(run, "start")] == [0, 4]
    assert shards(run) == shards(alone)


@pytest.mark.parametrize(("strategy", "ranks"), [("ddp", 2), ("fsdp", 3), ("hybrid", 4)])
def test_muon_trains_alike_with_every_strategy(
    alone: Path, new_run: NewRun, tiny_dataset: Path, train_elsewhere: TrainElsewhere, strategy: str, ranks: int
) -> None:
    """Also if a run resumes with other ranks. Three ranks have shards of unequal sizes."""
    batch = {"global_batch": 12, "micro_batch": 4} if ranks == 3 else {"micro_batch": 1}
    run = new_run("run", world_size=ranks, strategy=strategy, **MUON | batch)
    assert train_elsewhere((run, ranks, 0), nodes=2 if ranks == 4 else 1) == [[0] * ranks]
    reference = alone
    if ranks == 3:
        reference = new_run("reference", **MUON | batch)
        train(reference)
    alike(run, reference)
    copy = Path(shutil.copytree(run, run.parent / "copy"))
    shutil.rmtree(run / folder_of(12))
    assert train_elsewhere((run, ranks, 0), nodes=2 if ranks == 4 else 1) == [[0] * ranks]
    assert [row["step"] for row in rows(run, "start")] == [0, 8]
    assert shards(run) == shards(copy)
    shutil.rmtree(copy / folder_of(12))
    write_run(copy, tiny_dataset, **MUON | batch)
    train(copy)
    alike(copy, reference)


@pytest.mark.parametrize(
    "settings",
    [
        {"precision": "bf16-mixed", "activation_checkpointing": "full"},
        {"precision": "bf16-true", "activation_checkpointing": "selective"},
        {"precision": "bf16-true", "strategy": "fsdp", "world_size": 2},
        {"precision": "bf16-mixed", "strategy": "fsdp", "world_size": 2, "activation_checkpointing": "full"},
        {"precision": "16-mixed", "strategy": "ddp", "world_size": 2},
    ],
    ids=str,
)
def test_muon_lowers_the_loss_in_every_precision(
    new_run: NewRun, train_elsewhere: TrainElsewhere, settings: dict[str, Any]
) -> None:
    run, ranks = new_run("run", **MUON, **settings), settings.get("world_size", 1)
    assert train_elsewhere((run, ranks, 0)) == [[0] * ranks]
    losses = [row["loss"] for row in rows(run, "step")]
    assert losses[-1] < losses[0] - 1


def test_the_state_of_another_optimizer_is_refused(finished: Path, alone: Path, new_run: NewRun) -> None:
    for donor, kind, choice in [(finished, "adamw", "muon"), (alone, "muon", "adamw")]:
        origin = find_initial_weights(str(donor), True, "/nowhere")
        assert origin is not None
        training = training_of(new_run(choice, optimizer=choice, seed=2))
        with pytest.raises(UserError, match=f"is that of {kind}, but train.optimizer={choice} .*; set .*={kind}, or"):
            start_from(training, origin)
        training.feed.close()
    continued = training_of(new_run("continued", **MUON, seed=2))
    start_from(continued, find_initial_weights(str(alone), True, "/nowhere"))
    continued.feed.close()
    assert len(list_complete(open_storage(str(alone)))) == 2


def test_a_checkpoint_without_an_optimizers_name_is_of_adamw(finished_copy: Path) -> None:
    """Older ones have none, and there was no other."""
    run = open_storage(str(finished_copy))
    commit(run, list_complete(run)[0].model_copy(update={"config": {}}))
    origin = find_initial_weights(str(finished_copy), True, "/nowhere")
    assert optimizer_problem(origin, "adamw") is None
    problem = optimizer_problem(origin, "muon")
    assert problem is not None
    assert "is that of adamw" in problem[0]
