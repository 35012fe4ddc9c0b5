from __future__ import annotations

import fcntl
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import google_crc32c
import pytest
import yaml
from console_script import Cli, Said
from gke_jobs import IMAGE
from kubernetes_cluster import running_cluster
from terminal import Terminal
from typer.models import CommandInfo
from typer.testing import CliRunner
from waiting import until

from cli.main import app, read_config
from launcher.config import RunConfig, ScriptConfig, SweepConfig, validated
from launcher.errors import ConfigProblem, PlatformUnreachable, UnknownRun
from launcher.formatting import bytes_text
from launcher.runs.attempts import Claim, claim_of
from launcher.runs.index import Index
from launcher.runs.run import plan_run
from launcher.runs.sweeps import sweep_name, trials
from litgpt_demo.config import DataConfig
from litgpt_demo.data.dataset import DatasetManifest, plan_dataset
from litgpt_demo.data.preparation import prepare
from litgpt_demo.errors import EXIT_CODES, Fault
from litgpt_demo.manifests import FileRecord, read_manifest, write_manifest
from litgpt_demo.runs import METRICS
from litgpt_demo.storage import open_storage

CHECKOUT = Path(__file__).parents[2]
CONFIGS = CHECKOUT / "deployments" / "configs"
GOLDEN = CHECKOUT / "tests" / "golden" / "render-local.yaml"
USER = EXIT_CODES[Fault.USER]

TRAINING = """
name: tiny
root: out
data:
  corpus: {kind: files, paths: [poem.txt], separator: "\n\n"}
  tokenizer: {kind: train, vocab_size: 300}
  validation_fraction: 0.05
model: {name: null, config: {n_layer: 1, n_embd: 32, n_head: 2}, sequence_length: 32}
train: {global_batch: 4, micro_batch: 4, max_steps: 8, warmup_steps: 1, precision: 32-true}
"""


POEM = "\n\n".join(f"{number} bottles on the wall, {number} of them fall" for number in range(200))


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a training, a script and a sweep, in which one starts."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "poem.txt").write_text(POEM)
    (tmp_path / "training.yaml").write_text(TRAINING)
    (tmp_path / "pi.py").touch()
    (tmp_path / "script.yaml").write_text("name: pi\nroot: out\nscript: pi.py\n")
    (tmp_path / "twice.yaml").write_text("\n" * 10 + "train:\n  seed: 1\n  max_steps: 9\n  seed: 2\n")
    (tmp_path / "sweep.yaml").write_text(TRAINING + "sweep: {grid: {train.seed: [1, 2]}}\n")
    return tmp_path


def squeezed(text: str) -> str:
    return re.sub(r"[ ]+", " ", text)


# --- help -------------------------------------------------------------------------------------------------------------


def test_help_lists_every_command() -> None:
    commands = {"run", "submit", "prepare", "render", "plan", "doctor", "runs", "status", "logs", "cancel", "reap"}
    commands |= {"sweep", "verify", "collect"}
    said = CliRunner().invoke(app, ["--help"]).output
    assert commands <= set(re.findall(r"^\W+([a-z]+) ", said, re.MULTILINE))


@pytest.mark.parametrize("command", app.registered_commands, ids=lambda command: command.callback.__name__)
def test_every_command_says_what_it_does(command: CommandInfo) -> None:
    assert command.callback is not None
    result = CliRunner().invoke(app, [command.name or command.callback.__name__, "--help"])
    first_line = str(command.callback.__doc__).splitlines()[0]
    assert result.exit_code == 0
    assert first_line in " ".join(result.output.split())


def test_without_a_command_help_is_shown() -> None:
    assert "Usage" in CliRunner().invoke(app, []).output


def test_the_version_names_what_runs_and_imports_nothing_heavy() -> None:
    code = (
        "import sys, cli.main\n"
        "try: cli.main.main()\n"
        "finally: print(sorted({'torch', 'prefect', 'litgpt', 'lightning'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code, "--version"], capture_output=True, text=True, check=True)
    ours, others, imported = done.stdout.splitlines()
    assert re.fullmatch(r"train-litgpt \d+\.\d+\.\d+(, commit [0-9a-f]{10}( with changes)?)?", ours)
    assert re.fullmatch(r"torch 2\.\S+, litgpt 0\.\S+, prefect 3\.\S+, python 3\.\S+", others)
    assert imported == "[]"


# --- which config ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "kind"), [("training.yaml", RunConfig), ("script.yaml", ScriptConfig), ("sweep.yaml", SweepConfig)]
)
def test_a_files_sections_say_what_it_is(here: Path, name: str, kind: type[Any]) -> None:
    assert type(read_config(here / name, None)) is kind


def test_an_override_can_make_a_sweep_of_a_training(here: Path) -> None:
    config = read_config(here / "training.yaml", ["sweep.grid={train.seed: [1, 2]}", "train.learning_rate=3e-4"])
    assert isinstance(config, SweepConfig)
    assert config.sweep.grid == {"train.seed": [1, 2]}
    assert config.train.learning_rate == 3e-4


@pytest.mark.parametrize("mount", ["mine", "./mine", "~/mine"])
def test_a_deployment_takes_no_folder_below_whatever_its_worker_runs_in(mount: str, tmp_path: Path) -> None:
    given = {"script": "train.py"}
    with pytest.raises(ConfigProblem, match=r"code\.mount=.*takes an absolute path, of a folder that its worker has"):
        parameters("run-torchrun", given, {"code": {"mount": mount}})
    made = parameters("run-torchrun", given, {"code": {"mount": str(tmp_path)}})
    assert made["code"] == {"mount": str(tmp_path)}


def test_a_profile_takes_the_place_of_where_a_config_runs(here: Path) -> None:
    (here / "there.yaml").write_text("root: there\nplatform: {kind: local, nodes: 1, grace: 7}\n")
    for name in ("training.yaml", "script.yaml", "sweep.yaml"):
        config = read_config(here / name, ["platform.processes=1"], here / "there.yaml")
        assert (config.root, config.platform.nodes, config.platform.processes) == ("there", 1, 1)


@pytest.mark.parametrize(
    "verb",
    ["run", "benchmark-network", "prepare", "sweep", "collect", "render", "plan", "doctor", "status", "logs", "cancel"],
)
def test_every_verb_that_takes_a_config_takes_a_profile(here: Path, cli: Cli, verb: str) -> None:
    (here / "whole.yaml").write_text(TRAINING + "platform: {kind: local}\n")
    said = cli(verb, "training.yaml", "--platform", "whole.yaml")
    assert said.code == USER
    assert "whole.yaml is given as a profile and has name, " in said.err


def test_a_verb_that_is_given_a_config_looks_under_the_profiles_root(here: Path, cli: Cli) -> None:
    (here / "there.yaml").write_text("root: there\nplatform: {kind: local}\n")
    assert str(here / "there") in cli("status", "training.yaml", "--platform", "there.yaml").err
    said = cli("status", "tiny", "--platform", "there.yaml")
    assert (said.code, "--platform=there.yaml belongs to a config" in said.err) == (USER, True)


# --- verify -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def dataset(here: Path) -> Path:
    """A prepared one."""
    (here / "documents.txt").write_text("\n\n".join(f"document {number} of a few" for number in range(300)))
    tokenizer = {"kind": "train", "vocab_size": 300}
    corpus = {"kind": "files", "paths": [str(here / "documents.txt")], "separator": "\n\n"}
    planned = plan_dataset(DataConfig.model_validate({"corpus": corpus, "tokenizer": tokenizer}))
    prepare(planned, open_storage(str(here / "root")))
    return here / "root" / planned.path


def changed(path: Path, change: Callable[[bytearray], Any]) -> None:
    content = bytearray(path.read_bytes())
    change(content)
    path.write_bytes(content)


def test_a_sound_dataset_is_verified_and_counted(cli: Cli, dataset: Path) -> None:
    said = cli("verify", str(dataset))
    assert said.code == 0
    assert re.search(r"✓ \d files, .*/s: 300 documents, [\d,]+ tokens, all as the manifest says", said.out)


def test_each_problem_of_a_dataset_is_a_line_and_the_exit_code_says_data(cli: Cli, dataset: Path) -> None:
    def flip(content: bytearray) -> None:
        content[100] ^= 1

    changed(dataset / "train.bin", flip)
    (dataset / "val.bin").unlink()
    said = cli("verify", str(dataset))
    assert said.code == EXIT_CODES[Fault.DATA]
    lines = [line for line in said.out.splitlines() if line.startswith("✗")]
    assert any("val.bin is missing" in line for line in lines)
    assert any("train.bin has crc32c" in line for line in lines)
    assert str(dataset) in said.err


def test_an_id_beyond_the_vocabulary_is_found_even_if_the_checksums_agree(cli: Cli, dataset: Path) -> None:
    def beyond(content: bytearray) -> None:
        content[0:2] = (65_000).to_bytes(2, "little")  # a document's first id

    changed(dataset / "train.bin", beyond)
    manifest = read_manifest(open_storage(str(dataset)), DatasetManifest)
    assert manifest is not None
    content = (dataset / "train.bin").read_bytes()
    record = FileRecord(
        path="train.bin", size=len(content), crc32c=f"{google_crc32c.value(content):08x}",
        sha256=hashlib.sha256(content).hexdigest(),
    )  # fmt: skip
    train = manifest.train.model_copy(update={"files": (record,)})
    write_manifest(open_storage(str(dataset)), manifest.model_copy(update={"train": train}))
    said = cli("verify", str(dataset))
    assert said.code == EXIT_CODES[Fault.DATA]
    [line] = [line for line in said.out.splitlines() if line.startswith("✗")]
    assert "65000" in line


def test_a_folder_that_is_no_dataset_is_not_verified(cli: Cli, here: Path) -> None:
    said = cli("verify", str(here))
    assert said.code == EXIT_CODES[Fault.DATA]
    assert "no manifest" in said.err


# --- render ----------------------------------------------------------------------------------------------------------


def test_render_prints_what_would_be_sent_and_writes_nothing(cli: Cli, here: Path) -> None:
    before = sorted(here.iterdir())
    said = cli("render", "training.yaml", "platform={kind: local, nodes: 2}", "train.micro_batch=2")
    body = yaml.safe_load(said.out)
    assert (said.code, said.err) == (0, "")
    assert [node["argv"][4:8] for node in body["nodes"]] == [
        ["--nodes", "2", "--node-rank", "0"],
        ["--nodes", "2", "--node-rank", "1"],
    ]
    assert body["directory"].startswith(f"{here}/out/runs/tiny-")
    assert sorted(here.iterdir()) == before


def test_a_script_can_be_rendered(cli: Cli, here: Path) -> None:
    (node,) = yaml.safe_load(cli("render", "script.yaml", "args=[--steps, 9]", "args=[--steps, '9']").out)["nodes"]
    assert node["argv"][node["argv"].index("--") + 1 :] == [f"{here}/pi.py", "--steps", "9"]


def test_every_trial_of_a_sweep_is_rendered_behind_its_changes(cli: Cli) -> None:
    said = cli("render", "sweep.yaml")
    assert (said.code, said.err) == (0, "")
    assert [line for line in said.out.splitlines() if line.startswith("---")] == [
        "--- # train.seed=1",
        "--- # train.seed=2",
    ]
    one, other = yaml.safe_load_all(said.out)
    assert one["directory"] != other["directory"]


def without_this_machine(rendered: str, folder: Path) -> str:
    """What is rendered, without what differs from machine to machine: places, keys of Python's own text, cores."""
    text = rendered.replace(sys.executable, "PYTHON").replace(str(folder), "FOLDER")
    port = yaml.safe_load(rendered)["port"]
    text = re.sub(rf"\b{port}\b", "PORT", text)
    text = re.sub(r"\b(stdlib|stdlib-gpt)-[0-9a-f]{10}\b", r"\1-KEY", text)
    text = re.sub(r"(GLOO_SOCKET_IFNAME: ).*", r"\1LOOPBACK", text)
    return re.sub(r"(OMP_NUM_THREADS: ).*", r"\1CORES", text)


def test_what_the_shipped_config_sends_is_the_golden_one(cli: Cli, here: Path) -> None:
    """`make golden` writes it anew; its difference is read in review."""
    rendered = without_this_machine(cli("render", str(CONFIGS / "local.yaml")).out, here)
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(rendered)
    assert rendered == GOLDEN.read_text()


def test_where_every_variable_of_the_nodes_comes_from_is_told(cli: Cli, here: Path) -> None:
    config = here / "gke.yaml"
    platform = "{kind: gke, machine: a3-highgpu-8g, network: tcpx, nodes: 2, overrides: {NCCL_ALGO: Ring}}"
    config.write_text(f"script: -m x\nroot: {here}/out\nplatform: {platform}\n")
    rows = {line.split()[0]: line for line in cli("render", "--explain", str(config)).out.splitlines() if line.strip()}
    assert "platform.overrides, instead of Ring,Tree" in rows["NCCL_ALGO"]
    assert "https://github.com/GoogleCloudPlatform/" in rows["NCCL_BUFFSIZE"]
    assert " platform " in rows["LITGPT_ATTEMPT"]


# --- how fast it starts -----------------------------------------------------------------------------------------------

HEAVY = {"torch", "lightning", "litgpt", "prefect", "gigatoken", "pyarrow", "matplotlib", "google.cloud"}


@pytest.mark.parametrize("words", [["render", str(CONFIGS / "local.yaml")], ["doctor"]], ids=lambda words: words[0])
def test_looking_starts_fast_and_imports_no_torch(here: Path, words: list[str]) -> None:
    """Seconds of the processor, not of the clock: what else runs here does not count."""
    script = Path(sys.executable).with_name("train-litgpt")
    timed = [sys.executable, "-X", "importtime", str(script), *words]
    with (here / "imports").open("w") as log, subprocess.Popen(timed, stdout=subprocess.PIPE, stderr=log) as process:
        assert process.stdout is not None
        said = process.stdout.read()
        _, status, used = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    imported = {line.rpartition("|")[2].strip() for line in (here / "imports").read_text().splitlines()}
    assert process.returncode == 0
    assert said
    assert used.ru_utime + used.ru_stime < 2
    assert "typer" in imported
    assert imported.isdisjoint(HEAVY)


# --- plan and doctor --------------------------------------------------------------------------------------------------


def test_plan_says_what_would_be_done_where_and_what_stands_in_the_way(cli: Cli, here: Path) -> None:
    said = cli("plan", "training.yaml")
    key = plan_run(read_config(here / "training.yaml", None)).name  # type: ignore[arg-type]
    assert said.code == 0
    assert f"training train 8 steps {here}/out/runs/{key}" in squeezed(said.out)
    assert f"dataset prepare 1 files, {bytes_text(len(POEM))}" in squeezed(said.out)
    assert not (here / "out").exists()
    assert re.search(
        r"· new attempts after node fault 3 .*; none after user error.* restarts\n +→ train\.max_rest", said.out
    )
    fewer = cli("plan", "training.yaml", "train.max_restarts=0", "train.restarts.network_fault.attempts=7").out
    assert "new attempts after network fault 7 (" in fewer
    assert "no new attempts after a failure" in cli("plan", "script.yaml").out


def test_plan_ends_with_40_where_an_error_stands_in_the_way(cli: Cli, here: Path) -> None:
    said = cli("plan", "training.yaml", f"root={here}/poem.txt/x", "train.strategy=ddp")
    assert said.code == USER
    assert re.search(r"✗ root=.*poem\.txt is a file root\.not-a-folder\n +→ choose another root", said.out)
    assert re.search(r"! train\.strategy=ddp is ignored.*\n +→ raise platform\.nodes", said.out)


def test_plan_knows_scripts_and_sweeps(cli: Cli, here: Path) -> None:
    assert cli("plan", "script.yaml").out.splitlines()[-1] == "nothing blocks it"
    swept = cli("plan", "sweep.yaml")
    assert swept.code == 0
    assert "train.seed=1 train 8 steps" in squeezed(swept.out)
    assert "train.seed=2 train 8 steps" in squeezed(swept.out)
    assert "all 2, 1 at a time 16 steps left" in squeezed(swept.out)
    (here / "pi.py").unlink()
    assert "script.missing" in cli("plan", "script.yaml").out


@pytest.mark.parametrize(
    ("grid", "told"),
    [
        ("{train.lerning_rate: [1.0e-3]}", "trial train.lerning_rate=0.001 cannot be used"),
        ("{train.learning_rate: [1.0e-3, -1]}", "trial train.learning_rate=-1 cannot be used"),
        ("{model.config.n_layer: [1, -1, 0]}", "trial model.config.n_layer=-1 cannot be used"),
        ("{model.config.n_layer: [1, -1, 0]}", "trial model.config.n_layer=0 cannot be used"),
    ],
)
@pytest.mark.parametrize("command", ["plan", "run", "sweep", "render"])
def test_a_trial_that_cannot_be_is_refused_by_every_verb(cli: Cli, command: str, grid: str, told: str) -> None:
    said = cli(command, "training.yaml", f"sweep={{grid: {grid}}}")
    assert said.code == USER
    assert told in said.err


def test_a_trial_that_does_not_fit_is_named_in_the_sweeps_plan(cli: Cli) -> None:
    said = cli("plan", "training.yaml", "sweep={grid: {model.sequence_length: [32, 10_000]}}")
    assert said.code == USER
    assert re.search(r"✗ trial model.sequence_length=10000: the training split of .* has \d+ tokens", said.out)


def test_sweep_wants_a_sweep_section(cli: Cli) -> None:
    said = cli("sweep", "training.yaml")
    assert said.code == USER
    assert "training.yaml has no `sweep` section" in said.err
    assert "use `train-litgpt run`" in said.err


def test_plan_ends_with_41_where_the_corpus_is_all_that_is_wrong(cli: Cli, here: Path) -> None:
    (here / "poem.txt").write_text("")
    said = cli("plan", "training.yaml")
    assert said.code == EXIT_CODES[Fault.DATA]
    assert "✗ data.corpus holds no text" in said.out


def test_doctor_ends_with_40_where_something_is_broken(cli: Cli, here: Path) -> None:
    assert cli("doctor", "--root", "out").code == 0
    said = cli("doctor", "--root", "poem.txt")
    assert said.code == USER
    assert "root.not-a-folder" in said.out


def test_doctor_without_a_config_refuses_a_profile_that_nothing_would_run_by(cli: Cli, here: Path) -> None:
    said = cli("doctor", "--platform", "poem.txt")
    assert said.code == USER
    assert "--platform means nothing without a config" in said.err


@pytest.mark.parametrize("terminal", [True, False])
def test_a_terminal_shows_once_what_a_rendering_does_not_know(
    cli: Cli, here: Path, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    platform = "{kind: runai, api: cli, cli_version: v2, project: team-a, gpus: 1}"
    (here / "script.yaml").write_text(f"script: -m mine\nroot: out\nplatform: {platform}\n")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    said = cli("render", "script.yaml")
    assert said.code == 0, said
    assert said.out.count("stands for the image") == 1
    assert said.err.count("stands for the image") == (0 if terminal else 1)


def test_doctor_ticks_only_what_is_there(cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    said = cli("doctor").out
    assert "! git is not installed" in said
    assert "· docker is not installed" in said
    assert "✓ ranks can meet on 127.0.0.1" in said


# --- bad input --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere.yaml"], "nowhere.yaml is not there"),
        (["poem.txt"], "poem.txt holds a single value, and settings belong there"),
        (["twice.yaml"], "twice.yaml cannot be read as YAML: train.seed is given in line 12 and again in line 14"),
        (["training.yaml", "model.config={n_layer: 1, n_layer: 2}"], "n_layer is given in line 1 and again in line 1"),
        (["."], "cannot be read as YAML"),
        (["training.yaml", "train.lerning_rate=1"], "train.lerning_rate: there is no such setting; did you mean"),
        (["training.yaml", "train.max_steps=none"], "train.max_steps: 'none' given"),
        (["training.yaml", "train.micro_batch=3"], "train.global_batch=4 does not split over 1 processes"),
        (["training.yaml", "model.name=pythia-14"], "model.name='pythia-14' is not a LitGPT model; did you mean"),
        (["training.yaml", "train.learning_rate"], "is not an override"),
        (["training.yaml", "data.corpus.paths=[gone.txt]"], "gone.txt"),
        (["training.yaml", "root=s3://bucket"], "s3://bucket"),
        (["script.yaml", "script=null"], "script: None given"),
        (["script.yaml", "model.name=x"], "model: there is no such setting"),
    ],
    ids=lambda words: " ".join(words) if isinstance(words, list) else "",
)
@pytest.mark.parametrize("command", ["render", "plan"])
def test_what_cannot_be_used_is_named_and_ends_with_40(cli: Cli, command: str, words: list[str], told: str) -> None:
    said = cli(command, *words)
    assert said.code == USER
    assert said.err.startswith("error ")
    assert told in said.err
    assert said.out == ""


@pytest.mark.parametrize("command", ["status", "logs", "cancel", "collect"])
def test_a_config_that_cannot_be_used_names_no_run(cli: Cli, command: str) -> None:
    said = cli(command, "training.yaml", "train.lerning_rate=1")
    assert (said.code, said.out) == (USER, "")
    assert "did you mean learning_rate" in said.err


@pytest.mark.parametrize("command", ["run", "prepare", "sweep"])
def test_nothing_is_started_for_a_config_that_cannot_be_used(cli: Cli, here: Path, command: str) -> None:
    said = cli(command, "training.yaml", "train.lerning_rate=1")
    assert said.code == USER
    assert "did you mean learning_rate" in said.err
    assert not (here / "out").exists()


def test_a_script_has_no_dataset_to_prepare(cli: Cli) -> None:
    said = cli("prepare", "script.yaml")
    assert said.code == USER
    assert "runs a script, which has no dataset" in said.err


# --- what runs, and what has run --------------------------------------------------------------------------------------


UNKNOWN, UNREACHABLE = EXIT_CODES[UnknownRun.fault], EXIT_CODES[PlatformUnreachable.fault]


@pytest.mark.parametrize("command", ["status", "cancel", "logs", "collect"])
def test_a_config_that_nothing_was_started_with_is_answered_so_and_not_with_success(cli: Cli, command: str) -> None:
    said = cli(command, "training.yaml")
    assert (said.code, said.out) == (UNKNOWN, "")
    assert "nothing has been started under" in said.err


def test_before_anything_was_started_there_are_no_runs(cli: Cli, here: Path) -> None:
    assert cli("runs", "out") == Said(0, f"nothing has been started under {here}/out\n", "")
    assert cli("runs", "out", "--json") == Said(0, "[]\n", "")


def claim(here: Path) -> Claim:
    config = read_config(here / "training.yaml", None)
    assert isinstance(config, RunConfig)
    return claim_of(config)


@pytest.fixture
def failed(here: Path) -> Path:
    """The folder of an attempt that ended badly."""
    folder = Path(claim(here).take().job_id)
    folder.mkdir(parents=True)
    (folder / "submission.json").write_text(json.dumps({"body": {"nodes": [{}, {}]}}))
    result = {"state": "failed", "native": "node 1 ended with 41 (data error)", "exit_codes": {"1": 41}}
    (folder / "result.json").write_text(json.dumps({**result, "started": 1.0, "ended": 2.0}))
    (folder / "node-0.log").write_text("[rank0]: hello\n")
    (folder / "node-1.log").write_text("[rank1]: boom :x:\n")
    return folder


@pytest.fixture
def running(here: Path, failed: Path) -> Iterator[Path]:
    """A second attempt after it, which runs."""
    folder = Path(claim(here).take().job_id)
    folder.mkdir()
    (folder / "submission.json").write_text(json.dumps({"body": {"nodes": [{}]}}))
    (folder / "node-0.log").write_text("[rank0]: once more\n")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as its supervisor holds it
        yield folder


def write_metrics(here: Path) -> None:
    rows = [
        {"kind": "start", "step": 0, "steps": 8, "tokens_per_step": 128},
        *({"kind": "step", "step": step, "loss": 5.5, "step_seconds": 3.0} for step in (1, 2)),
    ]
    folder = open_storage(str(here / "out")).within(f"runs/{claim(here).attempts.run}")
    folder.write(METRICS, "".join(json.dumps(row) + "\n" for row in rows).encode())


def test_status_lists_every_attempt_on_a_line_and_how_far_it_is(cli: Cli, here: Path, running: Path) -> None:
    write_metrics(here)
    heading, first, second, progress = cli("status", "training.yaml").out.splitlines()
    assert heading.split()[:2] == ["attempt", "state"]
    assert squeezed(first).strip() == f"1 failed node 1 ended with 41 (data error) {running.with_name('1')}"
    assert squeezed(second).strip() == f"2 running running {running}"
    assert progress == "step 2/8, loss 5.5000, 18 s left"


def test_status_of_a_job_that_ended_tells_no_time_left(cli: Cli, here: Path, failed: Path) -> None:
    write_metrics(here)
    assert cli("status", "training.yaml").out.splitlines()[-1] == "step 2/8, loss 5.5000"


def test_status_says_why_a_job_waits_and_what_to_do(cli: Cli, here: Path) -> None:
    with running_cluster(simulate=True, nodes=0) as cluster:
        settings = {"kind": "gke", "kubeconfig": str(cluster.kubeconfig), "nodes": 2, "gate": 0}
        image = {"kind": "prebuilt", "reference": IMAGE}
        document = {"name": "pi", "root": "out", "script": "/pi.py", "image": image, "platform": settings}
        (here / "elsewhere.yaml").write_text(yaml.safe_dump(document))
        claim = claim_of(validated(ScriptConfig, document, where="test"))
        claim.platform.submit(claim.platform.render(claim.make_job(claim.take().attempt)))

        def told() -> str:
            shown = cli("status", "elsewhere.yaml").out
            return shown if "gke.pending" in shown else ""

        said = until(told, seconds=60)
        cli("cancel", "@last", "--root", "out")
    assert "no machine at all" in said
    assert "→" in said


def test_every_verb_takes_a_name_a_folder_or_a_config(cli: Cli, here: Path, running: Path) -> None:
    run = running.parents[1].name
    told = {cli("status", "training.yaml").out}
    for words in (run, "tiny", "@last"):
        told.add(cli("status", words, "--root", "out").out)
    told.add(cli("status", f"out/runs/{run}").out)
    assert len(told) == 1
    assert cli("logs", "@last", "--root", "out").out == "[node 0] [rank0]: once more\n"
    assert cli("status", "gtp", "--root", "out").code == UNKNOWN
    assert "is an override, which belongs to a config" in cli("status", "@last", "train.seed=1", "--root", "out").err


def test_a_changed_corpus_hides_no_job(cli: Cli, here: Path, running: Path) -> None:
    with (here / "poem.txt").open("a") as poem:
        poem.write("!")
    assert squeezed(cli("status", "training.yaml").out.splitlines()[2]).strip() == f"2 running running {running}"
    (here / "poem.txt").unlink()
    assert squeezed(cli("status", "training.yaml").out.splitlines()[2]).strip() == f"2 running running {running}"


def test_runs_are_listed_for_people_and_for_programs(cli: Cli, here: Path, running: Path) -> None:
    write_metrics(here)
    run = running.parents[1].name
    heading, row = cli("runs", "out").out.splitlines()
    assert heading.split() == ["run", "state", "step", "loss", "age", "platform", "attempts", "flow", "run"]
    assert squeezed(row).split()[:4] == [run, "running", "2/8", "5.5000"]
    [seen] = json.loads(cli("runs", "out", "--json").out)
    assert (seen["run"], seen["state"], seen["attempts"], seen["platform"]) == (run, "running", 2, "local")


@pytest.fixture
def damaged(here: Path) -> str:
    """Another run's record, which a power cut left half written; how a verb tells of it."""
    path = here / "out" / "index" / "cut-0123456789" / "1.json"
    path.parent.mkdir(parents=True)
    path.write_text('{"format":')
    return "1 records of the run index could not be read; the first: "


def test_a_damaged_record_of_another_run_stops_no_verb(cli: Cli, here: Path, running: Path, damaged: str) -> None:
    for command in ("status", "logs"):
        assert cli(command, "training.yaml").code == 0


def test_a_program_that_lists_the_runs_is_told_of_damaged_records_too(
    cli: Cli, here: Path, running: Path, damaged: str
) -> None:
    said = cli("runs", "out", "--json")
    assert [row["run"] for row in json.loads(said.out)] == [running.parents[1].name]
    assert said.err.startswith(damaged)


def test_the_status_of_a_sweep_tells_of_damaged_records(cli: Cli, here: Path, damaged: str) -> None:
    sweep = read_config(here / "sweep.yaml", [])
    assert isinstance(sweep, SweepConfig)
    for trial in trials(sweep):
        claim_of(trial.config).take()
    said = cli("status", "sweep.yaml")
    assert said.code == 0
    assert f"! {damaged}" in said.out


@pytest.fixture
def started(here: Path) -> list[str]:
    """The runs of a sweep's two trials, each with an attempt that is written down."""
    sweep = read_config(here / "sweep.yaml", [])
    assert isinstance(sweep, SweepConfig)
    return [claim_of(trial.config).take().run for trial in trials(sweep)]


def spoil(here: Path, run: str, attempt: int = 1) -> str:
    """Cut a record short, and return where it is."""
    (here / "out" / "index" / run / f"{attempt}.json").write_text('{"format":')
    return f"index/{run}/{attempt}.json"


def test_cancelling_a_sweep_names_trials_that_nobody_can_read_and_is_no_success(
    cli: Cli, here: Path, started: list[str], damaged: str
) -> None:
    (record,) = Index.of("out").records(started[0])
    place = spoil(here, started[1])
    for words in (["sweep.yaml"], [str(record.sweep), "--root", "out"]):
        said = cli("cancel", *words)
        assert said.code == EXIT_CODES[Fault.DATA]
        assert place in said.err
        assert "look for the job on its platform" in said.err
        assert "nothing was running" not in said.out
        assert "cut-0123456789" not in said.err, "a run of another name is no trial of this sweep"


def test_a_trial_that_cannot_be_cancelled_keeps_no_other_from_it(
    cli: Cli, here: Path, started: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = sorted(started)
    record = Index.of("out").records(first)[0].model_copy(update={"attempt": 2})
    again = record.model_copy(update={"directory": record.directory.removesuffix("1") + "2"})
    assert Index.of("out").create(again)
    place = spoil(here, first)
    said = cli("cancel", "sweep.yaml")
    assert (said.code, place in said.err) == (EXIT_CODES[Fault.DATA], True)
    assert Index.of("out").cancellations(second), "the second was asked to end"


def test_what_cannot_be_known_is_said_and_is_no_success(cli: Cli, here: Path, running: Path) -> None:
    """Its job was started on a machine that is not this one."""
    index, run = Index.of("out"), running.parents[1].name
    record = index.records(run)[-1].model_copy(update={"machine": "0123456789ab", "host": "other-laptop"})
    (here / "out" / "index" / run / "2.json").unlink()
    assert index.create(record)
    for command in ("status", "cancel", "logs"):
        said = cli(command, "training.yaml")
        assert said.code == UNREACHABLE
        assert "was started on other-laptop" in said.err
        assert "nothing was running" not in said.out
    listed = cli("runs", "out").out
    assert "unknown" in listed
    assert "other-laptop" in listed


def test_logs_are_those_of_the_last_attempt_or_of_the_one_asked_for(cli: Cli, running: Path) -> None:
    assert cli("logs", "training.yaml").out == "[node 0] [rank0]: once more\n"
    assert cli("logs", "training.yaml", "--attempt", "1").out == (
        "[node 0] [rank0]: hello\n[node 1] [rank1]: boom :x:\n"
    )
    assert cli("logs", "training.yaml", "--attempt", "3").code == USER


def test_metrics_in_logs_are_words_for_people_and_json_for_programs(cli: Cli, running: Path) -> None:
    row = '@litgpt-metrics {"kind":"evaluation","step":4,"validation_loss":2.5,"perplexity":12.2,"seconds":1.0}'
    (running / "node-0.log").write_text(f"[rank0]: hello\n[rank0]:{row}\n")
    assert cli("logs", "training.yaml").out.splitlines() == [
        "[node 0] [rank0]: hello",
        "[node 0] [rank0]: step 4  validation loss 2.5000 (1.0 s)",
    ]
    assert cli("logs", "training.yaml", "--raw").out.splitlines()[1] == f"[node 0] [rank0]:{row}"


EVIL = "\x1b]0;owned\x07 \x9b2J \u202eexe \x00"


def test_what_a_node_prints_steers_no_terminal(here: Path, failed: Path) -> None:
    (failed / "node-0.log").write_bytes(EVIL.encode() + b"\xff \x1b[31mred\n")
    with Terminal([sys.executable, "-m", "cli", "logs", "training.yaml"], env=os.environ, cwd=here) as terminal:
        text = terminal.read_until("boom :x:", within=60)
    assert "[node 0] \\x1b]0;owned\\x07 \\x9b2J \\u202eexe \\x00\ufffd red" in text
    assert not set("\x1b\x07\x9b\u202e\x00") & set(text)


def test_what_a_node_prints_goes_into_a_pipe_as_it_is(cli: Cli, failed: Path) -> None:
    (failed / "node-0.log").write_text(f"{EVIL}\n")
    assert cli("logs", "training.yaml").out.splitlines()[0] == f"[node 0] {EVIL}"


def test_metrics_that_are_none_stop_neither_status_nor_runs(cli: Cli, failed: Path) -> None:
    (failed.parents[1] / METRICS).write_text('{"kind":"step"}\n{"kind":"step","step":3,"loss":2.5}\n[[[[\n')
    assert cli("status", "training.yaml").out.splitlines()[-2:] == [
        "step 3/None, loss 2.5000",
        """2 lines of metrics could not be read; the first: '{"kind":"step"}' (Field required at step)""",
    ]
    assert "failed" in cli("runs", "out").out
    assert cli("cancel", "training.yaml").code == 0


def test_following_the_logs_of_a_job_that_ended_shows_them_and_ends(cli: Cli, failed: Path) -> None:
    assert cli("logs", "training.yaml", "--follow").out == "[node 0] [rank0]: hello\n[node 1] [rank1]: boom :x:\n"


def test_an_attempt_that_ended_is_not_cancelled(cli: Cli, failed: Path) -> None:
    run = failed.parents[1].name
    assert cli("cancel", "training.yaml") == Said(
        0, f"nothing was running of {run}: every attempt at it has ended\n", ""
    )


@pytest.fixture
def trial_that_failed(here: Path) -> str:
    config = read_config(here / "sweep.yaml", None)
    assert isinstance(config, SweepConfig)
    for trial in trials(config):
        folder = Path(claim_of(trial.config).take().job_id)
        folder.mkdir(parents=True)
        (folder / "submission.json").write_text(json.dumps({"body": {"nodes": [{}]}}))
        (folder / "result.json").write_text(
            json.dumps({"state": "failed", "native": "ended", "exit_codes": {}, "started": 1.0, "ended": 2.0})
        )
        (folder / "node-0.log").write_text(f"seed {trial.changes['train.seed']}\n")
    return sweep_name(config)


def test_a_sweep_is_one_thing_to_look_at_and_to_cancel(cli: Cli, trial_that_failed: str) -> None:
    for words in (["sweep.yaml"], [trial_that_failed, "--root", "out"]):
        rows = cli("status", *words).out.splitlines()[1:]
        assert [squeezed(row).split()[1] for row in rows] == ["failed", "failed"]
        lines = cli("logs", *words).out.splitlines()
        assert {line.split("  ")[1] for line in lines} == {"[node 0] seed 1", "[node 0] seed 2"}
        assert f"nothing was running of {trial_that_failed}" in cli("cancel", *words).out


@pytest.mark.parametrize("options", [["--new", "--cancel-old"]])
def test_keeping_and_ending_the_older_job_at_once_is_refused(cli: Cli, options: list[str]) -> None:
    said = cli("run", "training.yaml", *options)
    assert said.code == USER
    assert "give one of them" in said.err


# --- submitting -------------------------------------------------------------------------------------------------------


def test_submitting_without_a_server_says_how_to_get_one(cli: Cli) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings(restore_defaults={PREFECT_API_URL}):  # other tests have a server
        said = cli("submit", "local")
    assert said.code == USER
    assert "run `make serve` and set PREFECT_API_URL" in said.err


def parameters(flow: str, given: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    from flows.submission import parameters_with

    made = parameters_with(flow, given, overrides)
    assert json.loads(json.dumps(made)) == made, "Prefect stores them as JSON"
    return made


DEPLOYED = {
    "name": "mine",
    "train": {"global_batch": 16, "micro_batch": 4, "learning_rate": 1e-3},
    "data": {"corpus": {"kind": "stdlib", "max_bytes": 1000}},
}


def test_one_changed_setting_leaves_the_others_of_its_section_as_they_were_deployed() -> None:
    """Prefect itself would replace the whole section."""
    made = parameters("train-litgpt", DEPLOYED, {"train.learning_rate": 3e-4})
    deployed = RunConfig.model_validate(DEPLOYED).train.model_dump(mode="json")
    assert made["train"] == {**deployed, "learning_rate": 3e-4}
    assert (made["name"], made["data"]["corpus"]["max_bytes"]) == ("mine", 1000)


def test_every_section_is_sent_whole() -> None:
    made = parameters("train-litgpt", {}, {})
    assert made == RunConfig().model_dump(mode="json")
    assert set(made) == set(RunConfig.model_fields)


def test_a_deployments_own_overrides_give_way_to_ones_own() -> None:
    deployed = {**DEPLOYED, "overrides": {"train.learning_rate": 0.5, "train.seed": 7}}
    made = parameters("train-litgpt", deployed, {"train.learning_rate": 3e-4})
    assert (made["train"]["learning_rate"], made["train"]["seed"], made["overrides"]) == (3e-4, 7, {})


def test_a_profile_takes_the_place_of_what_was_deployed_and_overrides_win_over_it() -> None:
    from flows.submission import parameters_with

    deployed = {**DEPLOYED, "root": "here", "overrides": {"platform.nodes": 4, "train.seed": 7}}
    profile = {"root": "there", "platform": {"kind": "local", "grace": 7}}
    made = parameters_with("train-litgpt", deployed, {"platform.processes": 2}, profile=profile)
    assert (made["root"], made["train"]["seed"]) == ("there", 7)
    assert {name: made["platform"][name] for name in ("grace", "processes", "nodes")} == {
        "grace": 7, "processes": 2, "nodes": RunConfig().platform.nodes,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("flow", "overrides", "words"),
    [
        ("train-litgpt", {"train.lerning_rate": 1}, "train.lerning_rate: there is no such setting"),
        ("train-litgpt", {"train.micro_batch": 3}, "does not split"),
        ("run-torchrun", {"train.seed": 1}, "train: there is no such setting"),
        ("sweep-litgpt", {"sweep.grid": {"train.seed": []}}, "has no values for train.seed"),
        ("prepare-dataset", {"data.corpus.kind": "hub"}, "data.corpus.name: is not given"),
        ("my-flow", {}, "my-flow is not a flow of ours; there are train-litgpt"),
    ],
)
def test_what_cannot_be_used_is_refused_before_anything_is_submitted(
    flow: str, overrides: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigProblem, match=re.escape(words)):
        parameters(flow, {"script": "pi.py"} if flow == "run-torchrun" else DEPLOYED, overrides)


def test_each_flow_gets_the_parameters_it_takes() -> None:
    assert set(parameters("prepare-dataset", {"root": "x", "data": DEPLOYED["data"]}, {})) == {
        "root",
        "data",
        "workers",
    }
    assert set(parameters("run-torchrun", {"script": "pi.py"}, {})) == set(ScriptConfig.model_fields)
    assert set(parameters("sweep-litgpt", DEPLOYED, {})) == set(SweepConfig.model_fields)
