"""Starting from weights: what lies at `model.from` is compared, staged, and is the model at step 0."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from hub_server import Repository, running_hub
from litgpt.config import Config
from litgpt.model import GPT
from litgpt.utils import save_config
from safetensors.torch import load_file, save_file
from torch import Tensor

from litgpt_demo.config import ModelConfig
from litgpt_demo.data.tokens import assemble
from litgpt_demo.errors import UserError
from litgpt_demo.export import export
from litgpt_demo.export.huggingface import huggingface_model
from litgpt_demo.models import catalogue
from litgpt_demo.pretrained import look_at_weights, problems, tokenizer_problem, weights_model
from litgpt_demo.pretrained.staging import stage_weights
from litgpt_demo.storage import open_storage
from litgpt_demo.training.loss import LossGPT
from litgpt_demo.training.reading import load_weights

IDS = torch.arange(24).reshape(2, 12)

NEOX: dict[str, Any] = {"n_layer": 2, "n_embd": 32, "n_head": 2, "padded_vocab_size": 320, "block_size": 64}
LLAMA: dict[str, Any] = NEOX | {
    "n_head": 4, "n_query_groups": 2, "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP",
    "intermediate_size": 48, "bias": False, "parallel_residual": False, "rotary_percentage": 1.0,
}  # fmt: skip
QWEN = LLAMA | {"norm_qk": True, "norm_eps": 1e-6}
MIXTRAL = LLAMA | {"mlp_class_name": "LLaMAMoE", "n_expert": 4, "n_expert_per_token": 2}
GEMMA = LLAMA | {
    "name": "Gemma", "mlp_class_name": "GemmaMLP", "scale_embeddings": True, "gelu_approximate": "tanh"
}  # fmt: skip


def stage(address: Path | str, dataset: Path, root: Path, **model: Any) -> tuple[Path, ModelConfig]:
    """The staged weights, and the model that they are of."""
    asked = ModelConfig.model_validate({"from": str(address), "sequence_length": 16, **model})
    manifest = stage_weights(asked, open_storage(str(root)), open_storage(str(dataset)))
    (folder,) = (path.parent for path in root.glob("weights/*/manifest.json"))
    return folder, manifest.model


@torch.no_grad()
def logits(folder: Path, model: ModelConfig) -> Tensor:
    made = LossGPT(Config(**catalogue.settings(model.name, model.config)))
    load_weights(folder, made.state_dict())
    out: Tensor = made.eval()(IDS)
    return out


def litgpt_folder(folder: Path, dataset: Path, **changes: Any) -> GPT:
    """A LitGPT checkpoint with random weights and the dataset's tokenizer."""
    model = GPT(Config(name="custom", **NEOX | changes)).eval()
    shutil.copytree(dataset / "tokenizer", folder)
    torch.save(model.state_dict(), folder / "lit_model.pth")
    save_config(model.config, folder)
    return model


def huggingface_folder(folder: Path, dataset: Path, fields: dict[str, Any]) -> Any:
    """A Hugging Face model with random weights and the dataset's tokenizer, as transformers saves it."""
    from transformers import AutoConfig, AutoModelForCausalLM

    known = huggingface_model(Config(**{"name": "custom", **fields}))
    assert known is not None
    plain = {name: value for name, value in known.fields.items() if name != "model_type"}
    tied = {"tie_word_embeddings": True} if fields is GEMMA else {}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(known.fields["model_type"], **plain | tied)).eval()
    model.save_pretrained(folder)
    for path in (dataset / "tokenizer").iterdir():
        shutil.copy(path, folder)
    return model


@pytest.fixture
def neox(tiny_dataset: Path, tmp_path: Path) -> Path:
    huggingface_folder(tmp_path / "neox", tiny_dataset, NEOX)
    return tmp_path / "neox"


# --- step 0 -----------------------------------------------------------------------------------------------------------


def test_a_run_is_started_from_by_its_final_model(finished_copy: Path, tiny_dataset: Path, tmp_path: Path) -> None:
    from litgpt import LLM

    with pytest.raises(UserError, match="has no final model yet"):
        look_at_weights(str(finished_copy), tmp_path)
    export(open_storage(str(finished_copy)))
    folder, model = stage(finished_copy, tiny_dataset, tmp_path / "root")
    llm = LLM.load(str(finished_copy / "final/litgpt"), distribute=None)
    llm.distribute(accelerator="cpu", devices=1, precision="32-true")
    with torch.no_grad():
        torch.testing.assert_close(logits(folder, model), llm.model(IDS), rtol=0, atol=1e-5)
    places = [finished_copy, finished_copy / "final", finished_copy / "final/litgpt"]
    assert len({look_at_weights(str(place), tmp_path).key(model) for place in places}) == 1


@pytest.mark.parametrize(
    "fields", [NEOX, LLAMA, QWEN, MIXTRAL, GEMMA], ids=["neox", "llama", "qwen", "mixtral", "gemma"]
)
def test_a_hugging_face_model_computes_at_step_0_what_it_does_in_transformers(
    fields: dict[str, Any], tiny_dataset: Path, tmp_path: Path
) -> None:
    theirs = huggingface_folder(tmp_path / "theirs", tiny_dataset, fields)
    folder, model = stage(tmp_path / "theirs", tiny_dataset, tmp_path / "root", config=fields)
    with torch.no_grad():
        torch.testing.assert_close(logits(folder, model), theirs(IDS).logits, rtol=0, atol=1e-5)


def test_a_model_of_the_hub_is_taken_at_its_commit(
    neox: Path, tiny_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {path.name: path.read_bytes() for path in neox.iterdir()}
    repository = Repository(files=files, large={"model.safetensors"})
    with running_hub({"me/tiny": repository}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
        folder, model = stage("me/tiny", tiny_dataset, tmp_path / "root", config=NEOX)
        again = look_at_weights(f"me/tiny@{repository.commit}", tmp_path)
    assert folder.name == f"tiny-{again.key(model)}"
    here = look_at_weights(str(neox), tmp_path)
    assert {file.name for file in again.files} == {file.name for file in here.files}


def test_rows_for_new_ids_are_the_mean_of_the_others(tiny_dataset: Path, tmp_path: Path) -> None:
    before = litgpt_folder(tmp_path / "before", tiny_dataset)
    folder, model = stage(tmp_path / "before", tiny_dataset, tmp_path / "root", config={"padded_vocab_size": 384})
    after = LossGPT(Config(**catalogue.settings(model.name, model.config)))
    load_weights(folder, after.state_dict())
    assert torch.equal(after.lm_head.weight[:320], before.lm_head.weight)
    torch.testing.assert_close(after.lm_head.weight[320:], before.lm_head.weight.mean(0).expand(64, -1))
    torch.testing.assert_close(after.transformer.wte.weight[383], before.transformer.wte.weight.mean(0))


# --- what does not fit ------------------------------------------------------------------------------------------------


def test_a_missing_tensor_is_named_and_never_made_up(neox: Path, tiny_dataset: Path, tmp_path: Path) -> None:
    tensors = load_file(neox / "model.safetensors")
    del tensors["gpt_neox.layers.1.mlp.dense_4h_to_h.weight"]
    save_file(tensors, neox / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UserError, match=r"lacks .* tensors of the model: transformer\.h\.1\."):
        stage(neox, tiny_dataset, tmp_path / "root", config=NEOX)
    assert not list((tmp_path / "root").glob("weights/*/manifest.json"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_layer": 3}, "n_layer=2, and the model 3"),
        ({"n_head": 4}, "head_size=16, and the model 8"),
        ({"norm_eps": 1e-6}, "norm_eps=1e-05, and the model 1e-06"),
        ({"padded_vocab_size": 256}, "has 320 embeddings, and the model 256"),
    ],
)
def test_each_difference_from_the_model_is_named(
    changes: dict[str, Any], message: str, tiny_dataset: Path, tmp_path: Path
) -> None:
    litgpt_folder(tmp_path / "before", tiny_dataset)
    weights = look_at_weights(str(tmp_path / "before"), tmp_path)
    asked = ModelConfig.model_validate({"from": "x", "config": NEOX | changes, "sequence_length": 16})
    assert any(message in what for what, _ in problems(asked, weights_model(asked, weights), weights))


def test_a_hugging_face_model_of_another_shape_is_refused(neox: Path) -> None:
    weights = look_at_weights(str(neox), neox)
    asked = ModelConfig.model_validate({"from": "x", "config": NEOX | {"n_layer": 3}, "sequence_length": 16})
    assert any("num_hidden_layers=2, and the model 3" in what for what, _ in problems(asked, asked, weights))
    with pytest.raises(UserError, match="of a shape that LitGPT's catalogue does not have"):
        weights_model(ModelConfig.model_validate({"from": "x", "sequence_length": 16}), weights)


def test_another_tokenizer_is_refused_and_one_with_more_ids_is_not(tiny_dataset: Path, tmp_path: Path) -> None:
    litgpt_folder(tmp_path / "before", tiny_dataset)
    weights = look_at_weights(str(tmp_path / "before"), tmp_path)
    assert weights.tokenizer is not None
    definition = json.loads(weights.tokenizer.files["tokenizer.json"])
    longer = definition | {"added_tokens": [*definition["added_tokens"], {"content": "<new>", "id": 300}]}
    moved = definition["model"]["vocab"] | {"!": definition["model"]["vocab"]["a"]}
    other = definition | {"model": definition["model"] | {"vocab": moved}}

    def made(definition: dict[str, Any]) -> Any:
        return assemble({"tokenizer.json": json.dumps(definition).encode()}, origin="a test")

    assert tokenizer_problem(weights, made(longer)) is None
    problem = tokenizer_problem(weights, made(other))
    assert problem is not None
    assert "'!' is" in problem[0]
    assert problem[1] == f"set data.tokenizer={{kind: litgpt, path: {tmp_path / 'before'}}}"


@pytest.mark.parametrize(
    ("there", "message"),
    [
        ({}, "holds no weights that can be read"),
        ({"config.json": b"{}", "pytorch_model.bin": b""}, r"open them with transformers and save_pretrained"),
        ({"lit_model.pth": b""}, r"model_config\.yaml is not there"),
    ],
)
def test_a_folder_without_weights_is_refused(there: dict[str, bytes], message: str, tmp_path: Path) -> None:
    for name, content in there.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=message):
        look_at_weights(str(tmp_path), tmp_path)
    with pytest.raises(UserError, match="neither a run under the root nor a folder on this machine"):
        look_at_weights("./nothing/here", tmp_path)
