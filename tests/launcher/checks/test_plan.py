import json
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import yaml
from console_script import Cli

from launcher.checks.arithmetic import figures
from launcher.checks.plan import Inspection, lost_steps, plan_of, progress_of
from launcher.config import RunConfig, SweepConfig, SweepSettings
from launcher.errors import ConfigProblem
from launcher.runs.attempts import job_handle
from launcher.runs.run import plan_run, preview_run, training_spec
from launcher.runs.sweeps import trials
from litgpt_demo.data.dataset import plan_dataset
from litgpt_demo.data.preparation import prepare
from litgpt_demo.data.readers import Source
from litgpt_demo.documents import write_manifest
from litgpt_demo.errors import EXIT_CODES, DataError, FailureClass, UserError
from litgpt_demo.export import FinalManifest
from litgpt_demo.runs import FINAL, METRICS
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoints import CheckpointManifest, commit, folder_of

Tiny = Callable[..., RunConfig]


@pytest.fixture(autouse=True)
def _small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU, and with 16 GB, whatever this one has."""
    monkeypatch.setattr("launcher.checks.arithmetic.gpu_names", list)
    monkeypatch.setattr("launcher.checks.preflight.gpu_names", list)
    monkeypatch.setattr("launcher.checks.arithmetic.host_memory", lambda: 16 * 10**9)


def would(config: RunConfig) -> dict[str, str]:
    return {row["step"]: row["action"] for row in plan_of(config).steps}


def checkpoint(step: int) -> CheckpointManifest:
    return CheckpointManifest(
        format=1, run="run", step=step, tokens=step * 128, dataset_hash="hash", validation_loss=None, world_size=1,
        versions={}, files=(),
    )  # fmt: skip


def commit_checkpoint(config: RunConfig, step: int) -> None:
    run = plan_run(config)
    manifest = checkpoint(step).model_copy(update={"run": run.name, "dataset_hash": run.dataset.content_hash})
    write_manifest(run.storage.within(folder_of(step)), manifest)


def test_a_plan_says_how_much_of_a_corpus_is_read(tiny: Tiny, tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(f"{name} text\n\n" * 1000)
    files = {"kind": "files", "paths": [str(tmp_path / "*.txt")], "separator": "\n\n"}
    for most, read in ((None, "3 files, 24.0 kB,"), (10_000, "about 2 of 3 files, 10.0 kB of text,")):
        planned = would(tiny({"data.corpus": {**files, "max_bytes": most}}))["dataset"]
        assert planned.startswith(f"prepare {read} by ")


def test_plan_of_a_new_run_has_every_stage_without_writing(tiny: Tiny, tmp_path: Path) -> None:
    planned = plan_of(tiny())
    run = plan_run(tiny())
    assert [(row["step"], row["action"].partition(",")[0], row["where"]) for row in planned.steps] == [
        ("dataset", "prepare 1 files", f"{tmp_path}/{run.dataset.path}"),
        ("image", f"record this environment: torch {version('torch')}", ""),
        ("credentials", "prove write access", str(tmp_path)),
        ("training", "train 8 steps", f"{tmp_path}/runs/{run.name}"),
        ("checkpoints", "verify the last checkpoint", f"{tmp_path}/runs/{run.name}/{FINAL}"),
    ]
    arithmetic = {row["what"]: row["arithmetic"] for row in planned.arithmetic}
    assert arithmetic["FLOPs in all"] == "1,024 tokens, 0.0308 per parameter"
    assert list(tmp_path.iterdir()) == []


def test_steps_by_tokens_per_parameter_are_those_of_the_run(tiny: Tiny) -> None:
    """The vocabulary of a trained tokenizer is known before the dataset exists."""
    config = tiny({"train.max_steps": None, "train.tokens_per_parameter": 0.5})
    planned = plan_of(config)
    [row] = [row for row in planned.arithmetic if row["what"] == "FLOPs in all"]
    assert row["arithmetic"].endswith(" 0.5 per parameter")
    trained = would(config)["training"]
    run = plan_run(config)
    assert trained.startswith(f"train {training_spec(run, prepare(run.dataset, run.root)).steps:,} steps")


def test_a_plan_says_the_peak_of_scratch_disk_of_a_remote_corpus(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny({"dataset_workers.count": 2})
    assert "scratch" not in would(config)["dataset"]
    files = [Source(address=f"gs://b/{n}", name=f"{n}", size=n * 10**9, version="crc32c:0") for n in range(1, 6)]
    planned = replace(plan_dataset(config.data), sources=tuple(files))
    monkeypatch.setattr("launcher.runs.run.preview_dataset", lambda data: planned)
    scratch = f"with about 18.0 GB of scratch in {config.root}/.scratch/{planned.path.rpartition('/')[2]}"
    assert would(config)["dataset"].endswith(f"{scratch}, and 24.0 GB while half of that disk is free")


def test_plan_has_one_duration_by_the_precisions_peak(tiny: Tiny) -> None:
    gke = {"kind": "kubernetes", "machine": "a2-highgpu-8g"}
    steps, a100 = 10**8, {"32-true": 156, "bf16-mixed": 312}
    for precision, peak in a100.items():
        train = {"global_batch": 64, "micro_batch": 8, "max_steps": steps, "precision": precision}
        config = tiny({"platform": gke, **{f"train.{name}": value for name, value in train.items()}})
        (row,) = (row for row in figures(config, vocab_size=300, tokens=steps * 64 * 32) if "in all" in row["what"])
        duration, _, share = row["arithmetic"].partition("; ")[2].partition(" at ")
        assert share == f"35% of 8 A100 of {peak:g} TFLOP/s"
        assert f"about {duration} at 35% of peak" in would(config)["training"]


def test_plan_counts_the_tokens_of_a_growing_batch(tiny: Tiny) -> None:
    stages = {"train.global_batch": [{"batch": 4}, {"batch": 12, "after": 6}]}
    config = tiny(stages)
    (row,) = (row for row in plan_of(config).arithmetic if row["what"] == "FLOPs in all")
    assert row["arithmetic"].startswith("1,536 tokens"), "8 steps of 32 tokens a sample"
    inspection = Inspection(work=plan_run(config), handle=job_handle(plan_run(config)))
    assert [inspection.tokens_since(done) // 32 for done in (0, 2, 7, 8, 9)] == [48, 40, 12, 0, 0]
    short = tiny(stages | {"train.max_steps": None, "train.max_tokens": 256, "train.warmup_steps": 0})
    (finding,) = (finding for finding in plan_of(short).findings if finding.code == "train.global_batch")
    assert finding.what.endswith("one has no step of the 2 steps that train.max_tokens=256 makes")


def test_plan_finds_only_a_complete_dataset(tiny: Tiny) -> None:
    config = tiny({"train.max_steps": None})
    assert would(config)["training"] == "train one pass over the data"
    run = plan_run(config)
    manifest = prepare(run.dataset, run.root)
    assert would(config)["dataset"] == f"nothing: done, {manifest.train.tokens:,} training tokens"
    assert would(config)["training"] == f"train {manifest.train.tokens // (4 * 32):,} steps"
    run.root.remove(f"{run.dataset.path}/val.bin")
    with pytest.raises(DataError, match=r"val\.bin is missing"):
        plan_of(config)


def test_plan_continues_a_run_until_its_model_is_collected(tiny: Tiny) -> None:
    config = tiny()
    commit_checkpoint(config, 4)
    assert would(config)["training"] == "continue from step 4 of 8 steps"
    commit_checkpoint(config, 8)
    assert would(config)["training"] == "nothing: done, 8 steps"
    run = plan_run(config)
    final = FinalManifest(
        run=run.name, step=8, tokens=1024, parameters=1, dataset_hash=run.dataset.content_hash, validation_loss=2.5,
        perplexity=12.2, validation_windows=1, logits_difference=0.0, logits_tolerance=1e-4, huggingface=None,
        prompt="", sample="", files=(),
    )  # fmt: skip
    write_manifest(run.storage.within(FINAL), final)
    assert would(config)["checkpoints"] == "nothing: done, loss 2.5000"
    commit_checkpoint(config, 12)  # as a longer training leaves it
    assert would(config)["checkpoints"].startswith("verify the last checkpoint")
    assert would(tiny({"train.learning_rate": 0.5}))["training"] == "train 8 steps"


def test_progress_is_a_line_once_there_are_metrics(tmp_path: Path) -> None:
    """Steps that no checkpoint holds are lost."""
    run = open_storage(str(tmp_path))
    assert (progress_of(run, live=True), lost_steps(run)) == ("", "")
    rows: list[dict[str, Any]] = [{"kind": "start", "step": 0, "steps": 200, "tokens_per_step": 128}]
    speed = {"tokens_per_second": 1000, "step_seconds": 20.0}
    rows += [{"kind": "step", "step": step, "loss": 5.25, "tokens": step * 128, **speed} for step in range(1, 138)]
    run.write(METRICS, "".join(json.dumps(row) + "\n" for row in rows).encode())
    assert progress_of(run, live=True) == "step 137/200, loss 5.2500, 1,000 tok/s, 21 min left"
    assert "from its beginning, because it has no checkpoint yet" in lost_steps(run)
    commit(run, checkpoint(120))
    assert lost_steps(run) == "steps 121 to 137 are lost: the training continues from the checkpoint of step 120"
    commit(run, checkpoint(137))
    assert lost_steps(run) == ""


def sweep_of(base: RunConfig, grid: dict[str, list[Any]], **settings: Any) -> SweepConfig:
    sections = {name: getattr(base, name) for name in RunConfig.model_fields}
    return SweepConfig(**sections, sweep=SweepSettings(grid=grid, **settings))


def test_the_plan_of_a_sweep_lists_every_trial_and_adds_them_up(tiny: Tiny) -> None:
    sweep = sweep_of(tiny(), {"train.max_steps": [8, 12], "model.config.n_embd": [32, 64]}, max_parallel=3)
    planned = plan_of(sweep)
    *rows, total = planned.trials
    assert [row["trial"] for row in rows] == [str(trial) for trial in trials(sweep)]
    assert [row["action"] for row in rows] == ["train 8 steps", "train 8 steps", "train 12 steps", "train 12 steps"]
    assert (total["trial"], total["action"]) == ("all 4, 3 at a time", "40 steps left")
    assert float(total["FLOPs"]) == pytest.approx(sum(float(row["FLOPs"]) for row in rows), rel=0.01)
    assert [step["step"] for step in planned.steps] == ["dataset", "image", "credentials"], "what they share, once"
    commit_checkpoint(trials(sweep)[0].config, 8)
    *rows, total = plan_of(sweep).trials
    assert (rows[0]["action"], total["action"]) == ("nothing: done, 8 steps", "32 steps left")


HUGE_BATCH = "train.micro_batch=8192 | train.global_batch=8192"
# What is changed in a training, and words of the refusal.
REFUSED = [
    ("train.precision=16-mixed", "needs a GPU, and this machine has none"),
    ("train.wandb={project: pages, secret: NOBODY_EXPORTS_THIS}", "needs the secret NOBODY_EXPORTS_THIS"),
    ("model={name: transformer-175b, config: {}}", "a model of at most about"),
    ("model.sequence_length=50000", "one sample of model.sequence_length=50000 needs 50001"),
    ("root=s3://bucket/x", "has an unknown scheme; give gs://bucket/prefix"),
    ("root=/proc/runs", "cannot write to /proc"),
    ("platform={kind: kubernetes, gpus: 1}", "runs container images, but image.kind=none"),
    (
        "platform={kind: kubernetes, machine: a4x-highgpu-4g} | image={kind: docker, repository: r/x} "
        "| train.global_batch=16",
        "set image.architecture to arm64",
    ),
    ("dataset_workers={kind: dask, scheduler: 'tcp://127.0.0.1:9'}", "scheduler=tcp://127.0.0.1:9 does not accept"),
    ("data.tokenizer={kind: file, path: pi.py}", "is not a tokenizer, or is cut off (Cannot"),
    ("sweep={grid: {model.config.padded_vocab_size: [320, 64], train.seed: [1, 2]}}", "train.seed=1 and 1 more: the"),
    (f"{HUGE_BATCH} | sweep={{grid: {{train.seed: {list(range(64))}}}, max_parallel: 64}}", "set sweep.max_parallel="),
]
REFUSED_CORPORA = [
    ("data.corpus.paths=[latin1.txt]", "latin1.txt"),
    ("data.corpus={kind: files, paths: [cut.jsonl]}", "cut.jsonl, line 2"),
    ("data.filters.min_characters=100000", "has 0 documents"),
]


def test_plan_refuses_impossible_configs_by_class(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Tiny, cli: Cli
) -> None:
    """Its output says why."""
    training = yaml.safe_dump(tiny().model_dump(mode="json"))
    script = "{name: pi, script: pi.py}"
    cut = '{"text": "whole"}\n{"text": "cut\n'
    for name, text in {"training.yaml": training, "script.yaml": script, "pi.py": "", "cut.jsonl": cut}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "latin1.txt").write_bytes("café".encode("latin-1"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    before = sorted(tmp_path.iterdir())

    def require_refusal(message: str, code: int, *command: str) -> None:
        result = cli("plan", *command)
        assert (message in " ".join(f"{result.out} {result.err}".split()), result.code) == (True, code), (
            command,
            result,
        )

    for changes, message in REFUSED:
        require_refusal(message, EXIT_CODES[FailureClass.USER], "training.yaml", *changes.split(" | "))
    for changes, message in REFUSED_CORPORA:
        require_refusal(message, EXIT_CODES[FailureClass.DATA], "training.yaml", *changes.split(" | "))
    require_refusal("pi2.py is not a file", EXIT_CODES[FailureClass.USER], "script.yaml", "script=pi2.py")
    require_refusal("module pi2 is not installed", EXIT_CODES[FailureClass.USER], "script.yaml", "script=-m pi2")
    assert cli("plan", "training.yaml").code == cli("plan", "script.yaml", "script=-m pi").code == 0
    assert sorted(tmp_path.iterdir()) == before


def test_run_with_an_unreachable_corpus_is_shown_not_started(
    tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard port, where nobody listens
    config = tiny({"data.corpus": {"kind": "hub", "name": "some/text"}})
    planned = plan_of(config)
    (unknown,) = (finding for finding in planned.findings if finding.code == "data.unknown")
    assert unknown.severity == "unknown"
    run = preview_run(config)
    assert {row["step"]: row["where"] for row in planned.steps}["training"] == f"{tmp_path}/runs/{run.name}"
    with pytest.raises(ConfigProblem, match=r"-unknown can be inspected, but not started"):
        job_handle(run).reattach_or_create()
    with pytest.raises(UserError, match="cannot be reached"):
        plan_run(config)
    assert list(tmp_path.iterdir()) == []


def test_a_plan_says_what_of_a_corpus_is_not_read(tiny: Tiny, tmp_path: Path, corpus: Path) -> None:
    (folder := tmp_path / "texts").mkdir()
    (folder / "corpus.txt").symlink_to(corpus)
    (folder / "again").symlink_to(folder)
    (finding,) = (
        finding for finding in plan_of(tiny({"data.corpus.paths": [str(folder)]})).findings if "data." in finding.code
    )
    assert (finding.severity, finding.code) == ("warning", "data.left-out")
    assert f"{folder}/again is a link to {folder}, which contains it" in finding.what
