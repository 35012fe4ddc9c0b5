"""The tutorial of Prefect: its commands run against a real server and worker, and print what the page shows."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from test_server import engine_of
from waiting import until

from launcher.runs.run import RunManifest
from litgpt_demo.documents import read_manifest
from litgpt_demo.runs import read_metrics
from litgpt_demo.storage import open_storage

PAGE = Path(__file__).parents[3] / "docs" / "start" / "prefect.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)
FLOW_RUN = "01234567-89ab-cdef-0123-456789abcdef"
OF_THE_FIXTURE = ("make serve", "make stop", ". .prefect")
KILL = "$ pkill -9 --newest --parent $(cut -d' ' -f1 .prefect/serve/worker.pid) -f prefect.engine"


def stable_words(text: str) -> set[str]:
    """The words that do not differ between two calls: no numbers, ids, ages or paths."""
    return {word for word in re.findall(r"(?<![\w/.-])[A-Za-z]{3,}(?![\w/.-])", text) if word != "ago"}


class Reader:
    """Types the commands of the page, with a root of its own, and follows its last flow run."""

    def __init__(self, served: Any, client: SyncPrefectClient) -> None:
        self.served, self.client, self.flow_run, self.run = served, client, UUID(FLOW_RUN), ""

    def type(self, command: str) -> str:
        """Return the output of a command of the page."""
        command = command.replace(FLOW_RUN, str(self.flow_run))
        arguments = shlex.split(command)
        if arguments[0] == "train-litgpt":
            arguments += [f"root={self.served.root}"] if arguments[1] == "submit" else ["--root", str(self.served.root)]
        program = str(Path(sys.executable).with_name(arguments[0]))
        output: str = self.served.call(program, *arguments[1:])
        if arguments[1] == "submit":
            self.flow_run = UUID(output.strip().rpartition("/")[2])
            [self.run] = re.findall(r"name=(\S+)", command)
        return output

    def is_in(self, state: StateType) -> bool:
        return self.client.read_flow_run(self.flow_run).state_type is state

    def rows(self) -> list[dict[str, Any]]:
        """The metrics of the run that was started last."""
        folders = [*Path(self.served.root).glob(f"runs/{self.run}-*")]
        return read_metrics(open_storage(str(folders[0]))) if folders else []

    def wait(self, reached: Callable[[], bool]) -> None:
        until(reached, seconds=900)


def test_tutorial_of_prefect_prints_what_it_shows(
    served: Any, client: SyncPrefectClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader waits where the page says so: for a training's first steps, and for the end of a flow run."""
    monkeypatch.setenv("COLUMNS", "120")
    reader = Reader(served, client)
    before: dict[str, Callable[[], bool]] = {
        "prefect flow-run ls --limit 1": lambda: reader.is_in(StateType.RUNNING),
        "train-litgpt status from-prefect": lambda: reader.is_in(StateType.COMPLETED),
        f"prefect flow-run cancel {FLOW_RUN}": lambda: len(reader.rows()) > 3,
        "train-litgpt status too-long": lambda: reader.is_in(StateType.CANCELLED),
        KILL: lambda: len(reader.rows()) > 3,
        "train-litgpt status crash": lambda: reader.is_in(StateType.COMPLETED),
    }
    typed = []
    for (kind, block), (next_kind, shown) in pairwise([*BLOCK.findall(PAGE.read_text("utf-8")), ("", "")]):
        printed = ""
        for command in block.splitlines() if kind in {"sh", "console"} else ():
            if command.startswith(OF_THE_FIXTURE):
                continue
            if command in before:
                reader.wait(before[command])
            if command == KILL:
                engine_of(reader.flow_run).kill()
            elif command.startswith("prefect flow-run logs"):
                following = re.compile("reattached|this orchestrator follows")
                reader.wait(lambda: following.search(reader.type(command)) is not None)  # noqa: B023
                continue
            else:
                printed += reader.type(command)
            typed.append(command)
        if next_kind == "text" and printed:
            lines = [line for line in shown.splitlines() if stable_words(line)]
            found = [stable_words(line) for line in printed.splitlines()]
            assert [
                line for line in lines if not any(stable_words(line) <= printed_line for printed_line in found)
            ] == [], printed
    assert before.keys() <= {*typed}
    [crashed] = Path(served.root).glob("runs/crash-*")
    manifest = read_manifest(open_storage(str(crashed)), RunManifest)
    assert manifest is not None
    assert (manifest.step, manifest.attempts) == (120, 1)
