"""The public Python API: submit a training, wait for it, read its metrics, take its model."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from launcher.config import RunConfig, config_document, validated
from launcher.errors import JobFailed
from launcher.runs.run import Run, plan_run
from litgpt_demo import PYTHON
from litgpt_demo.documents import fetch_verified
from litgpt_demo.errors import DataError, FailureClass, fault_of_exit_code
from litgpt_demo.export import exported
from litgpt_demo.runs import FINAL, read_metrics
from litgpt_demo.storage.private import make_temporary


@dataclass(frozen=True)
class Submitted:
    """A training in a process of its own. The same submission again reattaches to its job and reuses finished steps."""

    run: Run
    _process: subprocess.Popen[bytes]
    _errors: IO[str]

    def wait(self) -> None:
        """Return when the model is collected. Raises JobFailed with the command's output and failure class."""
        code = self._process.wait()
        if code:
            self._errors.seek(0)
            fault = {fault.exit_code: fault for fault in FailureClass}.get(code) or fault_of_exit_code(code)
            what = f"{self.run.name} ended with exit code {code}: {self._errors.read().strip()}"
            raise JobFailed(what, fault=fault)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows so far, for pandas.DataFrame. docs/reference/metrics.md has the columns and units."""
        return read_metrics(self.run.storage)

    def model(self) -> Any:
        """Return the collected model of transformers. Raises DataError if it does not exist or is damaged."""
        from litgpt_demo.export.proof import opened

        final = exported(self.run.storage)
        if final is None or final.huggingface is None:
            why = "; ".join(final.findings) if final else "it is not collected yet; call wait() first"
            raise DataError(f"{self.run.name} has no model for transformers: {why}")
        records = [record for record in final.files if record.path.startswith("huggingface/")]
        folder = fetch_verified(self.run.storage.within(FINAL), records, lambda: make_temporary(self.run.name))
        return opened(folder / "huggingface")


def submit(config: str | Path, overrides: Mapping[str, Any] | None = None) -> Submitted:
    """Start `train-litgpt run` with a training's config and settings, as {"train.max_steps": 50}, in a process that
    outlives this one. Raises ConfigProblem or UserError for an invalid training."""
    settings = [f"{name}={json.dumps(value, ensure_ascii=False)}" for name, value in (overrides or {}).items()]
    run = plan_run(validated(RunConfig, config_document(Path(config), settings), where=str(config)))
    command, errors = [*PYTHON, "-m", "cli", "run", str(config), *settings], TemporaryFile("w+")  # noqa: SIM115
    lines = os.environ | {"FORCE_COLOR": ""}  # a notebook sets it, but does not process terminal codes
    process = subprocess.Popen(command, env=lines, stdin=subprocess.DEVNULL, stderr=errors, start_new_session=True)
    return Submitted(run, process, errors)
