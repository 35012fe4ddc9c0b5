"""The scores of any run's model, also of a run whose config has no `evaluation`."""

from __future__ import annotations

from prefect import flow

from flows.parameters import begin, name_flow_run
from launcher.events import Step
from litgpt_demo.config import EvaluationConfig
from litgpt_demo.export import FinalManifest
from litgpt_demo.storage import open_storage
from tasks import evaluation as step


@flow(name="evaluate", persist_result=False)
async def evaluate(run: str, evaluation: EvaluationConfig, root: str = "output") -> FinalManifest:
    """Score the collected model of a run, unless it is scored already.

    Args:
        run: The run's name, as `gpt-0123456789`, or the address of its folder.
        evaluation: The tasks.
        root: The root of a run that is given by its name.
    """
    begin((Step.EVALUATION,))
    place = open_storage(run) if "/" in run else open_storage(root).within(f"runs/{run}")
    await name_flow_run(f"evaluate-{place.root.rpartition('/')[2]}")
    return await step.evaluate(place.address(), evaluation)
