"""The commands of docs/two-machines.md, run as they stand there on two machines that share nothing but a network."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from machines import Place, machines
from tiny_runs import write_run

from litgpt_demo.metrics import rows_of
from litgpt_demo.storage import open_storage
from litgpt_demo.training.checkpoints import newest_step

pytestmark = [pytest.mark.long, pytest.mark.training, pytest.mark.timeout(900)]

CHECKOUT = Path(__file__).parents[3]
COMMANDS = re.findall(r"^```sh\n(.*?)^```", (CHECKOUT / "docs/two-machines.md").read_text(), re.MULTILINE | re.DOTALL)
(SETTING,) = (text for text in COMMANDS if text.startswith("export "))
PI = [text for text in COMMANDS if "examples/pi.py" in text]
TRAINING = [text for text in COMMANDS if "-m litgpt_demo train" in text]
(MASTER,) = {found for text in COMMANDS for found in re.findall(r"--master ([\d.]+):", text)}


@pytest.fixture
def two() -> Iterator[list[Place]]:
    """The page's first machine, by its address, and a second one."""
    with machines([MASTER, MASTER.rpartition(".")[0] + ".2"]) as places:
        yield places


def run_on(places: list[Place], commands: list[str], homes: Path) -> list[str]:
    """Run one command on each machine, with a home of its own; return what each said."""
    started = []
    for place, command in zip(places, commands, strict=True):
        home = homes / place.host
        home.mkdir()
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        environ = {**os.environ, "HOME": str(home), "PATH": path, "OMP_NUM_THREADS": "1"}
        shell = [*place.prefix, "bash", "-c", f"{SETTING}{command}"]
        started.append(
            subprocess.Popen(
                shell, cwd=CHECKOUT, env=environ, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
        )
    said = [process.communicate(timeout=240)[0] for process in started]
    assert [process.returncode for process in started] == [0, 0], "\n".join(said)
    return said


def test_two_machines_find_each_other_and_pi(two: list[Place], tmp_path: Path) -> None:
    first, second = run_on(two, PI, tmp_path)
    assert "[rank0]:pi = 3.141592653589" in first
    assert "4 ranks on 2 nodes" in first
    assert "pi =" not in second
    for number, place in enumerate(two):
        assert (tmp_path / place.host / "pi-1" / f"node-{number}.json").is_file()


def test_two_machines_train_a_run_to_its_end(two: list[Place], tiny_dataset: Path, tmp_path: Path) -> None:
    run = write_run(tmp_path / "runs" / "tiny", tiny_dataset, world_size=2)
    places = {"/shared/llm/datasets/DATASET": str(tiny_dataset), "/shared/llm/runs/RUN": str(run)}
    commands = []
    for command in TRAINING:
        for shown, real in places.items():
            assert shown in command
            command = command.replace(shown, real)
        commands.append(command)
    run_on(two, commands, tmp_path)
    rows = rows_of((run / "metrics.jsonl").read_bytes())
    assert [row["world_size"] for row in rows if row["kind"] == "start"] == [2]
    assert [row["step"] for row in rows if row["kind"] == "step"][-1] == 12
    assert newest_step(open_storage(str(run))) == 12
