"""The plan of a config: steps that are done by their key, steps that would run, and what blocks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version

from launcher.benchmark import BenchmarkConfig
from launcher.checks.arithmetic import Needs, arithmetic, check_together, needs, seconds_for
from launcher.checks.cost import Expected, expected, together
from launcher.checks.preflight import check_place, check_script, check_training, check_workers, vocabulary_of
from launcher.checks.preview import Seen, look_at, look_at_script, seen_at
from launcher.checks.rehearsal import Rehearsal, check_rehearsal, rehearse
from launcher.config import DaskWorkers, RunConfig, ScriptConfig, SweepConfig, Workers
from launcher.errors import LauncherError
from launcher.events import Step
from launcher.findings import finding_of
from launcher.formatting import bytes_text, count_text, loss_text
from launcher.images.fitness import chosen_image
from launcher.images.settings import BuiltImage, CloudBuildImage, NoImage
from launcher.job import Job
from launcher.platforms.base import Platform
from launcher.reports.curves import summary
from launcher.runs.attempts import claim_at, claim_script
from launcher.runs.restarts import Budget
from launcher.runs.run import Run, Script, plan_run, plan_script, preview_run
from launcher.runs.sweeps import Trial, runs_of, trials
from litgpt_demo.config import key_of
from litgpt_demo.data.dataset import plan_dataset, preview_dataset
from litgpt_demo.export import exported
from litgpt_demo.findings import Finding
from litgpt_demo.metrics import damaged_lines
from litgpt_demo.models.catalogue import config_of, fields_of
from litgpt_demo.models.estimates import flops_per_token
from litgpt_demo.runs import FINAL, read_metrics
from litgpt_demo.storage import Storage
from litgpt_demo.training import checkpoints

_OF_A_TRIAL = (Step.TRAINING, Step.CHECKPOINTS)
"""The steps that each trial of a sweep has for itself; the others are shared."""

_UNKNOWN_VOCABULARY = 50_304
"""The vocabulary of a tokenizer that is not known yet, for estimates: GPT-2's, padded."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan as `train-litgpt plan` prints it: tables, and findings."""

    steps: Sequence[dict[str, str]] = ()
    trials: Sequence[dict[str, str]] = ()
    """The rows of a sweep's trials."""
    arithmetic: Sequence[dict[str, str]] = ()
    findings: Sequence[Finding]


def plan_of(config: RunConfig | ScriptConfig | SweepConfig | BenchmarkConfig) -> Plan:
    """Return what a config would do, as far as this machine can tell, and all that a run would be refused for.

    Raises:
        ConfigProblem, UserError: the config means nothing that could be planned.
        DataError: its dataset is damaged.
    """
    if isinstance(config, SweepConfig):
        return _plan_of_sweep(config)
    if isinstance(config, RunConfig):
        run = preview_run(config)
        seen = look_at(run)
        findings = [*seen.findings, *Preflight().findings(run, seen)]
        return Plan(
            steps=steps_at(run, seen),
            arithmetic=arithmetic_at(run, seen),
            findings=[*findings, *_access(config, findings), _restarts(config)],
        )
    found: list[Finding] = []
    for script in config.jobs() if isinstance(config, BenchmarkConfig) else [config]:
        claim = claim_script(planned := plan_script(script))
        seen = look_at_script(claim)
        job = claim.make_job(seen.attempt)
        found += [*seen.findings, *check_script(script, claim.platform, job, files=planned.files)]
        found += [*_access(script, found), _restarts(script)]
    return Plan(findings=list(dict.fromkeys(found)))


# --- what blocks a run ------------------------------------------------------------------------------------------------


class Preflight:
    """The one list of checks, of a run alone and of a sweep's, by a plan and before a run: what several runs have in
    common is looked at once.

    Args:
        trusted: whether the config is about to run, so that what it names may be executed; looking executes nothing.
    """

    def __init__(self, *, trusted: bool = False) -> None:
        self._trusted = trusted
        self._rehearsals: dict[str, Rehearsal] = {}
        self._places: dict[str, list[Finding]] = {}

    def findings(self, run: Run, seen: Seen) -> list[Finding]:
        """Return all that blocks a run."""
        claim = claim_at(run)
        job = claim.make_job(seen.attempt)
        return [
            *self._place(run.config, claim.platform, job),
            *check_training(run.config, job, vocab_size=vocab_size(run, seen)),
            *check_rehearsal(run, self._rehearsal(run, seen)),
            *([] if seen.dataset is not None else check_workers(run.config.workers, trusted=self._trusted)),
        ]

    def _place(self, config: RunConfig, platform: Platform, job: Job) -> list[Finding]:
        key = key_of(config.root, config.platform, config.image)
        if key not in self._places:
            self._places[key] = check_place(config, platform, job)
        return self._places[key]

    def _rehearsal(self, run: Run, seen: Seen) -> Rehearsal:
        if seen.dataset is not None:
            return Rehearsal(manifest=seen.dataset)
        if run.dataset.key not in self._rehearsals:
            self._rehearsals[run.dataset.key] = rehearse(run.dataset)
        return self._rehearsals[run.dataset.key]


def findings_of(
    config: RunConfig | ScriptConfig | SweepConfig | BenchmarkConfig, *, trusted: bool = False
) -> list[Finding]:
    """Return what blocks this config.

    Args:
        trusted: whether the config is about to run.

    Raises:
        ConfigProblem, UserError: the config means nothing that could be planned.
        TrainLitgptError: what has to be known cannot be asked.
    """
    if isinstance(config, SweepConfig):
        return findings_of_trials(config, runs_of(trials(config), plan_dataset), trusted=trusted)
    if isinstance(config, BenchmarkConfig):
        return [finding for job in config.jobs() for finding in findings_of(job, trusted=trusted)]
    if isinstance(config, ScriptConfig):
        return findings_of_script(plan_script(config))
    return findings_at(plan_run(config), trusted=trusted)


def findings_of_trials(config: SweepConfig, runs: Sequence[Run], *, trusted: bool = False) -> list[Finding]:
    """Return what blocks a sweep whose trials' runs are planned already."""
    preflight = Preflight(trusted=trusted)
    found = {str(one): preflight.findings(run, seen_at(run)) for one, run in zip(trials(config), runs, strict=True)}
    return [*_told(found), *_about_parallel(config, [_needs(run, seen_at(run)) for run in runs])]


def findings_at(run: Run, *, trusted: bool = False) -> list[Finding]:
    """Return what blocks a run that is planned already: planning looks at every file of the corpus."""
    return Preflight(trusted=trusted).findings(run, seen_at(run))


def findings_of_script(script: Script) -> list[Finding]:
    """Return what blocks a script that is planned already: planning reads all of its code."""
    claim = claim_script(script)
    return check_script(script.config, claim.platform, claim.next_job(), files=script.files)


def _access(config: RunConfig | ScriptConfig, found: Sequence[Finding]) -> list[Finding]:
    """Ask the platform what a run's credentials step will ask, unless the platform is known to be out of reach."""
    platform = config.platform.open()
    if any(finding.severity in {"error", "unknown"} and finding.code.startswith(platform.name) for finding in found):
        return []
    try:
        platform.check_access()
    except LauncherError as error:
        return [finding_of(error, f"{platform.name}.access")]
    return []


def _restarts(config: RunConfig | ScriptConfig) -> Finding:
    """Tell how many new attempts may follow which failures."""
    section = "train." if isinstance(config, RunConfig) else ""
    settings = config.train if isinstance(config, RunConfig) else config
    budget = Budget(run=config.name, max_restarts=settings.max_restarts, settings=settings.restarts)
    return Finding("info", "restarts", str(budget), f"{section}max_restarts and {section}restarts change that")


def vocab_size(run: Run, seen: Seen) -> int | None:
    """Return the ids of the run's tokenizer, None where it is still to be trained or cannot be asked for."""
    known = seen.dataset or run.dataset.tokenizer
    return known.vocab_size if known else None


# --- what would be done -----------------------------------------------------------------------------------------------


def arithmetic_at(run: Run, seen: Seen) -> list[dict[str, str]]:
    """Return what the training will cost in operations and memory."""
    steps = _steps(run, seen)
    tokens = None if steps is None else steps * run.config.train.global_batch * run.config.model.sequence_length
    return arithmetic(run.config, vocab_size=vocabulary_of(run.config, vocab_size(run, seen)), tokens=tokens)


def _steps(run: Run, seen: Seen) -> int | None:
    """Return the optimizer steps of the whole run, None where the dataset decides and is not there."""
    train, length = run.config.train, run.config.model.sequence_length
    if train.max_steps is None and train.max_tokens is None and seen.dataset is None:
        return None
    return train.steps(tokens=seen.dataset.train.tokens if seen.dataset else 0, sequence_length=length)


def steps_at(run: Run, seen: Seen) -> list[dict[str, str]]:
    """Return the same of a run that is planned already."""
    return [_row(step, run, seen) for step in Step]


def _row(step: Step, run: Run, seen: Seen) -> dict[str, str]:
    match step:
        case Step.DATASET:
            would, where = _dataset(run, seen), run.root.address(run.dataset.path)
        case Step.IMAGE:
            would, where = _image(run.config), ""
        case Step.CREDENTIALS:
            would, where = "prove write access", run.root.address()
        case Step.TRAINING:
            would, where = _training(run, seen), run.storage.address()
        case Step.CHECKPOINTS:
            would, where = _checkpoints(run, seen), run.storage.address(FINAL)
    return {"step": step, "would": would, "where": where}


def _image(config: RunConfig) -> str:
    image = chosen_image(config)
    if isinstance(image, NoImage):
        return f"record this environment: torch {version('torch')}"
    if not isinstance(image, BuiltImage):
        return "pin by digest"
    by = f"Cloud Build in {image.billed}" if isinstance(image, CloudBuildImage) else "an engine on this machine"
    return f"build from {image.dockerfile or image.installed} unless it was built before, by {by}"


def _dataset(run: Run, seen: Seen) -> str:
    if seen.dataset is not None:
        return f"nothing: done, {count_text(seen.dataset.train.tokens)} training tokens"
    workers = _workers(run.config.workers)
    if run.dataset.unknown:
        return f"unknown: nothing if it is done, else prepare {run.dataset.name} by {workers}"
    size = sum(source.size for source in run.dataset.sources)
    would = f"prepare {len(run.dataset.sources):,} files, {bytes_text(size)}, by {workers}"
    return f"unknown: nothing if it is done, else {would}" if seen.blind else would


def _workers(workers: Workers) -> str:
    if isinstance(workers, DaskWorkers):
        return f"the Dask workers of {workers.scheduler}"
    return f"{workers.count or 'as many'} {workers.kind}" + ("" if workers.count else " as cores")


def _training(run: Run, seen: Seen) -> str:
    steps = _steps(run, seen)
    known = f"{steps:,} steps" if steps else "one pass over the data"
    if seen.blind:
        return f"unknown: go on where it is, or train {known}{_cost_text(run, seen, steps)}"
    live = claim_at(run).attempts.live()
    if live is not None:
        return f"take up attempt {live.number}, which is {live.status.state.value}"
    begun = _begun(run, seen)
    if steps and begun >= steps:
        return f"nothing: done, {steps:,} steps"
    left = None if steps is None else steps - begun
    return (f"train on from step {begun:,} of {known}" if begun else f"train {known}") + _cost_text(run, seen, left)


def _begun(run: Run, seen: Seen) -> int:
    """Return the step of the run's last checkpoint, 0 where there is none."""
    there = [] if seen.blind else checkpoints.committed(run.storage)
    return there[0].step if there else 0


def _cost_text(run: Run, seen: Seen, steps: int | None) -> str:
    cost = _cost(run, seen, steps)
    return "" if cost is None else f", {cost}"


def _cost(run: Run, seen: Seen, steps: int | None) -> Expected | None:
    """Return time and price of so many steps, None where the machines' GPUs or the steps are not known."""
    platform = run.config.platform
    machine = platform.machine_type
    if machine is None or not machine.gpus or steps is None:
        return None
    seconds = seconds_for(run.config, _flops(run, seen, steps))
    return None if seconds is None else expected(machine, nodes=platform.nodes, seconds=seconds)


def _flops(run: Run, seen: Seen, steps: int) -> float:
    model = run.config.model
    vocabulary = vocabulary_of(run.config, vocab_size(run, seen)) or _UNKNOWN_VOCABULARY
    fields = fields_of(model.name, model.config, sequence_length=model.sequence_length, vocab_size=vocabulary)
    tokens = steps * run.config.train.global_batch * model.sequence_length
    return float(tokens) * flops_per_token(config_of(fields), model.sequence_length)


def _checkpoints(run: Run, seen: Seen) -> str:
    done = None if seen.blind else exported(run.storage)
    return (
        "verify the last checkpoint, make final/litgpt and final/huggingface"
        if done is None
        else f"nothing: done, loss {loss_text(done.validation_loss)}"
    )


# --- sweeps -----------------------------------------------------------------------------------------------------------


def _plan_of_sweep(config: SweepConfig) -> Plan:
    """Return every trial with what it takes, and the sum of them; what all trials share is told once."""
    every, preflight = trials(config), Preflight()
    runs = runs_of(every, preview_dataset)
    seen = [look_at(run) for run in runs]
    found = {
        str(trial): [*sight.findings, *preflight.findings(run, sight)]
        for trial, run, sight in zip(every, runs, seen, strict=True)
    }
    findings = _told(found)
    findings += _about_parallel(config, list(map(_needs, runs, seen)))
    datasets = {run.dataset.path: (run, sight) for run, sight in zip(runs, seen, strict=True)}
    shared = [_row(step, *pair) for pair in datasets.values() for step in Step if step not in _OF_A_TRIAL]
    return Plan(
        steps=list({tuple(step.items()): step for step in shared}.values()),
        trials=[*map(_trial_row, every, runs, seen), _sum_row(config, runs, seen)],
        findings=[*findings, *_access(config, findings), _restarts(config)],
    )


def _trial_row(trial: Trial, run: Run, seen: Seen) -> dict[str, str]:
    steps, needed = _steps(run, seen), _needs(run, seen)
    return {
        "trial": str(trial) or "as it is written",
        "would": _training(run, seen),
        "FLOPs": "" if steps is None else f"{_flops(run, seen, steps):.3g}",
        "memory per process": "" if needed is None else bytes_text(needed.likely),
        "run": run.name,
    }


def _sum_row(config: SweepConfig, runs: Sequence[Run], seen: Sequence[Seen]) -> dict[str, str]:
    """Return the row that adds the trials up: what is left to train, and the memory of those that run together."""
    pairs = list(zip(runs, seen, strict=True))
    steps = [_steps(run, sight) for run, sight in pairs]
    left = [None if all_ is None else max(0, all_ - _begun(*pair)) for all_, pair in zip(steps, pairs, strict=True)]
    known = [count for count in left if count is not None]
    told = f"{sum(known):,} steps left" if len(known) == len(left) else "as many passes over the data"
    costs = [_cost(run, sight, count) for (run, sight), count in zip(pairs, left, strict=True)]
    cost = together([one for one in costs if one is not None], parallel=config.sweep.max_parallel)
    flops = [
        0.0 if count is None else _flops(run, sight, count) for (run, sight), count in zip(pairs, steps, strict=True)
    ]
    memory = _largest(config, [needed for needed in map(_needs, runs, seen) if needed is not None])
    return {
        "trial": f"all {len(runs)}, {len(memory)} at a time" if memory else f"all {len(runs)}",
        "would": told + ("" if cost is None else f", {cost}"),
        "FLOPs": f"{sum(flops):.3g}" if any(flops) else "",
        "memory per process": bytes_text(sum(needed.likely for needed in memory)) if memory else "",
        "run": "",
    }


def _needs(run: Run, seen: Seen) -> Needs | None:
    return needs(run.config, vocab_size=vocabulary_of(run.config, vocab_size(run, seen)))


def _largest(config: SweepConfig, needed: Sequence[Needs]) -> list[Needs]:
    """Return what the largest trials take that could run at the same time."""
    return sorted(needed, key=lambda one: one.likely, reverse=True)[: config.sweep.max_parallel]


def _about_parallel(config: SweepConfig, needed: Sequence[Needs | None]) -> list[Finding]:
    """Return why trials that run at the same time do not fit together: on this machine they share its memory."""
    known = [one for one in needed if one is not None]
    if not config.platform.on_this_machine or config.sweep.max_parallel == 1 or not known:
        return []
    return list(check_together(_largest(config, known)))


def _told(found: dict[str, list[Finding]]) -> list[Finding]:
    """Return each finding once, behind the trials that it is about unless it is about all of them."""
    about: dict[Finding, list[str]] = {}
    for trial, findings in found.items():
        for finding in dict.fromkeys(findings):
            about.setdefault(finding, []).append(trial)
    return [
        finding
        if len(whose) == len(found)
        else replace(
            finding, what=f"trial {whose[0]}{f' and {len(whose) - 1} more' * (len(whose) > 1)}: {finding.what}"
        )
        for finding, whose in about.items()
    ]


# --- how far it is ----------------------------------------------------------------------------------------------------


def lost_steps(storage: Storage) -> str:
    """Return which steps of a run's training no checkpoint holds, in a sentence; empty where all are kept."""
    done = max((row["step"] for row in read_metrics(storage) if row["kind"] == "step"), default=0)
    saved = max((found.step for found in checkpoints.committed(storage)), default=0)
    if done <= saved:
        return ""
    since = f"the checkpoint of step {saved}" if saved else "its beginning, for it has no checkpoint yet"
    return f"steps {saved + 1} to {done} are lost: the training goes on from {since}"


def progress_of(storage: Storage, *, live: bool) -> str:
    """Return how far the training in a run's folder is, in a line; empty where it has not begun.

    A second line says what of its metrics could not be read.

    Args:
        live: whether a job runs: only then is there a time left, and a pace.
    """
    rows = read_metrics(storage, bad := damaged_lines())
    seen = summary(rows)
    facts = seen.facts if live else seen.outcome
    far = ", ".join([f"step {seen.step}/{seen.steps}", *facts]) if rows else ""
    return "\n".join(filter(None, (far, str(bad))))
