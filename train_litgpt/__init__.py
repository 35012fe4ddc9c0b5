"""The product from Python, for notebooks: start a run, wait for it, take its metrics and its model.

    from train_litgpt import submit

    run = submit("deployments/configs/local.yaml", "train.max_steps=20").wait()
    run.metrics().to_pandas().plot("step", "loss")
    print(run.write("def main("))

A run is orchestrated by a process of its own, the command line's: it goes on when the notebook is closed, and
submitting the same again takes it up. Heavy imports wait until something needs them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Literal

from launcher.config import RunConfig, config_document, validated
from launcher.errors import ConfigProblem
from launcher.reports.compare import figures
from launcher.runs.index import Index
from launcher.runs.listing import RunRow, run_rows
from launcher.runs.results import result_of_run
from launcher.runs.run import plan_run
from launcher.runs.targets import find
from litgpt_demo.errors import EXIT_CODES, Fault, TrainLitgptError
from litgpt_demo.export import bring_model
from litgpt_demo.runs import LITGPT
from litgpt_demo.storage import Storage

if TYPE_CHECKING:
    import pyarrow as pa

    from litgpt_demo.export.proof import LitgptModel

__all__ = ["Run", "open_run", "submit"]

_LOOK = 5.0  # seconds between two looks at a run that another process orchestrates
_FAULTS = {code: fault for fault, code in EXIT_CODES.items()}


def submit(config: str | Path, *overrides: str) -> Run:
    """Start a training in the background, or take it up, and return at once.

    Args:
        config: a YAML file. Its relative paths count from the current folder.
        overrides: settings that win over it: `"train.max_steps=20"`.

    Raises:
        ConfigProblem, UserError: the config cannot be used, or its corpus is not there; nothing was started.
    """
    document = config_document(Path(config), overrides)
    if kinds := [name for name in ("script", "sweep", "measure") if name in document]:
        raise ConfigProblem(f"{config} has a section {kinds[0]}, and this starts trainings; use `train-litgpt run`")
    planned = plan_run(validated(RunConfig, document, where=str(config)))
    words = [sys.executable, "-m", "cli", "run", str(config), *overrides, "--json"]
    told = tempfile.TemporaryFile()  # noqa: SIM115 (it lives as long as the process that writes it)
    process = subprocess.Popen(
        words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=told, start_new_session=True
    )
    return Run(Index(planned.root), planned.name, process=process, told=told)


def open_run(name: str, *, root: str = "output") -> Run:
    """Return a run that was started, by its name, a unique beginning of it, `@last`, or its folder.

    Args:
        root: where names are looked up: a folder, or gs://bucket/prefix.

    Raises:
        UnknownRun: there is none, or there are several.
        ConfigProblem: it is a sweep.
    """
    found = find(name, root=root)
    if len(found.runs) > 1:
        raise ConfigProblem(f"{found.name} has {len(found.runs)} trials; name one of them: {', '.join(found.runs[:5])}")
    return Run(found.index, found.runs[0])


class Run:
    """One training under a root."""

    def __init__(
        self,
        index: Index,
        name: str,
        *,
        process: subprocess.Popen[bytes] | None = None,
        told: IO[bytes] | None = None,
    ) -> None:
        """Take the run's place, and the process that orchestrates it where this one has started it.

        Args:
            told: the process's standard error.
        """
        self.name = name
        """The run's name, `<name>-<key>`, which every command takes."""
        self._index, self._process, self._told = index, process, told

    def __repr__(self) -> str:
        return f"<run {self.name} under {self._index.root.address()}>"

    @property
    def folder(self) -> Storage:
        """Return the folder of the run, which may not be there yet."""
        return self._index.root.within(f"runs/{self.name}")

    def status(self) -> RunRow | None:
        """Return the state and progress of the run; None before its first attempt is written down."""
        return next(iter(run_rows(self._index, [self.name])), None)

    def wait(self, timeout: float | None = None) -> Run:
        """Wait until the run is trained, collected and reported, and return it.

        Args:
            timeout: seconds after which waiting is given up; the run goes on.

        Raises:
            TimeoutError: the time is up.
            TrainLitgptError: the run failed; `fault` is the class, and the message says what to do.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        if self._process is not None:
            try:
                code = self._process.wait(timeout)
            except subprocess.TimeoutExpired:
                raise TimeoutError(f"{self.name} goes on after {timeout:.0f} s; call wait() again") from None
            if code:
                raise TrainLitgptError(self._last_words(), fault=_FAULTS.get(code, Fault.UNKNOWN))
            return self
        while (row := self.status()) is not None and row.live:
            if deadline is not None and time.monotonic() > deadline:
                raise TimeoutError(f"{self.name} goes on after {timeout:.0f} s; call wait() again")
            time.sleep(_LOOK)
        if row is None or row.state != "done":
            state = "was never started" if row is None else f"ended as {row.state}"
            raise TrainLitgptError(f"{self.name} {state}; `{self._index.command('logs', self.name)}` shows why")
        return self

    def _last_words(self) -> str:
        """Return the error that the orchestrating process ended with, or all that it told."""
        assert self._told is not None
        self._told.seek(0)
        text = self._told.read().decode(errors="replace")
        return re.split(r"^(?:error|failed) ", text, flags=re.MULTILINE)[-1].strip()

    def metrics(self, kind: str = "step") -> pa.Table:
        """Return the metrics as a table, a row for each step, in the order of the steps; `.to_pandas()` if you like.

        Args:
            kind: `step`, `evaluation`, `checkpoint` or another kind of litgpt_demo.metrics. What was trained again
                after a restart is there once, as it went last.
        """
        import pyarrow as pa

        rows = {row["step"]: dict(row) for row in result_of_run(self._index, self.name).rows if row["kind"] == kind}
        columns = dict.fromkeys(name for row in rows.values() for name in row if name != "kind")
        return pa.table({name: [rows[step].get(name) for step in sorted(rows)] for name in columns})

    def figures(self) -> Mapping[str, Any]:
        """Return the run in figures: step, losses in nats per token, tokens, tokens per second, seconds, scores."""
        result = result_of_run(self._index, self.name)
        return {**figures(result), **{score.name: score.value for score in result.scores}}

    @contextmanager
    def model(self, device: Literal["auto", "cpu", "cuda"] = "auto") -> Iterator[LitgptModel]:
        """Open the trained model, every byte verified; its memory goes at the end of the `with` block.

        Raises:
            UserError: there is none; `wait` first.
            DataError: it is not what its manifest says.
        """
        with tempfile.TemporaryDirectory(prefix="litgpt-model-") as scratch:
            folder = bring_model(self.folder, LITGPT, Path(scratch))
            from litgpt_demo.export.proof import opened_by_litgpt

            with opened_by_litgpt(folder, accelerator=device, precision=None) as model:
                yield model

    def write(self, prompt: str, *, tokens: int = 100, temperature: float = 0.8, top_k: int | None = 50) -> str:
        """Return what the trained model writes after a prompt; a temperature of 0 takes the likeliest tokens."""
        with self.model() as model:
            return "".join(model.stream(prompt, most=tokens, temperature=temperature, top_k=top_k, top_p=1.0))
