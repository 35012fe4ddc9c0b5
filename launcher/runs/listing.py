"""The runs of a root: found by name, folder or config, shown as rows, and what dead ones have left."""

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
from launcher.runs.attempts import Attempts, OpenPlatform, opening_beside
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
_AT_ONCE = 8  # runs looked at side by side: each is a few small reads and perhaps a question or two to a platform


@dataclass(frozen=True, kw_only=True)
class Target:
    """One run, or all runs of a sweep or a network benchmark."""

    index: Index
    name: str
    """The run's or the sweep's name, which a cancellation is requested for."""
    runs: tuple[str, ...]
    damaged: tuple[str, ...] = ()
    """The damage of each unreadable record that may belong to one of the sweep's trials."""
    open: OpenPlatform = field(default_factory=opening_beside)

    @property
    def attempts(self) -> list[Attempts]:
        return [Attempts(index=self.index, run=run, open=self.open) for run in self.runs]

    def storage(self, run: str) -> Storage:
        return self.index.root.within(f"runs/{run}")


def find(words: str, *, root: str) -> Target:
    """Return the run or sweep that `words` mean: a name, its unique beginning, `@last`, or the folder of a run.

    An UnknownRun where there is none, or there are several.
    """
    if "/" in words:  # `<root>/runs/<run>`, or something below it
        folder, runs, rest = str(words if is_remote(words) else Path(words).expanduser().resolve()).rpartition("/runs/")
        if not runs:
            raise UnknownRun(f"{words} is not the folder of a run, which is <root>/runs/<name>, nor a config (*.yaml)")
        index, run = Index.of(folder), rest.partition("/")[0]
        if not index.records(run):
            raise _unknown(f"the index has no run {run}", index, index.newest())
        return Target(index=index, name=run, runs=(run,))
    index = Index.of(root)
    newest, bad = _newest(index, lambda record: words in (record.run, record.sweep))
    names = {name for record in newest for name in (record.run, record.sweep) if name}
    found = {name for name in names if name.startswith(words)}
    # A sweep is one thing: where its own name begins so, its trials are no candidates of their own.
    found -= {record.run for record in newest if record.sweep in found}
    if words == LAST and newest:
        found = {newest[0].sweep or newest[0].run}
    if words in names or len(found) == 1:
        return _target(index, newest, words if words in names else found.pop(), bad)
    if not found:
        raise _unknown(f"no run is called {words!r}", index, newest)
    those = [record for record in newest if {record.run, record.sweep} & found]
    raise UnknownRun(f"{words!r} is the beginning of {len(found)} names; give more of one:\n{_listed(those)}")


def find_started_with(config: RunConfig | ScriptConfig | BenchmarkConfig) -> Target:
    """Return the run or sweep that was started with a config, whatever has become of its corpus since.

    Of several runs with mounted code the one of the present code is meant, or else the only one that lives. An
    UnknownRun where none was started, or several were, as when the corpus changed in between.
    """
    index, beside = Index.of(config.root), opening_beside(config.platform)
    none = "nothing has been started with this config"
    if isinstance(config, BenchmarkConfig) or (isinstance(config, ScriptConfig) and config.code is None):
        jobs = config.jobs() if isinstance(config, BenchmarkConfig) else [config]
        there = set(index.runs())
        names = tuple(dict.fromkeys(name for job in jobs if (name := plan_script(job).name) in there))
        if not names:
            raise _unknown(none, index, index.newest(), config.name)
        return Target(index=index, name=names[0], runs=names, open=beside)
    sweep = sweep_name(config) if isinstance(config, SweepConfig) else ""
    newest, bad = _newest(index, partial(_means, config, sweep))
    meant = [record for record in newest if _means(config, sweep, record)]
    if not meant:
        raise _unknown(none, index, newest, config.name)
    if len(meant) > 1 and isinstance(config, ScriptConfig):
        with suppress(ConfigProblem):  # the mounted folder has gone, or cannot be mounted any more
            present = plan_script(config).name
            meant = [record for record in meant if record.run == present] or meant
        with suppress(TrainLitgptError):  # one of them cannot be asked for
            runs = {record.run for record in meant if len(meant) > 1}
            live = {run for run in runs if Attempts(index=index, run=run, open=beside).live() is not None}
            meant = [record for record in meant if record.run in live] or meant
    if len(meant) > 1 and not sweep:
        what = f"{len(meant)} runs were started with this config, for its corpus or code changed in between"
        raise UnknownRun(f"{what}; name one:\n{_listed(meant)}")
    return replace(_target(index, newest, sweep or meant[0].run, bad), open=beside)


def _means(config: RunConfig | ScriptConfig, sweep: str, record: AttemptRecord) -> bool:
    if sweep:
        return record.sweep == sweep
    # The same program out of the same folder, whatever that held, or the same model as far as configs say.
    if isinstance(config, ScriptConfig):
        mine = config.model_dump(mode="json", include={"name", "script", "args", "env", "code"})
        return mine == {name: record.config.get(name) for name in mine}
    try:
        theirs = RunConfig.model_validate({name: record.config[name] for name in ("data", "model", "train")})
    except (KeyError, ValidationError):  # of the other kind, or another version's
        return False
    models = [(one.data, one.model, one.train.run_id_settings()) for one in (theirs, config)]
    return record.name == config.name and models[0] == models[1]


def _newest(index: Index, means: Callable[[AttemptRecord], bool]) -> tuple[list[AttemptRecord], DamagedRecords]:
    newest = index.newest(bad := DamagedRecords())
    if bad and not any(map(means, newest)):
        raise DataError(str(bad))
    return newest, bad


def _target(index: Index, newest: Iterable[AttemptRecord], name: str, bad: DamagedRecords) -> Target:
    trials = tuple(sorted(record.run for record in newest if record.sweep == name))
    if not trials:
        return Target(index=index, name=name, runs=(name,))
    # A sweep's trials have the name of its config, as it has; only their keys differ.
    damaged = tuple(why for run, why in bad.items() if run.rpartition("-")[0] == name.rpartition("-")[0])
    return Target(index=index, name=name, runs=trials, damaged=damaged)


def _unknown(what: str, index: Index, newest: Sequence[AttemptRecord], name: str = "") -> UnknownRun:
    there, address = [record for record in newest if record.name == name] or newest, index.root.address()
    if not there:
        what = f"nothing has been started under {address}"
        return UnknownRun(what, fix="name another root by --root, or give the config")
    return UnknownRun(f"{what}; there are these under {address}, to be named instead:\n{_listed(there)}")


def _listed(records: Iterable[AttemptRecord]) -> str:
    rows = []
    for record in records:
        ago = duration_text(time.time() - record.created)
        rows.append(f"  {record.run}  ({record.platform.get('kind')}, started by {record.user} {ago} ago)")
    more = [f"  and {len(rows) - _SHOWN} more: train-litgpt runs"] if len(rows) > _SHOWN else []
    return "\n".join([*rows[:_SHOWN], *more])


@dataclass(frozen=True, kw_only=True)
class RunRow:
    run: str
    sweep: str | None
    trial: str
    """The settings that a sweep's trial varies, as `learning_rate=0.001`; else empty."""
    state: str
    """A JobState of its last attempt, or DONE."""
    step: int | None
    steps: int | None
    loss: float | None
    """Nats per token: of the validation split if it is known, else of the newest step."""
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
    def live(self) -> bool:
        """True if a job runs, as far as is known."""
        return self.state in {JobState.PENDING.value, JobState.RUNNING.value, JobState.UNKNOWN.value}


def run_rows(
    index: Index, runs: Sequence[str] = (), *, bad: DamagedRecords | None = None, open: OpenPlatform | None = None
) -> list[RunRow]:
    """Return a row for each run of an index, or for `runs` alone where there are any, the newest first.

    A platform that does not answer makes that run's state unknown, with the reason. `bad` gets the runs that have no
    row, because their records are damaged.
    """
    followers, open = index.flow_runs_of_attempts(), open or opening_beside()

    def row(record: AttemptRecord) -> RunRow:
        folder, note = index.root.within(f"runs/{record.run}"), ""
        step, steps, loss = None, None, None
        try:
            manifest = read_manifest(folder, RunManifest)
            last = None if manifest else Attempts(index=index, run=record.run, open=open).last()
            state = DONE if last is None else last.status.state.value
            if manifest:
                step, steps, loss = manifest.step, manifest.step, manifest.validation_loss
            elif rows := read_metrics(folder):
                seen = summary(rows)
                step, steps = seen.step, seen.steps
                loss = seen.loss if seen.validation_loss is None else seen.validation_loss
        except TrainLitgptError as error:
            state, note = JobState.UNKNOWN.value, str(error)
        return RunRow(
            run=record.run,
            sweep=record.sweep,
            trial=record.trial or "",
            state=state,
            step=step,
            steps=steps,
            loss=loss,
            started=record.created,
            platform=str(record.platform.get("kind")),
            attempts=record.attempt,
            flow_run=record.flow_run,
            flow_runs=followers.get((record.run, record.attempt), ()),
            user=record.user,
            note=note,
        )

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return list(pool.map(row, [one for one in index.newest(bad) if not runs or one.run in runs]))


def table_of(rows: Sequence[RunRow]) -> list[dict[str, str]]:
    """Return the rows as the terminal shows them."""
    now = time.time()
    return [
        {
            "run": row.run,
            "state": "trained, not collected" if row.state == JobState.SUCCEEDED and row.steps else row.state,
            "step": NOTHING if row.step is None else f"{row.step:,}" + (f"/{row.steps:,}" if row.steps else ""),
            "loss": loss_text(row.loss),
            "age": duration_text(now - row.started),
            "platform": row.platform,
            "attempts": str(row.attempts),
            "flow run": (row.flow_run or NOTHING)[:8],
            **({"trial": row.trial} if any(one.trial for one in rows) else {}),
        }
        for row in rows
    ]


@dataclass(frozen=True, kw_only=True)
class Leftover:
    """The machines or processes that an attempt which has ended left behind: nobody works with them, somebody pays."""

    run: str
    job_id: JobId | None
    """None where the run's state is not known: nothing of it is touched."""
    what: str
    """The sentence that says what is left, or why nothing is known."""


def leftovers(index: Index, *, open: OpenPlatform | None = None) -> list[Leftover]:
    """Return what every dead run of an index has left, by run and attempt: its last attempt is known to have ended.

    A job of another machine, which that one alone can ask for, is passed over.
    """

    open = open or opening_beside()

    def of(run: str) -> list[Leftover]:
        attempts, found = Attempts(index=index, run=run, open=open), list[Leftover]()
        try:
            for record in attempts.records() if _is_dead(attempts) else ():
                if attempts.is_out_of_reach(record):
                    continue
                if there := attempts.platform_of(record).remaining_resources(record.job_id):
                    what = f"{run}, attempt {record.attempt}, on {record.platform.get('kind')}: {', '.join(there)}"
                    found.append(Leftover(run=run, job_id=record.job_id, what=what))
        except TrainLitgptError as error:
            what = f"{run} is left alone, for its state is not known: {error}"
            return [Leftover(run=run, job_id=None, what=what)]
        return found

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        return [found for some in pool.map(of, index.runs()) for found in some]


def remove_leftover(index: Index, leftover: Leftover, *, open: OpenPlatform | None = None) -> bool:
    """Remove it, and prove by listing that it is gone; False if the run has come to life since, and was left alone."""
    attempts = Attempts(index=index, run=leftover.run, open=open or opening_beside())
    those = [record for record in attempts.records() if record.job_id == leftover.job_id]
    if not those or not _is_dead(attempts):
        return False
    attempts.platform_of(those[0]).cancel(those[0].job_id)
    return True


def _is_dead(attempts: Attempts) -> bool:
    last = attempts.last()
    return last is not None and last.status.state.is_final
