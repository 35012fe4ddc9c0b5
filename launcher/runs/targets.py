"""The target of a verb: a run or a sweep, found by name, by folder, or by the config that it was started with.

No key is computed for it, so that a corpus that has changed, moved or gone hides no job.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from pydantic import ValidationError

from launcher.benchmark import BenchmarkConfig
from launcher.config import RunConfig, ScriptConfig, SweepConfig
from launcher.errors import ConfigProblem, UnknownRun
from launcher.formatting import duration_text
from launcher.runs.attempts import Attempts, OpenPlatform, opening_beside, recorded_platform
from launcher.runs.index import AttemptRecord, DamagedRecords, Index, damaged_records
from launcher.runs.run import plan_script
from launcher.runs.sweeps import sweep_name
from litgpt_demo.errors import DataError, TrainLitgptError
from litgpt_demo.storage import Storage, is_remote

LAST = "@last"
_SHOWN = 10  # candidates in a message


@dataclass(frozen=True, kw_only=True)
class Target:
    """One run, or all runs of a sweep or a network benchmark."""

    index: Index
    name: str
    """The run's or the sweep's name, which a cancellation is requested for."""
    runs: tuple[str, ...]
    is_sweep: bool = False
    damaged: tuple[str, ...] = ()
    """The damage of each unreadable record that may belong to one of the sweep's trials."""
    open: OpenPlatform = recorded_platform

    @property
    def attempts(self) -> list[Attempts]:
        """Return the attempts of each run."""
        return [Attempts(index=self.index, run=run, open=self.open) for run in self.runs]

    def storage(self, run: str) -> Storage:
        """Return the folder of a run."""
        return self.index.root.within(f"runs/{run}")


def find(words: str, *, root: str) -> Target:
    """Return the run or sweep that `words` mean: a name, its unique beginning, `@last`, or the folder of a run.

    Args:
        root: where names are looked up; a folder says its own.

    Raises:
        UnknownRun: there is none, or there are several.
    """
    if "/" in words:  # `<root>/runs/<run>`, or something below it
        folder, runs, rest = str(words if is_remote(words) else Path(words).expanduser().resolve()).rpartition("/runs/")
        if not runs:
            raise UnknownRun(f"{words} is not the folder of a run, which is <root>/runs/<name>, nor a config (*.yaml)")
        index, run = Index.of(folder), rest.partition("/")[0]
        if not index.records(run):
            there = _listed(index.newest(damaged_records())) or "  none"
            raise UnknownRun(f"the index of {index.root.address()} has no run {run}; there are:\n{there}")
        return Target(index=index, name=run, runs=(run,))
    index = Index.of(root)
    newest, bad = _newest(index, lambda record: words in (record.run, record.sweep))
    if not newest:
        raise UnknownRun(
            f"nothing has been started under {index.root.address()}; name another root by --root, or give the config"
        )
    if words == LAST:
        return _target(index, newest, newest[0].sweep or newest[0].run, bad)
    names = {name for record in newest for name in (record.run, record.sweep) if name}
    if words in names:
        return _target(index, newest, words, bad)
    found = {name for name in names if name.startswith(words)}
    # A sweep is one thing: where its own name begins so, its trials are no candidates of their own.
    found -= {record.run for record in newest if record.sweep in found}
    if len(found) == 1:
        return _target(index, newest, found.pop(), bad)
    if not found:
        raise UnknownRun(f"no run under {index.root.address()} is called {words!r}; there are:\n{_listed(newest)}")
    raise UnknownRun(
        f"{words!r} is the beginning of {len(found)} names; give more of one:\n"
        f"{_listed(record for record in newest if {record.run, record.sweep} & found)}"
    )


def find_started_with(config: RunConfig | ScriptConfig | BenchmarkConfig) -> Target:
    """Return the run or sweep that was started with a config, whatever has become of its corpus since.

    Raises:
        UnknownRun: none was, or several runs were, as when the corpus changed in between. Of several with mounted code
            the one of the present code is meant, or else the only one that lives.
    """
    index, beside = Index.of(config.root), opening_beside(config.platform)
    if isinstance(config, SweepConfig):
        name = sweep_name(config)
        newest, bad = _newest(index, lambda record: record.sweep == name)
        if all(record.sweep != name for record in newest):
            raise UnknownRun(_none_of(index, newest, config.name))
        return replace(_target(index, newest, name, bad), open=beside)
    if isinstance(config, BenchmarkConfig) or (isinstance(config, ScriptConfig) and config.code is None):
        jobs = config.jobs() if isinstance(config, BenchmarkConfig) else [config]
        there = set(index.runs())
        runs = tuple(dict.fromkeys(name for job in jobs if (name := plan_script(job).name) in there))
        if not runs:
            raise UnknownRun(_none_of(index, index.newest(damaged_records()), config.name))
        return Target(index=index, name=runs[0], runs=runs, open=beside)
    newest, bad = _newest(index, partial(_means, config))
    meant = [record for record in newest if _means(config, record)]
    if not meant:
        raise UnknownRun(_none_of(index, newest, config.name))
    if len(meant) > 1 and isinstance(config, ScriptConfig):
        with suppress(ConfigProblem):  # the mounted folder has gone, or cannot be mounted any more
            present = plan_script(config).name
            meant = [record for record in meant if record.run == present] or meant
    if len(meant) > 1 and isinstance(config, ScriptConfig):
        with suppress(TrainLitgptError):  # one of them cannot be asked for
            each = [(record, Attempts(index=index, run=record.run, open=beside)) for record in meant]
            meant = [record for record, attempts in each if attempts.live() is not None] or meant
    if len(meant) > 1:
        raise UnknownRun(
            f"{len(meant)} runs were started with this config, for its corpus or code changed in between; name one:\n"
            f"{_listed(meant)}"
        )
    return replace(_target(index, newest, meant[0].run, bad), open=beside)


def _means(config: RunConfig | ScriptConfig, record: AttemptRecord) -> bool:
    """Return whether the record's config starts the same program out of the same folder, whatever that held, or leads
    to the same model as far as configs say, which name a corpus and do not hold it."""
    theirs: RunConfig | ScriptConfig
    try:
        if isinstance(config, ScriptConfig):
            decisive = {
                name: value for name, value in record.config.items() if name in ("script", "args", "env", "code")
            }
            theirs = ScriptConfig.model_validate({**decisive, "platform": config.platform})
            same = (theirs.program, theirs.env, theirs.code) == (config.program, config.env, config.code)
        else:
            theirs = RunConfig.model_validate({name: record.config[name] for name in ("data", "model", "train")})
            outcomes = theirs.train.outcome(), config.train.outcome()
            same = (theirs.data, theirs.model, outcomes[0]) == (config.data, config.model, outcomes[1])
    except (KeyError, ValidationError):  # of the other kind, or another version's
        return False
    return record.name == config.name and same


def _newest(index: Index, means: Callable[[AttemptRecord], bool]) -> tuple[list[AttemptRecord], DamagedRecords]:
    """Return the last attempt of every run whose record can be read, and those that cannot.

    Raises:
        DataError: none of them is meant, and a damaged record may be the one that is.
    """
    newest = index.newest(bad := damaged_records())
    if bad.count and not any(map(means, newest)):
        raise DataError(str(bad))
    return newest, bad


def _target(index: Index, newest: Iterable[AttemptRecord], name: str, bad: DamagedRecords) -> Target:
    trials = tuple(sorted(record.run for record in newest if record.sweep == name))
    if not trials:
        return Target(index=index, name=name, runs=(name,))
    # A sweep's trials have the name of its config, as it has; only their keys differ.
    damaged = tuple(why for run, why in bad.runs.items() if run.rpartition("-")[0] == name.rpartition("-")[0])
    return Target(index=index, name=name, runs=trials, is_sweep=True, damaged=damaged)


def _none_of(index: Index, newest: Sequence[AttemptRecord], name: str) -> str:
    there = [record for record in newest if record.name == name] or newest
    if not there:
        return f"nothing has been started under {index.root.address()}"
    return (
        f"nothing has been started with this config under {index.root.address()}; if one of these is meant, name it:\n"
        f"{_listed(there)}"
    )


def _listed(records: Iterable[AttemptRecord]) -> str:
    rows = [
        f"  {record.run}  ({record.platform.get('kind')}, started by {record.user} "
        f"{duration_text(time.time() - record.created)} ago)"
        for record in records
    ]
    more = [f"  and {len(rows) - _SHOWN} more: train-litgpt runs"] if len(rows) > _SHOWN else []
    return "\n".join([*rows[:_SHOWN], *more])
