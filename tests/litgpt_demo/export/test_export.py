"""Collection: what training left becomes models that LitGPT and Hugging Face open, proved, or nothing."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from bucket_emulator import bucket_emulator
from hostile import pickled_by_torch, seal, spoil_index, spoil_tensors

from litgpt_demo.config import DataConfig, ModelConfig
from litgpt_demo.data.dataset import DatasetManifest, plan_dataset
from litgpt_demo.data.preparation import prepare
from litgpt_demo.data.verification import verify_dataset
from litgpt_demo.errors import DataError, UserError
from litgpt_demo.export import FinalManifest, export, exported, main
from litgpt_demo.export.proof import opened_by_litgpt
from litgpt_demo.manifests import FileRecord, differences, read_manifest, write_manifest
from litgpt_demo.metrics import rows_of
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoints import CheckpointManifest, folder_of

NewRun: TypeAlias = Callable[..., Path]

SOFTWARE = {"image": "registry.test/litgpt@sha256:" + "5" * 64, "commit": "70af7e1", "dirty": False, "packages": {}}


@pytest.fixture(scope="module")
def collected_run(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, FinalManifest]:
    """A run with its collected model; read only."""
    run = Path(shutil.copytree(finished, tmp_path_factory.mktemp("collected") / "finished"))
    config = json.loads((run / "config.json").read_text())
    platform = {"kind": "local", "nodes": 1, "processes": 1}
    config |= {"run": {"name": "poems", "platform": platform}, "software": SOFTWARE}
    (run / "config.json").write_text(json.dumps(config))
    (run / "skipped.json").write_text(json.dumps({"steps": [{"step": 3, "why": "NaN", "windows": [5]}]}))
    return run, export(open_storage(str(run)))


@pytest.fixture
def collected_copy(collected_run: tuple[Path, FinalManifest], tmp_path: Path) -> Path:
    """The same, for tests that change it."""
    return Path(shutil.copytree(collected_run[0], tmp_path / "finished"))


def test_models_are_proved_while_the_job_ends_and_the_card_tells_what_came_of_it(finished_copy: Path) -> None:
    """Not a byte is published before, and what the nodes report at their end is in the card."""
    report = finished_copy / "attempts/1/node-0.json"

    def the_job_ends() -> None:
        assert list(finished_copy.glob(".scratch/collect/final/litgpt/lit_model.pth"))
        assert not (finished_copy / "final").exists()
        report.parent.mkdir(parents=True)
        report.write_text(json.dumps({"started": 0.0, "ended": 7200.0}))

    price = {"usd": 10.0, "machine": "a3-highgpu-8g", "region": "us-central1", "date": "2026-10-01"}
    config = json.loads((finished_copy / "config.json").read_text())
    (finished_copy / "config.json").write_text(json.dumps(config | {"price": price}))
    final = export(open_storage(str(finished_copy)), await_end=the_job_ends)
    assert final.cost is not None
    assert final.cost.usd == 20
    assert "$20.00" in (finished_copy / "final/MODEL_CARD.md").read_text()


# --- what it makes ----------------------------------------------------------------------------------------------------


def test_the_collected_model_opens_in_litgpt_and_writes(collected_run: tuple[Path, FinalManifest]) -> None:
    from litgpt import LLM

    run, _ = collected_run
    llm = LLM.load(str(run / "final" / "litgpt"), distribute=None)
    llm.distribute(accelerator="cpu", devices=1, precision="32-true")
    written = llm.generate("the ", max_new_tokens=8, top_k=1)
    assert isinstance(written, str)
    assert written


def test_the_collected_model_opens_in_transformers_and_says_what_litgpts_says(
    collected_run: tuple[Path, FinalManifest], corpus: Path
) -> None:
    from litgpt import LLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    final = collected_run[0] / "final"
    model, info = AutoModelForCausalLM.from_pretrained(final / "huggingface", output_loading_info=True)
    assert not any(info.values())
    tokenizer = AutoTokenizer.from_pretrained(final / "huggingface")
    llm = LLM.load(str(final / "litgpt"), distribute=None)
    llm.distribute(accelerator="cpu", devices=1, precision="32-true")
    text = corpus.read_text()[:60]
    ids = tokenizer(text, return_tensors="pt").input_ids[:, :32]
    assert ids[0].tolist() == llm.preprocessor.tokenizer.encode(text, bos=False, eos=False).tolist()[:32]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, llm.model(ids), rtol=1e-5, atol=1e-5)
    assert tokenizer.decode(ids[0]) in text
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    assert model.generate(ids[:, :4], max_new_tokens=8).shape[1] > 4


def test_the_manifest_tells_what_was_collected_and_what_was_proved(
    collected_run: tuple[Path, FinalManifest], tiny_dataset: Path, corpus: Path
) -> None:
    run, manifest = collected_run
    folder = run / "final"
    assert (manifest.step, manifest.tokens, manifest.dataset_key) == (12, 12 * 8 * 32, tiny_dataset.name[-10:])
    assert manifest.complete
    assert manifest.logits_difference == 0
    assert manifest.huggingface is not None
    assert manifest.huggingface.architecture == "GPTNeoXForCausalLM"
    assert manifest.huggingface.logits_difference < manifest.logits_tolerance < 0.01
    assert manifest.findings == ()
    assert manifest.prompt in corpus.read_text()
    assert manifest.sample
    assert manifest.huggingface.sample
    assert differences(folder, manifest.files) == []
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {record.path for record in manifest.files} == there - {"manifest.json"}
    assert {
        "litgpt/lit_model.pth", "litgpt/model_config.yaml", "litgpt/tokenizer.json", "litgpt/tokenizer_config.json",
        "huggingface/model.safetensors", "huggingface/config.json", "huggingface/generation_config.json",
        "huggingface/tokenizer.json", "huggingface/tokenizer_config.json",
        "MODEL_CARD.md", "loss.png", "lineage.json",
    } <= there  # fmt: skip
    weights = torch.load(folder / "litgpt/lit_model.pth", weights_only=True)
    assert manifest.parameters == sum(weight.numel() for weight in weights.values())


def test_the_validation_loss_is_of_the_collected_model_on_the_trainers_own_samples(
    collected_run: tuple[Path, FinalManifest],
) -> None:
    _, manifest = collected_run
    assert manifest.validation_windows == 7
    assert manifest.trainer_validation_loss is not None
    assert manifest.validation_loss == pytest.approx(manifest.trainer_validation_loss, rel=1e-5)
    assert manifest.perplexity == pytest.approx(math.exp(manifest.validation_loss))


def test_lineage_names_everything_that_the_model_came_from(
    collected_run: tuple[Path, FinalManifest], tiny_dataset: Path
) -> None:
    run, manifest = collected_run
    lineage = json.loads((run / "final/lineage.json").read_text())
    checkpoint = read_manifest(open_storage(str(run / folder_of(12))), CheckpointManifest)
    assert checkpoint is not None
    assert lineage["checkpoint"]["folder"] == folder_of(12)
    assert [file["crc32c"] for file in lineage["checkpoint"]["files"]] == [file.crc32c for file in checkpoint.files]
    assert lineage["dataset"]["key"] == manifest.dataset_key
    assert lineage["dataset"]["address"] == str(tiny_dataset)
    assert lineage["training"]["train"]["learning_rate"] == 0.02
    assert (lineage["config"]["name"], lineage["software"]) == ("poems", SOFTWARE)
    assert lineage["left_out"] == [{"step": 3, "why": "NaN", "windows": [5]}]
    assert lineage["seconds"] > 0
    assert {"torch", "litgpt", "transformers"} == set(lineage["collected_with"])


def test_the_model_card_says_what_people_ask_for(collected_run: tuple[Path, FinalManifest]) -> None:
    run, manifest = collected_run
    card = (run / "final/MODEL_CARD.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n")
    assert f"| Validation loss | {manifest.validation_loss:.4f} nats per token |" in card
    assert "| learning\\_rate | 0.02 |" in card
    assert f"| Dataset key | {manifest.dataset_key} |" in card
    assert f"| Tokens seen | {12 * 8 * 32:,} (" in card
    assert "| Commit | 70af7e1 |" in card
    assert SOFTWARE["image"] in card
    assert "| Platform | kind: local, nodes: 1, processes: 1 |" in card
    started = next(row for row in rows_of((run / "metrics.jsonl").read_text()) if row["kind"] == "start")
    assert f"| Hardware | 1 x {started['device_name']} |" in card
    assert "| Steps left out | 3 |" in card
    assert "![Loss over the steps of the training](loss.png)" in card
    assert (run / "final/loss.png").read_bytes().startswith(b"\x89PNG")
    assert "Cost |" not in card  # nobody sells this machine's hours
    assert "not known" not in card


def test_the_card_tells_the_cost_where_the_machines_have_a_list_price(finished_copy: Path) -> None:
    config = json.loads((finished_copy / "config.json").read_text())
    price = {"machine": "a2-highgpu-1g", "usd": 3.6, "region": "us-central1", "date": "2025-03-06"}
    (finished_copy / "config.json").write_text(json.dumps(config | {"price": price}))
    (finished_copy / "attempts/1").mkdir(parents=True, exist_ok=True)
    (finished_copy / "attempts/1/node-0.json").write_text(json.dumps({"started": 1e9, "ended": 1e9 + 7200}))
    manifest = export(open_storage(str(finished_copy)))
    assert manifest.cost is not None
    assert manifest.cost.usd == pytest.approx(7.2)
    assert "| Cost | $7.20 or more: 2.00 hours of a2-highgpu-1g " in (finished_copy / "final/MODEL_CARD.md").read_text()
    assert json.loads((finished_copy / "final/lineage.json").read_text())["cost"]["usd"] == pytest.approx(7.2)


# --- when -------------------------------------------------------------------------------------------------------------


def test_a_collected_model_is_found_done_and_not_written_again(collected_run: tuple[Path, FinalManifest]) -> None:
    run, manifest = collected_run
    weights = run / "final" / "litgpt" / "lit_model.pth"
    before = weights.stat()
    assert export(open_storage(str(run))) == manifest
    assert export(open_storage(str(run)), step=12) == manifest
    assert weights.stat() == before


def test_a_collected_model_whose_bytes_have_changed_is_not_found_done(collected_copy: Path) -> None:
    path = collected_copy / "final/huggingface/model.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(DataError, match=f"{path} has crc32c .* Remove that folder and collect again"):
        export(open_storage(str(collected_copy)))


def test_half_a_collection_is_made_anew(collected_copy: Path, collected_run: tuple[Path, FinalManifest]) -> None:
    final = collected_copy / "final"
    (final / "manifest.json").unlink()
    (final / "litgpt" / "lit_model.pth").write_bytes(b"half")
    (final / "leftover").write_bytes(b"")
    (collected_copy / ".scratch/collect").mkdir(parents=True)  # as one that was killed leaves it
    (collected_copy / ".scratch/collect/half").write_bytes(b"")
    run = open_storage(str(collected_copy))
    assert exported(run) is None
    again = export(run)
    weights = {record.path: record.crc32c for record in again.files if record.path.endswith((".pth", ".safetensors"))}
    assert weights == {file.path: file.crc32c for file in collected_run[1].files if file.path in weights}
    assert again.model_copy(update={"files": ()}) == collected_run[1].model_copy(update={"files": ()})
    assert not (final / "leftover").exists()
    assert not (collected_copy / ".scratch").exists()


def test_two_collections_at_once_make_one_model(finished_copy: Path) -> None:
    run = open_storage(str(finished_copy))
    with ThreadPoolExecutor(2) as both:
        first, second = both.map(lambda _: export(run), range(2))
    assert first == second == exported(run)


def test_a_model_may_be_collected_on_the_way_and_gives_way_to_the_finished_one(
    collected_copy: Path, collected_run: tuple[Path, FinalManifest]
) -> None:
    run = open_storage(str(collected_copy))
    early = export(run, step=8)
    assert (early.step, early.complete, early.trainer_validation_loss is None) == (8, False, False)
    assert "(8 of 12 steps)" in (collected_copy / "final/MODEL_CARD.md").read_text()
    assert exported(run) is None  # the run has gone further
    assert export(run).step == 12
    assert exported(run) == export(run)


def test_a_run_that_is_not_at_its_end_is_refused_unless_its_newest_is_asked_for(
    finished_copy: Path, new_run: NewRun, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(finished_copy / folder_of(12))
    run = open_storage(str(finished_copy))
    with pytest.raises(UserError, match="has reached step 8 of 12; run it again, it goes on from there"):
        export(run)
    with pytest.raises(UserError, match="has no checkpoint of step 4; there are: 8"):
        export(run, step=4)
    with pytest.raises(UserError, match="has reached step 0 of 12"):
        main(["--run", str(new_run("fresh"))])
    with pytest.raises(UserError, match="has no checkpoint yet"):
        main(["--run", str(new_run("fresh")), "--newest"])
    assert not (finished_copy / "final").exists()
    assert main(["--run", str(finished_copy), "--newest"]) == 0
    assert capsys.readouterr().out.startswith("step 8, ")


def test_a_run_whose_time_was_up_is_at_its_end(finished_copy: Path) -> None:
    shutil.rmtree(finished_copy / folder_of(12))
    place = open_storage(str(finished_copy / folder_of(8)))
    manifest = read_manifest(place, CheckpointManifest)
    assert manifest is not None
    write_manifest(place, manifest.model_copy(update={"seconds": 3601.0}))
    config = json.loads((finished_copy / "config.json").read_text())
    config["training"]["train"]["max_time"] = "1h"
    (finished_copy / "config.json").write_text(json.dumps(config))
    final = export(open_storage(str(finished_copy)))
    assert (final.step, final.complete) == (8, True)


# --- what it refuses --------------------------------------------------------------------------------------------------


def test_a_damaged_last_checkpoint_is_refused_by_its_files_name(finished_copy: Path) -> None:
    (shard,) = (finished_copy / folder_of(12)).glob("*.distcp")
    content = bytearray(shard.read_bytes())
    content[-100] ^= 1
    shard.write_bytes(content)
    run = open_storage(str(finished_copy))
    with pytest.raises(DataError, match=f"{shard} has crc32c"):
        export(run)
    assert exported(run) is None
    assert not (finished_copy / "final").exists()
    assert export(run, newest=True).step == 8  # the newest one that verifies


def test_a_damaged_dataset_is_refused_because_its_tokenizer_goes_into_the_model(
    finished_copy: Path, tiny_dataset: Path, tmp_path: Path
) -> None:
    spoilt = Path(shutil.copytree(tiny_dataset, tmp_path / tiny_dataset.name))
    (spoilt / "tokenizer" / "tokenizer.json").write_text("{}")
    config = json.loads((finished_copy / "config.json").read_text())
    config["training"]["dataset"] = str(spoilt)
    (finished_copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(DataError, match=r"tokenizer\.json has 2 bytes"):
        export(open_storage(str(finished_copy)))
    assert exported(open_storage(str(finished_copy))) is None


@pytest.fixture
def spoilt_export(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Has one of the two exports write a weight that is not the checkpoint's, as a bad disk or a wrong map would."""
    from litgpt_demo.export import models as making
    from litgpt_demo.export.weights import Tensors, Weights

    class Spoilt(Weights):
        def read(self, names: list[str]) -> Tensors:
            tensors = super().read(names)
            if "lm_head.weight" in tensors:
                tensors["lm_head.weight"][7, 3] += 0.1
            return tensors

    def spoil(writer: str) -> None:
        honest = getattr(making, writer)
        monkeypatch.setattr(making, writer, lambda weights, *more: honest(Spoilt(weights.shards), *more))

    return spoil


def test_a_litgpt_directory_whose_model_differs_from_the_checkpoint_is_refused(
    finished_copy: Path, spoilt_export: Callable[[str], None]
) -> None:
    spoilt_export("write_litgpt")
    with pytest.raises(DataError, match=r"differs by \d\.\d\de-\d\d in a logit from the checkpoint.*do not use it"):
        export(open_storage(str(finished_copy)))
    assert not (finished_copy / "final").exists()


def test_a_hugging_face_model_that_differs_is_left_out_and_the_finding_says_so(
    finished_copy: Path, spoilt_export: Callable[[str], None]
) -> None:
    spoilt_export("write_safetensors")
    final = export(open_storage(str(finished_copy)))
    assert final.huggingface is None
    assert final.logits_difference == 0
    (finding,) = final.findings
    assert "as GPTNeoXForCausalLM it is not the checkpoint's model: its logits differ by" in finding
    assert not (finished_copy / "final/huggingface").exists()
    assert "| transformers opens it | no |" in (finished_copy / "final/MODEL_CARD.md").read_text()


@pytest.mark.parametrize(("loss", "refused"), [(2.0, False), (2.09, False), (2.2, True), (math.nan, True)])
def test_a_loss_that_is_not_the_trainers_is_refused(loss: float, refused: bool) -> None:
    from litgpt_demo.export.models import require_same_loss

    require_same_loss(loss, None, same_samples=True)
    require_same_loss(loss, 2.0, same_samples=False)
    if not refused:
        return require_same_loss(loss, 2.0, same_samples=True)
    with pytest.raises(DataError, match=r"validation loss of .*, the trainer found 2\.0000"):
        require_same_loss(loss, 2.0, same_samples=True)
    return None


# --- other models, texts and places -----------------------------------------------------------------------------------


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
    ("config", "architecture"),
    [
        ({"vocab_size": 1000, "padding_multiple": 8}, "GPTNeoXForCausalLM"),
        (
            {
                "bias": False, "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "intermediate_size": 64,
                "parallel_residual": False, "rotary_percentage": 1.0,
            },
            "LlamaForCausalLM",
        ),
        ({"norm_class_name": "RMSNorm"}, None),
    ],
)  # fmt: skip
def test_models_and_texts_of_other_kinds_are_collected_too(
    new_run: NewRun, chinese_dataset: Path, config: dict[str, Any], architecture: str | None
) -> None:
    from litgpt_demo.training import loop as train

    model = ModelConfig(name=None, config={"n_layer": 1, "n_embd": 32, "n_head": 2} | config, sequence_length=32)
    run = new_run("run", dataset=chinese_dataset, model=model, max_steps=2, warmup_steps=1, precision="bf16-true")
    assert train.main(["--run", str(run)]) == 0
    final = export(open_storage(str(run)))
    assert final.logits_difference == 0
    assert (final.huggingface and final.huggingface.architecture) == architecture
    assert (run / "final/huggingface").exists() == (architecture is not None)
    if architecture is None:
        assert (
            "transformers has no architecture that computes what custom with RMSNorm and GptNeoxMLP"
            in (final.findings[0])
        )
    weights = torch.load(run / "final/litgpt/lit_model.pth", weights_only=True)
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}


def test_a_run_in_a_bucket_is_collected_there(
    collected_run: tuple[Path, FinalManifest], monkeypatch: pytest.MonkeyPatch
) -> None:
    with bucket_emulator("collected") as address:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", address)
        run = open_storage("gs://collected/runs/finished")
        for path in sorted(collected_run[0].rglob("*")):
            name = path.relative_to(collected_run[0]).as_posix()
            if path.is_file() and not name.startswith("final/"):
                run.upload(path, name)
        final = export(run)
        assert exported(run) == final == export(run)
        assert {f"final/{record.path}" for record in final.files} < set(run.list())
        models = [{file for file in one.files if "/" in file.path} for one in (final, collected_run[1])]
        assert models[0] == models[1]


# --- what others wrote ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("spoil", [spoil_index, spoil_tensors])
def test_collecting_executes_nothing_of_a_checkpoint(
    spoil: Callable[[Path, Path], None], finished_copy: Path, tmp_path: Path
) -> None:
    folder, marker = finished_copy / folder_of(12), tmp_path / "executed"
    spoil(folder, marker)
    seal(folder)
    with pytest.raises(DataError, match=f"{folder}.* names posix.mkdir for its reader to call.*Nothing of it was exec"):
        export(open_storage(str(finished_copy)))
    assert not marker.exists()
    assert exported(open_storage(str(finished_copy))) is None


def test_neither_collecting_nor_verifying_executes_what_lies_beside_a_datasets_tokenizer(
    finished_copy: Path, tiny_dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """LitGPT would open the one as weights and import what the other one names."""
    dataset, marker = Path(shutil.copytree(tiny_dataset, tmp_path / tiny_dataset.name)), tmp_path / "executed"
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "hostile_style.py").write_text(f"import os\nos.mkdir({str(marker)!r})\nStyle = object\n")
    (dataset / "tokenizer/lit_model.pth").write_bytes(pickled_by_torch(marker))
    (dataset / "tokenizer/prompt_style.yaml").write_text("class_path: hostile_style.Style\n")
    storage = open_storage(str(dataset))
    manifest = read_manifest(storage, DatasetManifest)
    assert manifest is not None
    hostile = [storage.stat(f"tokenizer/{name}") for name in ("lit_model.pth", "prompt_style.yaml")]
    files = manifest.tokenizer + tuple(map(FileRecord.of, hostile))
    write_manifest(storage, manifest.model_copy(update={"tokenizer": files}))
    config = json.loads((finished_copy / "config.json").read_text())
    config["training"]["dataset"] = str(dataset)
    (finished_copy / "config.json").write_text(json.dumps(config))
    verify_dataset(str(dataset))
    final = export(open_storage(str(finished_copy)))
    assert not marker.exists()
    assert {"litgpt/prompt_style.yaml"}.isdisjoint(record.path for record in final.files)
    assert torch.load(finished_copy / "final/litgpt/lit_model.pth", weights_only=True)


def test_weights_that_were_exchanged_before_litgpt_opens_them_are_not_executed(
    collected_copy: Path, tmp_path: Path
) -> None:
    folder, marker = collected_copy / "final/litgpt", tmp_path / "executed"
    (folder / "lit_model.pth").write_bytes(pickled_by_torch(marker))
    with pytest.raises(DataError, match=r"names posix\.mkdir"), opened_by_litgpt(folder):
        pass
    assert not marker.exists()
