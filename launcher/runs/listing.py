"""The runs of a root: found by name, folder or config, listed as rows, with the orphaned resources of dead runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from launcher.benchmark import BenchmarkConfig
from launcher.config import RunConfig, ScriptConfig, SweepConfig
from launcher.curves import summary
from launcher.errors import ConfigProblem, UnknownRun
from launcher.formatting import NOTHING, duration_text, loss_text
from launcher.job import JobId, JobState
from launcher.runs.attempts import Attempts, OpenPlatform, platform_opener
from launcher.runs.index import AttemptRecord, DamagedRecords, Index
from launcher.runs.run import RunManifest, plan_script
from launcher.runs.sweeps import sweep_name
from litgpt_demo.documents import read_manifest
from litgpt_demo.errors import DataError, TrainLitgptError
from litgpt_demo.runs import read_metrics
from litgpt_demo.storage import Storage, is_remote

LAST = "@last"
DONE = "done"
"""The state of a run that was trained, collected and reported."""

_SHOWN = 10  # candidates in a message
_AT_ONCE = 8  # runs that are read in parallel: a few small reads each, and perhaps a query or two to a platform


@dataclass(frozen=True, kw_only=True)
class Target:
    """One run, or all runs of a sweep or a network benchmark."""

    index: Index
    name: str
    """The run's or the sweep's name, which a cancellation is requested for."""
    runs: tuple[str, ...]
    damaged: tuple[str, ...] = ()
    """The damage of each unreadable record that may belong to one of the sweep's trials."""
    open: OpenPlatform = field(default_factory=platform_opener)

    @property
    def attempts(self) -> list[Attempts]:
        return [Attempts(index=self.index, run=run, open_platform=self.open) for run in self.runs]

    def storage(self, run: str) -> Storage:
        return self.index.root.within(f"runs/{run}")


def resolve_target(query: str, *, root: str) -> Target:
    """Return the run or sweep that a query names: by its name, its unique beginning, `@last`, or the folder of a
    run."""
    if "/" in query:  # `<root>/runs/<run>`, or something below it
        return _run_of_folder(query)
    index = Index.of(root)
    newest, bad = _newest(index, lambda record: query in (record.run, record.sweep))
    if query == LAST and newest:
        return _target(index, newest, newest[0].sweep or newest[0].run, bad)
    names = {record.run for record in newest} | {record.sweep for record in newest if record.sweep}
    if query in names:
        return _target(index, newest, query, bad)
    candidates = {name for name in names if name.startswith(query)}
    # A sweep whose name begins so stands for its trials, whose names begin so too.
    candidates -= {record.run for record in newest if record.sweep in candidates}
    if not candidates:
        raise _unknown(f"no run is called {query!r}", index, newest)
    if len(candidates) > 1:
        records = [record for record in newest if {record.run, record.sweep} & candidates]
        what = f"{query!r} is the beginning of {len(candidates)} names; give more of its letters"
        raise UnknownRun(f"{what}:\n{_listed(records)}")
    return _target(index, newest, candidates.pop(), bad)


def _run_of_folder(query: str) -> Target:
    address = query if is_remote(query) else str(Path(query).expanduser().resolve())
    root, runs, below = address.rpartition("/runs/")
    if not runs:
        raise UnknownRun(f"{query} is not the folder of a run, which is <root>/runs/<name>, nor a config (*.yaml)")
    index, run = Index.of(root), below.partition("/")[0]
    if not index.records(run):
        raise _unknown(f"the index has no run {run}", index, index.newest())
    return Target(index=index, name=run, runs=(run,))


def find_started_with(config: RunConfig | ScriptConfig | BenchmarkConfig) -> Target:
    """Return the run or sweep that was started with a config, even if its corpus has changed since. Of several with
    mounted code it is the run of the present code, or else the only live one."""
    index, opener = Index.of(config.root), platform_opener(config.platform)
    none = "nothing has been started with this config"
    if isinstance(config, BenchmarkConfig) or (isinstance(config, ScriptConfig) and config.code is None):
        jobs = config.jobs() if isinstance(config, BenchmarkConfig) else [config]
        started = set(index.runs())
        planned = dict.fromkeys(plan_script(job).name for job in jobs)
        names = tuple(name for name in planned if name in started)
        if not names:
            raise _unknown(none, index, index.newest(), config.name)
        return Target(index=index, name=names[0], runs=names, open=opener)
    sweep = sweep_name(config) if isinstance(config, SweepConfig) else ""
    newest, bad = _newest(index, partial(_matches, config, sweep))
    matches = [record for record in newest if _matches(config, sweep, record)]
    if not matches:
        raise _unknown(none, index, newest, config.name)
    if len(matches) > 1 and isinstance(config, ScriptConfig):
        matches = _present_or_live(config, matches, index, opener)
    if len(matches) > 1 and not sweep:
        what = f"{len(matches)} runs were started with this config, because its corpus or code changed in between"
        raise UnknownRun(f"{what}; name one:\n{_listed(matches)}")
    return replace(_target(index, newest, sweep or matches[0].run, bad), open=opener)


def _present_or_live(
    config: ScriptConfig, records: list[AttemptRecord], index: Index, opener: OpenPlatform
) -> list[AttemptRecord]:
    with suppress(ConfigProblem):  # the mounted folder has gone, or cannot be mounted any more
        run = plan_script(config).name
        present = [record for record in records if record.run == run]
        if present:
            return present
    with suppress(TrainLitgptError):  # a platform does not answer
        runs = {record.run: Attempts(index=index, run=record.run, open_platform=opener) for record in records}
        live = [record for record in records if runs[record.run].live() is not None]
        if live:
            return live
    return records


def _matches(config: RunConfig | ScriptConfig, sweep: str, record: AttemptRecord) -> bool:
    if sweep:
        return record.sweep == sweep
    # The same program out of the same folder, whatever the folder contained, or the same model as far as configs say.
    if isinstance(config, ScriptConfig):
        program = config.model_dump(mode="json", include={"name", "script", "args", "env", "code"})
        return program == {name: record.config.get(name) for name in program}
    try:
        recorded = RunConfig.model_validate({name: record.config[name] for name in ("data", "model", "train")})
    except (KeyError, ValidationError):  # a script, or a config of another version
        return False
    return (
        record.name == config.name
        and recorded.data == config.data
        and recorded.model == config.model
        and recorded.train.run_id_settings() == config.train.run_id_settings()
    )


def _newest(index: Index, matches: Callable[[AttemptRecord], bool]) -> tuple[list[AttemptRecord], DamagedRecords]:
    bad = DamagedRecords()
    newest = index.newest(bad)
    if bad and not any(map(matches, newest)):
        raise DataError(str(bad))
    return newest, bad


def _target(index: Index, newest: Iterable[AttemptRecord], name: str, bad: DamagedRecords) -> Target:
    trials = tuple(sorted(record.run for record in newest if record.sweep == name))
    if not trials:
        return Target(index=index, name=name, runs=(name,))
    # The trials of a sweep have the name of its config; only their ids differ.
    damaged = tuple(why for run, why in bad.items() if run.rpartition("-")[0] == name.rpartition("-")[0])
    return Target(index=index, name=name, runs=trials, damaged=damaged)


def _unknown(what: str, index: Index, newest: Sequence[AttemptRecord], name: str = "") -> UnknownRun:
    address = index.root.address()
    if not newest:
        fix = "give another root with --root, or give the config"
        return UnknownRun(f"nothing has been started under {address}", fix=fix)
    records = [record for record in newest if record.name == name] or newest
    return UnknownRun(f"{what}; name one of these, which are under {address}:\n{_listed(records)}")


def _listed(records: Iterable[AttemptRecord]) -> str:
    rows = []
    for record in records:
        ago = duration_text(time.time() - record.created)
        rows.append(f"  {record.run}  ({record.platform.get('kind')}, started by {record.user} {ago} ago)")
    if len(rows) > _SHOWN:
        rows[_SHOWN:] = [f"  and {len(rows) - _SHOWN} more: train-litgpt runs"]
    return "\n".join(rows)


@dataclass(frozen=True, kw_only=True)
class RunRow:
    run: str
    sweep: str | None
    trial: str
    """The settings that a sweep's trial varies, as `learning_rate=0.001`; else empty."""
    state: str
    """A JobState of its last attempt, or DONE."""
    step: int | None = None
    steps: int | None = None
    loss: float | None = None
    """Nats per token of the newest step; None for a finished run, whose manifest has only the validation loss."""
    validation_loss: float | None = None
    """Nats per token of the newest evaluation; of a finished run, that of its model."""
    started: float
    """The start of the last attempt, in seconds since the epoch."""
    platform: str
    attempts: int
    flow_run: str | None
    """The Prefect flow run that started the last attempt."""
    flow_runs: tuple[str, ...]
    """Every flow run that started that attempt or took it up."""
    user: str
    note: str = ""
    """The reason why the state is not known, or what contradicts it."""

    @property
    def is_live(self) -> bool:
        return self.state != DONE and JobState(self.state).is_live


def run_rows(
    index: Index, runs: Sequence[str] = (), *, bad: DamagedRecords | None = None, open: OpenPlatform | None = None
) -> list[RunRow]:
    """Return a row for each run of an index, or of `runs`, the newest first. If a platform does not answer, the row has
    the reason; `bad` gets the damaged records."""
    flow_runs, open = index.flow_runs_of_attempts(), open or platform_opener()

    def row(record: AttemptRecord) -> RunRow:
        unknown = RunRow(
            run=record.run,
            sweep=record.sweep,
            trial=record.trial or "",
            state=JobState.UNKNOWN.value,
            started=record.created,
            platform=str(record.platform.get("kind")),
            attempts=record.attempt,
            flow_run=record.flow_run,
            flow_runs=flow_runs.get((record.run, record.attempt), ()),
            user=record.user,
        )
        try:
            return _with_progress(unknown, Attempts(index=index, run=record.run, open_platform=open))
        except TrainLitgptError as error:
            return replace(unknown, note=str(error))

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(row, [record for record in index.newest(bad) if not runs or record.run in runs]))


def _with_progress(row: RunRow, attempts: Attempts) -> RunRow:
    folder = attempts.index.root.within(f"runs/{row.run}")
    manifest = read_manifest(folder, RunManifest)
    if manifest is not None:
        step = manifest.step
        return replace(row, state=DONE, step=step, steps=step, validation_loss=manifest.validation_loss)
    last = attempts.last()
    row = replace(row, state=DONE if last is None else last.status.state.value)
    rows = read_metrics(folder)
    if not rows:
        return row
    now = summary(rows)
    return replace(row, step=now.step, steps=now.steps, loss=now.loss, validation_loss=now.validation_loss)


def table_of(rows: Sequence[RunRow]) -> list[dict[str, str]]:
    now, table = time.time(), []
    has_trials = any(row.trial for row in rows)
    for row in rows:
        state, step = row.state, NOTHING
        if state == JobState.SUCCEEDED and row.steps:
            state = "trained, not collected"
        if row.step is not None:
            step = f"{row.step:,}/{row.steps:,}" if row.steps else f"{row.step:,}"
        cells = {
            "run": row.run,
            "state": state,
            "step": step,
            "loss": loss_text(row.loss),
            "validation": loss_text(row.validation_loss),
            "age": duration_text(now - row.started),
            "platform": row.platform,
            "attempts": str(row.attempts),
            "flow run": (row.flow_run or NOTHING)[:8],
        }
        if has_trials:
            cells["trial"] = row.trial
        table.append(cells)
    return table


@dataclass(frozen=True, kw_only=True)
class OrphanedResource:
    """Machines or processes that an ended attempt left behind: they do no work, but still cost money."""

    run: str
    job_id: JobId | None
    """None if the run's state is not known: no resource of it is removed."""
    what: str
    """A sentence that says what remains, or why nothing is known."""


def orphaned_resources(index: Index, *, open: OpenPlatform | None = None) -> list[OrphanedResource]:
    """Return the remaining resources of every run of an index whose last attempt has ended."""
    open = open or platform_opener()

    def of(run: str) -> list[OrphanedResource]:
        attempts, orphaned = Attempts(index=index, run=run, open_platform=open), list[OrphanedResource]()
        try:
            if not _is_dead(attempts):
                return []
            for record in attempts.records():
                if attempts.only_on_submit_host(record):
                    continue
                resources = attempts.platform_of(record).remaining_resources(record.job_id)
                if resources:
                    where = f"{run}, attempt {record.attempt}, on {record.platform.get('kind')}"
                    what = f"{where}: {', '.join(resources)}"
                    orphaned.append(OrphanedResource(run=run, job_id=record.job_id, what=what))
        except TrainLitgptError as error:
            what = f"{run} is left unchanged, because its state is not known: {error}"
            return [OrphanedResource(run=run, job_id=None, what=what)]
        return orphaned

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return [resource for resources in pool.map(of, index.runs()) for resource in resources]


def remove_orphaned_resource(index: Index, resource: OrphanedResource, *, open: OpenPlatform | None = None) -> bool:
    """Remove it, and prove by listing that it is gone. Returns False and removes nothing if the run is live again."""
    attempts = Attempts(index=index, run=resource.run, open_platform=open or platform_opener())
    records = [record for record in attempts.records() if record.job_id == resource.job_id]
    if not records or not _is_dead(attempts):
        return False
    attempts.platform_of(records[0]).cancel(records[0].job_id)
    return True


def _is_dead(attempts: Attempts) -> bool:
    last = attempts.last()
    return last is not None and last.status.state.is_final
