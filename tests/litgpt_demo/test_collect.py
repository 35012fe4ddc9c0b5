"""Collection: what training left becomes a checkpoint directory that LitGPT opens, proved, or nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from litgpt_demo.checkpoints import folder_of
from litgpt_demo.collect import FinalManifest, collect, collected, main, prove
from litgpt_demo.config import DataConfig, ModelConfig
from litgpt_demo.dataset import plan_dataset
from litgpt_demo.faults import DataError, UserError
from litgpt_demo.manifests import differences
from litgpt_demo.preparation import prepare
from litgpt_demo.storage import open_storage

NewRun: TypeAlias = Callable[..., Path]


@pytest.fixture(scope="module")
def collected_run(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FinalManifest]:
    """A run with its collected model; read only."""
    run = Path(shutil.copytree(finished, tmp_path_factory.mktemp("collected") / "finished"))
    return run, collect(open_storage(str(run)))


def test_the_collected_model_opens_in_litgpt_and_writes(collected_run: tuple[Path, FinalManifest]) -> None:
    from litgpt import LLM

    run, _ = collected_run
    llm = LLM.load(str(run / "final" / "litgpt"), distribute=None)
    llm.distribute(accelerator="cpu", devices=1, precision="32-true")
    written = llm.generate("the ", max_new_tokens=8, top_k=1)
    assert isinstance(written, str)
    assert written


def test_the_manifest_tells_what_was_collected_and_that_it_was_compared(
    collected_run: tuple[Path, FinalManifest], tiny_dataset: Path, corpus: Path
) -> None:
    run, manifest = collected_run
    folder = run / "final" / "litgpt"
    assert manifest.logits_difference == 0
    assert (manifest.step, manifest.tokens, manifest.dataset_key) == (12, 12 * 8 * 32, tiny_dataset.name[-10:])
    assert manifest.validation_loss is not None
    assert manifest.perplexity == pytest.approx(2.718281828**manifest.validation_loss)
    assert manifest.prompt in corpus.read_text()
    assert manifest.sample
    assert differences(folder, manifest.files) == []
    assert {record.path for record in manifest.files} == {path.name for path in folder.iterdir()} - {"manifest.json"}
    assert {"lit_model.pth", "model_config.yaml", "tokenizer.json", "tokenizer_config.json"} <= {
        record.path for record in manifest.files
    }
    weights = torch.load(folder / "lit_model.pth", weights_only=True)
    assert manifest.parameters == sum(weight.numel() for weight in weights.values())


def test_a_collected_model_is_found_done_and_not_written_again(collected_run: tuple[Path, FinalManifest]) -> None:
    run, manifest = collected_run
    weights = run / "final" / "litgpt" / "lit_model.pth"
    before = weights.stat()
    assert collect(open_storage(str(run))) == manifest
    assert weights.stat() == before


def test_half_a_collection_is_made_anew(finished_copy: Path, collected_run: tuple[Path, FinalManifest]) -> None:
    final = finished_copy / "final" / "litgpt"
    final.mkdir(parents=True)
    (final / "lit_model.pth").write_bytes(b"half")
    (final / "leftover").write_bytes(b"")
    run = open_storage(str(finished_copy))
    assert collected(run) is None
    assert collect(run) == collected_run[1]
    assert not (final / "leftover").exists()


def test_a_run_that_is_not_at_its_end_is_refused(finished_copy: Path, new_run: NewRun) -> None:
    shutil.rmtree(finished_copy / folder_of(12))
    with pytest.raises(UserError, match="has reached step 8 of 12; run it again, it goes on from there"):
        collect(open_storage(str(finished_copy)))
    with pytest.raises(UserError, match="has reached step 0 of 12"):
        main(["--run", str(new_run("fresh"))])
    assert not (finished_copy / "final").exists()


def test_a_damaged_last_checkpoint_is_refused_by_its_files_name(finished_copy: Path) -> None:
    (shard,) = (finished_copy / folder_of(12)).glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    with pytest.raises(DataError, match=f"{shard} has crc32c"):
        collect(open_storage(str(finished_copy)))
    assert collected(open_storage(str(finished_copy))) is None
    assert not (finished_copy / "final").exists()


def test_a_damaged_dataset_is_refused_because_its_tokenizer_goes_into_the_model(
    finished_copy: Path, tiny_dataset: Path, tmp_path: Path
) -> None:
    spoilt = Path(shutil.copytree(tiny_dataset, tmp_path / tiny_dataset.name))
    (spoilt / "tokenizer" / "tokenizer.json").write_text("{}")
    config = json.loads((finished_copy / "config.json").read_text())
    config["training"]["dataset"] = str(spoilt)
    (finished_copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"tokenizer\.json has 2 bytes"):
        collect(open_storage(str(finished_copy)))
    assert collected(open_storage(str(finished_copy))) is None


def test_a_directory_whose_model_differs_from_the_checkpoint_is_refused(
    collected_run: tuple[Path, FinalManifest],
) -> None:
    from litgpt.config import Config
    from litgpt.model import GPT

    folder = collected_run[0] / "final" / "litgpt"
    model = GPT(Config.from_file(folder / "model_config.yaml"))
    model.load_state_dict(torch.load(folder / "lit_model.pth", weights_only=True))
    assert prove(model, folder, [1, 2, 3])[2] == 0
    with torch.no_grad():
        model.lm_head.weight[7, 3] += 0.01
    with pytest.raises(DataError, match=r"differs by \d\.\d\de-\d\d in a logit from the checkpoint.*do not use it"):
        prove(model, folder, [1, 2, 3])


@pytest.fixture(scope="module")
def chinese_dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text whose every character is three tokens, so that a prompt ends inside one."""
    folder = tmp_path_factory.mktemp("chinese")
    (folder / "text.txt").write_text(
        "\n\n".join("春眠不觉晓，处处闻啼鸟。夜来风雨声，花落知多少。" * 20 for _ in range(30))
    )
    data = DataConfig.model_validate(
        {
            "corpus": {"kind": "files", "paths": [str(folder / "text.txt")], "separator": "\n\n"},
            "tokenizer": {"kind": "train", "vocab_size": 257},
            "validation_fraction": 0.05,
        }
    )
    planned = plan_dataset(data)
    prepare(planned, open_storage(str(folder / "root")))
    return folder / "root" / planned.path


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"vocab_size": 1000, "padding_multiple": 8},
        {"bias": False, "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "intermediate_size": 64},
    ],
)
def test_models_and_texts_of_other_kinds_are_collected_too(
    new_run: NewRun, chinese_dataset: Path, config: dict[str, Any]
) -> None:
    from litgpt_demo import train

    model = ModelConfig(name=None, config={"n_layer": 1, "n_embd": 32, "n_head": 2} | config, sequence_length=32)
    run = new_run("run", dataset=chinese_dataset, model=model, max_steps=2, warmup_steps=1)
    assert train.main(["--run", str(run)]) == 0
    assert collect(open_storage(str(run))).logits_difference == 0
