"""`train-litgpt replay` with ranks of its own, for a run that was killed and moved from one rank to two."""

import json
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from console_script import Cli
from hostile import flip_a_bit
from training_runs import NewRun, TrainElsewhere, write_run

from launcher.provenance.statements import write_statements
from litgpt_demo.export.models import export
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoints import folder_of


def test_spike_is_replayed_as_the_run_was_trained(
    new_run: NewRun, tiny_dataset: Path, train_elsewhere: TrainElsewhere, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("launcher.replay.usable_cores", lambda: 2)
    run = new_run("run", keep_every=4)
    assert train_elsewhere((run, 1, 8)) == [[-signal.SIGKILL]]
    write_run(run, tiny_dataset, world_size=2, keep_every=4)
    assert train_elsewhere((run, 2, 0)) == [[0, 0]]
    shown = cli("replay", str(run), "--steps", "5-12", "--tolerance", "0", "--json")
    assert shown.code == 0, shown.err
    found = json.loads(shown.out)
    assert (found["began_at"], found["world_size"], found["largest_difference"]) == (4, 2, 0)
    assert [step["step"] for step in found["steps"]] == [*range(5, 13)]
    assert "Equal bit for bit" in Path(found["page"]).read_text()
    by_one = cli("replay", str(run), "--steps", "5-12", "--tolerance", "0", "--processes", "1")
    assert by_one.code == 1
    assert "Different beyond the tolerance 0" in by_one.out
    earlier = cli("replay", str(run), "--steps", "2-3", "--processes", "1")
    assert (earlier.code, "train.keep_every" in earlier.err) == (40, True)
    assert cli("replay", str(run), "--steps", "2-3", "--from-start", "--tolerance", "0", "--processes", "1").code == 0


def test_run_killed_twice_and_moved_verifies_in_a_copy(
    tmp_path: Path, tiny_dataset: Path, one_thread: None, train_elsewhere: TrainElsewhere, cli: Cli,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Its own root is gone by then."""
    monkeypatch.setattr("launcher.replay.usable_cores", lambda: 2)
    root, settings = tmp_path / "root", {"max_steps": 200, "checkpoint_every": 20, "keep_every": 20}
    dataset = Path(shutil.copytree(tiny_dataset, root / "datasets" / tiny_dataset.name))
    run = write_run(root / "runs/run", dataset, **settings)
    assert train_elsewhere((run, 1, 80)) == [[-signal.SIGKILL]]
    assert train_elsewhere((run, 1, 140)) == [[-signal.SIGKILL]]
    write_run(run, dataset, world_size=2, **settings)
    assert train_elsewhere((run, 2, 0)) == [[0, 0]]
    export(open_storage(str(run)))
    write_statements(open_storage(str(run)))
    subprocess.run(["openssl", "ecparam", "-name", "prime256v1", "-genkey", "-noout", "-out", "key"], cwd=tmp_path)
    subprocess.run(["openssl", "pkey", "-in", "key", "-pubout", "-out", "key.pub"], cwd=tmp_path)
    assert cli("sign", str(run), "--key", str(tmp_path / "key")).code == 0
    copy = Path(shutil.copytree(root, tmp_path / "copy"))
    shutil.rmtree(root)
    options = ("--public-key", str(tmp_path / "key.pub"), "--replay", "5")
    verified = cli("verify", str(copy / "runs/run"), *options)
    assert verified.code == 0, verified.err
    assert "210 batches of the dataset" in verified.out, "of each step, and the sums of 10 checkpoints"
    assert re.search(r"(\d+) steps trained again", verified.out)
    flip_a_bit(copy / "runs/run/final/litgpt/lit_model.pth")
    forged = cli("verify", str(copy / "runs/run"), *options[:2])
    assert (forged.code, "final/litgpt/lit_model.pth" in forged.err) == (1, True)


def test_failed_replay_names_its_cause(finished: Path, tmp_path: Path, cli: Cli) -> None:
    run = Path(shutil.copytree(finished, tmp_path / "run"))
    flip_a_bit(next((run / folder_of(8)).glob("*.distcp")))
    failed = cli("replay", str(run), "--steps", "9", "--processes", "1")
    assert failed.code == 40
    assert "does not verify and is not used" in failed.out
    assert "no checkpoint before step 9 verifies" in failed.err
    assert not (run / "replays").exists()
