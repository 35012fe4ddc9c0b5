"""A flow that a worker starts within seconds: it says in a file that it began, and that it ended."""

from __future__ import annotations

import os
from pathlib import Path

from prefect import flow
from prefect.runtime import flow_run
from waiting import until

from flows.parameters import begin
from launcher.events import Step


@flow(name="tiny", persist_result=False)
async def tiny(folder: str, gate: str | None = None) -> None:
    """Begin as every flow of ours does, and end when the file `gate` is there."""
    begin((Step.TRAINING,))
    with Path(folder, str(flow_run.id)).open("a") as file:
        print("began", os.getpid(), file=file, flush=True)
        if gate is not None:
            until(Path(gate).exists, seconds=1800)
        print("ended", file=file, flush=True)
