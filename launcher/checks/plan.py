"""The plan of a config: steps that are done by their key, steps that would run, what blocks them, and the next job.

What this machine cannot ask is named, and shown as unknown.
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
from launcher.formatting import bytes_text, count_text, loss_text
from launcher.images.settings import BuiltImage, CloudBuildImage, NoImage
from launcher.job import PREVIEW, UNBUILT, Submission
from launcher.runs.attempts import Claim, claim_at, resolve_name_conflicts
from launcher.runs.restarts import Budget
from launcher.runs.run import Run, Script, plan_run, plan_script, preview_run, training_spec
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
from litgpt_demo.models.estimates import flops_per_token
from litgpt_demo.runs import EVALUATIONS, FINAL, read_metrics
from litgpt_demo.storage import Storage
from litgpt_demo.training import checkpoints
from litgpt_demo.training.origins import replay_problem

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
    """Return what a config would do, as far as this machine can tell, and all that a run would be refused for.
    Of a sweep that is every trial with what it takes, and the sum of them; what all trials share is told once.

    Raises:
        ConfigProblem, UserError: the config means nothing that could be planned.
        DataError: its dataset is damaged.
    """
    works = _works(config, preview=True)
    sights = [_look(work) for work in works.values()]
    told = [[*sight.findings, *blocked] for sight, blocked in zip(sights, _blocked(sights), strict=True)]
    findings = [*_told(list(works), told), *_about_parallel(config, sights)]
    first, platform = sights[0].claim.config, sights[0].claim.platform
    problems = [one.code for one in findings if one.severity in {"error", "unknown"}]
    if not any(code.startswith(platform.name) for code in problems):  # else it is known to be out of reach
        try:
            platform.check_access()
        except LauncherError as error:
            findings.append(finding_of(error, f"{platform.name}.access"))
    section, settings = ("train.", first.train) if isinstance(first, RunConfig) else ("", first)
    usual = type(settings).model_fields["max_restarts"].default
    if (settings.max_restarts, settings.restarts) != (usual, RestartSettings()):
        budget = Budget(run=first.name, max_restarts=settings.max_restarts, settings=settings.restarts)
        fix = f"{section}max_restarts and {section}restarts change that"
        findings.append(Finding("info", "restarts", str(budget), fix))
    if not isinstance(config, RunConfig):
        return Plan(findings=findings)
    figures, trial_rows, steps = list[dict[str, str]](), list[dict[str, str]](), list(TRAINING_STEPS)
    if isinstance(config, SweepConfig):
        steps = steps[:3]  # each trial has the others
        trial_rows = _trial_rows(config, dict(zip(works, sights, strict=True)))
    else:
        (sight,) = sights
        steps += [] if config.evaluation is None else [Step.EVALUATION]
        known, metrics = sight.tokens(sight.steps), [] if sight.blind else read_metrics(sight.run.storage)
        figures = arithmetic.figures(config, vocab_size=sight.vocabulary, tokens=known, metrics=metrics)
    datasets = {sight.run.dataset.path: sight for sight in sights}
    rows = [sight.row(step) for sight in datasets.values() for step in steps]
    unique = list({tuple(row.items()): row for row in rows}.values())
    return Plan(steps=unique, trials=trial_rows, arithmetic=figures, findings=findings)


def _works(config: AnyConfig, *, preview: bool = False) -> dict[str, Run | Script]:
    """What a config would start first, by the name that tells one of several from the others."""
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
    """Return every job that this config would start first, as it would be sent, by what tells it from the others."""
    shown = {}
    for title, work in _works(config, preview=True).items():
        sight = _look(work)
        claim = sight.claim
        job = claim.make_job(sight.attempt) if sight.blind else claim.job_as_rendered(sight.attempt)
        submission = claim.platform.render(job)
        unknown = [finding.what for finding in sight.findings if finding.severity == "unknown"]
        if job.nonce == PREVIEW:
            unknown.append(f"{PREVIEW}, at the end of the job's name, stands for a random number of each attempt")
        if job.image is None and claim.config.platform.in_containers:
            unknown.append(f"{UNBUILT} stands for the image: the image step builds it, and names it by its digest")
        shown[title] = replace(submission, unknown=(*unknown, *submission.unknown))
    return shown


@dataclass(frozen=True, kw_only=True)
class Sight:
    """A run or script, what is there of it, and what it would do."""

    work: Run | Script
    claim: Claim
    attempt: int = 1
    """The number of the attempt that runs, or else of the one to start."""
    dataset: DatasetManifest | None = None
    """Of a training, None where it is to be prepared, or cannot be looked at."""
    blind: bool = False
    """It could not be looked at: that nothing is there is a guess."""
    findings: tuple[Finding, ...] = ()
    """The questions that found no answer, and the reasons why a run would be refused."""

    @property
    def run(self) -> Run:
        assert isinstance(self.work, Run)
        return self.work

    @property
    def vocabulary(self) -> int | None:
        """Return the ids of the run's tokenizer, None where they cannot be known yet."""
        tokenizer, known = self.run.config.data.tokenizer, self.dataset or self.run.dataset.tokenizer
        if isinstance(tokenizer, TrainedTokenizer):
            return tokenizer.vocab_size
        return known.vocab_size if known else None

    @cached_property
    def needs(self) -> arithmetic.Needs | None:
        return arithmetic.needs(self.run.config, vocab_size=self.vocabulary)

    @property
    def steps(self) -> int | None:
        """Return the optimizer steps of the whole run, None where the dataset decides and is not there."""
        train, length = self.run.config.train, self.run.config.model.sequence_length
        if train.max_steps is None and train.max_tokens is None and self.dataset is None:
            return None
        return train.steps(tokens=self.dataset.train.tokens if self.dataset else 0, sequence_length=length)

    @cached_property
    def begun(self) -> int:
        """Return the step of the run's last checkpoint, 0 where there is none."""
        there = [] if self.blind else checkpoints.list_complete(self.run.storage)
        return there[0].step if there else 0

    @property
    def left(self) -> int | None:
        """Return the steps that are left, None where those of the whole run are not known."""
        return None if self.steps is None else max(0, self.steps - self.begun)

    def tokens(self, steps: int | None) -> int:
        return (steps or 0) * self.run.config.train.global_batch * self.run.config.model.sequence_length

    def flops(self, steps: int | None) -> float:
        model = arithmetic.model_of(self.run.config, self.vocabulary or _UNKNOWN_VOCABULARY)
        return float(self.tokens(steps)) * flops_per_token(model, self.run.config.model.sequence_length)

    @property
    def cost(self) -> arithmetic.Expected | None:
        """Return time and price of the steps that are left, None where they or the machines' GPUs are not known."""
        platform, seconds = self.run.config.platform, arithmetic.seconds_for(self.run.config, self.flops(self.left))
        machine = platform.machine_type
        if machine is None or not machine.gpus or not seconds:
            return None
        return arithmetic.expected(replace(machine, price=platform.price), nodes=platform.nodes, seconds=seconds)

    def row(self, step: Step) -> dict[str, str]:
        """Return what a step would do, and where."""
        run = self.run
        match step:
            case Step.DATASET:
                would, where = self.preparation(), run.root.address(run.dataset.path)
            case Step.IMAGE:
                image, where, would = chosen_image(run.config), "", "pin by digest"
                if isinstance(image, NoImage):
                    would = f"record this environment: torch {version('torch')}"
                elif isinstance(image, BuiltImage):
                    cloud = f"Cloud Build in {image.billed}" if isinstance(image, CloudBuildImage) else ""
                    would = f"build from {image.dockerfile or image.installed} unless it was built before, by "
                    would += cloud or "an engine on this machine"
            case Step.CREDENTIALS:
                would, where = "prove write access", run.root.address()
            case Step.TRAINING:
                would, where = self.training(), run.storage.address()
            case Step.CHECKPOINTS:
                would = "verify the last checkpoint, make final/litgpt and final/huggingface"
                where = run.storage.address(FINAL)
                if not self.blind and (done := finished(run.storage)) is not None:
                    would = f"nothing: done, loss {loss_text(done.validation_loss)}"
            case Step.EVALUATION:
                asked, where = run.config.evaluation, run.storage.address(EVALUATIONS)
                would = f"score final/huggingface by {', '.join(asked.tasks)}" if asked else ""
        return {"step": step, "would": would, "where": where}

    def preparation(self) -> str:
        if self.dataset is not None:
            return f"nothing: done, {count_text(self.dataset.train.tokens)} training tokens"
        planned, workers = self.run.dataset, self.run.config.workers
        if isinstance(workers, DaskWorkers):
            by = f"the Dask workers of {workers.scheduler}"
        else:
            by = f"{workers.count} {workers.kind}" if workers.count else f"as many {workers.kind} as cores"
        what = planned.name if planned.unknown else _read_of(planned)
        unsure = "unknown: nothing if it is done, else " if planned.unknown or self.blind else ""
        scratch = preflight.scratch_for(planned, root=self.run.config.root, workers=workers)
        return f"{unsure}prepare {what} by {by}{scratch and f', with {scratch}'}"

    def training(self) -> str:
        """Return what the training step would do, with the cost of the steps that are left."""
        known = f"{self.steps:,} steps" if self.steps else "one pass over the data"
        would = f"train on from step {self.begun:,} of {known}" if self.begun else f"train {known}"
        if self.blind:
            would = f"unknown: go on where it is, or train {known}"
        elif live := self.claim.attempts.live():
            return f"take up attempt {live.number}, which is {live.status.state.value}"
        elif self.begun and self.left == 0:
            return f"nothing: done, {known}"
        return would if self.cost is None else f"{would}, {self.cost}"


def _look(work: Run | Script) -> Sight:
    """Look for the attempt that runs, and for live jobs that a run would not double unless it is done.
    Where that cannot be asked, nothing is taken to be there; nothing is written, and no bucket is waited for."""
    claim, found, run = claim_at(work), list[Finding](), work if isinstance(work, Run) else None
    if run is not None and run.dataset.unknown:
        said = finding_of(Unreachable(run.dataset.unknown), "data.unknown")
        what = f"the files of the dataset {run.dataset.name}, and with them the run's key, are not known"
        found.append(replace(said, what=f"{what} (shown as {run.name} and {run.dataset.path}): {said.what}"))
    storage = replace(work.root, patience=timeouts.INTERACTIVE)
    if storage.local_path() is None:
        try:
            storage.exists(preflight.PROBE)
        except TrainLitgptError as error:
            said = finding_of(error, "root.unreachable")
            found.append(replace(said, what=f"what is there already is not known: {said.what}"))
    if found:
        return Sight(work=work, claim=claim, blind=True, findings=tuple(found))
    if claim.config.start.others == "refuse" and (run is None or finished(run.storage) is None):
        try:
            resolve_name_conflicts(claim.config, run=work.name, open=claim.attempts.open)
        except RunIsLive as error:
            found.append(finding_of(error, "run.live"))
        except UNVERIFIABLE as error:
            found.append(finding_of(error, "run.unknown"))
    attempt, blind = 1, False
    try:
        attempt = claim.attempts.next()
    except UNVERIFIABLE as error:
        blind = True
        found.append(finding_of(error, "attempt.unknown"))
    dataset = None if run is None else finished_dataset(run.root, run.dataset)
    return Sight(work=work, claim=claim, attempt=attempt, dataset=dataset, blind=blind, findings=tuple(found))


def _blocked(sights: Sequence[Sight]) -> list[list[Finding]]:
    """All that blocks each of these; what several have in common is looked at once."""
    places, workers, corpora, origins = (dict[str, list[Finding]]() for _ in range(4))
    rehearsals: dict[str, preflight.Rehearsal] = {}
    blocked = []
    for sight in sights:
        job = sight.claim.make_job(sight.attempt)
        if isinstance(sight.work, Script):
            blocked.append(list(preflight.check_script(sight.work, sight.claim.platform, job)))
            continue
        config, planned, dataset = sight.run.config, sight.run.dataset, sight.dataset
        if (place := content_hash(config.root, config.platform, config.image)) not in places:
            places[place] = preflight.check_place(config, sight.claim.platform, job)
        if planned.key not in corpora:  # the start of its texts is read
            corpora[planned.key] = list(warnings_of(planned))
        if dataset is None and planned.key not in rehearsals:
            rehearsals[planned.key] = preflight.rehearse(planned)
        found = [*places[place], *corpora[planned.key]]
        found += preflight.check_training(config, job, vocab_size=sight.vocabulary)
        if problem := replay_problem(sight.run.origin, planned.sample_keys, config.train.seed):
            found.append(Finding("error", "model.from.samples", *problem))
        if (model := content_hash(config.model, planned.key)) not in origins:  # by a process that takes seconds
            origins[model] = list(preflight.check_origin(sight.run, dataset, vocab_size=sight.vocabulary))
        found += origins[model]
        rehearsed = dataset or rehearsals[planned.key]
        if isinstance(rehearsed, Finding):
            found.append(rehearsed)
        elif rehearsed is not None:
            try:
                training_spec(sight.run, rehearsed)
            except TrainLitgptError as error:
                found.append(finding_of(error, "data.too-small"))
        if dataset is None:
            if (who := content_hash(config.workers)) not in workers:  # a scheduler is asked over the network
                workers[who] = preflight.check_workers(config.workers)
            found += workers[who]
        blocked.append(found)
    return blocked


def findings_of(config: AnyConfig, works: Mapping[str, Run | Script] | None = None) -> list[Finding]:
    """Return what blocks this config. `works` is what it starts, by name, where that is planned already: planning reads
    every file of the corpus, and all code."""
    works = _works(config) if works is None else works
    sights = []
    for work in works.values():  # of what is about to start all has to be known
        claim = claim_at(work)
        dataset = finished_dataset(work.root, work.dataset) if isinstance(work, Run) else None
        sights.append(Sight(work=work, claim=claim, attempt=claim.attempts.next(), dataset=dataset))
    return [*_told(list(works), _blocked(sights)), *_about_parallel(config, sights)]


def plan_to_start(config: RunConfig) -> Run:
    """Return the run that a config means; raise what refuses it at once, unless its job lives, which is followed."""
    run = plan_run(config)
    sight = Sight(work=run, claim=claim_at(run))
    with suppress(PlatformUnreachable):  # the run asks it again
        if sight.claim.attempts.live() is None:
            found = preflight.check_training(config, sight.claim.make_job(1), vocab_size=sight.vocabulary)
            raise_on_errors(finding for finding in found if finding.severity == "error")
            sight.claim.platform.check_access()
    return run


def _trial_rows(config: SweepConfig, sights: Mapping[str, Sight]) -> list[dict[str, str]]:

    def row(title: str, would: str, flops: float, memory: int, run: str = "") -> dict[str, str]:
        figures = {"FLOPs": f"{flops:.3g}" if flops else "", "memory per process": bytes_text(memory) if memory else ""}
        return {"trial": title, "would": would, **figures, "run": run}

    rows = []
    for title, sight in sights.items():
        memory = 0 if sight.needs is None else sight.needs.likely
        title = title or "as it is written"
        rows.append(row(title, sight.training(), sight.flops(sight.steps), memory, sight.run.name))
    left = [sight.left for sight in sights.values() if sight.left is not None]
    would = f"{sum(left):,} steps left" if len(left) == len(sights) else "as many passes over the data"
    costs = [cost for sight in sights.values() if (cost := sight.cost) is not None]
    if (cost := arithmetic.together(costs, parallel=config.sweep.max_parallel)) is not None:
        would = f"{would}, {cost}"
    largest = _largest(config, list(sights.values()))
    title = f"all {len(sights)}" + (f", {len(largest)} at a time" if largest else "")
    flops = sum(sight.flops(sight.steps) for sight in sights.values())
    return [*rows, row(title, would, flops, sum(needed.likely for needed in largest))]


def _largest(config: SweepConfig, sights: Sequence[Sight]) -> list[arithmetic.Needs]:
    known = [needed for sight in sights if (needed := sight.needs) is not None]
    return sorted(known, key=lambda one: one.likely, reverse=True)[: config.sweep.max_parallel]


def _about_parallel(config: AnyConfig, sights: Sequence[Sight]) -> list[Finding]:
    if not isinstance(config, SweepConfig) or not config.platform.on_this_machine or config.sweep.max_parallel == 1:
        return []
    return list(arithmetic.check_together(_largest(config, sights)))


def _told(titles: Sequence[str], found: Sequence[list[Finding]]) -> list[Finding]:
    """Return each finding once, behind the trials or jobs that it is about unless it is about all of them."""
    about: dict[Finding, list[str]] = {}
    for title, findings in zip(titles, found, strict=True):
        for finding in dict.fromkeys(findings):
            about.setdefault(finding, []).append(title)
    told = []
    for finding, (first, *others) in about.items():
        whose = f"{first} and {len(others)} more" if others else first
        shared = 1 + len(others) == len(found) or not whose
        told.append(finding if shared else replace(finding, what=f"{whose}: {finding.what}"))
    return told


def _read_of(planned: PlannedDataset) -> str:
    """Return how much is read: with `max_bytes`, the files that hold so much if all of their bytes are text."""
    read = files = size = 0
    for part in planned.parts or (planned,):
        ends = [*accumulate((source.size for source in part.sources), initial=0)]
        most = ends[-1] if part.data.corpus is None else part.data.corpus.max_bytes or ends[-1]
        read += min(bisect_left(ends, most), len(ends) - 1)
        files, size = files + len(ends) - 1, size + min(most, ends[-1])
    if read == files:
        return f"{files:,} files, {bytes_text(size)},"
    return f"about {read:,} of {files:,} files, {bytes_text(size)} of text,"


def lost_steps(storage: Storage) -> str:
    """Return which steps of a run's training no checkpoint holds, in a sentence; empty where all are kept."""
    done = max((row["step"] for row in read_metrics(storage) if row["kind"] == "step"), default=0)
    saved = max((found.step for found in checkpoints.list_complete(storage)), default=0)
    if done <= saved:
        return ""
    since = f"the checkpoint of step {saved}" if saved else "its beginning, for it has no checkpoint yet"
    return f"steps {saved + 1} to {done} are lost: the training goes on from {since}"


def progress_of(storage: Storage, *, live: bool) -> str:
    """Return how far the training in a run's folder is, in a line; empty where it has not begun.
    A second line says what of its metrics could not be read. Only a `live` job has a time left, and a pace."""
    rows = read_metrics(storage, bad := damaged_lines())
    seen = summary(rows)
    facts = seen.facts if live else seen.outcome
    far = ", ".join([f"step {seen.step}/{seen.steps}", *facts]) if rows else ""
    return "\n".join(filter(None, (far, str(bad))))
