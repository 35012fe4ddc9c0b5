"""The commands of each tutorial run in an empty folder, and print what the page shows."""

import gzip
import json
import os
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

from launcher.runs.run import RunManifest
from litgpt_demo.documents import read_manifest
from litgpt_demo.metrics import curve, rows_of
from litgpt_demo.storage import open_storage

CHECKOUT = Path(__file__).parents[3]
BLOCK = re.compile(r'^```(\w+)(?: title="([^"]+)")?\n(.*?)^```', re.MULTILINE | re.DOTALL)
PLACEHOLDER = re.compile(r"\b([a-z-]+)-0123456789\b")
PROGRAM = "$ python make_"  # other console lines of a page are git, pip and PATH
INTERRUPT = "^C"
HAS_SCORES = find_spec("lm_eval") is not None


def stable_words(line: str) -> set[str]:
    """Return the words of a line that do not differ between two runs: no numbers, paths, hashes or units."""
    stripped = (word.strip(".,:;()`") for word in line.split())
    return {word for word in stripped if re.fullmatch(r"[A-Za-z'-]{3,}|✓", word) and word != "min"}


def is_live(line: str) -> bool:
    """Report whether a terminal removes the line later, as a progress bar."""
    return "━" in line


def missing_lines(shown: str, printed: str) -> list[str]:
    """Return the lines of a page that no printed line contains, numbers aside."""
    lines = [line for line in shown.splitlines() if not is_live(line) and line.strip("… ") not in {"", "^C"}]
    stable = [stable_words(line) for line in printed.splitlines()]
    return [line for line in lines if not any(stable_words(line) <= found for found in stable)]


class Reader:
    """Follows a page in a folder of its own, and keeps the output of each command."""

    def __init__(self, folder: Path, home: Path) -> None:
        self.folder, self.printed = folder, dict[str, str]()
        path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
        self._environment = {**os.environ, "PREFECT_HOME": str(home), "COLUMNS": "120", "PATH": path}
        (folder / "deployments").symlink_to(CHECKOUT / "deployments")

    def follow(self, page: str, *, instead: dict[str, str] | None = None) -> None:
        """Write the titled blocks of a page, type its commands, and compare their output with the next block.

        A command in `instead` is replaced; the replacement "" leaves it out, with its output.
        """
        text = (CHECKOUT / "docs" / "start" / page).read_text(encoding="utf-8")
        for (kind, name, block), (next_kind, next_name, output) in pairwise([*BLOCK.findall(text), ("", "", "")]):
            block = PLACEHOLDER.sub(self._run_name, block)
            if "." in name:
                (self.folder / name).parent.mkdir(exist_ok=True)
                (self.folder / name).write_text(block, encoding="utf-8")
            typed = [(instead or {}).get(command, command) for command in _commands(kind, block)]
            shown = output if typed and all(typed) and next_kind == "text" and not next_name else ""
            printed = "".join([self._type(command, shown) for command in typed if command])
            if HAS_SCORES or "evaluate" not in block:
                assert missing_lines(shown, printed) == [], printed

    def _run_name(self, placeholder: re.Match[str]) -> str:
        [run] = (self.folder / "output" / "runs").glob(f"{placeholder[1]}-*")
        return run.name

    def _type(self, command: str, shown: str) -> str:
        """Return the output of a command. Ctrl-C is pressed as often, and at the step, as the shown output has it."""
        process = subprocess.Popen(
            shlex.split(command),
            cwd=self.folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        interrupts = shown.splitlines().count(INTERRUPT)
        expected = 40 if "evaluate" in command and not HAS_SCORES else 0
        if interrupts:
            [bar] = filter(is_live, shown.splitlines())
            step, expected = int(re.findall(r"(\d+)/", bar)[-1]), 130
        printed = ""
        with process:
            for line in process.stdout or ():
                printed += line
                reached = re.match(r" *step (\d+)/", line)
                if interrupts and ((reached and int(reached[1]) >= step) or "press Ctrl-C once more" in line):
                    os.killpg(process.pid, signal.SIGINT)
                    interrupts -= 1
        assert process.returncode == expected, printed
        assert "Warning" not in printed
        self.printed[command] = printed
        return printed


def _commands(kind: str, block: str) -> Iterator[str]:
    """Yield the commands of a block. Only the page's own programs are typed of a console block."""
    for line in block.splitlines():
        if kind == "sh":
            yield shlex.join(shlex.split(line, comments=True))
        elif kind == "console" and line.startswith(PROGRAM):
            yield line.removeprefix("$ ")


@pytest.fixture
def reader(tmp_path: Path, prefect_home: Callable[[], Path]) -> Reader:
    return Reader(tmp_path, prefect_home())


def test_tutorial_installs_an_environment_for_doctor(reader: Reader) -> None:
    """The commands of make are left out: a second environment takes minutes, and this one is in use."""
    reader.follow("install.md", instead={"make train": "", "make stop": "", "make clean": ""})
    assert "python.version" in reader.printed["train-litgpt doctor"]


def test_tutorial_trains_a_first_model(reader: Reader) -> None:
    """The command of `make train` is typed in its place, because make would make a second environment."""
    command = "train-litgpt run deployments/configs/local.yaml"
    makefile = (CHECKOUT / "Makefile").read_text(encoding="utf-8")
    assert re.search(rf"^train: .*\n\t\$\(BIN\)/{command}\n", makefile, re.MULTILINE)
    reader.follow("first-model.md", instead={"make train": command})
    report, *_ = reader.folder.glob("output/runs/*/report.html")
    for part in ("Validation loss", "What it writes", "Where the time went", "Dataset", "Use it"):
        assert part in report.read_text(encoding="utf-8")


def test_tutorial_resumes_a_model_of_own_text(reader: Reader) -> None:
    """A real Ctrl-C stops it, and the same command continues at the step of its last checkpoint."""
    reader.follow("own-text.md")
    [run] = reader.folder.glob("output/runs/own-text-*")
    assert {attempt.name for attempt in (run / "attempts").iterdir()} == {"1", "2"}
    assert [*curve(rows_of((run / "metrics.jsonl").read_bytes()), "step", "loss")] == [*range(1, 401)]
    [stopped] = re.findall(r"step (\d+)/400", reader.printed["train-litgpt status own.yaml"])
    assert int(stopped) < 400
    assert f"step {stopped}/400" in reader.printed["train-litgpt run own.yaml"]


def test_tutorial_continues_a_model_on_token_files(reader: Reader) -> None:
    """It ends with scores and text."""
    reader.follow("pretrain.md")
    runs = reader.folder / "output" / "runs"
    [first], [second] = runs.glob("first-*"), runs.glob("second-*")
    with gzip.open(first / "profile" / "steps-20-22-rank-0.json.gz") as trace:
        marks = {event["name"] for event in json.load(trace)["traceEvents"]}
    assert {"ProfilerStep#20", "ProfilerStep#21", "ProfilerStep#22"} <= marks
    rows = rows_of((second / "metrics.jsonl").read_bytes())
    rates = curve(rows, "step", "learning_rate")
    assert [*rates] == [*range(1, 21)]
    assert {rates[step] for step in range(1, 11)} == {4e-3}
    assert rates[10] > rates[11] > rates[19] > rates[20] == pytest.approx(4e-4)
    shares = [curve(rows, "step", f"tokens.{source}")[20] / (20 * 8 * 64) for source in ("mine", "stdlib")]
    assert shares == pytest.approx([0.7, 0.3], abs=0.01)
    learned = curve(rows_of((first / "metrics.jsonl").read_bytes()), "step", "loss")
    assert curve(rows, "step", "loss")[1] < learned[10], "it began with the weights of the first"
    origin = read_manifest(open_storage(str(second)), RunManifest).origin
    lineage = json.loads((second / "final" / "lineage.json").read_text())["training"]["origin"]
    assert lineage["files"] == {name: [*file] for name, file in origin.files.items()}
    assert "trained from" in (second / "final" / "MODEL_CARD.md").read_text()
    printed = "".join(reader.printed.values())
    assert "The value of " in printed
    assert ("openings, acc: " if HAS_SCORES else "not installed: lm_eval") in printed
