"""A GPU computes what a CPU computes but for rounding, with each kernel, precision, checkpoint and resume."""

import math
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from litgpt.config import Config
from states import loss_and_gradients, model_with_loss, pair, stepped_by_hand, tensors, training_of
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from training_runs import NewRun, rows, train

from litgpt_demo.config import ModelConfig, TrainConfig
from litgpt_demo.data.dataset import stage
from litgpt_demo.metrics import curve
from litgpt_demo.models.loss import projected_cross_entropy
from litgpt_demo.models.model import LossGPT
from litgpt_demo.node.gpu import check_gpus, check_used, torch_seen
from litgpt_demo.node.network import NodeNetwork
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoint_reader import load_checkpoint
from litgpt_demo.training.checkpoints import folder_of
from litgpt_demo.training.loop import fit, scratch_of
from litgpt_demo.training.resuming import resume
from litgpt_demo.training.saving import Saver, ShardWriter
from litgpt_demo.training.setup import apply_float8_ac_compile, open_data, set_up
from litgpt_demo.training.step import train_step

Record = Callable[[str, object], None]
END = 7  # ends the documents of made-up tokens


def error(found: Tensor, expected: Tensor) -> float:
    """The length of the difference, as a share of what is expected."""
    return float((found.double().cpu() - expected.double().cpu()).norm() / expected.double().cpu().norm())


def losses(run: Path) -> list[float]:
    return [row["loss"] for row in rows(run, "step")]


def test_torch_computes_on_every_gpu_that_the_driver_shows(gpu: torch.device) -> None:
    seen = torch_seen(os.environ)
    assert (seen.cuda, seen.gpus, seen.gpu_error) == (torch.version.cuda, torch.cuda.device_count(), "")
    assert seen.nccl == ".".join(map(str, torch.cuda.nccl.version()))
    network = NodeNetwork(gpus=seen.gpus)
    errors = [finding for finding in check_gpus(network, os.environ) if finding.severity == "error"]
    assert [*errors, *check_used(network, seen, os.environ, processes=seen.gpus)] == []


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("rows", [1, 777, 8191])  # 8191 are several chunks of logits, and the last one is shorter
@pytest.mark.parametrize("vocabulary", [50_304, 128_256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_loss_in_chunks_is_that_of_the_whole_logits(
    device: torch.device, dtype: torch.dtype, vocabulary: int, rows: int, softcap: float | None, record_property: Record
) -> None:
    if device.type == "cpu":
        vocabulary, rows = vocabulary // 128, -(-rows // 32)
    generator = torch.Generator(device).manual_seed(rows)

    def drawn(*size: int, scale: float) -> Tensor:
        numbers = torch.randn(*size, generator=generator, device=device) * scale
        return numbers.to(dtype).float().requires_grad_()  # its rounding is no error of the product

    hidden, weight, bias = drawn(rows, 512, scale=1.0), drawn(vocabulary, 512, scale=0.1), drawn(vocabulary, scale=1.0)
    parts = hidden, weight, bias
    targets = torch.randint(vocabulary, (rows,), generator=generator, device=device)
    logits = linear(hidden, weight, bias)
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    full_loss = cross_entropy(logits, targets)
    expected = torch.autograd.grad(full_loss + 1e-3 * logits.logsumexp(-1).square().mean(), parts)
    del logits
    per_token = torch.empty(rows, device=device)
    with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        loss = projected_cross_entropy(
            hidden, weight, targets, bias=bias, softcap=softcap, z_loss=1e-3, per_token_loss_out=per_token
        )
    found = torch.autograd.grad(loss, parts)
    errors = [error(gradient, reference) for gradient, reference in zip(found, expected, strict=True)]
    record_property("errors of gradients", errors)
    narrow = dtype != torch.float32
    assert loss.item() == pytest.approx(full_loss.item(), rel=1e-3 if narrow else 1e-5)
    assert per_token.mean().item() == pytest.approx(loss.item(), rel=1e-5)
    assert max(errors) < (1e-2 if narrow else 1e-4)


FAMILIES: dict[str, dict[str, Any]] = {
    "pythia-14m": {},
    "Llama-3.2-1B": {"n_query_groups": 2},
    "Gemma-2-2b": {"n_query_groups": 2, "sliding_window_size": 60},
    "Gemma-3-1b-it": {
        "n_query_groups": 1, "sliding_window_size": 60, "sliding_window_indices": [1, 0], "rope_indices": [1, 0],
    },
    "OLMo-2-1124-7B": {"n_query_groups": 4},
    "Qwen3-0.6B": {"n_query_groups": 2},
    "Mixtral-8x7B-v0.1": {"n_query_groups": 2, "n_expert": 4},
}  # fmt: skip


def packed_model(family: str) -> LossGPT:
    """A model whose attention stays within documents, with weights so large that attention shows."""
    sizes = {"n_layer": 2, "n_embd": 128, "n_head": 4, "head_size": 32, "intermediate_size": 192}
    config = Config.from_name(family, padded_vocab_size=96, block_size=512, **(sizes | FAMILIES[family]))
    model = LossGPT(config, end_of_text=END)
    torch.manual_seed(0)
    for weight in model.parameters():
        torch.nn.init.normal_(weight, std=0.1)
    return model


def gradients_of(model: LossGPT, tokens: Tensor) -> tuple[float, Tensor]:
    """The loss and all its gradients; of a model without any, the logits."""
    tokens = tokens.to(model.lm_head.weight.device)
    loss = model(tokens[:, :-1], tokens[:, 1:])
    if not loss.requires_grad:
        return loss.item(), model(tokens[:, :-1])
    loss.backward()
    return loss.item(), torch.cat([weight.grad.flatten() for weight in model.parameters() if weight.grad is not None])


@pytest.fixture
def packed_tokens() -> Tensor:
    """Two samples of 300 tokens: more than a block of FlexAttention, and no multiple of one."""
    return torch.randint(40, (2, 301), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_has_the_gradients_of_a_cpu(
    device: torch.device, family: str, precision: torch.dtype, packed_tokens: Tensor, record_property: Record
) -> None:
    loss, expected = gradients_of(packed_model(family), packed_tokens)
    with torch.autocast(device.type, precision, enabled=precision != torch.float32):
        again, found = gradients_of(packed_model(family).to(device), packed_tokens)
    record_property("error of the gradient", error(found, expected))
    narrow = precision != torch.float32
    # A rounded router chooses another expert here and there.
    assert (narrow and "Mixtral" in family) or error(found, expected) < (5e-2 if narrow else 1e-3)
    assert again == pytest.approx(loss, rel=5e-2 if narrow else 1e-4)


@pytest.mark.parametrize(("family", "precision"), [("Gemma-3-1b-it", torch.float32), ("Llama-3.2-1B", torch.bfloat16)])
def test_flex_attention_sees_what_dense_masks_show(
    device: torch.device, family: str, precision: torch.dtype, packed_tokens: Tensor, record_property: Record
) -> None:
    """In both directions, within windows and documents, with heads that share keys."""
    by_masks, by_flex = packed_model(family).to(device), packed_model(family).to(device)
    if device.type == "cuda":
        apply_float8_ac_compile(by_flex, TrainConfig(compile="blocks"), device)
        assert by_flex.by_flex
    else:  # FlexAttention has no gradients on a CPU
        by_flex.by_flex = True
        by_masks.requires_grad_(False), by_flex.requires_grad_(False)
    with torch.autocast(device.type, precision, enabled=precision != torch.float32):
        loss, expected = gradients_of(by_masks, packed_tokens)
        again, found = gradients_of(by_flex, packed_tokens)
    record_property("error of the gradient", error(found, expected))
    assert again == pytest.approx(loss, rel=1e-5 if precision == torch.float32 else 1e-2)
    assert error(found, expected) < (1e-3 if precision == torch.float32 else 5e-2)


@pytest.mark.parametrize(
    ("precision", "compiled", "rounding"),
    [("32-true", "auto", 1e-2), ("bf16-mixed", "none", 2e-2), ("bf16-true", "none", 5e-2)],
)
def test_a_run_ends_where_it_ends_on_a_cpu(
    new_run: NewRun, device: torch.device, precision: str, compiled: str, rounding: float, record_property: Record,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    run, on_cpu = new_run("run", precision=precision, compile=compiled), new_run("on-cpu")
    train(run)
    with monkeypatch.context() as patched:
        patched.setattr(torch.cuda, "is_available", lambda: False)
        train(on_cpu)
    devices = [rows(folder, "start")[0]["device"] for folder in (run, on_cpu)]
    assert devices == [str(device), "cpu"]
    record_property("largest difference", max(abs(x - y) for x, y in zip(losses(run), losses(on_cpu), strict=True)))
    assert losses(run) == pytest.approx(losses(on_cpu), rel=rounding)
    evaluated = [curve(rows(folder), "evaluation", "validation_loss") for folder in (run, on_cpu)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=rounding)


def test_a_deterministic_training_repeats_bit_for_bit(new_run: NewRun, device: torch.device) -> None:
    settings = {"deterministic": True, "precision": "bf16-mixed"}
    runs = [new_run(name, **settings) for name in ("one", "two")]
    for run in runs:
        train(run)
    assert losses(runs[0]) == losses(runs[1])
    first, second = ([path.read_bytes() for path in sorted((run / folder_of(12)).glob("*.distcp"))] for run in runs)
    assert len(first) == 2
    assert first == second


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
def test_a_resumed_run_goes_on_as_if_uninterrupted(
    new_run: NewRun, device: torch.device, precision: str, deterministic: bool, record_property: Record
) -> None:
    settings = {"precision": precision, "deterministic": deterministic, "compile": "none", "keep_last": 9}
    run = new_run("run", **settings)
    train(run)
    through = losses(run)
    for step in (8, 12):  # as if it was killed before
        shutil.rmtree(run / folder_of(step))
    train(run)
    assert [row["step"] for row in rows(run, "start")] == [0, 4]
    resumed = losses(run)
    difference = max(abs(x - y) for x, y in zip(through, resumed, strict=True))
    record_property("largest difference", difference)
    assert difference <= (0 if deterministic else 0.02)


def test_a_late_copy_has_the_state_of_its_step(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The copy to the host begins a second after the step, and three more steps follow meanwhile."""
    trained, restored = pair(1, width=768, device=device.type), pair(2, steps=0, width=768, device=device.type)
    fabric = Fabric(accelerator=device.type, devices=1)
    model, optimizer = fabric.setup_module(trained[0]), fabric.setup_optimizers(trained[1])
    training, stage_to_host = stepped_by_hand(tmp_path, fabric, model, optimizer), ShardWriter.stage_to_host

    def late(writer: ShardWriter, state: Any, ready_event: Any) -> None:
        if writer._stream is not None:
            with torch.cuda.stream(writer._stream):
                torch.cuda._sleep(2_000_000_000)  # cycles of less than 2 GHz
        stage_to_host(writer, state, ready_event)

    monkeypatch.setattr(ShardWriter, "stage_to_host", late)
    before = [tensor.clone() for tensor in tensors(*trained)]
    with Saver(training, on_result=lambda saved: None) as saver:
        saver.save(1, None)
        for _ in range(3):
            model(torch.randint(0, 64, (2, 32), device=device)).square().mean().backward()
            optimizer.param_groups[0]["lr"] = 0.5
            optimizer.step()
    assert not all(map(torch.equal, before, tensors(*trained)))
    load_checkpoint(*restored, Path(training.run.address(folder_of(1))))
    assert all(map(torch.equal, before, tensors(*restored)))
    assert "warning" not in capsys.readouterr().out, "a GPU's copy goes through pinned memory"


def test_the_scale_of_losses_falls_and_is_resumed(new_run: NewRun, device: torch.device) -> None:
    run = open_storage(str(new_run("run", precision="16-mixed", compile="none")))
    spec, scratch = read_spec(run), scratch_of(run, 0)
    data = open_data(spec, stage(spec.dataset, scratch))

    def scaled() -> Any:
        scaler = torch.amp.GradScaler(device.type, init_scale=2.0**40)
        precision = MixedPrecision("16-mixed", device=device.type, scaler=scaler)
        return set_up(spec, data, Fabric(accelerator=device.type, devices=1, plugins=[precision]), run, scratch)

    training, again = scaled(), scaled()
    fit(training)
    norms = [float(row["grad_norm"]) for row in rows(Path(run.root), "step")]
    assert not math.isfinite(norms[0]), "its update overflows, and is left out"
    assert resume(again, on_warning=pytest.fail) == 12
    assert again.scaler.state_dict() == training.scaler.state_dict()
    assert again.scaler.get_scale() < 2.0**40
    again.feed.close()


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_step_whose_loss_is_not_finite_changes_no_state(
    new_run: NewRun, device: torch.device, precision: str
) -> None:
    """The fused AdamW reads on the device that it must do nothing."""
    training = training_of(new_run("run", precision=precision, on_nonfinite="skip", compile="none"))
    for step in range(4):
        train_step(training, step)
    trained = training.model.module, training.optimizer.optimizer
    before = [tensor.clone() for tensor in tensors(*trained)]
    hook = training.model.register_forward_hook(lambda module, inputs, loss: loss * math.inf)
    train_step(training, 4)
    hook.remove()
    assert all(map(torch.equal, before, tensors(*trained)))
    train_step(training, 5)
    assert not any(map(torch.equal, before[:1], tensors(*trained)[:1]))
    training.feed.close()


@pytest.mark.parametrize(
    "settings", [{"compile": "blocks", "activation_checkpointing": "selective"}, {"compile": "model"}]
)
def test_compiling_changes_only_rounding(device: torch.device, settings: dict[str, Any]) -> None:
    compiled, plain = model_with_loss(device=device.type), model_with_loss(device=device.type)
    apply_float8_ac_compile(compiled, TrainConfig(**settings), device)
    (again, alike), (loss, gradients) = loss_and_gradients(compiled), loss_and_gradients(plain)
    assert again == pytest.approx(loss, rel=1e-5)
    assert alike.keys() == gradients.keys()
    for name, gradient in gradients.items():
        torch.testing.assert_close(alike[name], gradient, rtol=1e-3, atol=1e-5)


@pytest.fixture
def float8(gpu: torch.device) -> torch.device:
    pytest.importorskip("torchao")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not multiply in float8")
    return gpu


def test_float8_changes_a_loss_by_rounding_only(float8: torch.device) -> None:
    plain, eighth = model_with_loss(128, "cuda"), model_with_loss(128, "cuda")
    train = TrainConfig(float8=True, compile="blocks", precision="bf16-mixed")
    apply_float8_ac_compile(eighth, train, float8)
    with torch.autocast("cuda", torch.bfloat16):
        assert loss_and_gradients(eighth)[0] == pytest.approx(loss_and_gradients(plain)[0], rel=0.05)


def test_float8_learns_as_bfloat16(float8: torch.device, new_run: NewRun, record_property: Record) -> None:
    model = ModelConfig(name=None, config={"n_layer": 4, "n_embd": 256, "n_head": 4}, sequence_length=32)
    often = {"max_steps": 100, "evaluate_every": 100, "checkpoint_every": 100, "learning_rate": 1e-3}
    ends = list[float]()
    for is_eighth in (False, True):
        run = new_run(f"float8-{is_eighth}", model=model, precision="bf16-mixed", compile="blocks", float8=is_eighth,
                      micro_batch=8, **often)  # fmt: skip
        train(run)
        ends.append(sum(losses(run)[-10:]) / 10)
        assert losses(run)[-1] < losses(run)[0] - 1
    record_property("bfloat16, float8", ends)
    assert ends[0] == pytest.approx(ends[1], abs=0.05)
