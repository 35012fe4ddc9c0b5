from __future__ import annotations

import fcntl
import json
import re
import socket
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from launcher.checks.plan import findings_of, lost_steps, plan_of, progress_of, steps_of
from launcher.config import (
    RunConfig,
    ScriptConfig,
    SweepConfig,
    SweepSettings,
    overridden,
    validated,
)
from launcher.errors import ConfigProblem
from launcher.formatting import bytes_text
from launcher.platforms.local.settings import LocalPlatformConfig
from launcher.runs.attempts import claim_at
from launcher.runs.run import plan_run, preview_run
from launcher.runs.sweeps import trials
from litgpt_demo.config import TokenizerFile, key_of
from litgpt_demo.data.dataset import UNKNOWN
from litgpt_demo.data.preparation import prepare
from litgpt_demo.errors import DataError, UserError
from litgpt_demo.export import FinalManifest
from litgpt_demo.manifests import write_manifest
from litgpt_demo.runs import FINAL, METRICS
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoints import CheckpointManifest, commit, folder_of

Tiny = Callable[..., RunConfig]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def tiny(tmp_path: Path, root: Path) -> Tiny:
    """Makes configs of a training so small that its dataset takes no time: `tiny({"train.seed": 7})`."""
    text = tmp_path / "poem.txt"
    text.write_text("\n\n".join(f"{number} bottles on the wall, {number} of them fall" for number in range(200)))
    document = {
        "name": "tiny",
        "root": str(root),
        "data": {
            "corpus": {"kind": "files", "paths": [str(text)], "separator": "\n\n"},
            "tokenizer": {"kind": "train", "vocab_size": 300},
            "validation_fraction": 0.05,
        },
        "model": {
            "name": None,
            "config": {"n_layer": 1, "n_embd": 32, "n_head": 2, "padded_vocab_size": 320},
            "sequence_length": 32,
        },
        "train": {"global_batch": 4, "micro_batch": 4, "max_steps": 8, "warmup_steps": 1},
    }
    return lambda changes=None: validated(RunConfig, overridden(document, changes or {}), where="tiny")


def would(config: RunConfig) -> dict[str, str]:
    return {row["step"]: row["would"] for row in steps_of(config)}


def commit_checkpoint(config: RunConfig, step: int) -> None:
    run = plan_run(config)
    manifest = CheckpointManifest(
        format=1, run=run.name, step=step, tokens=step * 128, dataset_key=run.dataset.key, validation_loss=None,
        world_size=1, versions={}, files=(),
    )  # fmt: skip
    write_manifest(run.storage.within(folder_of(step)), manifest)


def test_a_new_run_would_do_everything_and_planning_writes_nothing(tiny: Tiny, root: Path) -> None:
    config = tiny()
    size = (root.parent / "poem.txt").stat().st_size
    assert would(config) == {
        "dataset": f"prepare 1 files, {bytes_text(size)}, by as many threads as cores",
        "image": f"record this environment: torch {version('torch')}",
        "credentials": "prove write access",
        "training": "train 8 steps",
        "checkpoints": "verify the last checkpoint, make final/litgpt and final/huggingface",
    }
    assert not root.exists()


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        ({"kind": "threads", "count": 3}, "by 3 threads"),
        ({"kind": "processes"}, "by as many processes as cores"),
        ({"kind": "dask", "scheduler": "tcp://10.0.0.2:8786"}, "by the Dask workers of tcp://10.0.0.2:8786"),
    ],
)
def test_a_plan_names_the_workers(workers: dict[str, str], words: str, tiny: Tiny) -> None:
    assert would(tiny({"workers": workers}))["dataset"].endswith(words)


def test_every_step_says_where(tiny: Tiny, root: Path) -> None:
    config = tiny()
    run = plan_run(config)
    assert [row["where"] for row in steps_of(config)] == [
        f"{root}/{run.dataset.path}",
        "",
        str(root),
        f"{root}/runs/{run.name}",
        f"{root}/runs/{run.name}/{FINAL}",
    ]


def test_a_dataset_that_is_there_is_found_and_tells_how_long_one_pass_is(tiny: Tiny) -> None:
    config = tiny({"train.max_steps": None})
    assert would(config)["training"] == "train one pass over the data"
    run = plan_run(config)
    manifest = prepare(run.dataset, run.root)
    assert would(config)["dataset"] == f"nothing: done, {manifest.train.tokens:,} training tokens"
    assert would(config)["training"] == f"train {manifest.train.tokens // (4 * 32):,} steps"


def test_a_dataset_that_lost_a_file_is_no_dataset(tiny: Tiny) -> None:
    config = tiny()
    run = plan_run(config)
    prepare(run.dataset, run.root)
    run.root.remove(f"{run.dataset.path}/val.bin")
    with pytest.raises(DataError, match=r"val\.bin is missing"):
        steps_of(config)


def test_a_training_goes_on_where_it_stopped_until_it_is_done(tiny: Tiny) -> None:
    config = tiny()
    commit_checkpoint(config, 4)
    assert would(config)["training"] == "train on from step 4 of 8 steps"
    commit_checkpoint(config, 8)
    assert would(config)["training"] == "nothing: done, 8 steps"
    assert would(tiny({"train.learning_rate": 0.5}))["training"] == "train 8 steps"


def test_a_training_that_runs_would_be_taken_up(tiny: Tiny) -> None:
    config = tiny()
    attempt = Path(claim_at(plan_run(config)).take().directory)
    attempt.mkdir(parents=True)
    (attempt / "submission.json").write_text(json.dumps({"body": {"nodes": []}}))
    with (attempt / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as its supervisor holds it
        assert would(config)["training"] == "take up attempt 1, which is running"
    assert would(config)["training"] == "train 8 steps"


def test_a_collected_model_is_found(tiny: Tiny) -> None:
    config = tiny()
    run = plan_run(config)
    final = FinalManifest(
        run=run.name, step=8, tokens=1024, parameters=1, dataset_key=run.dataset.key, validation_loss=2.5,
        perplexity=12.2, validation_windows=1, logits_difference=0.0, logits_tolerance=1e-4, huggingface=None,
        prompt="", sample="", files=(),
    )  # fmt: skip
    write_manifest(run.storage.within(FINAL), final)
    assert would(config)["checkpoints"] == "nothing: done, loss 2.5000"
    commit_checkpoint(config, 12)  # as a longer training leaves it
    assert would(config)["checkpoints"].startswith("verify the last checkpoint")


def test_an_image_would_be_pinned(tiny: Tiny) -> None:
    reference = "example.test/litgpt@sha256:" + "0" * 64
    assert would(tiny({"image": {"kind": "prebuilt", "reference": reference}}))["image"] == "pin by digest"


def test_a_plan_says_what_the_training_takes(tiny: Tiny) -> None:
    planned = plan_of(tiny())
    figures = {row["what"]: row for row in planned.arithmetic}
    assert figures["parameters"]["arithmetic"] == "1 blocks of 12,704, embedding and output of 320 x 32 each"
    assert figures["FLOPs in all"]["arithmetic"] == "1,024 tokens"  # 8 steps of 4 samples of 32
    assert [row["step"] for row in planned.steps] == ["dataset", "image", "credentials", "training", "checkpoints"]


def test_a_training_that_cannot_fit_stands_in_the_way(tiny: Tiny) -> None:
    large = plan_of(tiny({"model": {"name": "transformer-175b", "config": {}}}))
    assert ("error", "train.memory") in {(finding.severity, finding.code) for finding in large.findings}


# --- how far it is ----------------------------------------------------------------------------------------------------


def test_progress_is_a_line_once_there_are_metrics(tiny: Tiny) -> None:
    storage = plan_run(tiny()).storage
    assert progress_of(storage, live=True) == ""
    rows = [
        {"kind": "start", "step": 0, "steps": 8, "tokens_per_step": 128},
        {"kind": "step", "step": 1, "loss": 5.5, "tokens": 128, "tokens_per_second": 1000, "step_seconds": 20.0},
        {"kind": "step", "step": 2, "loss": 5.25, "tokens": 256, "tokens_per_second": 1000, "step_seconds": 20.0},
    ]
    storage.write(METRICS, "".join(json.dumps(row) + "\n" for row in rows).encode())
    assert progress_of(storage, live=True) == "step 2/8, loss 5.2500, 1,000 tok/s, 2 min left"
    assert progress_of(storage, live=False) == "step 2/8, loss 5.2500"


# --- what blocks a run ------------------------------------------------------------------------------------------------


def test_the_next_attempts_port_is_the_one_that_is_checked(tiny: Tiny) -> None:
    with socket.create_server(("", 0)) as taken:
        found = findings_of(tiny({"platform": {"kind": "local", "port": taken.getsockname()[1]}}))
    assert "local.port" in {finding.code for finding in found}
    assert "local.port" not in {finding.code for finding in findings_of(tiny())}


def test_a_tokenizer_that_is_there_is_held_against_the_model(tiny: Tiny) -> None:
    run = plan_run(tiny())
    manifest = prepare(run.dataset, run.root)
    path = run.root.address(f"{run.dataset.path}/tokenizer/tokenizer.json")
    tokenizer = TokenizerFile(kind="file", path=path).model_dump()
    fits, does_not = (
        findings_of(tiny({"data.tokenizer": tokenizer, "model.config.padded_vocab_size": rows}))
        for rows in (manifest.vocab_size, manifest.vocab_size - 1)
    )
    assert "model.vocabulary" not in {finding.code for finding in fits}
    assert "model.vocabulary" in {finding.code for finding in does_not}


def test_a_scripts_findings_are_its_own(tmp_path: Path) -> None:
    config = ScriptConfig(root=str(tmp_path), script=str(tmp_path / "gone.py"))
    assert "script.missing" in {finding.code for finding in findings_of(config)}


def sweep_of(base: RunConfig, grid: dict[str, list[Any]], **settings: Any) -> SweepConfig:
    sections = {name: getattr(base, name) for name in RunConfig.model_fields}
    return SweepConfig(**sections, sweep=SweepSettings(grid=grid, **settings))


def test_what_is_wrong_with_every_trial_of_a_sweep_is_told_once(tiny: Tiny, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    sweep = sweep_of(tiny({"root": f"{tmp_path}/file"}), {"train.seed": [1, 2, 3]})
    assert [finding.code for finding in findings_of(sweep)].count("root.not-a-folder") == 1


def test_what_is_wrong_with_one_trial_is_told_with_its_name(tiny: Tiny) -> None:
    sweep = sweep_of(tiny(), {"model.config.padded_vocab_size": [320, 64], "train.seed": [1, 2]})
    for found in (findings_of(sweep), plan_of(sweep).findings):
        (finding,) = (one for one in found if one.code == "model.vocabulary")
        assert finding.severity == "error"
        assert finding.what.startswith("trial model.config.padded_vocab_size=64 train.seed=1 and 1 more: ")


def test_the_plan_of_a_sweep_lists_every_trial_and_adds_them_up(tiny: Tiny) -> None:
    config = tiny()
    sweep = sweep_of(config, {"train.max_steps": [8, 12], "model.config.n_embd": [32, 64]}, max_parallel=3)
    planned = plan_of(sweep)
    *rows, total = planned.trials
    assert [row["trial"] for row in rows] == [str(trial) for trial in trials(sweep)]
    assert [row["would"] for row in rows] == ["train 8 steps", "train 8 steps", "train 12 steps", "train 12 steps"]
    assert [row["run"] for row in rows] == [plan_run(trial.config).name for trial in trials(sweep)]
    assert (total["trial"], total["would"]) == ("all 4, 3 at a time", "40 steps left")
    each = [float(row["FLOPs"]) for row in rows]
    assert float(total["FLOPs"]) == pytest.approx(sum(each), rel=0.01)
    assert [step["step"] for step in planned.steps] == ["dataset", "image", "credentials"], "what they share, once"
    commit_checkpoint(trials(sweep)[0].config, 8)
    *rows, total = plan_of(sweep).trials
    assert (rows[0]["would"], total["would"]) == ("nothing: done, 8 steps", "32 steps left")


def test_the_cost_of_a_sweep_is_that_of_its_trials(tiny: Tiny) -> None:
    machine = {"kind": "gke", "machine": "a3-highgpu-8g", "nodes": 1, "kubeconfig": "/nowhere"}
    config = tiny({"platform": machine, "train.global_batch": 8, "train.micro_batch": 1, "train.max_steps": 10**7})
    one = plan_of(sweep_of(config, {"train.seed": [1]})).trials[0]["would"]
    *rows, total = plan_of(sweep_of(config, {"train.seed": [1, 2, 3, 4]}, max_parallel=2)).trials
    dollars = [float(re.search(r"\$([\d,.]+)", row["would"])[1].replace(",", "")) for row in (*rows, total)]  # type: ignore[index]
    assert one == rows[0]["would"]
    assert dollars[-1] == pytest.approx(sum(dollars[:-1]), abs=1)


def test_trials_that_run_at_once_on_this_machine_have_to_fit_it_together(tiny: Tiny) -> None:
    grid = {"train.seed": list(range(1, 65))}
    batch = {"train.micro_batch": 2**14, "train.global_batch": 2**14}
    alone = plan_of(sweep_of(tiny(batch), grid))
    assert "sweep.memory" not in {finding.code for finding in alone.findings}
    (finding,) = (
        one for one in plan_of(sweep_of(tiny(batch), grid, max_parallel=64)).findings if one.code == "sweep.memory"
    )
    assert "64 trials at a time take about" in finding.what
    fits = int(finding.fix.removeprefix("set sweep.max_parallel="))
    assert 1 <= fits < 64
    fixed = plan_of(sweep_of(tiny(batch), grid, max_parallel=fits))
    assert "sweep.memory" not in {one.code for one in fixed.findings}


def test_a_corpus_that_is_not_there_stands_in_the_way(tiny: Tiny) -> None:
    with pytest.raises(UserError, match="nowhere"):
        findings_of(tiny({"data.corpus.paths": ["/nowhere/at/all.txt"]}))


# --- what cannot be asked from here -----------------------------------------------------------------------------------


@pytest.fixture
def no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # the discard port, where nobody listens


@pytest.mark.usefixtures("no_hub")
def test_a_run_whose_corpus_cannot_be_asked_for_is_shown_and_never_started(tiny: Tiny, root: Path) -> None:
    config = tiny({"data.corpus": {"kind": "hub", "name": "some/text"}})
    planned = plan_of(config)
    (unknown,) = (finding for finding in planned.findings if finding.code == "data.unknown")
    assert unknown.severity == "unknown"
    assert "http://127.0.0.1:9 cannot be reached" in unknown.what
    assert {row["step"]: row["where"] for row in planned.steps}["training"] == f"{root}/runs/tiny-unknown"
    run = preview_run(config)
    with pytest.raises(UserError, match=r"cannot be made while its sources are not known"):
        prepare(run.dataset, run.root)
    with pytest.raises(ConfigProblem, match=r"tiny-unknown can be looked at, and not be started"):
        claim_at(run).take()
    with pytest.raises(UserError, match="cannot be reached"):
        plan_run(config)
    assert not root.exists()


def test_a_key_that_is_not_known_looks_like_no_key() -> None:
    assert not re.fullmatch("[0-9a-f]+", UNKNOWN)
    assert re.fullmatch("[0-9a-f]+", key_of("anything"))


def test_too_many_processes_are_told(tiny: Tiny) -> None:
    crowded = LocalPlatformConfig(kind="local", nodes=64, processes=64)
    config = tiny({"platform": crowded.model_dump(), "train.global_batch": 4 * 64 * 64})
    assert "local.cores" in {finding.code for finding in findings_of(config)}


# --- what a cancelled training loses ----------------------------------------------------------------------------------


def test_the_steps_that_no_checkpoint_holds_are_lost_and_said(tmp_path: Path) -> None:
    run = open_storage(str(tmp_path))
    assert lost_steps(run) == ""
    rows = [{"kind": "step", "step": step, "loss": 1.0} for step in range(1, 138)]
    run.write("metrics.jsonl", "".join(f"{json.dumps(row)}\n" for row in rows).encode())
    assert lost_steps(run) == (
        "steps 1 to 137 are lost: the training goes on from its beginning, for it has no checkpoint yet"
    )
    for step in (100, 120):
        commit(run, manifest(step))
    assert lost_steps(run) == "steps 121 to 137 are lost: the training goes on from the checkpoint of step 120"
    commit(run, manifest(137))
    assert lost_steps(run) == ""


def manifest(step: int) -> CheckpointManifest:
    return CheckpointManifest(
        format=2, run="run", step=step, tokens=step, dataset_key="key", validation_loss=None, world_size=1,
        versions={}, files=(),
    )  # fmt: skip
