"""Every kind of model in LitGPT's catalogue, made small, says in transformers what it says in LitGPT."""

import inspect
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from corpora import large_vocabulary
from litgpt.config import Config
from litgpt.model import GPT
from safetensors.torch import load_file

from litgpt_demo import catalogue
from litgpt_demo.config import ModelConfig
from litgpt_demo.data.dataset import TokenDataset
from litgpt_demo.errors import DataError
from litgpt_demo.export import weights as weights_module
from litgpt_demo.export.proof import Texts, last_logits, opened_by_transformers, probe_batch
from litgpt_demo.export.weights import Weights, write_litgpt, write_safetensors
from litgpt_demo.models.huggingface import HuggingFaceModel, huggingface_model
from litgpt_demo.training.origins import find_initial_weights
from litgpt_demo.training.starting import CompatibilityRequest

SHORT = {"vocab_size": 300, "padded_vocab_size": 320, "block_size": 64}


def small(name: str) -> Config:
    """The model with all that makes its family, but few and narrow layers, and windows shorter than the test's text."""
    fields: dict[str, Any] = dict(catalogue.models()[name])
    full = Config(**fields)
    layers = 7 if full.rope_local_base_freq else 2  # Gemma 3 looks at everything in every sixth layer
    fields |= SHORT | {"n_layer": layers, "n_embd": 64, "n_head": 4, "intermediate_size": 96}
    fields["head_size"] = 16 if full.head_size * full.n_head == full.n_embd else 24
    fields["n_query_groups"] = {full.n_head: 4, 1: 1}.get(full.n_query_groups, 2)
    if full.n_expert:
        fields |= {"n_expert": 4, "n_expert_per_token": 2, "moe_intermediate_size": 48}
    if full.sliding_window_size:
        fields |= {"sliding_window_size": 8, "sliding_window_indices": full.sliding_window_indices[:layers]}
    if full.rope_indices:
        fields["rope_indices"] = full.rope_indices[:layers]
    if full.attention_scores_scalar:
        fields["attention_scores_scalar"] = 20
    return Config(**fields)


def random_model(config: Config) -> GPT:
    """Every weight of it at random: norms' and biases' too, which begin as ones and zeros."""
    torch.manual_seed(0)
    model = GPT(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(torch.randn_like(weight) * 0.05)
        for block in model.transformer.h:
            block.attn.qkv.weight.mul_(8)  # so that scores are as large as their caps
    return model


def saved(model: GPT, folder: Path) -> Weights:
    """The weights of a checkpoint of `model`."""
    dcp.save({"model": model.state_dict(), "optimizer": {"step": torch.ones(1)}}, checkpoint_id=folder, no_dist=True)
    return Weights(folder)


def exported(weights: Weights, found: HuggingFaceModel, folder: Path) -> Path:
    folder.mkdir()
    write_safetensors(weights, found.rename, folder)
    (folder / "config.json").write_text(json.dumps(found.fields | {"bos_token_id": 0, "eos_token_id": 0}))
    return folder


EVERY = {name: huggingface_model(Config(**fields)) for name, fields in catalogue.models().items()}
# One model for each architecture of transformers and set of fields that its config has there.
KINDS = {(*model.fields["architectures"], *sorted(model.fields)): name for name, model in EVERY.items() if model}


def test_catalogue_families_compute_the_same_in_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    assert [name for name, model in EVERY.items() if model is None] == []
    assert len({architecture for architecture, *_ in KINDS}) >= 16
    for (architecture, *_), name in KINDS.items():
        config = small(name)
        model, found = random_model(config), huggingface_model(config)
        folder = exported(saved(model, tmp_path / name / "shards"), found, tmp_path / name / "huggingface")
        loaded, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
        assert type(loaded).__name__ == architecture
        capped = config.attention_logit_softcapping is not None
        assert loaded.config._attn_implementation == ("eager" if capped else "sdpa"), name
        assert not any(info.values()), name
        ids = torch.randint(0, 300, (2, 40))
        with torch.no_grad():
            logits = model(ids)
            torch.testing.assert_close(
                loaded(ids).logits, logits, rtol=0, atol=1e-5 * float(logits.abs().max()), msg=name
            )
        # And back, as weights that a training starts from.
        from safetensors.torch import load_file

        back = found.rename_back(load_file(folder / "model.safetensors"))
        assert back.keys() == model.state_dict().keys(), name
        assert all(torch.equal(back[key], tensor) for key, tensor in model.state_dict().items()), name


def problems_of(name: str, config: Config, folder: Path) -> list[tuple[str, str]]:
    """What is wrong with the weights of a folder for this model."""
    full = Config(**catalogue.models()[name])
    known = {field: value for field, value in vars(config).items() if field in Config.__dataclass_fields__}
    changes = {field: value for field, value in known.items() if value != getattr(full, field)}
    model = ModelConfig(name=name, config=changes, sequence_length=64)
    origin = find_initial_weights(str(folder), False, "nowhere")
    assert origin is not None
    return CompatibilityRequest(model=model, vocab_size=300, origin=origin).check()


def saved_by_transformers(folder: Path, **changes: Any) -> None:
    """Write config.json as transformers writes one of its own, with what is not as its class has it."""
    from transformers import AutoConfig

    read = AutoConfig.from_pretrained(folder)
    known = {name: getattr(read, name) for name in inspect.signature(type(read)).parameters if hasattr(read, name)}
    if read.model_type == "qwen3_moe":  # which its class has from the file alone
        known["head_dim"] = read.head_dim
    type(read)(**known | changes).save_pretrained(folder)


@pytest.mark.parametrize("name", [name for _, name in sorted(KINDS.items())])
def test_weights_are_taken_with_transformers_own_config(name: str, tmp_path: Path) -> None:
    config = small(name)
    found = huggingface_model(config)
    folder = exported(saved(random_model(config), tmp_path / "shards"), found, tmp_path / "huggingface")
    assert problems_of(name, config, folder) == []
    saved_by_transformers(folder)
    assert problems_of(name, config, folder) == []
    document = json.loads((folder / "config.json").read_text())
    ropes = document["rope_parameters"]
    (ropes if "rope_theta" in ropes else ropes["full_attention"])["rope_theta"] = 77.0
    (folder / "config.json").write_text(json.dumps(document))
    ((what, fix),) = problems_of(name, config, folder)
    assert "the model has rope_parameters {" in what
    assert fix == "make model.name and model.config those of the weights"


def test_weights_of_pythia_are_taken_as_the_hub_has_them(tmp_path: Path) -> None:
    config = small("pythia-14m")
    found = huggingface_model(config)
    folder = exported(saved(random_model(config), tmp_path / "shards"), found, tmp_path / "huggingface")
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({name: fields[name] for name in fields if name != "rope_theta"}))
    assert problems_of("pythia-14m", config, folder) == []


def test_a_wrong_window_is_noticed_beyond_256_tokens(tmp_path: Path) -> None:
    config = small("Mistral-7B-Instruct-v0.1")
    config.block_size, config.sliding_window_size = 700, 300
    model, found = random_model(config), huggingface_model(config)
    ids = torch.randint(0, 300, (1401,)).numpy().astype("uint16")
    inputs = probe_batch(TokenDataset(files=[ids], length=700), config.sliding_window_size)
    assert inputs.shape == (1, 616)
    assert probe_batch(TokenDataset(files=[ids], length=700), None).shape == (2, 256)
    own, tokenizer = last_logits(model, model.lm_head, inputs), large_vocabulary(tmp_path)
    with torch.no_grad():
        assert torch.equal(own, model(inputs)[:, -256:])
    folder = exported(saved(model, tmp_path / "shards"), found, tmp_path / "huggingface")
    (folder / "config.json").write_text(json.dumps({**found.fields, "sliding_window": 301}))
    with pytest.raises(DataError, match="its logits differ by"):
        opened_by_transformers(folder, own=own, texts=Texts(tokenizer, inputs))


def test_a_logit_that_is_no_number_is_not_taken_for_rounding(tmp_path: Path) -> None:
    config = small("pythia-14m")
    model, found, ids = random_model(config), huggingface_model(config), torch.randint(0, 300, (2, 40))
    with torch.no_grad():
        own = model(ids)
        model.lm_head.weight[7, 3] = torch.nan
    folder = exported(saved(model, tmp_path / "shards"), found, tmp_path / "huggingface")
    with pytest.raises(DataError, match="its logits differ by nan"):
        opened_by_transformers(folder, own=own, texts=Texts(large_vocabulary(tmp_path), ids))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_exported_weights_keep_their_bits_in_limited_files(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(weights_module, "SHARD_BYTES", 100_000)
    config = small("Llama-2-7b-hf")
    model, found = random_model(config).to(dtype), huggingface_model(config)
    weights = saved(model, tmp_path / "shards")
    write_litgpt(weights, tmp_path / "lit_model.pth")
    written = torch.load(tmp_path / "lit_model.pth", weights_only=True)
    assert set(written) == set(model.state_dict())
    assert all(torch.equal(written[name], value) for name, value in model.state_dict().items())
    folder = exported(weights, found, tmp_path / "huggingface")
    assert len(list(folder.glob("*.safetensors"))) > 1
    assert max(path.stat().st_size for path in folder.glob("*.safetensors")) < 150_000
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    sizes = (tensor.nbytes for path in folder.glob("*.safetensors") for tensor in load_file(path).values())
    assert index["metadata"]["total_size"] == sum(sizes)
    loaded, info = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, output_loading_info=True)
    assert not any(info.values())
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)
    assert torch.equal(loaded.model.layers[1].self_attn.q_proj.weight, model.transformer.h[1].attn.qkv.weight[:64])
