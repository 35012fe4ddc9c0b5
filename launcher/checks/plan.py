"""The plan of a config: the steps that are done already, the steps that would run, what blocks them, and the next job.

Facts that this machine cannot query are named, and shown as unknown.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from itertools import accumulate
from typing import TypeAlias

from launcher.benchmark import BenchmarkConfig
from launcher.checks import arithmetic, preflight
from launcher.checks.fitness import chosen_image
from launcher.config import DaskWorkers, RunConfig, ScriptConfig, SweepConfig
from launcher.curves import summary
from launcher.errors import UNVERIFIABLE, LauncherError, PlatformUnreachable, RunIsLive, finding_of, raise_on_errors
from launcher.events import TRAINING_STEPS, Step
from launcher.formatting import bytes_text, count_text, loss_text, shown
from launcher.images.settings import BuiltImage, CloudBuildImage, NoImage
from launcher.job import PREVIEW, UNBUILT, Submission
from launcher.runs.attempts import JobHandle, job_handle, resolve_name_conflicts
from launcher.runs.restarts import RestartPolicy
from launcher.runs.run import Run, Script, model_of, plan_run, plan_script, preview_run, steps_of, training_spec
from launcher.runs.sweeps import runs_of, trials
from litgpt_demo import timeouts
from litgpt_demo.config import RestartSettings, TrainedTokenizer, content_hash
from litgpt_demo.data.dataset import (
    DatasetManifest,
    PlannedDataset,
    finished_dataset,
    plan_dataset,
    preview_dataset,
    warnings_of,
)
from litgpt_demo.errors import Finding, TrainLitgptError, Unreachable
from litgpt_demo.export import finished
from litgpt_demo.metrics import damaged_lines
from litgpt_demo.models.estimates import flops_per_token, update_flops
from litgpt_demo.runs import EVALUATIONS, FINAL, read_metrics
from litgpt_demo.storage import Storage
from litgpt_demo.training import checkpoints

_UNKNOWN_VOCABULARY = 50_304
"""The vocabulary of a tokenizer that is not known yet, for estimates: GPT-2's, padded."""

AnyConfig: TypeAlias = RunConfig | ScriptConfig | SweepConfig | BenchmarkConfig


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A plan as `train-litgpt plan` prints it: tables, and findings."""

    steps: Sequence[dict[str, str]] = ()
    trials: Sequence[dict[str, str]] = ()
    """The rows of a sweep's trials."""
    arithmetic: Sequence[dict[str, str]] = ()
    findings: Sequence[Finding]


def plan_of(config: AnyConfig) -> Plan:
    """Return what a config would do, as far as this machine can see, and all that would refuse the run. Findings that
    the trials of a sweep share appear once."""
    works = _works(config, preview=True)
    inspections = [_inspect(work) for work in works.values()]
    found = [list(inspection.findings) for inspection in inspections]
    for findings_of_one, blockers in zip(found, _blockers(inspections), strict=True):
        findings_of_one += blockers
    findings = _grouped(list(works), found)
    findings += _about_parallel(config, inspections)
    findings += _about_access(inspections[0].handle, findings)
    findings += _about_restarts(inspections[0].handle.config)
    if not isinstance(config, RunConfig):
        return Plan(findings=findings)
    figures: list[dict[str, str]] = []
    trial_rows: list[dict[str, str]] = []
    steps = list(TRAINING_STEPS)
    if isinstance(config, SweepConfig):
        steps = steps[:3]  # each trial has the others
        trial_rows = _trial_rows(config, dict(zip(works, inspections, strict=True)))
    else:
        (inspection,) = inspections
        if config.evaluation is not None:
            steps.append(Step.EVALUATION)
        metrics = [] if inspection.unreachable else read_metrics(inspection.run.storage)
        tokens = inspection.tokens_since(0)
        figures = arithmetic.figures(config, vocab_size=inspection.vocabulary, tokens=tokens, metrics=metrics)
    datasets = {inspection.run.dataset.path: inspection for inspection in inspections}
    step_rows: list[dict[str, str]] = []
    for inspection in datasets.values():
        for row in map(inspection.row, steps):
            if row not in step_rows:
                step_rows.append(row)
    return Plan(steps=step_rows, trials=trial_rows, arithmetic=figures, findings=findings)


def _about_access(handle: JobHandle, findings: Sequence[Finding]) -> list[Finding]:
    problems = [finding.code for finding in findings if finding.severity in {"error", "unknown"}]
    area = handle.config.platform.area
    if any(code.startswith(area) for code in problems):
        return []
    try:
        handle.platform.check_access()
    except LauncherError as error:
        return [finding_of(error, f"{area}.access")]
    return []


def _about_restarts(config: RunConfig | ScriptConfig) -> list[Finding]:
    policy = RestartPolicy.of(config, config.name)
    owner = config.train if isinstance(config, RunConfig) else config
    default = type(owner).model_fields["max_restarts"].default
    if (policy.max_restarts, policy.settings) == (default, RestartSettings()):
        return []
    fix = f"{policy.section}max_restarts and {policy.section}restart_policy change that"
    return [Finding("info", "run.restarts", str(policy), fix)]


def _works(config: AnyConfig, *, preview: bool = False) -> dict[str, Run | Script]:
    if isinstance(config, SweepConfig):
        every = trials(config)
        runs = runs_of(every, preview_dataset if preview else plan_dataset)
        return {str(trial): run for trial, run in zip(every, runs, strict=True)}
    if isinstance(config, RunConfig):
        return {"": preview_run(config) if preview else plan_run(config)}
    if isinstance(config, ScriptConfig):
        return {"": plan_script(config)}
    return {" ".join(script.env): plan_script(script) for script in config.jobs()}


def previews(config: AnyConfig) -> dict[str, Submission]:
    """Return every job that this config would start first, as it would be sent, by its title."""
    submissions = {}
    for title, work in _works(config, preview=True).items():
        inspection = _inspect(work)
        handle = inspection.handle
        if inspection.unreachable:
            job = handle.make_job(inspection.attempt)
        else:
            job = handle.job_as_rendered(inspection.attempt)
        submission = handle.platform.render(job)
        unknown = [finding.what for finding in inspection.findings if finding.severity == "unknown"]
        if job.nonce == PREVIEW:
            unknown.append(f"{PREVIEW} at the end of the job's name is a placeholder for each attempt's random number")
        if job.image is None and handle.config.platform.in_containers:
            unknown.append(f"{UNBUILT} is a placeholder for the digest of the image, which the image step builds")
        submissions[title] = replace(submission, unknown=(*unknown, *submission.unknown))
    return submissions


@dataclass(frozen=True, kw_only=True)
class Inspection:
    """A run or script with what exists of it, and what it would do."""

    work: Run | Script
    handle: JobHandle
    attempt: int = 1
    """The number of the running attempt, or else of the one to start."""
    dataset: DatasetManifest | None = None
    """The dataset of a training; None if it must be prepared, or cannot be read."""
    unreachable: bool = False
    """Its files or its platform could not be queried, so nothing is known to exist."""
    findings: tuple[Finding, ...] = ()
    """Checks that could not be made, and reasons to refuse the run."""

    @property
    def run(self) -> Run:
        assert isinstance(self.work, Run)
        return self.work

    @property
    def vocabulary(self) -> int | None:
        tokenizer = self.run.config.data.tokenizer
        if isinstance(tokenizer, TrainedTokenizer):
            return tokenizer.vocab_size
        if self.dataset is not None:
            return self.dataset.vocab_size
        planned = self.run.dataset.tokenizer
        return planned.vocab_size if planned else None

    @cached_property
    def needs(self) -> arithmetic.Needs | None:
        return arithmetic.needs(self.run.config, vocab_size=self.vocabulary)

    @property
    def steps(self) -> int | None:
        """Return the optimizer steps of the run, None if they depend on a dataset that does not exist yet."""
        tokens = self.dataset.train.tokens if self.dataset else None
        return steps_of(self.run.config, tokens=tokens, vocab_size=self.vocabulary)

    @cached_property
    def saved_step(self) -> int:
        if self.unreachable:
            return 0
        return max((manifest.step for manifest in checkpoints.list_complete(self.run.storage)), default=0)

    @property
    def remaining_steps(self) -> int | None:
        return None if self.steps is None else max(0, self.steps - self.saved_step)

    def tokens_since(self, done: int) -> int:
        """Return the tokens that the run sees after its first `done` steps; 0 if its steps are not known."""
        if self.steps is None or done >= self.steps:
            return 0
        train = self.run.config.train
        samples = train.samples_after(self.steps, steps=self.steps) - train.samples_after(done, steps=self.steps)
        return samples * self.run.config.model.sequence_length

    def flops_since(self, done: int) -> float:
        model = model_of(self.run.config, self.vocabulary or _UNKNOWN_VOCABULARY)
        config = self.run.config
        of_tokens = float(self.tokens_since(done)) * flops_per_token(model, config.model.sequence_length)
        return of_tokens + max(0, (self.steps or 0) - done) * update_flops(model, config.train)

    @property
    def cost(self) -> arithmetic.Expected | None:
        platform = self.run.config.platform
        seconds = arithmetic.seconds_for(self.run.config, self.flops_since(self.saved_step))
        machine = platform.machine_type
        if machine is None or not machine.gpus or not seconds:
            return None
        return arithmetic.expected(replace(machine, price=platform.price), nodes=platform.nodes, seconds=seconds)

    def row(self, step: Step) -> dict[str, str]:
        run = self.run
        match step:
            case Step.DATASET:
                action, place = self.preparation(), run.root.address(run.dataset.path)
            case Step.IMAGE:
                action, place = _image_action(run.config), ""
            case Step.CREDENTIALS:
                action, place = "prove write access", run.root.address()
            case Step.TRAINING:
                action, place = self.training(), run.storage.address()
            case Step.CHECKPOINTS:
                action = "verify the last checkpoint, make final/litgpt and final/huggingface"
                place = run.storage.address(FINAL)
                final = None if self.unreachable else finished(run.storage)
                if final is not None:
                    action = f"nothing: done, loss {loss_text(final.validation_loss)}"
            case Step.EVALUATION:
                tasks = run.config.evaluation.tasks if run.config.evaluation else ()
                action, place = f"score final/huggingface by {', '.join(tasks)}", run.storage.address(EVALUATIONS)
        return {"step": step, "action": action, "where": place}

    def preparation(self) -> str:
        if self.dataset is not None:
            return f"nothing: done, {count_text(self.dataset.train.tokens)} training tokens"
        planned, workers = self.run.dataset, self.run.config.dataset_workers
        if isinstance(workers, DaskWorkers):
            executor = f"the Dask workers of {workers.scheduler}"
        else:
            executor = f"{workers.count or 'as many'} {workers.kind}"
            if not workers.count:
                executor += " as cores"
        action = f"prepare {planned.name if planned.unknown else _amount_to_read(planned)} by {executor}"
        if planned.unknown or self.unreachable:
            action = f"unknown: nothing if it is done, else {action}"
        scratch = preflight.scratch_for(planned, root=self.run.config.root, workers=workers)
        return f"{action}, with {scratch}" if scratch else action

    def training(self) -> str:
        length = f"{self.steps:,} steps" if self.steps else "one pass over the data"
        if self.unreachable:
            action = f"unknown: continue from the last checkpoint, or train {length}"
        elif live := self.handle.attempts.live():
            return f"reattach to attempt {live.number}, which is {live.status.state.value}"
        elif self.saved_step and self.remaining_steps == 0:
            return f"nothing: done, {length}"
        elif self.saved_step:
            action = f"continue from step {self.saved_step:,} of {length}"
        else:
            action = f"train {length}"
        if self.cost is not None:
            action += f", {self.cost}"
        return action


def _image_action(config: RunConfig) -> str:
    image = chosen_image(config)
    if isinstance(image, NoImage):
        return f"record this environment: torch {version('torch')}"
    if not isinstance(image, BuiltImage):
        return "pin by digest"
    builder = "an engine on this machine"
    if isinstance(image, CloudBuildImage):
        builder = f"Cloud Build in {image.billed}"
    return f"build from {image.dockerfile or image.installed} unless it was built before, by {builder}"


def _inspect(work: Run | Script) -> Inspection:
    # If the root or the platform does not answer, nothing is known to exist. Nothing is written.
    handle = job_handle(work)
    run = work if isinstance(work, Run) else None
    findings: list[Finding] = []
    if run is not None and run.dataset.unknown:
        finding = finding_of(Unreachable(run.dataset.unknown), "data.unknown")
        what = f"the files of the dataset {run.dataset.name}, and with them the run id, are not known"
        findings.append(replace(finding, what=f"{what} (shown as {run.name} and {run.dataset.path}): {finding.what}"))
    storage = replace(work.root, patience=timeouts.INTERACTIVE)
    if storage.local_path() is None:
        try:
            storage.exists(preflight.PROBE)
        except TrainLitgptError as error:
            finding = finding_of(error, "root.unreachable")
            findings.append(replace(finding, what=f"the files under the root are not known: {finding.what}"))
    if findings:
        return Inspection(work=work, handle=handle, unreachable=True, findings=tuple(findings))
    if handle.config.launch.if_running == "refuse" and (run is None or finished(run.storage) is None):
        try:
            resolve_name_conflicts(handle.config, run=work.name, open_platform=handle.attempts.open_platform)
        except RunIsLive as error:
            findings.append(finding_of(error, "run.live"))
        except UNVERIFIABLE as error:
            findings.append(finding_of(error, "run.unknown"))
    attempt, unreachable = 1, False
    try:
        attempt = handle.attempts.next()
    except UNVERIFIABLE as error:
        unreachable = True
        findings.append(finding_of(error, "attempt.unknown"))
    dataset = None if run is None else finished_dataset(run.root, run.dataset)
    return Inspection(
        work=work, handle=handle, attempt=attempt, dataset=dataset, unreachable=unreachable, findings=tuple(findings)
    )


def _blockers(inspections: Sequence[Inspection]) -> list[list[Finding]]:
    # Trials have inputs in common. A check of the same inputs is made once, and its result is kept by their hash.
    results: dict[tuple[str, str], list[Finding]] = {}
    dry_runs: dict[str, preflight.DryRun] = {}
    return [_blockers_of(inspection, results, dry_runs) for inspection in inspections]


def _blockers_of(
    inspection: Inspection, results: dict[tuple[str, str], list[Finding]], dry_runs: dict[str, preflight.DryRun]
) -> list[Finding]:
    platform, job = inspection.handle.platform, inspection.handle.make_job(inspection.attempt)
    if isinstance(inspection.work, Script):
        return list(preflight.check_script(inspection.work, platform, job))
    run, dataset = inspection.run, inspection.dataset
    config, planned, vocab_size = run.config, run.dataset, inspection.vocabulary
    place = "place", content_hash(config.root, config.platform, config.image)
    if place not in results:
        results[place] = preflight.check_place(config, platform, job)
    corpus = "corpus", planned.content_hash
    if corpus not in results:
        results[corpus] = list(warnings_of(planned))  # reads the start of its texts
    findings = [*results[place], *results[corpus], *preflight.check_training(config, job, vocab_size=vocab_size)]
    findings += [*preflight.check_position(run), *preflight.check_optimizer(run)]
    weights = "weights", content_hash(config.model, planned.content_hash)
    if weights not in results:  # in a process that takes seconds
        results[weights] = list(preflight.check_origin(run, dataset, vocab_size=vocab_size))
    findings += results[weights]
    prepared: preflight.DryRun = dataset
    if dataset is None:
        if planned.content_hash not in dry_runs:
            dry_runs[planned.content_hash] = preflight.dry_run_dataset(planned)
        prepared = dry_runs[planned.content_hash]
        workers = "workers", content_hash(config.dataset_workers)
        if workers not in results:  # a Dask scheduler is queried over the network
            results[workers] = preflight.check_workers(config.dataset_workers)
        findings += results[workers]
    if isinstance(prepared, Finding):
        findings.append(prepared)
    elif prepared is not None:
        try:
            training_spec(run, prepared)
        except TrainLitgptError as error:
            findings.append(finding_of(error, "data.too-small"))
    return findings


def findings_of(config: AnyConfig, works: Mapping[str, Run | Script] | None = None) -> list[Finding]:
    """Return what blocks this config. `works` is what it starts, by title, if it is planned already: planning reads
    every file of the corpus and all code."""
    works = works or _works(config)
    inspections = []
    for work in works.values():
        handle = job_handle(work)
        dataset = finished_dataset(work.root, work.dataset) if isinstance(work, Run) else None
        inspections.append(Inspection(work=work, handle=handle, attempt=handle.attempts.next(), dataset=dataset))
    return [*_grouped(list(works), _blockers(inspections)), *_about_parallel(config, inspections)]


def plan_to_start(config: RunConfig) -> Run:
    """Return the run of a config. Raises what refuses it at once, unless its job is running."""
    run = plan_run(config)
    inspection = Inspection(work=run, handle=job_handle(run))
    with suppress(PlatformUnreachable):  # the run queries it again
        if inspection.handle.attempts.live() is None:
            job = inspection.handle.make_job(1)
            findings = preflight.check_training(config, job, vocab_size=inspection.vocabulary)
            raise_on_errors(finding for finding in findings if finding.severity == "error")
            inspection.handle.platform.check_access()
    return run


def _trial_rows(config: SweepConfig, inspections: Mapping[str, Inspection]) -> list[dict[str, str]]:
    def row(title: str, action: str, flops: float, memory: int, run: str = "") -> dict[str, str]:
        numbers = {"FLOPs": shown("{:.3g}".format, flops or None, "")}
        numbers["memory per process"] = shown(bytes_text, memory or None, "")
        return {"trial": title, "action": action, **numbers, "run": run}

    rows = []
    for title, inspection in inspections.items():
        memory = 0
        if inspection.needs is not None:
            memory = inspection.needs.likely
        flops = inspection.flops_since(0)
        rows.append(row(title or "as it is written", inspection.training(), flops, memory, inspection.run.name))
    remaining = [i.remaining_steps for i in inspections.values() if i.remaining_steps is not None]
    action = "as many passes over the data"
    if len(remaining) == len(inspections):
        action = f"{sum(remaining):,} steps left"
    costs = [inspection.cost for inspection in inspections.values()]
    total = arithmetic.together([cost for cost in costs if cost is not None], parallel=config.sweep.max_parallel)
    if total is not None:
        action = f"{action}, {total}"
    largest = _largest(config, list(inspections.values()))
    title = f"all {len(inspections)}"
    if largest:
        title += f", {len(largest)} at a time"
    flops = sum(inspection.flops_since(0) for inspection in inspections.values())
    return [*rows, row(title, action, flops, sum(needs.likely for needs in largest))]


def _largest(config: SweepConfig, inspections: Sequence[Inspection]) -> list[arithmetic.Needs]:
    known = [inspection.needs for inspection in inspections if inspection.needs is not None]
    return sorted(known, key=lambda needs: needs.likely, reverse=True)[: config.sweep.max_parallel]


def _about_parallel(config: AnyConfig, inspections: Sequence[Inspection]) -> list[Finding]:
    if not isinstance(config, SweepConfig) or not config.platform.on_this_machine or config.sweep.max_parallel == 1:
        return []
    return list(arithmetic.check_together(_largest(config, inspections)))


def _grouped(titles: Sequence[str], found: Sequence[list[Finding]]) -> list[Finding]:
    titles_of: dict[Finding, list[str]] = {}
    for title, findings in zip(titles, found, strict=True):
        for finding in dict.fromkeys(findings):
            titles_of.setdefault(finding, []).append(title)
    grouped = []
    for finding, about in titles_of.items():
        prefix = about[0]
        if len(about) > 1:
            prefix += f" and {len(about) - 1} more"
        is_about_all = len(about) == len(found) or not about[0]
        grouped.append(finding if is_about_all else replace(finding, what=f"{prefix}: {finding.what}"))
    return grouped


def _amount_to_read(planned: PlannedDataset) -> str:
    read = files = size = 0
    for part in planned.parts or (planned,):
        ends = list(accumulate((source.size for source in part.sources), initial=0))
        limit = ends[-1]
        if part.data.corpus is not None and part.data.corpus.max_bytes:
            limit = part.data.corpus.max_bytes
        read += min(bisect_left(ends, limit), len(ends) - 1)
        files += len(ends) - 1
        size += min(limit, ends[-1])
    if read == files:
        return f"{files:,} files, {bytes_text(size)},"
    return f"about {read:,} of {files:,} files, {bytes_text(size)} of text,"


def lost_steps(storage: Storage) -> str:
    """Return which steps of a run's training no checkpoint holds, in a sentence; empty if all are kept."""
    done = max((row["step"] for row in read_metrics(storage) if row["kind"] == "step"), default=0)
    saved = max((manifest.step for manifest in checkpoints.list_complete(storage)), default=0)
    if done <= saved:
        return ""
    since = f"the checkpoint of step {saved}" if saved else "its beginning, because it has no checkpoint yet"
    return f"steps {saved + 1} to {done} are lost: the training continues from {since}"


def progress_of(storage: Storage, *, live: bool) -> str:
    """Return a line with the progress of the training in a run's folder; empty if it has not begun.
    A second line names the part of its metrics that could not be read. Only a `live` job has a pace and a time left."""
    damaged = damaged_lines()
    rows = read_metrics(storage, damaged)
    progress = summary(rows)
    lines = []
    if rows:
        facts = [fact for fact in progress.facts if live or fact.startswith("loss")]
        lines.append(", ".join([f"step {progress.step}/{progress.steps}", *facts]))
    if str(damaged):
        lines.append(str(damaged))
    return "\n".join(lines)
