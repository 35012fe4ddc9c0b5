"""Every deployment starts from its form in Prefect's UI, in a real browser.

Those of platforms elsewhere end here at their preflight; that they lead to their platforms is in
tests/real/server/test_every_deployment.py. The pictures of the forms lie in the folder of each test's temporary files,
as `form.png`.
"""

import json
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from playwright.sync_api import Page
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.states import Cancelling
from waiting import until

from deployments.bootstrap import PREFECT_FILE
from launcher.config import RunConfig
from launcher.yaml_files import read_yaml

DEPLOYMENTS = {deployment["name"]: deployment for deployment in read_yaml(PREFECT_FILE)["deployments"]}


def write(page: Page, value: dict[str, Any]) -> None:
    """Write JSON into the editor of overrides, the next thing after its label, once its default stands there."""
    editor = page.locator(
        "xpath=//label[starts-with(., 'overrides')]/following::*[self::label or @role='textbox'][1][@role='textbox']"
    )
    until(lambda: editor.inner_text().strip() == "{}")

    def written() -> bool:
        editor.press("ControlOrMeta+a")  # which focuses it wherever the page has moved it
        page.keyboard.insert_text(json.dumps(value))
        return editor.inner_text().strip() == json.dumps(value)

    until(written)


def what_is_on(value: Any) -> Any:
    """The same without what is off, empty or zero, at every depth."""
    if not isinstance(value, dict):
        return value
    return {name: on for name, item in value.items() if (on := what_is_on(item))}


def submitted(
    page: Page, client: SyncPrefectClient, served: Any, name: str, picture: Path, overrides: dict[str, Any]
) -> FlowRun:
    """Open a deployment's form, fill it in, take its picture and press Submit; return the flow run of that."""
    [deployment] = [deployment for deployment in client.read_deployments() if deployment.name == name]
    page.goto(f"{served.ui}/deployments/deployment/{deployment.id}/run")
    page.get_by_role("button", name="Submit").wait_for()
    parameters = dict(deployment.parameters)
    if overrides:
        write(page, overrides)
        parameters["overrides"] = overrides
    if name == "evaluate":
        page.get_by_label("run", exact=True).fill("none-0123456789")
        parameters |= {
            "run": "none-0123456789",
            "evaluation": {"batch_size": 8, **parameters["evaluation"]},
        }  # 8 by default
    page.screenshot(path=picture, full_page=True)

    def accepted() -> UUID | None:
        with page.expect_response(lambda answer: answer.url.endswith("/create_flow_run")) as answer:
            page.get_by_role("button", name="Submit").click()
        assert answer.value.status in {201, 503}, answer.value.text()
        # 503: SQLite was busy (docs/howto/deploy.md)
        return UUID(answer.value.json()["id"]) if answer.value.status == 201 else None

    made = client.read_flow_run(until(accepted))
    page.get_by_text("scheduled to start now").first.wait_for()
    # All that the form did not change is as the deployment has it; it writes out what is off or empty by default.
    assert what_is_on(made.parameters) == what_is_on(parameters)
    return made


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_a_form_starts_its_flow(
    name: str, served: Any, client: SyncPrefectClient, browser_page: Page, tiny_under: Any, tmp_path: Path
) -> None:
    tiny: RunConfig = tiny_under(tmp_path, {"name": "form"})
    changes: dict[str, Any] = {"root": str(tmp_path)}
    if name in {"local", "dataset-local"}:  # these come to their good end
        changes |= {"data": tiny.data.model_dump(mode="json")}
    if name == "local":
        changes |= tiny.model_dump(mode="json", include={"name", "model", "train", "platform"})
    parameters = {} if name in {"evaluate", "cancel-orphaned-jobs"} else changes
    flow_run = submitted(browser_page, client, served, name, tmp_path / "form.png", parameters)

    def state() -> StateType | None:
        return client.read_flow_run(flow_run.id).state_type

    begun, lacks = {StateType.RUNNING, StateType.COMPLETED}, {"gke", "kubernetes", "runai", "batch", "slurm"}
    if name == "evaluate" or lacks & {*DEPLOYMENTS[name]["tags"]}:  # no such run, and no such platform, is here
        begun.add(StateType.FAILED)
    until(lambda: state() in begun or client.read_flow_run(flow_run.id).state.is_final(), seconds=300)
    assert state() in begun
    if name in {"local", "dataset-local", "cancel-orphaned-jobs"}:
        until(lambda: state() is not StateType.RUNNING, seconds=600)
        assert state() is StateType.COMPLETED
    else:
        client.set_flow_run_state(flow_run.id, Cancelling())
        until(lambda: client.read_flow_run(flow_run.id).state.is_final(), seconds=300)


def test_form_refuses_a_wrong_value_at_its_field(
    served: Any, client: SyncPrefectClient, browser_page: Page, tmp_path: Path
) -> None:
    """It begins with the overrides."""
    page, [deployment] = (
        browser_page,
        [deployment for deployment in client.read_deployments() if deployment.name == "local"],
    )
    page.goto(f"{served.ui}/deployments/deployment/{deployment.id}/run")
    page.locator("label", has_text="Max Usd").wait_for()  # of the last section
    labels = page.locator("label").all_inner_texts()
    titles = [label.removesuffix(" (Optional)") for label in labels]
    assert titles[titles.index("Run Name") + 1] == "overrides"
    assert {"Node Fault", "Network Fault", "Wandb"} <= {*titles}
    assert not {"New attempts", "Field", "Sweep"} & {*titles}
    page.get_by_label("Learning Rate (Optional)", exact=True).fill("-1")
    page.get_by_role("button", name="Submit").click()
    page.get_by_text("-1 is less than or equal to the minimum of 0", exact=True).wait_for()
    page.screenshot(path=tmp_path / "refused.png")
