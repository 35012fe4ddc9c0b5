"""Models and samples divided among ranks train as on one rank, and go on under another layout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest
import torch
from states import training_of
from tiny_runs import write_run
from waiting import free_port

from litgpt_demo.config import ModelConfig, TrainConfig
from litgpt_demo.data.dataset import plan_dataset
from litgpt_demo.data.preparation import prepare
from litgpt_demo.data.settings import DataConfig
from litgpt_demo.export import export
from litgpt_demo.metrics import curve, rows_of
from litgpt_demo.models import catalogue, estimates
from litgpt_demo.models.model import litgpt_config
from litgpt_demo.pretrained.staging import stage_weights
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoints import folder_of
from litgpt_demo.training.context import SamplePart
from litgpt_demo.training.experts import imbalance
from litgpt_demo.training.loop import main
from litgpt_demo.training.step import train_step
from litgpt_demo.training.tensor import rows_by_rank

# Two heads of queries for each of keys, so that a rank's rows lie apart; both kinds of residual, norm and MLP.
LLAMA = ModelConfig(
    name=None,
    config={
        "n_layer": 2, "n_embd": 64, "n_head": 4, "n_query_groups": 2, "bias": False, "norm_class_name": "RMSNorm",
        "mlp_class_name": "LLaMAMLP", "intermediate_size": 96, "parallel_residual": False,
    },
    sequence_length=32,
)  # fmt: skip
NEOX = ModelConfig(name=None, config={"n_layer": 2, "n_embd": 64, "n_head": 4}, sequence_length=32)
THIRTY: Mapping[str, Any] = MappingProxyType(
    {
        "max_steps": 30, "learning_rate": 0.003, "global_batch": 8, "micro_batch": 2, "evaluate_every": 15,
        "checkpoint_every": 15, "keep_last": 9,
    }
)  # fmt: skip

LAYOUTS: Mapping[str, tuple[ModelConfig, Any]] = MappingProxyType(
    {
        "hybrid": (LLAMA, {"kind": "hybrid"}),
        "tensor": (LLAMA, {"kind": "fsdp", "tensor": 2}),
        "copies-of-tensor": (NEOX, {"kind": "hybrid", "tensor": 2}),
        "context": (LLAMA, {"kind": "fsdp", "context": 2}),
        "both": (LLAMA, {"kind": "fsdp", "tensor": 2, "context": 2}),
    }
)
MOVES: Mapping[str, tuple[str, Any]] = MappingProxyType(
    {
        "both-to-hybrid": ("both", {"kind": "hybrid"}),
        "tensor-to-fsdp": ("tensor", "fsdp"),
        "fsdp-to-hybrid": ("context", {"kind": "hybrid"}),
        "hybrid-to-tensor": ("hybrid", {"kind": "fsdp", "tensor": 2}),
    }
)
"""Runs that go on from the half of another, and their own layout."""
_OFTEN = {"copies-of-tensor", "both", "both-to-hybrid"}  # each way to divide a model is in one of them


def named(names: Mapping[str, Any]) -> pytest.MarkDecorator:
    """The parameter `name`; those that add no way of their own are drills, for their length."""
    some = [pytest.param(name, marks=() if name in _OFTEN else pytest.mark.drill) for name in names]
    return pytest.mark.parametrize("name", some)


RANKS = """
import itertools, json, os, shutil, sys
from pathlib import Path
import torch
from waiting import free_port, until
from litgpt_demo.__main__ import without_unused_metrics
with without_unused_metrics():
    from states import training_of
    from litgpt_demo.training.checkpoints import folder_of
    from litgpt_demo.training.loop import main
    from litgpt_demo.training.step import train_step

def size(tensors):
    local = [one.to_local() if hasattr(one, "to_local") else one for one in tensors if one is not None]
    return sum(one.numel() * one.element_size() for one in local if one.dim())

root, runs, moves = Path(sys.argv[1]), *map(json.loads, sys.argv[2:])
groups = itertools.count()

def fresh(name):
    # torchrun's own store still has the addresses of the group before, so each group meets at a port of its own, which
    # is chosen only now: another process would take one that was free minutes ago.
    chosen = root / f"port-{next(groups)}"
    if os.environ["RANK"] == "0":
        chosen.with_suffix(".new").write_text(str(free_port()))
        chosen.with_suffix(".new").rename(chosen)
    until(chosen.exists)
    os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "False", "MASTER_PORT": chosen.read_text()}
    return str(root / name)

for name in runs:
    assert main(["--run", fresh(name)]) == 0
for name, begun in moves.items():
    if os.environ["RANK"] == "0":
        shutil.copytree(root / begun / folder_of(15), root / name / folder_of(15))
    assert main(["--run", fresh(name)]) == 0
for name in runs:
    training, held = training_of(Path(fresh(name))), {}
    optimizer = training.optimizer.optimizer
    optimizer.register_step_pre_hook(
        lambda *_: held.update(gradients=size(one.grad for one in training.model.parameters()))
    )
    train_step(training, 0)
    held["weights"] = size(training.model.parameters())
    held["optimizer"] = size(value for state in optimizer.state.values() for value in state.values())
    (root / name / f"held-{os.environ['RANK']}.json").write_text(json.dumps(held))
    torch.distributed.destroy_process_group()
"""


def written(folder: Path, dataset: Path, **settings: Any) -> Path:
    return write_run(folder, dataset, **settings)


def two_nodes_of_two(*program: str) -> None:
    """Run a program with its arguments on four ranks, by torchrun."""
    port = free_port()
    environment = os.environ | {
        "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": os.pathsep.join(sys.path),
    }  # fmt: skip
    nodes = [
        subprocess.Popen(
            [
                sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={number}",
                "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={port}", *program,
            ],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for number in range(2)
    ]  # fmt: skip
    told = []
    for node in nodes:
        told.append(node.communicate(timeout=1700)[0])
        if node.returncode:
            nodes[1].kill()  # which would wait for the other for ever
    assert [node.returncode for node in nodes] == [0, 0], "\n".join(told)[-20_000:]


@pytest.fixture(scope="module")
def trained(
    request: pytest.FixtureRequest, tiny_dataset: Path, one_thread: None, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Runs of both models on one rank, and on 2 x 2 ranks those that are asked for, some from another's half."""
    root = tmp_path_factory.mktemp("layouts")
    here = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = {item.callspec.params.get("name") for item in here}
    moves = {name: begun for name, (begun, _) in MOVES.items() if name in asked}
    layouts = [name for name in LAYOUTS if name in {*asked, *moves.values()}]
    for name, model in {"one-llama": LLAMA, "one-neox": NEOX}.items():
        assert main(["--run", str(written(root / name, tiny_dataset, model=model, **THIRTY))]) == 0
    for name in layouts:
        model, strategy = LAYOUTS[name]
        written(root / name, tiny_dataset, world_size=4, model=model, strategy=strategy, **THIRTY)
    for name, begun in moves.items():
        written(root / name, tiny_dataset, world_size=4, model=LAYOUTS[begun][0], strategy=MOVES[name][1], **THIRTY)
    (program := root / "ranks.py").write_text(RANKS)
    two_nodes_of_two(str(program), str(root), json.dumps(layouts), json.dumps(moves))
    return root


def curves_of(run: Path, *, since: int = 0) -> list[float]:
    rows = rows_of((run / "metrics.jsonl").read_text())
    asked = [("step", "loss"), ("step", "grad_norm"), ("evaluation", "validation_loss")]
    return [value for what in asked for step, value in curve(rows, *what).items() if step > since]


def alone(root: Path, model: ModelConfig) -> Path:
    return root / ("one-llama" if model == LLAMA else "one-neox")


@pytest.mark.long
@pytest.mark.training
@pytest.mark.timeout(1800)
@named(LAYOUTS)
def test_thirty_steps_on_four_ranks_are_those_of_one(trained: Path, name: str) -> None:
    ours, theirs = curves_of(trained / name), curves_of(alone(trained, LAYOUTS[name][0]))
    assert len(ours) == 62
    assert ours == pytest.approx(theirs, rel=1e-5)
    weights = [exported(run) for run in (trained / name, alone(trained, LAYOUTS[name][0]))]
    assert weights[0].keys() == weights[1].keys()
    for key, tensor in weights[0].items():
        if key.endswith("attn.qkv.bias"):  # keys' do not change the loss, and AdamW makes steps of their rounding
            tensor, weights[1][key] = tensor[:64], weights[1][key][:64]
        torch.testing.assert_close(tensor, weights[1][key], rtol=1e-3, atol=1e-4)


def exported(run: Path) -> dict[str, torch.Tensor]:
    export(open_storage(str(run)))
    found: dict[str, torch.Tensor] = torch.load(run / "final" / "litgpt" / "lit_model.pth", mmap=True)
    return found


@pytest.mark.long
@pytest.mark.training
@pytest.mark.timeout(1800)
@named(MOVES)
def test_a_training_goes_on_under_another_layout(trained: Path, name: str) -> None:
    theirs = curves_of(alone(trained, LAYOUTS[MOVES[name][0]][0]), since=15)
    assert curves_of(trained / name) == pytest.approx(theirs, rel=1e-5)


@pytest.mark.long
@pytest.mark.training
@pytest.mark.timeout(1800)
def test_a_training_on_divided_products_goes_on_on_one_rank(trained: Path, tiny_dataset: Path, tmp_path: Path) -> None:
    run = written(tmp_path / "single", tiny_dataset, model=LLAMA, **THIRTY)
    half = trained / "both" / folder_of(15)
    (run / folder_of(15)).parent.mkdir()
    (run / folder_of(15)).symlink_to(half)
    assert main(["--run", str(run)]) == 0
    assert curves_of(run) == pytest.approx(curves_of(trained / "one-llama", since=15), rel=1e-5)


@pytest.mark.long
@pytest.mark.training
@pytest.mark.timeout(1800)
@named(LAYOUTS)
def test_each_rank_holds_what_the_arithmetic_says(trained: Path, name: str) -> None:
    model, strategy = LAYOUTS[name]
    config = litgpt_config(model, vocab_size=300)
    train = TrainConfig.model_validate({**THIRTY, "precision": "32-true", "strategy": strategy, "warmup_steps": 1})
    said = estimates.memory(config, train, length=32, world_size=4, per_node=2, device="cpu")
    for rank in range(4):
        held = json.loads((trained / name / f"held-{rank}.json").read_text())
        for what in ("weights", "gradients", "optimizer"):
            assert held[what] == pytest.approx(getattr(said, what), rel=0.1), (rank, what)


# --- what is started from, adapters, and targets that are not learned -------------------------------------------------

STARTED: Mapping[str, Any] = MappingProxyType(
    {
        "weights": {"strategy": {"kind": "fsdp", "tensor": 2}},
        "adapters": {
            "strategy": {"kind": "hybrid", "context": 2},
            "lora": {"rank": 4, "alpha": 8, "targets": ["query", "value", "projection", "mlp"]},
        },
        "answers": {"strategy": {"kind": "fsdp", "tensor": 2, "context": 2}},
    }
)
"""Runs that start from a model's weights; the last on a mixture of text and of answers, with a cap of its logits."""
CAPPED = LLAMA.model_copy(update={"config": {**LLAMA.config, "final_logit_softcapping": 4.0}})
SIX: Mapping[str, Any] = MappingProxyType({**THIRTY, "max_steps": 6, "evaluate_every": 3, "checkpoint_every": 6})


@pytest.fixture(scope="module")
def answers(tiny_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture whose one source has targets that are not learned."""
    root = tmp_path_factory.mktemp("answers")
    lines = (json.dumps({"prompt": f"{number}? ", "response": f"{number + 1}."}) for number in range(300))
    (root / "pairs.jsonl").write_text("\n".join(lines))
    data = DataConfig.model_validate(
        {
            "tokenizer": {"kind": "file", "path": str(tiny_dataset / "tokenizer" / "tokenizer.json")},
            "mixture": [
                {"name": "text", "corpus": {"kind": "tokens", "path": str(tiny_dataset)}},
                {"name": "pairs", "corpus": {"kind": "instructions", "paths": [str(root / "pairs.jsonl")]}},
            ],
            "validation_fraction": 0.1,
        }
    )
    planned = plan_dataset(data)
    prepare(planned, open_storage(str(root)))
    return root / planned.path


@pytest.fixture(scope="module")
def started(trained: Path, answers: Path, tiny_dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Those runs on one rank and on 2 x 2."""
    root, source = tmp_path_factory.mktemp("started"), trained / "one-llama"
    export(open_storage(str(source)))
    asked = ModelConfig.model_validate({"from": str(source), "sequence_length": 32})
    stage_weights(asked, open_storage(str(root)), open_storage(str(tiny_dataset)))
    (weights,) = (path.parent for path in root.glob("weights/*/manifest.json"))
    for name, changes in STARTED.items():
        model, dataset = (CAPPED, answers) if name == "answers" else (LLAMA, tiny_dataset)
        for run, settings in (
            (root / f"one-{name}", {**SIX, **changes, "strategy": "auto"}),
            (root / name, {**SIX, **changes, "world_size": 4}),
        ):
            written(run, dataset, model=model, **settings)
            spec = read_spec(open_storage(str(run))).model_copy(update={"weights": str(weights)})
            (run / "config.json").write_text(json.dumps({"training": spec.model_dump(mode="json")}))
        assert main(["--run", str(root / f"one-{name}")]) == 0
    (program := root / "ranks.py").write_text(RANKS)
    two_nodes_of_two(str(program), str(root), json.dumps(list(STARTED)), "{}")
    return root


@pytest.mark.drill  # for its length
@pytest.mark.training
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", STARTED)
def test_what_starts_from_weights_trains_on_four_ranks_as_on_one(started: Path, name: str) -> None:
    ours, theirs = curves_of(started / name), curves_of(started / f"one-{name}")
    assert len(ours) == 14
    assert ours == pytest.approx(theirs, rel=1e-5)
    rows = [rows_of((started / run / "metrics.jsonl").read_text()) for run in (name, f"one-{name}")]
    sources = [curve(one, "evaluation", "validation_loss/pairs") for one in rows]
    assert sources[0] == pytest.approx(sources[1], rel=1e-5)
    assert list(sources[0]) == ([3, 6] if name == "answers" else [])


@pytest.mark.drill
@pytest.mark.training
@pytest.mark.timeout(1800)
def test_a_rank_holds_its_part_of_the_weights_and_averages_of_its_part_of_the_adapters(started: Path) -> None:
    config = litgpt_config(LLAMA, vocab_size=300)
    asked = {**SIX, **STARTED["adapters"], "precision": "32-true", "warmup_steps": 1}
    train = TrainConfig.model_validate(asked)
    said = estimates.memory(config, train, length=32, world_size=4, per_node=2, device="cpu")
    for rank in range(4):
        held = json.loads((started / "adapters" / f"held-{rank}.json").read_text())
        for what in ("weights", "gradients", "optimizer"):
            assert held[what] == pytest.approx(getattr(said, what), rel=0.1), (rank, what)


# --- a model that does not fit ----------------------------------------------------------------------------------------

BLOCK = """
import torch
from litgpt_demo.config import ModelConfig, TrainConfig
from litgpt_demo.data.settings import DataConfig
from litgpt_demo.data.dataset import plan_dataset
from litgpt_demo.data.preparation import prepare
from litgpt_demo.models.model import initialise, litgpt_config
from litgpt_demo.training.blocks import prepare_blocks
from litgpt_demo.training.loss import LossGPT

short = {"n_layer": 1, "vocab_size": 300, "padded_vocab_size": 384}
asked = ModelConfig(name="transformer-175b", config=short, sequence_length=16)
torch.set_default_dtype(torch.bfloat16)
model = LossGPT(litgpt_config(asked, vocab_size=300))
initialise(model, seed=1)
prepare_blocks(model, TrainConfig(precision="bf16-true", activation_checkpointing="full"), torch.device("cpu"))
print(sum(weight.numel() for weight in model.transformer.h.parameters()))
sgd = torch.optim.SGD(model.parameters(), lr=1e-3)
ids = torch.randint(0, 300, (1, 17), generator=torch.Generator().manual_seed(0))
for _ in range(2):
    loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    print(float(loss))
    sgd.step()
    sgd.zero_grad()
"""


@pytest.mark.drill  # for its length and its memory
@pytest.mark.training
@pytest.mark.timeout(900)
def test_a_block_of_the_largest_model_trains_at_its_real_width() -> None:
    """In bfloat16 and by SGD, whose weights and gradients take 7.3 GB; AdamW in float32 would take 29."""
    if psutil.virtual_memory().available < 11e9:
        pytest.skip("a block of transformer-175b takes 10 GB of memory to train, and so much is not free")
    done = subprocess.run([sys.executable, "-c", BLOCK], capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr
    count, *losses = map(float, done.stdout.split())
    config = catalogue.config_of(catalogue.fields_of("transformer-175b", {}, sequence_length=16, vocab_size=None))
    assert count == estimates.block(config, 0).held
    assert losses[1] < losses[0]


# --- what no ranks are needed for -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "ranks"), [("pythia-1b", 8), ("Llama-3.1-8B", 8), ("transformer-175b", 4)])
def test_the_ranks_rows_of_queries_keys_and_values_are_all_of_them_once(model: str, ranks: int) -> None:
    config: Any = litgpt_config(ModelConfig(name=model, sequence_length=128), vocab_size=300)
    rows = [row for first, count in rows_by_rank(config, ranks) for row in range(first, first + count)]
    assert sorted(rows) == list(range((config.n_head + 2 * config.n_query_groups) * config.head_size))
    # The last rank has the last head of each.
    last = rows[-len(rows) // ranks :]
    ends = [config.n_head, config.n_head + config.n_query_groups, config.n_head + 2 * config.n_query_groups]
    assert {end * config.head_size - 1 for end in ends} <= set(last)


def test_the_ranks_parts_of_a_sample_are_all_of_it_and_of_equal_work() -> None:
    sample = torch.arange(24).unsqueeze(0)
    parts = [SamplePart(rank=rank, ranks=3).own(sample, 1)[0].tolist() for rank in range(3)]
    assert sorted(position for part in parts for position in part) == list(range(24))
    assert len({sum(part) for part in parts}) == 1  # of keys that come before


def test_experts_that_all_have_as_many_tokens_are_balanced() -> None:
    even = torch.eye(4).repeat(3, 1) * 50
    assert float(imbalance(even, used=1)) == pytest.approx(1)
    one = torch.zeros(12, 4)
    one[:, 2] = 50
    assert float(imbalance(one, used=1)) == pytest.approx(4)
    two = torch.randn(64, 4, requires_grad=True)
    imbalance(two, used=2).backward()
    assert two.grad is not None
    assert two.grad.abs().sum() > 0


@pytest.mark.parametrize(
    ("model", "strategy", "fix"),
    [
        ("Mixtral-8x7B-v0.1", {"tensor": 2}, "there is no expert parallelism"),
        ("Llama-3.1-8B", {"tensor": 16}, "take a divisor of them"),
        ("OLMo-2-1124-7B", {"tensor": 2}, "leave tensor out"),
        ("Gemma-2-2b", {"context": 2}, "leave context out"),
        ("Llama-3.1-8B", {"context": 8, "tensor": 2}, "take model.sequence_length=128"),
    ],
)
def test_a_model_that_cannot_be_divided_so_is_refused_with_what_would_do(
    model: str, strategy: dict[str, int], fix: str
) -> None:
    length = 100
    config = catalogue.config_of(catalogue.fields_of(model, {}, sequence_length=length, vocab_size=None))
    layout = TrainConfig.model_validate({"strategy": {"kind": "fsdp", **strategy}}).layout(16)
    problem = catalogue.layout_problem(config, layout, length=length)
    assert problem is not None
    assert fix in problem[1]
    assert catalogue.layout_problem(config, TrainConfig(strategy="fsdp").layout(16), length=length) is None


EXPERTS = ModelConfig(
    name=None,
    config={
        "n_layer": 2, "n_embd": 32, "n_head": 2, "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMoE",
        "intermediate_size": 32, "n_expert": 4, "n_expert_per_token": 2,
    },
    sequence_length=32,
)  # fmt: skip


def test_the_load_balance_of_experts_weighs_the_same_however_few_tokens_are_learned(
    tiny_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = training_of(written(tmp_path / "balanced", tiny_dataset, model=EXPERTS, balance_loss=0.5))
    take = training.feed.take

    def some_learned(step: int) -> Any:
        taken = take(step)
        training.feed.scale = 4.0  # a quarter of the targets is learned
        return taken

    monkeypatch.setattr(training.feed, "take", some_learned)
    train_step(training, 0)
    assert training.model.module.balance_weight * training.feed.scale == 0.5


@pytest.mark.training
@pytest.mark.long
def test_a_mixture_of_experts_tells_its_load_balance_beside_the_loss(tiny_dataset: Path, tmp_path: Path) -> None:
    """The loss that is told is without it: on the same weights it is the same whatever the weight."""
    told: list[Sequence[dict[str, Any]]] = []
    for weight in (0.0, 10.0):
        run = written(tmp_path / f"balanced-{weight}", tiny_dataset, model=EXPERTS, balance_loss=weight)
        assert main(["--run", str(run)]) == 0
        told.append([row for row in rows_of((run / "metrics.jsonl").read_text()) if row["kind"] == "step"])
    assert told[0][0]["loss"] == pytest.approx(told[1][0]["loss"], rel=1e-6)
    assert told[0][0]["balance_loss"] == pytest.approx(told[1][0]["balance_loss"])
    assert 1 <= told[1][-1]["balance_loss"] < told[0][-1]["balance_loss"]
