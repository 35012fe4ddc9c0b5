"""Collection: what training left becomes models that LitGPT and Hugging Face open, proved, or nothing."""

import json
import shutil
from collections.abc import Callable
from itertools import chain, repeat
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch
from bucket_faults import FaultyBucket
from console_script import Cli
from corpora import SEPARATOR, TEXTS, corpus_in, large_vocabulary, with_bos, write
from hostile import flip_a_bit, pickled_by_torch, seal, spoil_index, spoil_tensors
from states import training_of
from tokenizers import Tokenizer as HfTokenizer
from training_runs import NewRun, rows, train, write_run

from litgpt_demo import documents
from litgpt_demo.config import DataConfig, ModelConfig
from litgpt_demo.data.dataset import DatasetManifest, plan_dataset, verify_dataset
from litgpt_demo.data.preparation import prepare
from litgpt_demo.documents import FileRecord, differences, read_manifest, write_manifest
from litgpt_demo.errors import DataError, NodeError, UserError
from litgpt_demo.export import FinalManifest, exported, finished
from litgpt_demo.export import models as making
from litgpt_demo.export.models import export, main
from litgpt_demo.export.weights import Weights
from litgpt_demo.models.huggingface import Tensors
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training.checkpoints import CheckpointManifest, folder_of
from litgpt_demo.training.loop import fit

Collected: TypeAlias = tuple[Path, FinalManifest]
SOFTWARE = {"image": "registry.test/litgpt@sha256:" + "5" * 64, "commit": "70af7e1", "dirty": False, "packages": {}}


@pytest.fixture(scope="module")
def collected_run(finished: Path, tmp_path_factory: pytest.TempPathFactory) -> Collected:
    """A run with its collected model; read only."""
    run = Path(shutil.copytree(finished, tmp_path_factory.mktemp("collected") / "finished"))
    config = json.loads((run / "config.json").read_text())
    config |= {"run": {"name": "poems", "platform": {"kind": "local"}}, "software": SOFTWARE}
    (run / "config.json").write_text(json.dumps(config))
    with (run / "metrics.jsonl").open("a") as metrics:
        metrics.write('{"kind":"skip","step":5,"why":"the loss of step 5 is nan","windows":[7]}\n')
    return run, export(open_storage(str(run)))


@pytest.fixture
def collected_copy(collected_run: Collected, tmp_path: Path) -> Path:
    """The same, for tests that change it."""
    return Path(shutil.copytree(collected_run[0], tmp_path / "finished"))


def test_nothing_is_published_before_the_job_ends(finished_copy: Path) -> None:
    """The card has the cost of the whole job."""
    attempts = finished_copy / "attempts"

    def report(name: str, *, hours: float) -> None:
        times = {"started": 1e9, "ended": 1e9 + 3600 * hours}
        (attempts / name).write_text(json.dumps({"node": 0, "exit_code": 0, "fault": None, "message": "", **times}))

    def the_job_ends() -> None:
        assert list(finished_copy.glob(".scratch/collect/final/litgpt/lit_model.pth")), "models are proved meanwhile"
        assert not (finished_copy / "final").exists()
        report("2/node-0.json", hours=0.5)

    price = {"usd": 10.0, "machine": "a3-highgpu-8g", "region": "us-central1", "date": "2026-10-01"}
    config = json.loads((finished_copy / "config.json").read_text())
    (finished_copy / "config.json").write_text(json.dumps(config | {"price": price}))
    for number in "12":
        (attempts / number).mkdir(parents=True)
    report("1/node-0.json", hours=4)
    (attempts / "1/node-1.json").write_text('{"node": 2, "started"')
    without_start = {"node": 2, "exit_code": 0, "fault": None, "message": "", "ended": 1e9}
    (attempts / "1/node-2.json").write_text(json.dumps(without_start))
    final = export(open_storage(str(finished_copy)), await_end=the_job_ends)
    assert (final.cost.hours, final.cost.usd) == (4.5, 45)
    card = (finished_copy / "final/MODEL_CARD.md").read_text()
    assert "| Cost | $45.00 or more: 4.50 hours of a3-highgpu-8g at $10.00, list price on demand in us-central1" in card
    assert "reports of nodes that could not be read, and are left out: 2" in card


def test_the_collected_model_is_equal_in_both_libraries(
    collected_run: Collected, corpus: Path, tiny_dataset: Path
) -> None:
    """Its manifest has the proof."""
    from litgpt import LLM
    from transformers import AutoModelForCausalLM, AutoTokenizer

    final, manifest = collected_run[0] / "final", collected_run[1]
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
    assert tokenizer.eos_token_id == model.config.eos_token_id == model.generation_config.eos_token_id
    assert (manifest.step, manifest.tokens, manifest.dataset_hash) == (12, 12 * 8 * 32, tiny_dataset.name[-10:])
    assert (manifest.complete, manifest.logits_difference, manifest.findings) == (True, 0, ())
    assert manifest.huggingface.architecture == "GPTNeoXForCausalLM"
    assert manifest.huggingface.logits_difference < manifest.logits_tolerance < 0.01
    assert manifest.validation_loss == pytest.approx(manifest.trainer_validation_loss, rel=1e-5)
    assert differences(final, manifest.files) == []
    paths = {path.relative_to(final).as_posix() for path in final.rglob("*") if path.is_file()}
    assert {record.path for record in manifest.files} == paths - {"manifest.json"}


def test_the_collected_model_is_the_one_trained_in_bfloat16(new_run: NewRun) -> None:
    """All tables and sums in float32: only the weights are rounded, and they are the same."""
    from litgpt import LLM

    run = new_run("half", precision="bf16-true", max_steps=4)
    training, ids = training_of(run), torch.arange(64).view(2, 32)
    fit(training)
    assert export(open_storage(str(run))).logits_difference == 0
    llm = LLM.load(str(run / "final/litgpt"), distribute=None)
    llm.distribute(accelerator="cpu", devices=1, precision="32-true")
    with torch.no_grad():
        assert torch.equal(training.model.module.float()(ids), llm.model(ids))


def test_the_trainers_loss_is_compared_on_its_own_samples(finished_copy: Path, tiny_dataset: Path) -> None:
    """The setting that a run has today may be another than that of the checkpoint."""
    write_run(finished_copy, tiny_dataset, evaluation_samples=1)
    final = export(open_storage(str(finished_copy)))
    assert final.validation_windows == 7
    assert final.validation_loss == pytest.approx(final.trainer_validation_loss, rel=1e-5)


def test_a_model_of_documents_is_compared_by_its_own_loss(new_run: NewRun) -> None:
    """The card says that other libraries attend to all tokens they are given."""
    run = new_run("documents", attention="documents")
    train(run)
    final = export(open_storage(str(run)))
    assert final.validation_loss == pytest.approx(final.trainer_validation_loss, rel=1e-5)
    assert "one document at a time" in (run / "final/MODEL_CARD.md").read_text()
    assert json.loads((run / "final/lineage.json").read_text())["training"]["train"]["attention"] == "documents"


@pytest.mark.parametrize("kind", ["texts", "ids", "mixture"])
def test_exported_tokenizer_adds_the_prefix_of_its_dataset(
    kind: str, tmp_path: Path, new_run: NewRun, cli: Cli
) -> None:
    """Text gets no BOS, whatever its tokenizer adds elsewhere; ids that begin with one are continued with one."""
    from litgpt import LLM
    from transformers import AutoTokenizer

    path = with_bos(large_vocabulary(tmp_path / "tokenizer"))
    bos, ids = 300, np.random.default_rng(1).integers(0, 256, 3000)
    ids[::100], ids[99::100] = bos, 298
    halves = [(tmp_path / str(number), ids[500 * number :].astype("<u2").tobytes()) for number in range(2)]
    own, second = (
        {"kind": "tokens", "path": str(write(place, {"train.bin": half, "val.bin": half[:1800]}))}
        for place, half in halves
    )
    texts = {"kind": "files", "paths": [str(corpus_in(tmp_path / "texts", TEXTS * 4))], "separator": SEPARATOR}
    mixed = {"mixture": [{"corpus": own, "weight": 1}, {"corpus": second, "weight": 1}]}
    data = {"texts": {"corpus": texts}, "ids": {"corpus": own}, "mixture": mixed}[kind]
    planned = plan_dataset(DataConfig.model_validate({**data, "tokenizer": {"kind": "file", "path": str(path)}}))
    prepare(planned, open_storage(str(tmp_path / "root")))
    run = new_run("run", dataset=tmp_path / "root" / planned.path, max_steps=3, global_batch=2, evaluation_samples=1)
    train(run)
    prefix = [] if kind == "texts" else [bos]
    text, expected = "Do this", [*prefix, *HfTokenizer.from_file(str(path)).encode("Do this").ids[1:]]
    before = cli("generate", str(run), text, "--max-tokens", "5", "--seed", "1")
    final = export(open_storage(str(run)))
    folder = run / "final"
    reader = AutoTokenizer.from_pretrained(folder / "huggingface")
    llm = LLM.load(str(folder / "litgpt"), distribute=None)
    assert reader(text).input_ids == llm.preprocessor.tokenizer.encode(text).tolist() == expected
    config = json.loads((folder / "huggingface/config.json").read_text())
    assert config["bos_token_id"] == reader.bos_token_id == (prefix or [298])[0]
    assert (final.findings, final.prefix) == ((), ("<s>",) * len(prefix))
    shown = "no token" if kind == "texts" else r"\<s\>"
    assert f"| Before a text | {shown}, as in training" in (folder / "MODEL_CARD.md").read_text()
    assert before.out.endswith(cli("generate", str(run), text, "--max-tokens", "5", "--seed", "1").out)


def test_a_model_with_capped_attention_opens_as_its_card_says(new_run: NewRun) -> None:
    """Gemma 2: transformers' default attention, sdpa, leaves the cap out; LitGPT's cache masks no capped scores."""
    from litgpt import LLM
    from transformers import AutoModelForCausalLM

    fields = {"n_layer": 2, "n_embd": 32, "n_head": 2, "n_query_groups": 1, "head_size": 16, "intermediate_size": 48}
    fields |= {"sliding_window_size": 6, "sliding_window_indices": [1, 0], "attention_logit_softcapping": 0.01}
    model_config = ModelConfig(name="Gemma-2-2b", config={**fields, "padded_vocab_size": 320}, sequence_length=32)
    run = new_run("capped", model=model_config, max_steps=3, global_batch=2, evaluation_samples=1)
    train(run)
    final = export(open_storage(str(run)))
    assert final.findings == ()
    assert (final.huggingface.attention, final.huggingface.tokens) == ("eager", 32)
    model = AutoModelForCausalLM.from_pretrained(run / "final/huggingface", dtype=torch.float32)
    llm = LLM.load(str(run / "final/litgpt"), distribute=None)
    llm.distribute(accelerator="cpu", devices=1, precision="32-true")
    ids = torch.arange(32)[None]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, llm.model(ids), rtol=1e-5, atol=1e-5)
    card = (run / "final/MODEL_CARD.md").read_text()
    assert "from_pretrained('huggingface', attn_implementation=\"eager\")" in card
    assert "With `sdpa` it leaves the limit out" in card
    assert "LLM.load" not in card
    assert "| Compared over | 32 tokens, with eager attention |" in card


def test_a_run_generates_the_same_text_everywhere(
    collected_run: Collected, finished: Path, finished_copy: Path, tiny_dataset: Path, tmp_path: Path, bucket: Storage,
    new_run: NewRun, cli: Cli, corpus: Path,
) -> None:  # fmt: skip
    """By its collected model, or its newest checkpoint."""
    from litgpt import LLM

    llm, text = LLM.load(str(collected_run[0] / "final/litgpt"), distribute=None), corpus.read_text()[:20]
    llm.distribute(accelerator="cpu", devices=1, precision="32-true")
    torch.manual_seed(1)
    litgpts = text + llm.generate(text, max_new_tokens=12, temperature=0.9, top_k=40)
    for path in filter(Path.is_file, collected_run[0].rglob("*")):
        bucket.upload(path, str(path.relative_to(collected_run[0])))
    where = {"collected": str(collected_run[0]), "checkpoint": str(finished), "bucket": bucket.root}
    short = ("--max-tokens", "12", "--temperature", "0.9", "--top-k", "40")
    for run in where.values():
        result = cli("generate", run, text, *short, "--seed", "1")
        assert (result.code, result.out) == (0, f"{litgpts}\n")
        assert result.err.splitlines()[-1] == "by the model of step 12"
    drawn = [cli("generate", run, *short, "--seed", seed).out for seed in "112" for run in where.values()]
    assert len(set(drawn[:6])) == 1 != len(set(drawn[3:]))  # of no text it begins a document
    result = cli("generate", str(finished), corpus.read_text()[:9000])
    assert (result.code, result.out, "tokens, but the model sees 32; give it a shorter one" in result.err) == (
        40,
        "",
        True,
    )
    result = cli("generate", str(new_run("new")), text)
    assert (result.code, result.out, "has no checkpoint yet; wait" in result.err) == (40, "", True)
    dataset_copy, config = Path(shutil.copytree(tiny_dataset, tmp_path / "d")), finished_copy / "config.json"
    config.write_text(config.read_text().replace(str(tiny_dataset), str(dataset_copy)))
    (dataset_copy / "tokenizer/tokenizer.json").unlink()
    result = cli("generate", str(finished_copy), text)
    assert (result.code, result.out, "tokenizer.json is missing" in result.err) == (41, "", True)


def test_lineage_and_card_name_all_that_the_model_came_from(collected_run: Collected, tiny_dataset: Path) -> None:
    run, manifest = collected_run
    lineage = json.loads((run / "final/lineage.json").read_text())
    checkpoint = read_manifest(open_storage(str(run / folder_of(12))), CheckpointManifest)
    assert lineage["checkpoint"]["folder"] == folder_of(12)
    assert [file["crc32c"] for file in lineage["checkpoint"]["files"]] == [file.crc32c for file in checkpoint.files]
    used = lineage["dataset"]
    assert (used["content_hash"], used["address"]) == (manifest.dataset_hash, str(tiny_dataset))
    assert lineage["training"]["train"]["learning_rate"] == 0.02
    assert (lineage["config"]["name"], lineage["software"]) == ("poems", SOFTWARE)
    assert lineage["left_out"] == [{"step": 5, "why": "the loss of step 5 is nan", "windows": [7]}]
    card = (run / "final/MODEL_CARD.md").read_text()
    for fact in ("| Steps left out | 5 |", f"{manifest.validation_loss:.4f} nats", str(SOFTWARE["image"])):
        assert fact in card
    assert "Cost |" not in card, "nobody sells this machine's hours"
    assert str(run) not in card, "it is made to be published"
    assert f"LLM.load('litgpt').generate({manifest.prompt!r})" in card
    assert " processes on " in card


def test_a_collected_model_is_refused_when_its_bytes_change(collected_copy: Path, collected_run: Collected) -> None:
    """Until then it is kept."""
    path = collected_copy / "final/huggingface/model.safetensors"
    before = path.stat().st_mtime_ns
    assert export(open_storage(str(collected_copy))) == collected_run[1]
    assert path.stat().st_mtime_ns == before
    flip_a_bit(path)
    with pytest.raises(DataError, match=f"{path} has crc32c .*; remove that folder and collect again"):
        export(open_storage(str(collected_copy)))


def test_half_a_collection_is_made_anew(collected_copy: Path, collected_run: Collected) -> None:
    final = collected_copy / "final"
    (final / "manifest.json").unlink()
    (final / "litgpt" / "lit_model.pth").write_bytes(b"half")
    (final / "leftover").write_bytes(b"")
    run = open_storage(str(collected_copy))
    assert exported(run) is None
    again = export(run)
    assert again.model_copy(update={"files": ()}) == collected_run[1].model_copy(update={"files": ()})
    models = [{file for file in manifest.files if "/" in file.path} for manifest in (again, collected_run[1])]
    assert models[0] == models[1]
    assert not (final / "leftover").exists()
    assert not (collected_copy / ".scratch").exists()


def test_the_finished_model_replaces_one_collected_before(collected_copy: Path, collected_run: Collected) -> None:
    run = open_storage(str(collected_copy))
    early = export(run, step=8)
    assert (early.step, early.complete, early.trainer_validation_loss is None) == (8, False, False)
    assert finished(run) is None
    assert "(8 of 12 steps)" in (collected_copy / "final/MODEL_CARD.md").read_text()
    assert exported(run) is None  # the run has gone further
    assert export(run).step == 12
    assert finished(run) == exported(run) == export(run)


def test_a_run_before_its_end_is_collected_only_by_newest(
    finished_copy: Path, new_run: NewRun, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(finished_copy / folder_of(12))
    run = open_storage(str(finished_copy))
    with pytest.raises(UserError, match="has reached step 8 of 12; run it again to continue from there"):
        export(run)
    with pytest.raises(UserError, match="has no checkpoint of step 4; choose one of: 8"):
        export(run, step=4)
    with pytest.raises(UserError, match="has no checkpoint yet"):
        main(["--run", str(new_run("fresh")), "--newest"])
    assert not (finished_copy / "final").exists()
    assert main(["--run", str(finished_copy), "--newest"]) == 0
    assert capsys.readouterr().out.startswith("step 8, ")


def test_a_run_with_a_damaged_last_checkpoint_trains_further(finished_copy: Path) -> None:
    """From the checkpoint before."""
    shard = finished_copy / folder_of(12) / "__0_0.distcp"
    flip_a_bit(shard)
    run = open_storage(str(finished_copy))
    assert export(run, newest=True).step == 8  # the newest one that verifies
    with pytest.raises(DataError, match=f"{shard} has crc32c .* moved to {finished_copy}/quarantine/.*; run it again"):
        export(run)
    assert exported(run) == export(run, step=8)
    train(finished_copy)
    assert [row["step"] for row in rows(finished_copy, "start")] == [0, 8]
    assert (export(run).step, export(run).complete) == (12, True)


def test_a_sound_checkpoint_stays_when_a_collection_misreads(
    finished_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    crcs = chain(["00000000"], repeat(None))
    read = documents.crc32c_of
    with monkeypatch.context() as patch:
        patch.setattr(documents, "crc32c_of", lambda path: next(crcs) or read(path))
        with pytest.raises(NodeError, match="read again, they are as the manifest has them"):
            export(open_storage(str(finished_copy)))
    assert not (finished_copy / "quarantine").exists()
    assert export(open_storage(str(finished_copy))).step == 12


def test_collecting_from_a_bucket_fetches_only_weights(
    finished: Path, bucket: Storage, proxy: FaultyBucket, collected_run: Collected
) -> None:
    """The models are published in the bucket."""
    for path in filter(Path.is_file, finished.rglob("*")):
        bucket.upload(path, path.relative_to(finished).as_posix())
    proxy.arm()
    final = export(bucket)
    stored = sum(file.size for file in bucket.inventory(folder_of(12)))
    assert proxy.downloaded < 0.5 * stored, "two thirds are the optimizer's state"
    assert exported(bucket) == final == export(bucket)
    assert {f"final/{record.path}" for record in final.files} < set(bucket.list())
    models = [{file for file in manifest.files if "/" in file.path} for manifest in (final, collected_run[1])]
    assert models[0] == models[1]


@pytest.mark.parametrize("writer", ["write_litgpt", "write_safetensors"])
def test_a_model_that_differs_is_not_handed_out(
    finished_copy: Path, monkeypatch: pytest.MonkeyPatch, writer: str
) -> None:
    """A weight is not the checkpoint's, as after a bad disk. LitGPT's folder is the model, the other one is extra."""

    class Spoilt(Weights):
        def read(self, names: list[str]) -> Tensors:
            tensors = super().read(names)
            if "lm_head.weight" in tensors:
                tensors["lm_head.weight"][7, 3] += 0.1
            return tensors

    honest = getattr(making, writer)
    monkeypatch.setattr(making, writer, lambda weights, *more: honest(Spoilt(weights.shards), *more))
    if writer == "write_litgpt":
        with pytest.raises(DataError, match=r"differs by \d\.\d\de-\d\d in a logit from the checkpoint.*do not use it"):
            export(open_storage(str(finished_copy)))
        assert not (finished_copy / "final").exists()
    else:
        final = export(open_storage(str(finished_copy)))
        assert final.huggingface is None
        assert "as GPTNeoXForCausalLM it is not the checkpoint's model: its logits differ by" in final.findings[0]
        assert not (finished_copy / "final/huggingface").exists()


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


def test_files_next_to_a_tokenizer_are_never_executed(
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
