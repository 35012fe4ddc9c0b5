"""The artifacts that people see in Prefect, updated in place while there is work, and the report when it is done."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from typing import Any, Self
from uuid import UUID

import httpx
from prefect import artifacts, get_client, get_run_logger
from prefect.client.schemas.actions import ArtifactUpdate
from prefect.client.schemas.objects import State
from prefect.exceptions import PrefectException
from prefect.runtime import flow_run
from prefect.states import Running

from launcher.curves import summary
from launcher.events import Note
from launcher.formatting import loss_text
from launcher.images.identity import SoftwareIdentity
from launcher.provenance.statements import write_statements
from launcher.reports import report
from launcher.reports.goodput import attempt_times, ledger
from launcher.reports.report import RunReport
from launcher.runs.diagnosis import Diagnosis
from launcher.runs.index import Index
from launcher.runs.run import Run, RunManifest, models_of, trained_seconds
from litgpt_demo.data.dataset import DatasetManifest
from litgpt_demo.documents import FileRecord, read_manifest, write_manifest
from litgpt_demo.errors import DataError, failure_text, one_line
from litgpt_demo.export import FinalManifest, exported
from litgpt_demo.export.evaluation import evaluations
from litgpt_demo.metrics import NUMBERS, damaged_lines
from litgpt_demo.runs import REPORT, read_document, read_metrics
from litgpt_demo.secrets import Cleaner
from litgpt_demo.storage import MANIFEST, ObjectInfo, bucket_path
from tasks.steps import emit, report_unreadable, step_task

# Seconds between two updates of what the UI shows; it refreshes only on focus, so more often has no effect.
_UPDATE = 5.0
# Seconds between two lines in the log: a week of work stays readable.
LINE = 60.0
_ANSWER = 10.0  # seconds that Prefect's server has to answer: meanwhile rented machines may wait
_MOST_ROWS = 50_000  # metrics rows that are kept while a job runs, 1 kB each; the run's own file has all of them
# The columns of a row that are kept while a job runs: others may hold texts and lists of any length.
_SHOWN = {"kind", "step", *NUMBERS}
_MOST_SAMPLES = 8  # texts by the model that are kept and shown while a job runs: those of a step


async def update_ui(update: Coroutine[Any, Any, object], *, otherwise: str) -> bool:
    """Update what Prefect shows; warn and return False if its server does not answer, which must not delay the work."""
    try:
        # Not `wait_for`: nested, it loses a cancellation that comes while the inner update ends (Python 3.11).
        async with asyncio.timeout(_ANSWER):
            await update
    except (TimeoutError, httpx.HTTPError, PrefectException) as error:
        get_run_logger().warning("%s (%s)", otherwise, one_line(error) or "no answer")
        return False
    return True


async def show_state(name: str) -> bool:
    """Name the state of this flow run, whose type stays RUNNING. A flow run that has ended keeps its state."""

    async def rename() -> None:
        async with get_client() as client:
            state = (await client.read_flow_run(UUID(flow_run.id))).state if flow_run.id else None
            if state is not None and state.is_running() and state.name != name:
                await client.set_flow_run_state(UUID(flow_run.id), Running(State[Any], name=name))

    return await update_ui(rename(), otherwise=f"the flow run could not be shown as {name}")


class ProgressReporter(ABC):
    """While it is entered, an artifact shows the progress of the work, and at times a line in the log."""

    def __init__(self, key: str, what: str) -> None:
        self.revision = 0
        """The number of changes that can be shown."""
        self.line_is_due = False
        self._key, self._what, self._shown, self._line_at = key, what, 0, time.monotonic()
        self._ended = asyncio.Event()
        self._artifact: UUID | None = None

    async def __aenter__(self) -> Self:
        self._updates = asyncio.create_task(self._update_till_the_end())
        return self

    async def __aexit__(self, *exception: object) -> None:
        # Not cancelled: an update cut in the middle would leave one artifact of two.
        self._ended.set()
        await self._updates

    async def _update_till_the_end(self) -> None:
        """Show changes until the end. Each update shows everything, also what an unreachable server has missed."""
        ended = False
        while not ended:
            ended = self._ended.is_set()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._ended.wait(), _UPDATE)
            revision = self.revision
            if revision != self._shown and await update_ui(self.show(), otherwise="the artifacts could not be updated"):
                self._shown = revision

    @abstractmethod
    def progress(self) -> tuple[float, str]:
        """Return the percentage that is done, and a text, which is empty as long as there is no progress."""

    async def show(self) -> None:
        percent, text = self.progress()
        if text and (self.line_is_due or time.monotonic() > self._line_at + LINE):
            self.line_is_due, self._line_at = False, time.monotonic()
            get_run_logger().info(text)
        description = f"{self._what}: {text}" if text else self._what
        if self._artifact is None:
            self._artifact = await artifacts.acreate_progress_artifact(percent, key=self._key, description=description)
        else:
            await artifacts.aupdate_progress_artifact(self._artifact, percent, description=description)


class LiveArtifacts(ProgressReporter):
    """While a job runs: a progress artifact and a page with the loss curve; at times a log line."""

    def __init__(self, job_name: str) -> None:
        super().__init__(f"progress-{job_name}", f"Training of {job_name}")
        self._page_key = f"training-{job_name}"
        self._page: UUID | None = None
        self._rows: list[Mapping[str, Any]] = []
        self._samples: deque[Mapping[str, Any]] = deque(maxlen=_MOST_SAMPLES)
        self._clean = Cleaner()
        self.queued, self._state = False, ""

    def add(self, row: Mapping[str, Any]) -> None:
        if row.get("kind") == "network":  # measured before a training, and in benchmarks: no step of one
            return
        if row.get("kind") == "sample":
            self._samples.append(self._clean(dict(row)))
        self._rows.append({name: value for name, value in row.items() if name in _SHOWN})
        if len(self._rows) > _MOST_ROWS:  # a curve of every second step looks the same
            thinner = [row for number, row in enumerate(self._rows) if row["kind"] != "step" or number % 2 == 0]
            older, newer = thinner[: -_MOST_ROWS // 2], thinner[-_MOST_ROWS // 2 :]
            # The newest `start` row stays in front: it says how many steps there are.
            self._rows = [*[row for row in older if row["kind"] == "start"][-1:], *newer]
        self.revision += 1
        self.line_is_due = self.line_is_due or row.get("kind") == "evaluation"

    def progress(self) -> tuple[float, str]:
        seen = summary(list(self._rows))
        if not seen.step:
            return seen.percent, ""
        facts = [f"step {seen.step}/{seen.steps}", *seen.facts]
        if seen.validation_loss is not None:
            facts.append(f"validation loss {loss_text(seen.validation_loss)}")
        return seen.percent, ", ".join(facts)

    async def show(self) -> None:
        state = "Running"
        if self._rows:
            state = "Training"
        if self.queued:
            state = "Queued"
        if state != self._state and await show_state(state):
            self._state = state
        if not self._rows:  # a script has none
            return
        await super().show()
        page = report.live_markdown(list(self._rows), list(self._samples))
        if self._page is None:
            self._page = await artifacts.acreate_markdown_artifact(page, key=self._page_key, description="Loss so far")
        else:
            async with get_client() as client:
                await client.update_artifact(self._page, ArtifactUpdate(data=page))


async def show_diagnosis(diagnosis: Diagnosis, *, attempt: str) -> None:
    """Show in Prefect why an attempt ended."""
    page = report.diagnosis_markdown(diagnosis)
    update = artifacts.acreate_markdown_artifact(page, key=f"diagnosis-{attempt}", description=f"Why {attempt} ended")
    await update_ui(update, otherwise=f"the diagnosis could not be shown; it is in {diagnosis.logs}")


@step_task("publish-report")
async def publish_report(
    run: Run, *, dataset: DatasetManifest, identity: SoftwareIdentity, final: FinalManifest
) -> str:
    """Write report.html and the run's manifest, show the report in Prefect; returns the report's address."""
    made = await asyncio.to_thread(_written, run, dataset, identity, final)
    await artifacts.acreate_markdown_artifact(report.markdown(made), key=f"report-{run.name}", description="The report")
    address = run.storage.address(REPORT)
    path = bucket_path(address)
    if path is not None:  # no page of a server may link to a local file
        link = f"https://storage.cloud.google.com/{path}"
        await artifacts.acreate_link_artifact(link, link_text=address, key=f"page-{run.name}", description="Its page")
    return address


class LiveReport:
    """Shows the report and its address while it is entered. report.html is written after checkpoints, at most once a
    minute, and after a failure."""

    def __init__(self, run: Run) -> None:
        self._run, self._news = run, asyncio.Event()
        self.dataset: DatasetManifest | None = None
        self.identity: SoftwareIdentity | None = None

    async def __aenter__(self) -> Self:
        with _warning():
            made = await asyncio.to_thread(self._made, live=True)
            page, key = report.markdown(made), f"report-{made.name}"
            shown = artifacts.acreate_markdown_artifact(page, key=key, description="The report so far")
            await update_ui(shown, otherwise=f"the report could not be shown; it will be {made.address}/{REPORT}")
        self._updates = asyncio.create_task(self._until_the_end())
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        self._updates.cancel()
        await asyncio.gather(self._updates, return_exceptions=True)
        if isinstance(error, Exception):
            if await self._write(live=False, ended=one_line(failure_text(error).partition("\n")[0])):
                emit(Note(what=f"report: {self._run.storage.address(REPORT)}"))

    def follow(self, row: Mapping[str, Any]) -> None:
        """Note a checkpoint, by its row of the training's metrics."""
        if row.get("kind") == "checkpoint":
            self._news.set()

    async def _until_the_end(self) -> None:
        pause = LINE
        while True:
            await asyncio.sleep(pause)
            await self._news.wait()
            self._news.clear()
            begun = time.monotonic()
            await self._write(live=True)
            pause = max(LINE, 20 * (time.monotonic() - begun))  # a run of many nodes and attempts has much to read

    def _made(self, *, live: bool, ended: str = "") -> RunReport:
        final = exported(self._run.storage)
        return _report_of(self._run, self.dataset, self.identity, final, live=live, ended=ended)

    async def _write(self, *, live: bool, ended: str = "") -> bool:
        def write() -> bool:
            made = self._made(live=live, ended=ended)
            is_published = made.final is not None and made.final.complete and self._run.storage.exists(MANIFEST)
            if not made.attempts or is_published:  # a published page is a file of the run's manifest
                return False
            self._run.storage.write(REPORT, report.html(made).encode())
            return True

        with _warning():
            return await asyncio.to_thread(write)
        return False


@contextmanager
def _warning() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of any kind: it must not hide why the run itself ended
        emit(Note(what=f"{REPORT} could not be written: {one_line(error)}", severity="warning"))


def _report_of(
    run: Run, dataset: DatasetManifest | None, identity: SoftwareIdentity | None, final: FinalManifest | None,
    *, live: bool = False, ended: str = "",
) -> RunReport:  # fmt: skip
    storage, times = run.storage, attempt_times(Index(run.root), run.name)
    bad = damaged_lines()
    rows = read_metrics(storage, bad)
    report_unreadable(bad)
    price = read_document(storage).price if times else None
    return RunReport(
        name=run.name,
        address=storage.address(),
        rows=rows,
        dataset=dataset,
        final=final,
        identity=identity,
        config=run.config.model_dump(mode="json"),
        attempts=len(times),
        avoided=times[-1].record.exclude_nodes if times else (),
        seconds=trained_seconds(rows),
        ledger=ledger(times, rows, price),
        evaluations=evaluations(storage),
        live=live,
        ended=ended,
    )


def _written(run: Run, dataset: DatasetManifest, identity: SoftwareIdentity, final: FinalManifest) -> RunReport:
    """Write report.html, the statements and the manifest, unless there is a manifest that says the same: drawing takes
    two seconds."""
    storage, made = run.storage, _report_of(run, dataset, identity, final)

    def manifest_with(page: ObjectInfo, statements: Sequence[FileRecord]) -> RunManifest:
        return RunManifest(
            run=run.name,
            run_id=run.id,
            dataset=run.dataset.path,
            config=dict(made.config),
            software=asdict(identity),
            step=final.step,
            tokens=final.tokens,
            validation_loss=final.validation_loss,
            origin=run.origin,
            attempts=made.attempts,
            files=(*models_of(final), *statements, FileRecord.of(page)),
        )

    with suppress(FileNotFoundError, DataError):  # no report, or the manifest of another version of this code
        manifest = read_manifest(storage, RunManifest)
        if manifest is not None:
            expected = manifest_with(storage.stat(REPORT), write_statements(storage))
            # A run that is started again with another platform has the same model, and the same statements.
            others = set(RunManifest.model_fields) - {"config", "software"}
            if manifest.model_dump(include=others) == expected.model_dump(include=others):
                return made
    page = storage.write(REPORT, report.html(made).encode())
    write_manifest(storage, manifest_with(page, write_statements(storage)))  # statements have the page's digest
    return made
