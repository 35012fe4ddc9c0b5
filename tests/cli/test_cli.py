"""What each verb prints, how it ends (0, 40 for what the user can mend, 41 for data, …), and what it refuses."""

import fcntl
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from console_script import Cli, Said
from job_handles import handle_of

from cli import main as main_module
from cli.main import main, read_config
from launcher.config import RunConfig, ScriptConfig, SweepConfig, overridden, validated
from launcher.errors import ConfigProblem, JobFailed, PlatformUnreachable, UnknownRun
from launcher.job import LogLine, LogPage
from launcher.runs.attempts import JobHandle
from launcher.runs.index import Index
from launcher.runs.sweeps import sweep_name, trials
from litgpt_demo.data.dataset import DatasetManifest
from litgpt_demo.errors import EXIT_CODES, FailureClass
from litgpt_demo.runs import METRICS
from train_litgpt import Submitted

USER, DATA = EXIT_CODES[FailureClass.USER], EXIT_CODES[FailureClass.DATA]
UNKNOWN, UNREACHABLE = EXIT_CODES[UnknownRun.fault], EXIT_CODES[PlatformUnreachable.fault]

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


@pytest.fixture(autouse=True)
def workdir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a training, a script and a sweep, in which one starts."""
    monkeypatch.chdir(tmp_path)
    poem = "\n\n".join(f"{number} bottles on the wall, {number} of them fall" for number in range(200))
    (tmp_path / "poem.txt").write_text(poem)
    (tmp_path / "training.yaml").write_text(TRAINING)
    (tmp_path / "pi.py").touch()
    (tmp_path / "script.yaml").write_text("name: pi\nroot: out\nscript: pi.py\n")
    (tmp_path / "there.yaml").write_text("root: there\nplatform: {kind: local, nodes: 1, grace_period: 7}\n")
    (tmp_path / "sweep.yaml").write_text(TRAINING + "sweep: {grid: {train.seed: [1, 2]}}\n")
    return tmp_path


def squeezed(text: str) -> str:
    return re.sub(r"[ ]+", " ", text).strip()


def test_looking_imports_nothing_heavy(workdir: Path) -> None:
    code = (
        "import os, sys, cli.main\n"
        "sys.argv[0] = 'train-litgpt'\n"
        "os.environ |= dict(_TRAIN_LITGPT_COMPLETE='complete_bash', COMP_WORDS='train-litgpt sta', COMP_CWORD='1')\n"
        "for sys.argv[1:] in ([], ['render', 'training.yaml'], ['doctor'], ['--version']):\n"
        "    try: cli.main.main()\n"
        "    except SystemExit as end: assert not end.code, end.code\n"
        "    os.environ.pop('_TRAIN_LITGPT_COMPLETE', None)\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    completed, *_, own, libraries, imported = done.stdout.splitlines()
    assert completed == "status"
    assert re.fullmatch(r"train-litgpt \d+\.\d+\.\d+(, commit [0-9a-f]{10}( with changes)?)?", own)
    assert re.fullmatch(r"torch 2\.\S+, litgpt 0\.\S+, prefect 3\.\S+, python 3\.\S+", libraries)
    heavy = {"torch", "lightning", "litgpt", "prefect", "gigatoken", "pyarrow", "matplotlib", "google.cloud"}
    assert heavy.isdisjoint(imported.split())


def test_help_imports_no_settings(workdir: Path) -> None:
    """Help and completion wait for no model of Pydantic: those of all settings take half a second."""
    code = (
        "import sys, cli.main\n"
        "sys.argv[1:] = ['--help']\n"
        "try: cli.main.main()\n"
        "except SystemExit as end: assert not end.code\n"
        "print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *help_lines, imported = done.stdout.splitlines()
    assert any("benchmark-network" in line for line in help_lines)
    assert {"pydantic", "numpy", "launcher.config", "litgpt_demo.config"}.isdisjoint(imported.split())


def test_sections_select_the_kind_of_a_config(workdir: Path, cli: Cli) -> None:
    for name, kind in (("training.yaml", RunConfig), ("script.yaml", ScriptConfig), ("sweep.yaml", SweepConfig)):
        config = read_config(workdir / name, ["platform.processes_per_node=1"], workdir / "there.yaml")
        assert type(config) is kind
        assert (config.root, config.platform.nodes, config.platform.processes_per_node) == ("there", 1, 1)
    assert str(workdir / "there") in cli("status", "training.yaml", "--platform", "there.yaml").err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["plan", "poem.txt"], "has no settings"),
        (["run", "training.yaml", "train.lerning_rate=1"], "did you mean learning_rate"),
        (["run", "training.yaml", "data.corpus.paths=[none.txt]"], "no file matches it"),
        (["run", "training.yaml", "model.config={n_layer: 99, n_embd: 99999, n_head: 1}"], "[train.memory]"),
        (["run", "script.yaml", "args=[--fast, yes]"], "quote it, as 'True'"),
        (["plan", "training.yaml", "root=$HOME/x"], "'$HOME/x' has $HOME, which no shell has replaced"),
        (["plan", "training.yaml", "data.corpus.paths=[$DATA/a.txt]"], "has $DATA, which no shell has replaced"),
        (["sweep", "training.yaml"], "no `sweep` section"),
        (["run", "training.yaml", "--allow-duplicate", "--replace"], "give one of them"),
        (["plan", "training.yaml", "name=My Run"], "'My Run' given; a name has lower-case letters, digits and dashes"),
        (["init", "moon"], "unknown platform 'moon'; choose one of batch, gke, kubernetes, local, runai"),
        (["run", "there.yaml"], "give a config, followed by --platform there.yaml"),
    ],
    ids=lambda arguments: " ".join(arguments) if isinstance(arguments, list) else "",
)
def test_invalid_request_is_named_and_starts_nothing(
    cli: Cli, workdir: Path, arguments: list[str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("cli.main._run_in_foreground")  # which starts a server
    output = cli(*arguments)
    assert (output.code, output.out) == (USER, "")
    assert output.err.startswith("error ")
    assert named in output.err
    assert output.err.splitlines()[-1].startswith("help: docs/reference/")
    assert not (workdir / "out").exists()


def test_a_dataset_is_verified_or_each_problem_is_a_line(
    cli: Cli, dataset: tuple[DatasetManifest, Path], copied: Path
) -> None:
    assert cli("verify", str(dataset[1])).code == 0
    (copied / "train.bin").write_bytes((copied / "train.bin").read_bytes()[::-1])
    (copied / "val.bin").unlink()
    output = cli("verify", str(copied))
    assert (output.code, "val.bin is missing" in output.err, "\n✗ train.bin has crc32c" in output.err) == (
        DATA,
        True,
        True,
    )


def test_render_prints_what_would_be_sent_and_writes_nothing(cli: Cli, workdir: Path) -> None:
    before = sorted(workdir.iterdir())
    output = cli("render", "training.yaml", "platform={kind: local, nodes: 2}", "train.micro_batch=2")
    assert output.code == 0
    assert "000000 at the end of the job's name is a placeholder for each attempt's random number" in output.err
    assert yaml.safe_load(output.out)["directory"].startswith(f"{workdir}/out/runs/tiny-")
    (node,) = yaml.safe_load(cli("render", "script.yaml", "args=[--steps, 9, 0.5]", "env={N: 4}").out)["nodes"]
    assert (node["argv"][-4:], node["env"]["N"]) == ([f"{workdir}/pi.py", "--steps", "9", "0.5"], "4")
    item, another = yaml.safe_load_all(cli("render", "sweep.yaml").out)
    assert item["directory"] != another["directory"]
    assert sorted(workdir.iterdir()) == before


def test_plan_prints_steps_places_and_blockers(cli: Cli, workdir: Path) -> None:
    output = cli("plan", "training.yaml")
    assert output.code == 0
    assert f"training train 8 steps {workdir}/out/runs/tiny-" in squeezed(output.out)
    assert "dataset prepare 1 files" in squeezed(output.out)
    assert cli("plan", "script.yaml").out.splitlines() == ["nothing blocks it"], "restarts are the usual ones"
    assert "new attempts after node fault 1 " in cli("plan", "script.yaml", "max_restarts=1").out
    assert "all 2, 1 at a time 16 steps left" in squeezed(cli("plan", "sweep.yaml").out)
    output = cli("plan", "training.yaml", f"root={workdir}/poem.txt/x")
    assert (output.code, "root.not-a-folder" in output.out) == (USER, True)
    (workdir / "poem.txt").write_text("")
    output = cli("plan", "training.yaml")
    assert (output.code, "✗ data.corpus holds no text" in output.out) == (DATA, True)
    assert not (workdir / "out").exists()


@pytest.mark.parametrize(("encoding", "folder", "arrow"), [("ascii", "caf\\xe9", ">"), ("utf-8", "café", "→")])
def test_any_encoding_of_a_terminal_or_a_pipe_gets_every_line(
    encoding: str, folder: str, arrow: str, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding=encoding, write_through=True))
    monkeypatch.setattr(
        "sys.argv", ["train-litgpt", "plan", "training.yaml", f"root={workdir}/café", "train.max_restarts=1"]
    )
    with pytest.raises(SystemExit, match="0"):
        main()
    shown = written.getvalue().decode(encoding)
    assert f"{folder}/runs" in shown
    assert f"\n{arrow} " in shown.replace("    ", "")


def test_doctor_ticks_only_what_is_there(cli: Cli, monkeypatch: pytest.MonkeyPatch, workdir: Path) -> None:
    monkeypatch.setenv("PATH", str(workdir))
    lines = cli("doctor", "--root", "out").out
    assert "! git is not installed" in lines
    assert len({line.index("  package.") for line in lines.splitlines() if "  package." in line}) == 1, "a column"
    assert cli("doctor", "--root", "poem.txt").code == USER


def test_run_names_its_model_when_the_corpus_is_gone(cli: Cli, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    final = SimpleNamespace(run="tiny-0123456789", prompt="ten bottles", sample="ten bottles fall", huggingface=None)
    monkeypatch.setattr("cli.main._run_in_foreground", lambda *_, **__: final)
    monkeypatch.setattr("launcher.checks.plan.plan_to_start", lambda _: (workdir / "poem.txt").unlink(missing_ok=True))
    output = cli("run", "training.yaml")
    assert (output.code, output.err) == (0, "")
    model = str(workdir / "out/runs/tiny-0123456789/final/litgpt")
    assert "out/runs/tiny-0123456789/final/litgpt" in output.out
    assert json.loads(cli("run", "training.yaml", "--json").out)["model"] == model


def test_verbs_fail_when_nothing_was_started(cli: Cli, workdir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("launcher.checks.preflight.check_evaluation", lambda _: [])  # the harness may not be installed
    verbs = ("status", "cancel", "logs", "collect", "generate", "evaluate", "replay")
    required = {"evaluate": ["tasks=[words]"], "replay": ["--steps", "1-2"]}
    for verb, *arguments in (*((verb, "training.yaml") for verb in verbs), ("evaluate", "@last", "--root", "out")):
        output = cli(verb, *arguments, *required.get(verb, []))
        assert (output.code, output.out, "nothing has been started under" in output.err) == (UNKNOWN, "", True)
    for arguments in (["out"], ["--root", "out"]):
        assert cli("runs", *arguments) == Said(0, f"nothing has been started under {workdir}/out\n", "")
        assert cli("runs", *arguments, "--json").out == "[]\n"


def handle(workdir: Path) -> JobHandle:
    return handle_of(read_config(workdir / "training.yaml", None))


def attempt_in(folder: Path, *logs: str, **result: Any) -> Path:
    """Write what a job of one node for each log leaves in its folder."""
    folder.mkdir(parents=True)
    (folder / "submission.json").write_text(json.dumps({"body": {"nodes": [{} for _ in logs]}}))
    for node, text in enumerate(logs):
        (folder / f"node-{node}.log").write_text(text)
    if result:
        (folder / "result.json").write_text(json.dumps({**result, "started": 1.0, "ended": 2.0}))
    return folder


@pytest.fixture
def failed(workdir: Path) -> Path:
    """The folder of an attempt that ended badly."""
    result = {"state": "failed", "native": "node 1 ended with 41 (data error)", "exit_codes": {"1": 41}}
    return attempt_in(
        Path(handle(workdir).reattach_or_create().job_id), "[rank0]: hello\n", "[rank1]: boom :x:\n", **result
    )


@pytest.fixture
def running(workdir: Path, failed: Path) -> Iterator[Path]:
    """A second attempt after it, which runs."""
    folder = attempt_in(Path(handle(workdir).reattach_or_create().job_id), "[rank0]: once more\n")
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # as its supervisor holds it
        yield folder


def write_metrics(run: Path) -> None:
    start = {"kind": "start", "step": 0, "steps": 8, "tokens_per_step": 128}
    steps = [{"kind": "step", "step": step, "loss": 5.5, "step_seconds": 3.0} for step in (1, 2)]
    (run / METRICS).write_text("".join(json.dumps(row) + "\n" for row in (start, *steps)))


def test_status_lists_every_attempt_on_a_line_and_how_far_it_is(cli: Cli, workdir: Path, running: Path) -> None:
    write_metrics(running.parents[1])
    _, first, second, progress = cli("status", "training.yaml").out.splitlines()
    assert squeezed(first) == f"1 failed node 1 ended with 41 (data error) {running.with_name('1')}"
    assert squeezed(second) == f"2 running running {running}"
    assert progress == "step 2/8, loss 5.5000, 18 s left"
    (workdir / "poem.txt").unlink()  # a run is found by its name: what it was made of may have changed
    assert cli("status", "training.yaml").out.splitlines()[2] == second


def test_every_verb_takes_a_name_a_folder_or_a_config(cli: Cli, running: Path) -> None:
    run = running.parents[1].name
    targets = [["training.yaml"], *([word, "--root", "out"] for word in (run, "tiny", "@last")), [f"out/runs/{run}"]]
    assert len({cli("status", *arguments).out for arguments in targets}) == 1
    assert cli("status", "gtp", "--root", "out").code == UNKNOWN
    assert "is an override, which belongs to a config" in cli("status", "@last", "train.seed=1", "--root", "out").err


def test_runs_are_listed_for_people_and_for_programs(cli: Cli, workdir: Path, running: Path) -> None:
    write_metrics(running.parents[1])
    run = running.parents[1].name
    _, row = cli("runs", "out").out.splitlines()
    assert row.split()[:4] == [run, "running", "2/8", "5.5000"]
    damaged = workdir / "out" / "index" / "cut-0123456789" / "1.json"  # of another run, half written in a power cut
    damaged.parent.mkdir()
    damaged.write_text('{"format":')
    output = cli("runs", "out", "--json")
    [seen] = json.loads(output.out)
    assert (seen["run"], seen["state"], seen["attempts"], seen["platform"]) == (run, "running", 2, "local")
    assert output.err.startswith("! 1 records of the run index could not be read")
    assert cli("status", "training.yaml").code == 0


def test_runs_keeps_name_and_state_whole_in_a_narrow_terminal(
    cli: Cli, workdir: Path, failed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_metrics(failed.parents[1])
    (failed / "result.json").write_text('{"state": "succeeded", "native": "ended", "exit_codes": {}}')
    monkeypatch.setattr(main_module.console, "width", 60)
    head, row = cli("runs", "out").out.splitlines()
    assert head.split() == ["run", "state", "step", "loss"]
    assert squeezed(row) == f"{failed.parents[1].name} trained, not collected 2/8 5.5000"


def test_collect_prints_only_its_result_not_that_of_libraries(
    cli: Cli, workdir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def export(*_: Any, **__: Any) -> dict[str, str]:
        print("Using 1 device(s)")
        print("Could not load this library", file=sys.stderr)
        return {"sample": "made"}

    monkeypatch.setattr("litgpt_demo.export.models.export", export)
    written = list[tuple[str, str]]()
    statements = "launcher.provenance.statements.write_statements"
    monkeypatch.setattr(statements, lambda run, place: written.append((run.address(), place)))
    monkeypatch.setattr("litgpt_demo.export.summary_lines", lambda made: [made["sample"]])
    assert cli("collect", f"{workdir}/out/runs/copy") == Said(0, f"made\n✓ {workdir}/out/runs/copy/final\n", "")
    assert cli("collect", f"{workdir}/out/runs/copy", "--average").code == 0
    assert written == [(f"{workdir}/out/runs/copy", place) for place in ("final", "final-average")]


def test_logs_shows_the_last_or_the_chosen_attempt(cli: Cli, running: Path) -> None:
    """Metrics rows are printed as text."""
    assert cli("logs", "training.yaml").out == "[node 0] [rank0]: once more\n"
    before = cli("logs", "training.yaml", "--attempt", "1").out
    assert before == "[node 0] [rank0]: hello\n[node 1] [rank1]: boom :x:\n"
    assert cli("logs", "training.yaml", "--attempt", "3").code == USER
    row = '@litgpt-metrics {"kind":"evaluation","step":4,"validation_loss":2.5,"perplexity":12.2,"seconds":1.0}'
    (running / "node-0.log").write_text(f"[rank0]:{row}\n")
    assert cli("logs", "training.yaml").out == "[node 0] [rank0]: step 4  validation loss 2.5000 (1.0 s)\n"
    assert cli("logs", "training.yaml", "--raw").out == f"[node 0] [rank0]:{row}\n"


def test_logs_are_followed_at_the_pace_of_the_platform(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = {
        "name": "pi",
        "root": str(tmp_path),
        "script": "/pi.py",
        "platform": {"kind": "kubernetes", "workload": "job"},
    }
    run = handle_of(ScriptConfig.model_validate(script)).reattach_or_create().run
    paces: list[float] = []

    async def follow(*_: object, poll: float, **__: object) -> None:
        paces.append(poll)

    monkeypatch.setattr("launcher.runs.waiting.follow", follow)
    monkeypatch.setattr("launcher.runs.attempts.Attempts.last", lambda _: None)
    assert cli("logs", run, "--root", str(tmp_path), "--follow").code == 0
    assert paces == [5.0]


def test_logs_selects_a_node_a_rank_or_a_time(cli: Cli, failed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (failed / "node-0.log").write_text("checked\n[rank0]: hello\n[rank1]: hi\n")
    assert cli("logs", "training.yaml", "--node", "1").out == "[node 1] [rank1]: boom :x:\n"
    assert cli("logs", "training.yaml", "--rank", "1", "--follow").out.splitlines() == [
        "[node 0] [rank1]: hi", "[node 1] [rank1]: boom :x:",
    ]  # fmt: skip
    assert cli("logs", "training.yaml", "--node", "0", "--rank", "1").out == "[node 0] [rank1]: hi\n"
    output = cli("logs", "training.yaml", "--since", "10m")
    assert (output.code, output.out) == (USER, "")
    assert "the logs of platform local are files, whose lines have no time" in output.err
    output = cli("logs", "training.yaml", "--since", "soon")
    assert (output.code, "'soon' is neither an age" in output.err) == (2, True)

    now = datetime.now().astimezone()
    lines = [LogLine(0, text, (now - timedelta(minutes=age)).timestamp()) for text, age in (("old", 20), ("new", 5))]
    page = LogPage(tuple(lines), "")
    monkeypatch.setattr("launcher.platforms.local.platform.LocalPlatform.logs", lambda *_: page)
    for since in ("10m", (now - timedelta(minutes=10)).isoformat(), f"{now - timedelta(minutes=10):%Y-%m-%dT%H:%M}"):
        assert cli("logs", "training.yaml", "--since", since).out == "[node 0] new\n"


def test_json_output_is_one_document(cli: Cli, running: Path, dataset: tuple[DatasetManifest, Path]) -> None:
    """All else is on standard error."""

    def answer(*arguments: str, code: int = 0) -> Any:
        output = cli(*arguments, "--json")
        assert output.code == code, output
        return json.loads(output.out, parse_constant=pytest.fail)

    write_metrics(running.parents[1])
    run = running.parents[1].name
    assert "step" in answer("plan", "training.yaml")["steps"][0]
    [finding, *_] = answer("doctor", "--root", "poem.txt", code=USER)["findings"]
    assert {"severity", "code", "what", "fix"} <= finding.keys()
    assert [row["setting"] for row in answer("settings", "train.seed")] == ["train.seed"]
    assert answer("verify", str(dataset[1]))["documents"] > 0
    seen = answer("status", "training.yaml")
    assert (seen["name"], seen["runs"][0]["step"], seen["runs"][0]["state"]) == (run, 2, "running")
    assert [(item["attempt"], item["state"]) for item in seen["attempts"]] == [(1, "failed"), (2, "running")]
    assert answer("cleanup", "--root", "out", "--dry-run") == {"cancelled": [], "orphaned": [], "removed": []}
    assert "local" in [row["deployment"] for row in answer("submit")]
    with (running.parents[1] / METRICS).open("a") as rows:
        rows.write('{"kind": "step", "step": 3, "loss": "NaN", "step_seconds": 3.0}\n')
    assert answer("runs", "--root", "out")[0]["loss"] == "NaN"


def test_a_shell_completes_configs_and_the_names_of_runs(
    cli: Cli, running: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("_TRAIN_LITGPT_COMPLETE", "complete_bash")
    run = running.parents[1].name
    for line, wanted in (("status --root out ti", [run]), ("plan t", ["there.yaml", "training.yaml"])):
        monkeypatch.setenv("COMP_WORDS", f"train-litgpt {line}")
        monkeypatch.setenv("COMP_CWORD", str(len(line.split())))
        output = cli()
        assert (output.code, output.out.split()) == (0, wanted)


def test_into_a_pipe_no_row_ends_with_blanks(cli: Cli) -> None:
    assert [line for line in cli("settings").out.splitlines() if line.endswith(" ")] == []


def test_output_of_a_node_cannot_control_a_terminal(cli: Cli, failed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evil = "\x1b]0;owned\x07 \x9b2J \u202eexe \x00"
    (failed / "node-0.log").write_bytes(evil.encode() + b"\n\xff \x1b[31mred\n")
    assert cli("logs", "training.yaml").out.splitlines()[0] == f"[node 0] {evil}"  # into a pipe as it is
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    first, second, *_ = cli("logs", "training.yaml").out.splitlines()
    assert first == "[node 0] \\x1b]0;owned\\x07 \\x9b2J \\u202eexe \\x00"
    assert second == "[node 0] \ufffd \x1b[31mred\x1b[0m"  # a colour, which ends with its line


@pytest.mark.parametrize("is_terminal", [True, False])
def test_generated_text_steers_no_terminal(cli: Cli, monkeypatch: pytest.MonkeyPatch, is_terminal: bool) -> None:
    pieces = ["\x1b]52;c;", "AAAA\x07", "\x1b", "[2J"]
    writer = SimpleNamespace(step=8, write=lambda *_, **__: iter(pieces))
    monkeypatch.setattr("litgpt_demo.export.generation.Writer", lambda _: writer)
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    text = cli("generate", "./run", "text").out
    assert text == ("text\\x1b]52;c;AAAA\\x07\\x1b[2J\n" if is_terminal else f"text{''.join(pieces)}\n")


@pytest.mark.parametrize(("code", "fault"), [(53, "cancelled"), (55, "refused"), (41, "data"), (-9, "node")])
def test_submitted_run_ends_with_its_failure_class(code: int, fault: str) -> None:
    process: Any = SimpleNamespace(wait=lambda: code)
    run: Any = SimpleNamespace(name="gpt")
    with pytest.raises(JobFailed, match="gpt ended with exit code") as failed:
        Submitted(run, process, io.StringIO("its words")).wait()
    assert failed.value.fault is FailureClass[fault.upper()]


def test_a_cancelled_run_is_named(cli: Cli, running: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = running.parents[1].name
    monkeypatch.setattr("launcher.platforms.local.platform.LocalPlatform.cancel", lambda *_: None)
    write_metrics(running.parents[1])
    lines = cli("cancel", "training.yaml").out
    assert lines.startswith(f"cancelled {run}; no resources remain\n{run}: steps 1 to 2 are lost")


def test_unknown_state_is_reported_and_is_not_a_success(cli: Cli, workdir: Path, running: Path) -> None:
    """Its job was started on a machine that is not this one."""
    index, run = Index.of("out"), running.parents[1].name
    record = index.records(run)[-1].model_copy(update={"machine": "0123456789ab", "host": "other-laptop"})
    (workdir / "out" / "index" / run / "2.json").unlink()
    assert index.create(record)
    for command in ("status", "cancel", "logs"):
        output = cli(command, "training.yaml")
        assert (output.code, "was started on other-laptop" in output.err) == (UNREACHABLE, True)
        assert "nothing was running" not in output.out
    assert "unknown" in cli("runs", "out").out


def test_verbs_take_a_sweep_as_a_whole(cli: Cli, workdir: Path) -> None:
    """A trial that cannot be read does not keep the others from being cancelled."""
    sweep = read_config(workdir / "sweep.yaml", [])
    handles = [handle_of(trial.config) for trial in trials(sweep)]
    for number, item in enumerate(handles):
        attempt_in(Path(item.reattach_or_create().job_id), f"{number}\n", state="failed", native="ended", exit_codes={})
    for arguments in (["sweep.yaml"], [sweep_name(sweep), "--root", "out"]):
        assert [row.split()[1] for row in cli("status", *arguments).out.splitlines()[1:]] == ["failed", "failed"]
        assert {line.split("  ")[1] for line in cli("logs", *arguments).out.splitlines()} == {
            "[node 0] 0",
            "[node 0] 1",
        }
        assert f"{sweep_name(sweep)} has no running job" in cli("cancel", *arguments).out
    first, second = sorted(item.attempts.run for item in handles)
    requested = len(Index.of("out").cancellations(second))
    (workdir / "out" / "index" / first / "1.json").write_text('{"format":')
    output = cli("cancel", sweep_name(sweep), "--root", "out")
    assert (output.code, f"index/{first}/1.json" in output.err) == (DATA, True)
    assert len(Index.of("out").cancellations(second)) > requested
    assert "nothing was running" not in output.out


def test_logs_skip_trials_that_lack_the_attempt(cli: Cli, workdir: Path) -> None:
    handles = [handle_of(trial.config) for trial in trials(read_config(workdir / "sweep.yaml", []))]
    for handle in (*handles, handles[1]):
        attempt_in(Path(handle.reattach_or_create().job_id), "hello\n", state="failed", native="ended", exit_codes={})
    result = cli("logs", "sweep.yaml", "--attempt", "2")
    assert (result.code, result.out) == (0, f"{handles[1].attempts.run}  [node 0] hello\n")
    assert f"{handles[0].attempts.run} has no attempt 2" in result.err
    assert cli("logs", "sweep.yaml", "--attempt", "3").code == USER


def test_submitting_without_a_server_says_how_to_get_one(cli: Cli) -> None:
    from prefect.settings import PREFECT_API_URL, temporary_settings

    with temporary_settings(restore_defaults={PREFECT_API_URL}):  # other tests have a server
        output, listed = cli("submit", "local"), cli("submit")
        handed = cli("run", str(Path(__file__).parents[2] / "deployments/configs/pi.yaml"), "--detach")
    for item in (output, handed):
        assert (item.code, "run `train-litgpt serve`, or set PREFECT_API_URL" in item.err) == (USER, True)
    assert listed.out.startswith("! no Prefect server runs")
    assert {"gke-tcpxo", "sweep-local"} <= {line.split()[0] for line in listed.out.splitlines()}


def test_unreadable_prefect_settings_are_named_with_a_workaround(workdir: Path) -> None:
    broken = {"profiles.toml": "active = 'x", "pyproject.toml": "[tool.prefect]\napi.url = 3"}
    for file, text in broken.items():
        (workdir / f"with-{file}").mkdir()
        (workdir / f"with-{file}" / file).write_text(text)
    code = (
        "import os, sys, cli.main\n"
        "for folder in sys.argv[1:]:\n"
        "    os.environ['PREFECT_HOME'], sys.argv = folder, ['train-litgpt', 'submit', 'local']\n"
        "    os.chdir(folder)\n"
        "    try: cli.main.main()\n"
        f"    except SystemExit as end: assert end.code == {USER}"
    )
    places = [workdir / f"with-{file}" / file for file in broken]
    command = [sys.executable, "-c", code, *(str(place.parent) for place in places)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [line for line in done.stderr.splitlines() if line.startswith("error ")]
    assert [f"fix {place}" in line for place, line in zip(places, lines, strict=True)] == [True, True]


def test_changed_setting_keeps_all_other_deployed_settings() -> None:
    """Prefect itself would replace the whole section; and a deployment's own overrides give way to one's own."""
    from flows.parameters import parameters_with

    document = {"root": "here", "train": {"global_batch": 16, "micro_batch": 4, "learning_rate": 1e-3}}
    deployed = {**document, "overrides": {"train.learning_rate": 0.5, "train.seed": 7}}
    made = parameters_with("train-litgpt", deployed, {"train.learning_rate": 3e-4})
    wanted = validated(RunConfig, overridden(document, {"train.learning_rate": 3e-4, "train.seed": 7}), where="test")
    assert made == {**wanted.model_dump(mode="json"), "overrides": {}}
    platform_file = {"root": "there", "platform": {"kind": "local", "grace_period": 7}}
    moved = parameters_with("train-litgpt", deployed, {"platform.processes_per_node": 2}, platform_file=platform_file)
    assert (moved["root"], moved["platform"]["grace_period"], moved["platform"]["processes_per_node"]) == (
        "there",
        7,
        2,
    )
    assert moved["train"]["seed"] == 7
    with pytest.raises(ConfigProblem, match=r"train\.lerning_rate: unknown setting"):
        parameters_with("train-litgpt", deployed, {"train.lerning_rate": 1})
