"""Trainings that start from weights: whatever wrote them, the first step begins with exactly these."""

import shutil
import signal
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from corpora import POINTER, write
from hub_server import Repository, running_hub
from litgpt.model import GPT
from litgpt.utils import save_config
from safetensors.torch import load_file, save_file
from states import settings_of, training_of
from training_runs import MODEL, NewRun, TrainElsewhere, ends, rows, train

from litgpt_demo.config import InitialWeights, ModelConfig
from litgpt_demo.data.batches import sample_ids_for_step, validation_sources
from litgpt_demo.data.dataset import open_dataset
from litgpt_demo.documents import read_manifest, write_manifest
from litgpt_demo.errors import DataError, UserError
from litgpt_demo.metrics import curve
from litgpt_demo.models.model import litgpt_config
from litgpt_demo.runs import read_spec
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training.checkpoints import CheckpointManifest, folder_of
from litgpt_demo.training.origins import fetch_initial_weights, find_initial_weights, position_problem
from litgpt_demo.training.setup import open_data
from litgpt_demo.training.starting import CompatibilityRequest, start_from

IDS = torch.randint(0, 300, (2, 32), generator=torch.Generator().manual_seed(1))
LLAMA = {
    "n_layer": 2, "n_embd": 32, "n_head": 4, "n_query_groups": 2, "norm_class_name": "RMSNorm", "bias": False,
    "mlp_class_name": "LLaMAMLP", "intermediate_size": 48, "parallel_residual": False, "rotary_percentage": 1.0,
    "padded_vocab_size": 300, "vocab_size": 300, "norm_eps": 1e-6,
}  # fmt: skip


def found(name: Path | str, root: str = "nowhere", *, optimizer: bool = False) -> InitialWeights:
    origin = find_initial_weights(str(name), optimizer, root)
    assert origin is not None
    return origin


def asked(
    origin: InitialWeights, model: ModelConfig = MODEL, *, vocab_size: int = 300, **config: Any
) -> list[tuple[str, str]]:
    """What is wrong with these weights for a model, with changes."""
    changed = model.model_copy(update={"config": {**model.config, **config}})
    return CompatibilityRequest(model=changed, vocab_size=vocab_size, origin=origin).check()


def logits(run: Path, origin: InitialWeights) -> torch.Tensor:
    """Of the model with which the first step of a run begins."""
    training = training_of(run)
    start_from(training, origin)
    training.feed.close()
    with torch.no_grad():
        return training.model.module(IDS)  # type: ignore[no-any-return]


@pytest.fixture(scope="session")
def of_transformers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ModelConfig, torch.Tensor]:
    """A tiny Llama that ties its output to its embedding, as transformers saves it; with its logits."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True,
    ))  # fmt: skip
    folder = tmp_path_factory.mktemp("transformers") / "llama"
    model.save_pretrained(folder)
    with torch.no_grad():
        return folder, ModelConfig(name=None, config=LLAMA, sequence_length=32), model(IDS).logits


def test_run_starts_from_weights_and_optimizer_of_another_run(finished: Path, new_run: NewRun) -> None:
    origin = found(finished)
    assert asked(origin) == []
    assert found(finished / folder_of(12)) == origin
    assert found(finished, optimizer=True).content_hash != origin.content_hash, "they are two trainings"
    continued = training_of(new_run("same"))
    start_from(continued, origin)
    continued.feed.close()
    weights, state = continued.model.module, continued.optimizer.optimizer.state
    assert not state
    again = training_of(new_run("averages", seed=2, weight_decay=0.3, betas=(0.8, 0.99)))
    settings = settings_of(again.optimizer)
    start_from(again, found(finished, optimizer=True))
    again.feed.close()
    assert [group["weight_decay"] for group in settings] == [0.3, 0.0]
    assert settings_of(again.optimizer) == settings
    assert {float(entry["step"]) for entry in again.optimizer.optimizer.state.values()} == {12.0}
    last = next(row for row in rows(finished, "evaluation") if row["step"] == 12)["validation_loss"]
    for model in (weights, again.model.module):
        windows = again.data.validation
        batch = [torch.from_numpy(part) for part in windows.read(validation_sources(windows, 7)[0].sample_ids)]
        with torch.no_grad():
            assert float(model(*batch)) == pytest.approx(last, abs=1e-5)


def test_sharded_run_starts_from_weights_and_resumes_its_own(
    finished: Path, new_run: NewRun, tmp_path: Path, train_elsewhere: TrainElsewhere
) -> None:
    source = Path(shutil.copytree(finished, tmp_path / "source"))
    settings: dict[str, Any] = {"origin": found(source), "max_steps": 6, "checkpoint_every": 4}
    alone, sharded = new_run("alone", **settings), new_run("sharded", world_size=2, strategy="fsdp", **settings)
    train(alone)
    assert train_elsewhere((sharded, 2, 6)) != [[0, 0]]  # a rank dies while it saves step 6
    shutil.rmtree(source)
    assert train_elsewhere((sharded, 2, 0)) == [[0, 0]]
    alone_losses, sharded_losses = ({row["step"]: row["loss"] for row in rows(run, "step")} for run in (alone, sharded))
    assert alone_losses == pytest.approx(sharded_losses, rel=1e-4)
    assert [row["step"] for row in rows(sharded, "start")] == [0, 4]
    assert alone_losses[1] < rows(finished, "step")[0]["loss"] - 0.5
    with pytest.raises(DataError, match="is missing"):
        train(new_run("late", **settings))


@pytest.mark.parametrize(("strategy", "ranks"), [("auto", 1), ("ddp", 2), ("fsdp", 2), ("hybrid", 4)])
def test_the_optimizers_settings_are_the_configs_after_any_load(
    finished: Path, new_run: NewRun, train_elsewhere: TrainElsewhere, strategy: str, ranks: int
) -> None:
    """After a start from another run, and after a resume."""
    origin = found(finished, optimizer=True)
    for weight_decay, max_steps, start in [(0.3, 2, 0), (0.4, 3, 2)]:
        run = new_run(
            "run", world_size=ranks, strategy=strategy, micro_batch=1, origin=origin, seed=2, warmup_steps=0,
            max_steps=max_steps, weight_decay=weight_decay, betas=(0.8, 0.99),
        )  # fmt: skip
        assert train_elsewhere((run, ranks, 0), nodes=2 if ranks == 4 else 1) == [[0] * ranks]
        assert rows(run, "start")[-1]["step"] == start
        assert len(ends(run)) == ranks
        for end in ends(run):
            groups = [(group["weight_decay"], group["betas"]) for group in end["optimizer"]]
            assert groups == [(weight_decay, [0.8, 0.99]), (0.0, [0.8, 0.99])]


def test_a_runs_name_goes_before_a_folder_of_that_name(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    for place in (tmp_path / "gpt-0123456789", root / "runs/gpt-0123456789"):
        shutil.copytree(finished, place)
    monkeypatch.chdir(tmp_path)
    assert found("gpt-0123456789", str(root)).address == str(root / "runs/gpt-0123456789" / folder_of(12))
    assert found("./gpt-0123456789", str(root)).address == str(tmp_path / "gpt-0123456789" / folder_of(12))


def samples_of(*runs: Path) -> list[int]:
    """The ids of the samples that these runs see, in their order."""
    ids = list[int]()
    for run in runs:
        spec = read_spec(open_storage(str(run)))
        samples = open_data(spec, Path(spec.dataset)).train
        for step in range(spec.steps):
            ids += sample_ids_for_step(spec, samples, step).tolist()
    return ids


def test_a_decay_branch_equals_one_uninterrupted_run(new_run: NewRun) -> None:
    """Bit for bit: the branch continues weights, optimizer and samples, with its own learning rate."""
    uninterrupted = new_run("uninterrupted", schedule="wsd", decay_steps=4)
    stable = new_run("stable", schedule="constant", max_steps=7)
    for run in (uninterrupted, stable):
        train(run)
    branch = new_run(
        "branch", origin=found(stable, optimizer=True), schedule="linear", warmup_steps=0, max_steps=5
    )  # fmt: skip
    train(branch)
    losses = [curve(rows(run), "step", "loss") for run in (uninterrupted, stable, branch)]
    assert list(losses[0].values()) == [*losses[1].values(), *losses[2].values()]
    files = [
        sorted((run / folder).glob("*.distcp"))
        for run, folder in ((uninterrupted, folder_of(12)), (branch, folder_of(5)))
    ]
    assert [path.read_bytes() for path in files[0]] == [path.read_bytes() for path in files[1]]


def test_continued_runs_see_the_samples_of_one_long_run(
    finished: Path, new_run: NewRun, tiny_dataset: Path, bucket: Storage, train_elsewhere: TrainElsewhere
) -> None:
    """One is killed and resumed by more ranks, one has a growing batch and another one's weights in a bucket."""
    growing = [{"batch": 4}, {"batch": 12, "after": 0.5}]
    second = new_run("second", origin=found(finished, optimizer=True), max_steps=8, global_batch=growing)
    assert train_elsewhere((second, 1, 8)) == [[-signal.SIGKILL]]
    second = new_run(
        "second", origin=found(finished, optimizer=True), max_steps=8, global_batch=growing, world_size=2
    )  # fmt: skip
    assert train_elsewhere((second, 2, 0)) == [[0, 0]]
    assert [row["step"] for row in rows(second, "start")] == [0, 4]
    for path in (second / folder_of(8)).iterdir():
        bucket.upload(path, f"{folder_of(8)}/{path.name}")
    third = new_run("third", origin=found(bucket.address(folder_of(8)), optimizer=True), max_steps=3)
    train(third)
    long = new_run("long", max_steps=12 + (4 * 4 + 4 * 12) // 8 + 3)
    assert samples_of(finished, second, third) == samples_of(long)
    (seen,) = found(third).trained_on
    assert seen == (open_dataset(str(tiny_dataset)).content_hash, 1337, len(samples_of(long)), 32)


def test_order_of_samples_begins_again_where_it_is_not_continued(finished: Path, new_run: NewRun) -> None:
    """With another seed, or with the weights only; both orders are remembered."""
    origin = found(finished, optimizer=True)
    only_weights = new_run("weights", origin=found(finished), max_steps=4)
    assert samples_of(only_weights) == samples_of(finished)[:32]
    reseeded = new_run("reseeded", origin=origin, seed=1, max_steps=4)
    assert samples_of(reseeded) == samples_of(new_run("first", seed=1, max_steps=4))
    for run in (only_weights, reseeded):
        train(run)
    assert {(seen.seed, seen.samples) for seen in found(reseeded).trained_on} == {(1337, 96), (1, 32)}
    assert {(seen.seed, seen.samples) for seen in found(only_weights).trained_on} == {(1337, 96)}
    back = new_run("back", origin=found(reseeded, optimizer=True), max_steps=4)
    assert samples_of(finished, back) == samples_of(new_run("long", max_steps=16))


def test_unknown_place_in_the_samples_is_refused(finished_copy: Path, new_run: NewRun, tiny_dataset: Path) -> None:
    """Of a checkpoint that does not record it, and of samples that are cut otherwise."""
    origin, dataset = found(finished_copy, optimizer=True), open_dataset(str(tiny_dataset)).content_hash
    shorter = new_run("shorter", origin=origin, model=MODEL.model_copy(update={"sequence_length": 16}), max_steps=3)
    with pytest.raises(UserError, match=r"of 32 tokens, not of model\.sequence_length=16; set another train\.seed"):
        train(shorter)
    place = open_storage(str(finished_copy / folder_of(12)))
    manifest = read_manifest(place, CheckpointManifest)
    assert manifest is not None
    written = manifest.model_dump(mode="json") | {"trained_on": [[dataset, 1337]]}  # as earlier versions wrote it
    write_manifest(place, CheckpointManifest.model_validate(written))
    origin = found(finished_copy, optimizer=True)
    with pytest.raises(UserError, match=r"does not say how far; set another train\.seed, such as 1, or train on anoth"):
        train(new_run("again", origin=origin))
    weights = found(finished_copy)
    for own, hashes, seed in [(origin, {dataset}, 1), (origin, {"another"}, 1337), (weights, {dataset}, 1337)]:
        assert position_problem(own, hashes, seed=seed, length=32) is None


def test_nodes_fetch_from_a_bucket_what_they_start_from(
    finished: Path, new_run: NewRun, bucket: Storage, train_elsewhere: TrainElsewhere
) -> None:
    for path in (finished / folder_of(12)).iterdir():
        bucket.upload(path, f"{folder_of(12)}/{path.name}")
    origin = found(bucket.address(folder_of(12)))
    assert asked(origin) == []
    run = new_run("fetched", world_size=2, origin=origin, max_steps=3)
    assert train_elsewhere((run, 2, 0), nodes=2) == [[0, 0]]
    assert rows(run, "step")[0]["loss"] < rows(finished, "step")[0]["loss"] - 0.5
    assert not list(run.rglob("origin-*"))


def test_started_model_has_the_logits_of_its_weights(
    of_transformers: tuple[Path, ModelConfig, torch.Tensor], new_run: NewRun, tmp_path: Path
) -> None:
    config = litgpt_config(MODEL, vocab_size=300)
    gpt, chance = GPT(config), torch.Generator().manual_seed(5)
    for weights in gpt.parameters():  # written here: transformers replaces torch's initialisers while it loads a model
        weights.data.normal_(std=0.02, generator=chance)
    folder = tmp_path / "litgpt"
    folder.mkdir()
    save_config(config, folder)
    torch.save({"model": gpt.state_dict()}, folder / "lit_model.pth")
    root = open_storage(str(tmp_path / "root"))
    with torch.no_grad():
        for place, model, donor in [(folder, MODEL, gpt(IDS)), of_transformers]:
            assert asked(found(place), model) == []
            copied = fetch_initial_weights(found(place), root)
            assert copied.address == f"{root.address()}/weights/{copied.content_hash}"
            torch.testing.assert_close(logits(new_run(place.name, model=model), copied), donor, rtol=0, atol=1e-5)


@pytest.mark.parametrize("padded", [300, 320, 384])
def test_tokenizer_with_more_ids_than_the_weights_has_one_answer(
    of_transformers: tuple[Path, ModelConfig, torch.Tensor], padded: int
) -> None:
    folder, model, _ = of_transformers
    ((what, fix),) = asked(found(folder), model, vocab_size=330, padded_vocab_size=padded)
    assert what == f"the tokenizer has 330 ids, but the weights of {folder} 300 embeddings"
    assert fix.startswith("take the tokenizer of the weights")
    changed = model.model_copy(update={"init_from": str(folder), "config": {**model.config, "padded_vocab_size": 320}})
    with pytest.raises(UserError, match=r"330 ids, but model config has 320 embeddings.*take the tokenizer of"):
        litgpt_config(changed, vocab_size=330)


@pytest.fixture
def of_litgpt(tmp_path: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    """A folder of LitGPT with weights at random, and those."""
    save_config(config := litgpt_config(MODEL, vocab_size=300), tmp_path)
    return tmp_path, GPT(config).state_dict()


def test_prefixes_of_wrappers_are_taken_off_weights(
    of_litgpt: tuple[Path, dict[str, torch.Tensor]], new_run: NewRun, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, weights = of_litgpt
    wrapped = {f"module._orig_mod.{name.replace('h.1.', 'h.1._orig_mod.')}": weight for name, weight in weights.items()}
    for state in (wrapped, {"state_dict": wrapped, "epoch": 3}, {"model": weights}):
        torch.save(state, folder / "lit_model.pth")
        assert asked(found(folder)) == []
    torch.save({"state_dict": wrapped}, folder / "lit_model.pth")
    training = training_of(new_run("run"))
    start_from(training, found(folder))
    training.feed.close()
    assert torch.equal(training.model.module.lm_head.weight, weights["lm_head.weight"])
    assert "model.init_from: _orig_mod, module was removed from names of weights" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("state", "kind"),
    [({"net": {"lm_head.weight": torch.ones(1)}}, "dict by the name 'net'"), (torch.ones(1), "Tensor"), ([1], "list")],
)
def test_file_without_named_weights_is_refused(
    state: Any, kind: str, of_litgpt: tuple[Path, dict[str, torch.Tensor]]
) -> None:
    torch.save(state, of_litgpt[0] / "lit_model.pth")
    with pytest.raises(DataError, match=rf"holds a {kind}, not weights.*torch\.save"):
        asked(found(of_litgpt[0]))


@pytest.mark.parametrize(
    "name", ["lit_model.pth", "model_config.yaml", "model.safetensors", "config.json", "model.safetensors.index.json"]
)
def test_git_lfs_pointer_among_weights_is_refused(name: str, tmp_path: Path) -> None:
    pairs = (("lit_model.pth", "model_config.yaml"), ("model.safetensors", "config.json"))
    write(tmp_path, {**dict.fromkeys(pairs["lit" not in name and "yaml" not in name], b"x" * 2000), name: POINTER})
    with pytest.raises(UserError, match=f"{tmp_path}/{name} is a Git LFS pointer.*`git lfs pull`"):
        found(tmp_path)


def test_model_of_the_hub_is_fetched_at_the_start_as_pinned(
    of_transformers: tuple[Path, ModelConfig, torch.Tensor], monkeypatch: pytest.MonkeyPatch, new_run: NewRun,
    tmp_path: Path,
) -> None:  # fmt: skip
    folder, model, _ = of_transformers
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    repository = Repository(files, large={"model.safetensors"})
    with running_hub({"someone/llama": repository}) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
        origin = found("someone/llama")
        assert origin.name == f"someone/llama@{repository.commit}"
        assert asked(origin, model) == []
        assert hub.starts == [], "weights are fetched when the training starts"
        copied = fetch_initial_weights(origin, open_storage(str(tmp_path)), check := Mock())
        assert (copied.content_hash, hub.starts) == (origin.content_hash, [0])
        assert asked(check.call_args[0][0], model) == []
        assert logits(new_run("begun", model=model), copied) is not None
        assert fetch_initial_weights(origin, open_storage(str(tmp_path)), Mock(side_effect=[])) == copied
        with monkeypatch.context() as offline:
            offline.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
            assert found("someone/llama").content_hash == origin.content_hash
        hub.spoil = True
        shutil.rmtree(tmp_path / "cache")
        with pytest.raises(DataError, match=r"model.safetensors of someone/llama@.* was damaged on its way here"):
            fetch_initial_weights(found("someone/llama"), open_storage(str(tmp_path / "another")))
        with pytest.raises(UserError, match="check the name"):
            found("someone/else")


def test_each_mismatch_with_the_weights_has_a_fix(
    of_transformers: tuple[Path, ModelConfig, torch.Tensor], finished: Path, new_run: NewRun, tmp_path: Path
) -> None:
    origin = found(finished)
    ((what, fix),) = asked(origin, parallel_residual=False)
    assert "has parallel_residual False, but the weights of" in what
    assert fix.startswith("set model.config.parallel_residual=True")
    folder, model, _ = of_transformers
    wrong = asked(found(folder), model, rope_base=500, padded_vocab_size=320, n_query_groups=4)
    names = [what.split()[3] for what, _ in wrong]
    assert sorted(names) == ["n_query_groups", "padded_vocab_size", "rope_parameters"]
    ((what, _),) = asked(found(folder), MODEL)
    assert "is a llama, but the model is a gpt_neox to transformers" in what
    tensors, spoilt = load_file(folder / "model.safetensors"), Path(shutil.copytree(folder, tmp_path / "spoilt"))
    lost = "model.layers.1.mlp.up_proj.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != lost}, spoilt / "model.safetensors")
    ((what, _),) = asked(found(spoilt), model)
    assert what.startswith("transformer.h.1.mlp.fc_2.weight: no such tensor in")
    save_file({**tensors, "model.layers.1.extra": tensors[lost].clone()}, spoilt / "model.safetensors")
    with pytest.raises(DataError, match=r"has a tensor 'model.layers.\{\}.extra', but this model has none"):
        asked(found(spoilt), model)
    with pytest.raises(DataError, match="extra"):
        logits(new_run("begun", model=model), found(spoilt))
    half = Path(shutil.copytree(finished, tmp_path / "half"))
    shutil.rmtree(half / folder_of(12))
    with pytest.raises(UserError, match=r"is at step 8 of 12; name one of its checkpoints: .*step-00000008"):
        found(half)
    for name, problem in [(tmp_path / "none", "holds no weights to start from"), ("nothing", "holds no weights")]:
        with pytest.raises(UserError, match=problem):
            found(name)
    with pytest.raises(UserError, match="has no optimizer's state"):
        found(folder, optimizer=True)
