"""A job whose orchestrator is gone, for tests of what becomes of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from uuid import UUID

from launcher.config import RunConfig, ScriptConfig
from launcher.runs.attempts import Claim, claim_of


def running_job(config: RunConfig | ScriptConfig, *flow_runs: UUID) -> Claim:
    """Start a job of this run that works until it is ended, whatever the machine is busy with."""
    claim = replace(claim_of(config), flow_runs=[str(flow_run) for flow_run in flow_runs])
    record = claim.take()
    script = Path(config.root) / "works.py"
    script.write_text("import time; time.sleep(600)")
    job = replace(claim.make_job(record.attempt), program=(str(script),), stage=())
    claim.platform.submit(claim.platform.render(job))
    assert claim.attempts.live()
    return claim
