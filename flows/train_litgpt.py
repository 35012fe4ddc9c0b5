"""The main job: raw text in, a verified checkpoint out."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from prefect import flow

from flows.hooks import begin, cancel_jobs
from flows.parameters import config_from, named, takes
from launcher.checks.plan import findings_at
from launcher.config import RunConfig
from launcher.events import Note
from launcher.runs.attempts import opening_beside, settle_others
from launcher.runs.index import Index
from launcher.runs.run import Run, plan_run
from launcher.runs.sweeps import ON_ROW
from litgpt_demo.export import FinalManifest, exported
from litgpt_demo.metrics import Row
from tasks.checkpoints import Collector, collect_checkpoints
from tasks.credentials import get_credentials
from tasks.dataset import prepare_dataset
from tasks.evaluation import evaluate_model
from tasks.image import build_image
from tasks.preflight import report_findings
from tasks.report import publish_report
from tasks.steps import as_it_is, emit
from tasks.training import at_work, is_resumed, train
from tasks.weights import stage_weights


@flow(name="train-litgpt", flow_run_name=named("{name}"), persist_result=False, on_cancellation=[cancel_jobs])
@takes(RunConfig)
async def train_litgpt(**parameters: Any) -> FinalManifest:
    """Prepare the data, pin the software, prove access, train, collect, evaluate."""
    begin()
    return await run_pipeline(config_from(RunConfig, parameters))


async def run_pipeline(config: RunConfig) -> FinalManifest:
    """The six steps; each finds itself done by its key, so that running again is free."""
    run = await asyncio.to_thread(plan_run, config)
    index = Index(run.root)
    # A sweep has settled it for its trials. What a resumed flow run would find came later, and knew of this one.
    settled = config.start.sweep is not None or await is_resumed(index, run.name)
    if not settled and await asyncio.to_thread(exported, run.storage) is None:
        beside = opening_beside(config.platform)
        settle = partial(settle_others, index, config.start, name=config.name, run=run.name, open=beside)
        await asyncio.to_thread(settle)
    await report_findings(await asyncio.to_thread(findings_at, run, trusted=True), artifact=run.name)
    async with at_work(index, run.name):
        return await _from_text_to_model(config, run)


async def _from_text_to_model(config: RunConfig, run: Run) -> FinalManifest:
    dataset = await prepare_dataset(as_it_is(run.dataset), root=config.root, workers=config.workers)
    await stage_weights(run)
    identity = await build_image(config)
    await get_credentials(config)
    with Collector(run) as collector:
        await train(as_it_is(run), as_it_is(dataset), identity, on_row=_for_each(collector.follow, ON_ROW.get()))
        final = await collect_checkpoints(as_it_is(run), collector)
    scored = await evaluate_model(as_it_is(run))
    if scored is not None:  # its scores are in the card
        with_scores = await asyncio.to_thread(exported, run.storage)
        final = with_scores or final
    address = await publish_report(
        as_it_is(run), dataset=as_it_is(dataset), identity=identity, final=as_it_is(final), scores=as_it_is(scored)
    )
    emit(Note(what=f"report: {address}"))
    return final


def _for_each(*listeners: Callable[[Row], None] | None) -> Callable[[Row], None]:
    """Return what hands a row of metrics to each of these listeners."""
    those = [listener for listener in listeners if listener is not None]

    def hand_on(row: Row) -> None:
        for listener in those:
            listener(row)

    return hand_on
