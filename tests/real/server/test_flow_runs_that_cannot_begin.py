"""A flow run whose process fails before the flow begins ends once, with a message."""

from __future__ import annotations

from typing import Any

import pytest
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import LogFilter, LogFilterFlowRunId
from waiting import until

GONE = "/folder/that/is/gone"
ENTRYPOINT = "flows.train_litgpt.train_litgpt"
PULLED: list[dict[str, Any]] = [{"prefect.deployments.steps.set_working_directory": {"directory": GONE}}]


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"parameters": {"section_of_another_version": {}}}, "section_of_another_version"),
        ({"entrypoint": "flows.gone.train_litgpt"}, "No module named 'flows.gone'"),
        ({"path": GONE, "pull_steps": PULLED}, "set_working_directory"),  # the worker's log has the rest
    ],
    ids=["section of another version", "import that fails", "folder that is gone"],
)
def test_flow_run_that_cannot_begin_fails_once(client: SyncPrefectClient, changed: dict[str, Any], reason: str) -> None:
    local = client.read_deployment_by_name("train-litgpt/local")
    kept = {name: getattr(local, name) for name in ("entrypoint", "path", "pull_steps", "tags")}
    pool = {"work_pool_name": "litgpt-local", "enforce_parameter_schema": False}
    made = client.create_deployment(local.flow_id, "unstartable", **{**kept, **pool, **changed})
    flow_run = client.create_flow_run_from_deployment(made).id
    until(lambda: (state := client.read_flow_run(flow_run).state) is not None and state.is_failed())
    names = [state.name for state in client.read_flow_run_states(flow_run)]
    assert (names.count("Crashed"), names.count("AwaitingRetry")) == (1, 0)
    state = client.read_flow_run(flow_run).state
    assert state is not None
    assert "could not begin, and is not started again" in str(state.message)
    logs = client.read_logs(LogFilter(flow_run_id=LogFilterFlowRunId(any_=[flow_run])))
    assert reason in "\n".join(log.message for log in logs)
