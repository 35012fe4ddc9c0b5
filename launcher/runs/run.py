"""A run worked out from its config: its key, its place, its job; and the runs of a sweep, with their ranking."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import JsonValue, TypeAdapter

from launcher.config import RunConfig, ScriptConfig, SweepConfig, overridden, validated
from launcher.errors import ConfigProblem
from launcher.images.identity import SBOM, SoftwareIdentity, bill_of_materials
from launcher.job import Job
from launcher.runs.code import CodeArchive, pack_code
from litgpt_demo import catalogue
from litgpt_demo.config import DataConfig, Settings, TrainingSpec, key_of
from litgpt_demo.data.dataset import (
    UNKNOWN,
    DatasetManifest,
    PlannedDataset,
    plan_dataset,
    preview_dataset,
    require_sample,
)
from litgpt_demo.documents import FileRecord
from litgpt_demo.errors import TrainLitgptError, UserError
from litgpt_demo.metrics import Row, curve
from litgpt_demo.models import estimates
from litgpt_demo.runs import ATTEMPTS, RecordedPrice, RunDocument, read_document, write_document
from litgpt_demo.storage import Storage, open_storage

FORMAT = 1
"""Part of every run's key: raise it when the same settings mean another training."""

MOST_TRIALS = 10_000
"""More are a mistake in the grid, and would take minutes only to be listed."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training whose key is known, though perhaps nothing of it exists yet."""

    config: RunConfig
    dataset: PlannedDataset
    key: str

    @property
    def name(self) -> str:
        return f"{self.config.name}-{self.key}"

    @property
    def root(self) -> Storage:
        return open_storage(self.config.root)

    @property
    def storage(self) -> Storage:
        return self.root.within(f"runs/{self.name}")

    @property
    def parameters(self) -> int:
        """The number of the model's parameters, at least: the tokenizer's vocabulary counts as one id."""
        model = self.config.model
        gpt = catalogue.config_of(model.name, model.config, sequence_length=model.sequence_length, vocab_size=1)
        return estimates.parameters(gpt)

    def job(self, *, attempt: int, image: str | None, labels: Mapping[str, str] | None = None) -> Job:
        """The job of one attempt. It follows from the config alone: `render` shows it before anything runs."""
        wandb = self.config.train.wandb
        return Job(
            name=self.name,
            root=self.root.address(),
            attempt=attempt,
            nodes=self.config.platform.nodes,
            processes=self.config.platform.processes,
            program=("-m", "litgpt_demo", "train", "--run", self.storage.address()),
            directory=self.storage.address(f"{ATTEMPTS}/{attempt}"),
            # The secret that these settings refer to, by its name.
            secrets=() if wandb is None or wandb.secret is None else (wandb.secret,),
            image=image,
            stage=(self.root.address(self.dataset.path),),
            labels=labels or {},
            unknown=self.dataset.unknown,
        )


def plan_run(config: RunConfig) -> Run:
    """The run that this config means. A UserError where the corpus or the tokenizer is not there.

    The key holds what decides the trained model: dataset, model, training. Neither platform nor node count: the samples
    do not depend on them, and a run that lost half its machines must be able to go on with the other half.
    """
    return as_started(run_of(config, plan_dataset(config.data)))


def preview_run(config: RunConfig) -> Run:
    """Return the run that this config means, to be looked at: its key is UNKNOWN where its dataset's is."""
    run = run_of(config, preview_dataset(config.data))
    try:
        return run if run.dataset.unknown else as_started(run)
    except TrainLitgptError:  # what is said of the root itself is said by its own check
        return run


def run_of(config: RunConfig, dataset: PlannedDataset, *, in_old_keys: bool = False) -> Run:
    """Return the run of a config whose dataset is planned already: planning looks at every file of the corpus."""
    train = config.train.outcome(in_old_keys=in_old_keys)
    fields = catalogue.settings(config.model.name, config.model.config)
    model: JsonValue = {"fields": fields, "length": config.model.sequence_length}
    key = UNKNOWN if dataset.unknown else key_of(FORMAT, dataset.key, model, dict(train))
    return Run(config=config, dataset=dataset, key=key)


def as_started(run: Run) -> Run:
    """Return the run under the key that it has in the index: one of an earlier version goes on under its old key."""
    old = run_of(run.config, run.dataset, in_old_keys=True)
    return next((one for one in (run, old) if one.root.within(f"index/{one.name}").list()), run)


def training_spec(run: Run, dataset: DatasetManifest) -> TrainingSpec:
    """Return the settings that the nodes get; a UserError where a split is too short for one sample, or the run for its
    warm-up."""
    config = run.config
    for split, name in ((dataset.train, "the training split"), (dataset.validation, "the validation split")):
        where = f"{name} of {run.root.address(run.dataset.path)}"
        require_sample(split.tokens, length=config.model.sequence_length, where=where)
    steps = config.train.steps(tokens=dataset.train.tokens, sequence_length=config.model.sequence_length)
    if config.train.warmup_steps >= steps:
        raise UserError(
            f"train.warmup_steps={config.train.warmup_steps} leaves nothing of the run's {steps} steps",
            fix="a tenth of the steps is a usual warm-up",
        )
    return TrainingSpec(
        run=run.name,
        dataset=run.root.address(run.dataset.path),
        dataset_key=dataset.key,
        model=config.model,
        train=config.train,
        steps=steps,
        world_size=config.world_size,
    )


def write_config(run: Run, spec: TrainingSpec, software: Mapping[str, JsonValue] | None = None) -> None:
    """Leave config.json in the run's folder: the config as written, what the nodes are told, their code and price."""
    machine, price = run.config.platform.machine_type, None
    if machine is not None and (listed := machine.price) is not None:
        price = RecordedPrice(machine=machine.name, usd=listed.usd, region=listed.region, date=listed.date)
    written = run.config.model_dump(mode="json")
    write_document(run.storage, RunDocument(run=written, training=spec, software=dict(software or {}), price=price))


def recorded_software(run: Run) -> SoftwareIdentity | None:
    """Return the software that a run was started with; None where its version did not record it."""
    software = read_document(run.storage).software
    return TypeAdapter(SoftwareIdentity).validate_python(software) if software else None


def write_bill(run: Run, identity: SoftwareIdentity) -> None:
    """Leave the bill of materials of the run's code in its folder, where we know what its image holds."""
    if (bill := bill_of_materials(identity, run.config.image)) is not None:
        run.storage.write(SBOM, bill.encode())


@dataclass(frozen=True, kw_only=True)
class Script:
    """A user's own script whose key is known."""

    config: ScriptConfig
    code: CodeArchive | None
    """Its code as it is now, where the config mounts any."""

    @property
    def name(self) -> str:
        """Same script, arguments, environment and code: same name, so that a live job is adopted."""
        parts: list[JsonValue] = [list(self.config.program), dict(self.config.env)]
        return f"{self.config.name}-{key_of(FORMAT, *parts, *([self.code.sha256] if self.code else []))}"

    @property
    def root(self) -> Storage:
        return open_storage(self.config.root)

    def job(self, *, attempt: int, image: str | None) -> Job:
        """The job of one attempt."""
        config = self.config
        return Job(
            name=self.name,
            root=self.root.address(),
            attempt=attempt,
            nodes=config.platform.nodes,
            processes=config.platform.processes,
            program=config.program,
            directory=self.root.address(f"runs/{self.name}/{ATTEMPTS}/{attempt}"),
            env=config.env,
            image=image,
            code=self.root.address(self.code.path) if self.code else None,
        )


def plan_script(config: ScriptConfig) -> Script:
    """Return the script that this config means; the code that it mounts is read now."""
    return Script(config=config, code=pack_code(config.code.mount, root=config.root) if config.code else None)


class RunManifest(Settings):
    """A run that is done: trained, collected, reported. Written last into the run's folder."""

    run: str
    key: str
    dataset: str
    """Below the root."""
    config: JsonValue
    software: JsonValue
    step: int
    tokens: int
    validation_loss: float | None
    """Nats per token."""
    attempts: int
    files: tuple[FileRecord, ...]


def trained_seconds(rows: Iterable[Row]) -> float:
    """Seconds spent in steps, evaluations and checkpoints that count, whatever was repeated after a resume."""
    per_step = curve(rows := list(rows), "step", "step_seconds")
    stepping = sum((step - before) * per_step[step] for before, step in itertools.pairwise([0, *per_step]))
    pauses = [sum(curve(rows, kind, "seconds").values()) for kind in ("evaluation", "checkpoint")]
    return stepping + sum(pauses)


# --- sweeps -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One training of a sweep."""

    changes: Mapping[str, JsonValue]
    """Dotted setting to its value."""
    config: RunConfig

    def __str__(self) -> str:
        """Its changes as they would be written on a command line."""
        return " ".join(f"{name}={value}" for name, value in self.changes.items())


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a trial."""

    trial: Trial
    run: str
    """`<name>-<key>`, or '' where the trial did not get that far."""
    validation_loss: float | None
    tokens_per_second: float | None
    error: str = ""

    @property
    def rank(self) -> tuple[bool, float]:
        """Return the sort key of a trial: first those with a loss, an infinite one too, the smaller the better."""
        loss = self.validation_loss
        return (True, math.inf) if loss is None or math.isnan(loss) else (False, loss)


def sweep_name(sweep: SweepConfig) -> str:
    """Return the sweep's own name, `<name>-<key>`: where its table lies, and what its trials are found by."""
    return f"{sweep.name}-{key_of(sweep.model_dump(mode='json', exclude={'start'}))}"


def trials(sweep: SweepConfig) -> list[Trial]:
    """Every combination of the grid, in the order it is written; all are validated before any of them runs.

    A ConfigProblem where a trial's settings cannot be used, or two trials would be the same training.
    """
    base = sweep.model_dump(mode="json", exclude={"sweep", "start"}) | {
        "start": {"others": sweep.start.others, "sweep": sweep_name(sweep)}
    }
    grid = sweep.sweep.grid
    if (count := math.prod(map(len, grid.values()))) > MOST_TRIALS:
        raise ConfigProblem(
            f"sweep.grid has {count:,} trials, more than {MOST_TRIALS:,}", fix="vary fewer settings at a time"
        )
    made, problems = [], []
    for values in itertools.product(*grid.values()):
        changes = dict(zip(grid, values, strict=True))
        where = "trial " + ", ".join(f"{name}={value}" for name, value in changes.items())
        try:
            made.append(Trial(changes=changes, config=validated(RunConfig, overridden(base, changes), where=where)))
        except ConfigProblem as problem:
            problems.append(str(problem))
    if problems:
        raise ConfigProblem("\n".join(problems))
    # What decides the trained model: two trials that agree in it would share one run's folder.
    if len({key_of(one.config.data, one.config.model, one.config.train.outcome()) for one in made}) < len(made):
        raise ConfigProblem(
            "sweep.grid: two of its trials are the same training; is a value listed twice, or a setting varied that "
            "does not change the model (name, root, image, platform, checkpoint_every, …)?"
        )
    return made


def runs_of(every: Sequence[Trial], plan: Callable[[DataConfig], PlannedDataset]) -> list[Run]:
    """Return the runs of these trials; `plan` looks at a corpus once, however many trials read it."""
    corpora = {key_of(trial.config.data): trial.config.data for trial in every}
    planned = {key: plan(data) for key, data in corpora.items()}
    return [as_started(run_of(trial.config, planned[key_of(trial.config.data)])) for trial in every]


def ranking(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """The sweep's table, best trial first."""
    return [
        {
            **{name: str(value) for name, value in outcome.trial.changes.items()},
            "validation loss": "" if outcome.validation_loss is None else f"{outcome.validation_loss:.4f}",
            "tokens/s": "" if outcome.tokens_per_second is None else f"{outcome.tokens_per_second:,.0f}",
            "run": outcome.run,
            "error": outcome.error.splitlines()[0] if outcome.error else "",
        }
        for outcome in sorted(outcomes, key=lambda outcome: outcome.rank)
    ]


def best_yaml(outcomes: Iterable[Outcome]) -> str | None:
    """The best trial's whole config, ready for `train-litgpt run`; None where none succeeded."""
    best = min(outcomes, key=lambda outcome: outcome.rank, default=None)
    if best is None or best.rank >= (False, math.inf):
        return None
    heading = f"# validation loss {best.validation_loss:.4f}, run {best.run}\n"
    settings = best.trial.config.model_dump(mode="json", exclude={"start"})
    return heading + yaml.safe_dump(settings, sort_keys=False, allow_unicode=True)
