"""Sweeps that share GPUs hold slots of Prefect's global concurrency limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
from waiting import until

from flows.sweep_litgpt import GPUS

# As a trial holds them; for the shortest time that Prefect allows, for the test waits until it is over.
HOLDER = """
import asyncio
from flows.sweep_litgpt import gpus

async def hold():
    async with gpus(3, lease=60):
        print("held", flush=True)
        await asyncio.Event().wait()

asyncio.run(hold())
"""


def test_slots_of_a_killed_sweep_return_with_its_lease(served: Any, client: SyncPrefectClient) -> None:
    """Also by a server that was restarted."""

    def taken() -> int:
        return client.read_global_concurrency_limit_by_name(GPUS).active_slots

    client.create_global_concurrency_limit(GlobalConcurrencyLimitCreate(name=GPUS, limit=4))
    environment, root = {**os.environ, "PREFECT_HOME": str(served.home), **served.settings}, Path(__file__).parents[3]
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, env=environment, cwd=root, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        assert taken() == 3
        holder.kill()
    served.python("cli", "stop")
    served.serve()
    until(lambda: taken() == 0, seconds=300)
    client.delete_global_concurrency_limit_by_name(GPUS)
