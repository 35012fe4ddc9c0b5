"""The artifacts that people see in Prefect: progress and curves while a job runs, the report when it is done."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from typing import Any

import httpx
from prefect import get_run_logger, task
from prefect.artifacts import acreate_link_artifact, acreate_markdown_artifact, acreate_table_artifact
from prefect.exceptions import PrefectException

from launcher.formatting import loss_text
from launcher.images.identity import SoftwareIdentity
from launcher.job import JobStatus
from launcher.reports import report
from launcher.reports.curves import Progress, summary
from launcher.reports.goodput import AttemptTimes, ledger
from launcher.reports.live import LivePage, live_markdown
from launcher.reports.nodes import gpu_row, node_table
from launcher.reports.report import RunReport
from launcher.runs.diagnosis import Verdict
from launcher.runs.evidence import node_reports
from launcher.runs.index import Index
from launcher.runs.run import Run, RunManifest, trained_seconds
from litgpt_demo.data.dataset import DatasetManifest
from litgpt_demo.errors import DataError
from litgpt_demo.evaluation import EvaluationManifest, Score
from litgpt_demo.export import FinalManifest
from litgpt_demo.manifests import FileRecord, read_manifest, write_manifest
from litgpt_demo.metrics import GpuRow, damaged_lines
from litgpt_demo.runs import FINAL, REPORT, read_document, read_metrics
from litgpt_demo.storage import MANIFEST, ObjectInfo, Storage, open_storage
from tasks.live import LINE, Live
from tasks.run_events import RunFinished, emit_run_event
from tasks.steps import RETRIED, report_unreadable

_MOST_NODES = 10_000  # a log may tell of any number of them
_MOST_ROWS = 50_000  # metrics rows that are kept while a job runs, 1 kB each; the run's own file has all of them
_RESTART = re.compile(r"restart-[0-9]{1,9}/")
# What is shown of a row while a job runs. A row may hold other columns and lists of any length, which are not kept.
_COLUMNS = frozenset({
    "kind", "step", "steps", "tokens_per_step", "loss", "validation_loss", "learning_rate", "tokens",
    "tokens_per_second", "mfu", "memory", "step_seconds", "seconds",
    "attempt", "nodes", "elapsed", "node_started", "gate_seconds", "stage_seconds", "first_step_seconds", "taken",
})  # fmt: skip


class LiveArtifacts(Live):
    """While a job runs: a progress artifact and a page with figures and curves; at times a log line.

    Args:
        page: what is known of the attempt before its first row.
    """

    def __init__(self, job_name: str, page: LivePage | None = None) -> None:
        super().__init__()
        self.news = 1  # the page says where to look before there is a step
        self._name, self._page_so_far = job_name, page or LivePage()
        self._rows: list[Mapping[str, Any]] = []
        self._nodes: dict[int, GpuRow] = {}
        self._stragglers: dict[int, Mapping[str, Any]] = {}
        self._line_at = time.monotonic()
        self._line_loss: float | None = None

    def add(self, row: Mapping[str, Any]) -> None:
        if row.get("kind") == "network":  # measured before a training, and in benchmarks: no step of one
            return
        self.news += 1
        if row.get("kind") == "gpus":
            # A script could have printed the row: of its texts only NVML's own words are shown.
            if (node := gpu_row({**row, "host": ""})) is not None and (
                node.node in self._nodes or len(self._nodes) < _MOST_NODES
            ):
                self._nodes[node.node] = node
            return
        if row.get("kind") == "straggler" and "rank" in row and len(self._stragglers) < _MOST_NODES:
            self._stragglers[row["rank"]] = row
        self._rows.append({name: value for name, value in row.items() if name in _COLUMNS})
        if len(self._rows) > _MOST_ROWS:
            self._rows = _thinned(self._rows)

    def see(self, status: JobStatus) -> None:
        """Take up the state of the job."""
        known, self._page_so_far = self._page_so_far.status, replace(self._page_so_far, status=status)
        if known is None or (known.state, known.reasons) != (status.state, status.reasons):
            self.news += 1

    async def show(self) -> None:
        page = replace(
            self._page_so_far,
            rows=list(self._rows),
            nodes=list(self._nodes.values()),
            stragglers=list(self._stragglers.values()),
            now=time.time(),
        )
        if page.rows:  # a user's own script need not tell of any step
            progress = summary(page.rows)
            self._log(progress)
            await self.show_progress(
                progress.percent, key=f"progress-{self._name}", description=f"Training of {self._name}"
            )
        text = await asyncio.to_thread(live_markdown, page)
        await self.show_page(text, key=f"training-{self._name}", description="The run so far")

    def _log(self, progress: Progress) -> None:
        evaluated, long_ago = progress.validation_loss != self._line_loss, time.monotonic() > self._line_at + LINE
        if progress.step and (evaluated or long_ago):
            get_run_logger().info(_so_far(progress))
            self._line_at, self._line_loss = time.monotonic(), progress.validation_loss


async def show_verdict(verdict: Verdict, *, attempt: str) -> None:
    """Show in Prefect why an attempt ended. A server that is away must not keep the next one waiting."""
    try:
        await acreate_markdown_artifact(
            report.verdict_markdown(verdict), key=f"verdict-{attempt}", description=f"Why {attempt} ended"
        )
    except (httpx.HTTPError, PrefectException) as error:
        get_run_logger().warning("the verdict could not be shown (%s); it is in %s", error, verdict.logs)


@task(name="publish-report", task_run_name="publish-report", **RETRIED)
async def publish_report(
    run: Run,
    *,
    dataset: DatasetManifest,
    identity: SoftwareIdentity,
    final: FinalManifest,
    scores: EvaluationManifest | None = None,
) -> str:
    """Write report.html and the run's manifest, show the report in Prefect; returns the report's address."""
    known = () if scores is None else scores.scores
    made = await asyncio.to_thread(_gathered, run, dataset, identity, final, known)
    first = await asyncio.to_thread(_write, run, made, identity, final)
    if first:
        emit_run_event(await asyncio.to_thread(_finished, run, made, final))
    await acreate_markdown_artifact(report.markdown(made), key=f"report-{run.name}", description="How the run went")
    await acreate_table_artifact(report.table(made), key=f"figures-{run.name}", description="The run in figures")
    if nodes := node_table(made.nodes, made.rows):
        await acreate_table_artifact(nodes, key=f"nodes-{run.name}", description="The nodes and their GPUs")
    address, link = run.storage.address(REPORT), run.storage.browse_url(REPORT)
    if link is not None:
        await acreate_link_artifact(link, link_text=address, key=f"page-{run.name}", description="The report as a page")
    return address


def _finished(run: Run, made: RunReport, final: FinalManifest) -> RunFinished:
    """Return the event of a run that is done."""
    records = Index(run.root).records(run.name)
    return RunFinished(
        run=run.name, folder=run.storage.address(), sweep=run.config.start.sweep,
        attempt=records[-1].attempt if records else 0, submitted=records[-1].created if records else 0.0,
        step=final.step, loss=summary(made.rows).loss, validation_loss=final.validation_loss, tokens=final.tokens,
        seconds=made.ledger.wall if made.ledger else made.seconds,
        usd=made.ledger.cost if made.ledger else None, report=run.storage.address(REPORT),
    )  # fmt: skip


def _write(run: Run, made: RunReport, identity: SoftwareIdentity, final: FinalManifest) -> bool:
    """Write report.html and the manifest, unless there is a manifest that says the same: drawing takes two seconds.

    Returns whether there was no manifest before.
    """
    storage = run.storage
    first = not storage.exists(MANIFEST)
    manifest = RunManifest(
        run=run.name,
        key=run.key,
        dataset=run.dataset.path,
        config=run.config.model_dump(mode="json"),
        software=asdict(identity),
        step=final.step,
        tokens=final.tokens,
        validation_loss=final.validation_loss,
        attempts=made.attempts,
        files=tuple(record.model_copy(update={"path": f"{FINAL}/{record.path}"}) for record in final.files),
    )

    def with_report(stored: ObjectInfo) -> RunManifest:
        return manifest.model_copy(update={"files": (*manifest.files, FileRecord.of(stored))})

    with suppress(FileNotFoundError, DataError):  # no report, or the manifest of another version of this code
        there = read_manifest(storage, RunManifest)
        if there is not None and there.model_dump_json() == with_report(storage.stat(REPORT)).model_dump_json():
            return False
    write_manifest(storage, with_report(storage.write(REPORT, report.html(made).encode())))
    return first


def _thinned(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return half of the rows, for a curve of every second step looks the same.

    Where a `start` row is among the others the newest stays in front: it says how many steps there are.
    """
    thinner = [row for number, row in enumerate(rows) if row["kind"] != "step" or number % 2 == 0]
    older, newer = thinner[: -_MOST_ROWS // 2], thinner[-_MOST_ROWS // 2 :]
    return [*[row for row in older if row["kind"] == "start"][-1:], *newer]


def _so_far(progress: Progress) -> str:
    held_out = progress.validation_loss
    validation = [] if held_out is None else [f"validation loss {loss_text(held_out)}"]
    return ", ".join([f"step {progress.step}/{progress.steps}", *progress.facts, *validation])


def _gathered(
    run: Run, dataset: DatasetManifest, identity: SoftwareIdentity, final: FinalManifest, scores: Sequence[Score]
) -> RunReport:
    rows = read_metrics(run.storage, bad := damaged_lines())
    report_unreadable(bad)
    times = attempt_times(Index(run.root), run.name)
    return RunReport(
        name=run.name,
        address=run.storage.address(),
        rows=rows,
        dataset=dataset,
        final=final,
        scores=scores,
        identity=identity,
        config=run.config.model_dump(mode="json"),
        attempts=len(times),
        avoided=times[-1].record.exclude_nodes if times else (),
        seconds=trained_seconds(rows),
        ledger=ledger(times, rows, read_document(run.storage).price),
        nodes=_nodes(times[-1].reports) if times else (),
    )


def _nodes(reports: Sequence[Mapping[str, Any]]) -> tuple[GpuRow, ...]:
    """Return what the nodes of an attempt told of their GPUs, in its last life."""
    told = {report["node"]: gpu_row(report["gpus"]) for report in reports if report.get("gpus")}
    return tuple(node for node in told.values() if node is not None)


def attempt_times(index: Index, run: str) -> list[AttemptTimes]:
    """Return what is recorded of the times of a run's attempts, oldest first; a report that is damaged is left out."""
    return [replace(one, reports=_reports(open_storage(one.record.directory))) for one in attempt_ends(index, run)]


def attempt_ends(index: Index, run: str) -> list[AttemptTimes]:
    """Return the times of a run's attempts as the index alone tells them: no report of a node is read."""
    ends = index.ends(run)
    return [AttemptTimes(record=record, end=ends.get(record.attempt)) for record in index.records(run)]


def _reports(attempt: Storage) -> list[dict[str, Any]]:
    """Return the reports of all lives of an attempt: one that its platform started again was moved one deeper."""
    lives = {path.partition("/")[0] for path in attempt.list() if _RESTART.match(path)}
    return [report for folder in (attempt, *map(attempt.within, sorted(lives))) for report in node_reports(folder)]
