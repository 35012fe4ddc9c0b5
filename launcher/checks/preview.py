"""The next submission, as far as this machine can tell: what it cannot ask is named, and shown as unknown."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from launcher.benchmark import BenchmarkConfig
from launcher.checks.access import PROBE
from launcher.config import RunConfig, ScriptConfig, SweepConfig
from launcher.errors import RunIsLive
from launcher.findings import OUT_OF_SIGHT, finding_of
from launcher.job import UNBUILT, Submission
from launcher.platforms.base import Capability
from launcher.runs.attempts import Claim, claim_at, claim_of, opening_beside, settle_others
from launcher.runs.index import Index
from launcher.runs.run import Run, preview_run
from launcher.runs.sweeps import runs_of, trials
from litgpt_demo.data.dataset import DatasetManifest, finished_dataset, preview_dataset
from litgpt_demo.errors import TrainLitgptError, Unreachable
from litgpt_demo.export import exported
from litgpt_demo.findings import Finding
from litgpt_demo.storage import open_storage

_PATIENCE = 5.0
"""Seconds that a bucket may take to answer a plan; a run waits for it longer."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """The parts of a run that are there before it starts."""

    dataset: DatasetManifest | None = None
    attempt: int = 1
    """The number of the attempt that runs, or else of the one to start."""
    blind: bool = False
    """It could not be looked at: that nothing is there is a guess."""
    findings: tuple[Finding, ...] = ()
    """The questions that found no answer, and the reasons why a run would be refused."""


@dataclass(frozen=True, kw_only=True)
class Preview:
    """A submission to be looked at."""

    title: str
    """The name that tells one of several submissions from the others; empty for the only one."""
    submission: Submission
    unknown: tuple[str, ...]
    """The values that are not known from here: what stands for each, and why."""


def previews(config: RunConfig | ScriptConfig | SweepConfig | BenchmarkConfig) -> Iterator[Preview]:
    """Yield every job that this config would start first, as it would be sent.

    Raises:
        ConfigProblem, UserError: the config cannot be used.
    """
    if isinstance(config, SweepConfig):
        every = trials(config)
        for trial, run in zip(every, runs_of(every, preview_dataset), strict=True):
            yield _previewed(claim_at(run), _look_once(run), title=str(trial))
    elif isinstance(config, RunConfig):
        run = preview_run(config)
        yield _previewed(claim_at(run), _look_once(run))
    elif isinstance(config, BenchmarkConfig):
        for script in config.jobs():
            claim = claim_of(script)
            yield _previewed(claim, look_at_script(claim), title=" ".join(script.env))
    else:
        claim = claim_of(config)
        yield _previewed(claim, look_at_script(claim))


def _look_once(run: Run) -> Seen:
    """Look for what is there of a run. Under an unknown key there is nothing, and nobody is asked for it."""
    return Seen(blind=True, findings=(_unknown_key(run),)) if run.dataset.unknown else look_at(run)


def _previewed(claim: Claim, seen: Seen, title: str = "") -> Preview:
    job = claim.make_job(seen.attempt) if seen.blind else claim.job_as_rendered(seen.attempt)
    submission = claim.platform.render(job)
    unknown = [finding.what for finding in seen.findings if finding.severity == "unknown"]
    if job.image is None and Capability.IMAGES in claim.platform.capabilities:
        unknown.append(f"{UNBUILT} stands for the image: the image step builds it, and names it by its digest")
    return Preview(title=title, submission=submission, unknown=(*unknown, *submission.unknown))


# --- looking ----------------------------------------------------------------------------------------------------------


def look_at(run: Run) -> Seen:
    """Look for what is there of a run, and guess that nothing is where that cannot be asked.

    Raises:
        DataError: its dataset is damaged.
    """
    if run.dataset.unknown:
        return Seen(blind=True, findings=(_unknown_key(run), *check_reach(run.config.root)))
    if found := tuple(check_reach(run.config.root)):
        return Seen(blind=True, findings=found)
    seen = _attempt_of(claim_at(run), done=exported(run.storage) is not None)
    return replace(seen, dataset=finished_dataset(run.root, run.dataset))


def _unknown_key(run: Run) -> Finding:
    said = finding_of(Unreachable(run.dataset.unknown), "data.unknown")
    what = f"the files of the dataset {run.dataset.name}, and with them the run's key, are not known"
    return replace(said, what=f"{what} (shown as {run.name} and {run.dataset.path}): {said.what}")


def seen_at(run: Run) -> Seen:
    """Look for what is there of a run that is about to start, which has to be known.

    Raises:
        TrainLitgptError: it cannot be asked.
    """
    return Seen(dataset=finished_dataset(run.root, run.dataset), attempt=claim_at(run).attempts.next())


def look_at_script(claim: Claim) -> Seen:
    """Look for what is there of a script's job, as `look_at` does of a run."""
    found = tuple(check_reach(claim.config.root))
    return Seen(blind=True, findings=found) if found else _attempt_of(claim)


def check_reach(root: str) -> Iterator[Finding]:
    """Yield why a bucket that the root is in cannot be read; nothing is written, and nobody is waited for."""
    storage = replace(open_storage(root), patience=_PATIENCE)
    if storage.local_path() is None:
        try:
            storage.exists(PROBE)
        except TrainLitgptError as error:
            said = finding_of(error, "root.unreachable")
            yield replace(said, what=f"what is there already is not known: {said.what}")


def check_others(config: RunConfig | ScriptConfig, run: str) -> Iterator[Finding]:
    """Yield the live job of the same name that a run would refuse to double."""
    if config.start.others == "refuse":
        try:
            beside = opening_beside(config.platform)
            settle_others(Index.of(config.root), config.start, name=config.name, run=run, open=beside)
        except RunIsLive as error:
            yield finding_of(error, "run.live")
        except OUT_OF_SIGHT as error:
            yield finding_of(error, "run.unknown")


def _attempt_of(claim: Claim, *, done: bool = False) -> Seen:
    """Look for the attempt that runs, and for jobs that a run would not double unless it is `done`."""
    others = () if done else tuple(check_others(claim.config, claim.attempts.run))
    try:
        return Seen(attempt=claim.attempts.next(), findings=others)
    except OUT_OF_SIGHT as error:
        return Seen(blind=True, findings=(*others, finding_of(error, "attempt.unknown")))
