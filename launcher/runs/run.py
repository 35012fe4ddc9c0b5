"""A run worked out from its config: its key, its place, its job; and the runs of a sweep, with their ranking."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace

from pydantic import Field, JsonValue

from launcher.config import RunConfig, ScriptConfig
from launcher.images.identity import SBOM, SoftwareIdentity, bill_of_materials
from launcher.job import Job
from launcher.runs.code import CodeArchive, pack_code
from litgpt_demo import catalogue
from litgpt_demo.config import InitialWeights, Settings, TrainingSpec, content_hash
from litgpt_demo.data.dataset import (
    UNKNOWN,
    DatasetManifest,
    PlannedDataset,
    plan_dataset,
    preview_dataset,
    require_sample,
)
from litgpt_demo.documents import FileRecord
from litgpt_demo.errors import NetworkError, Unreachable, UserError
from litgpt_demo.metrics import Row, curve
from litgpt_demo.models import estimates
from litgpt_demo.runs import ATTEMPTS, RecordedPrice, RunDocument, write_document
from litgpt_demo.schedules import schedule_problem
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training.origins import find_initial_weights

FORMAT = 1
"""Part of every run's key: raise it when the same settings mean another training."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training whose key is known, though perhaps nothing of it exists yet."""

    config: RunConfig
    dataset: PlannedDataset
    key: str
    origin: InitialWeights | None = None
    """The weights that it starts from; None for random ones."""

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
            program=("-m", "litgpt_demo", "train", "--run", self.storage.address(), "--attempt", str(attempt)),
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
    return run_of(config, plan_dataset(config.data), origin_of(config))


def origin_of(config: RunConfig) -> InitialWeights | None:
    """Return the weights that the config's model starts from."""
    return find_initial_weights(config.model.origin, config.model.with_optimizer, config.root)


def preview_run(config: RunConfig) -> Run:
    """Return the run that this config means, to be looked at: its key is UNKNOWN where its dataset's is."""
    dataset, origin = preview_dataset(config.data), None
    try:
        origin = origin_of(config)
    except (NetworkError, Unreachable) as error:
        dataset = replace(dataset, unknown=str(error))
    return run_of(config, dataset, origin)


def run_of(config: RunConfig, dataset: PlannedDataset, origin: InitialWeights | None = None) -> Run:
    """Return the run of a config whose dataset and weights to start from are found already: finding reads them all."""
    train = config.train.run_id_settings()
    fields = catalogue.settings(config.model.name, config.model.config)
    model: dict[str, JsonValue] = {"fields": fields, "length": config.model.sequence_length}
    model |= {} if origin is None else {"origin": origin.content_hash}
    key = UNKNOWN if dataset.unknown else content_hash(FORMAT, dataset.key, model, dict(train))
    return Run(config=config, dataset=dataset, key=key, origin=origin)


def training_spec(run: Run, dataset: DatasetManifest) -> TrainingSpec:
    """Return the settings that the nodes get; a UserError where a split is too short for one sample, or the run for its
    warm-up."""
    config = run.config
    for split, name in ((dataset.train, "the training split"), (dataset.validation, "the validation split")):
        where = f"{name} of {run.root.address(run.dataset.path)}"
        require_sample(split.tokens, length=config.model.sequence_length, where=where)
    for source in dataset.mixture.sources if dataset.mixture else ():
        where = f"the smaller split of {source.name}, of data.mixture,"
        require_sample(min(source.train, source.validation), length=config.model.sequence_length, where=where)
    steps = config.train.steps(tokens=dataset.train.tokens, sequence_length=config.model.sequence_length)
    if problem := schedule_problem(config.train, steps, f"the run's {steps} steps"):
        raise UserError(problem[0], fix=problem[1])
    return TrainingSpec(
        run=run.name,
        dataset=run.root.address(run.dataset.path),
        dataset_key=dataset.key,
        model=config.model,
        train=config.train,
        steps=steps,
        origin=run.origin,
        world_size=config.world_size,
    )


def write_config(
    run: Run, spec: TrainingSpec, identity: SoftwareIdentity | None = None, *, attempt: int | None = None
) -> None:
    """Leave config.json in the attempt's folder, which its nodes read, and in the run's, for who reads of its newest
    attempt: the config as written, the nodes' settings, their code and price. Also the bill of materials of that code,
    where we know what its image holds. Only the claimant of an attempt may call it: a follower's config may differ."""
    platform, price = run.config.platform, None
    if (known := platform.price) is not None:
        name = platform.hardware or f"a node ({platform.kind})"
        price = RecordedPrice(machine=name, usd=known.usd, region=known.region, date=known.date)
    written, software = run.config.model_dump(mode="json"), asdict(identity) if identity else {}
    document = RunDocument(run=written, training=spec, software=software, price=price)
    if attempt is not None:
        write_document(run.storage.within(f"{ATTEMPTS}/{attempt}"), document)
    write_document(run.storage, document)
    if identity is not None and (bill := bill_of_materials(identity, run.config.image)) is not None:
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
        return f"{self.config.name}-{content_hash(FORMAT, *parts, *([self.code.sha256] if self.code else []))}"

    @property
    def root(self) -> Storage:
        return open_storage(self.config.root)

    def job(self, *, attempt: int, image: str | None) -> Job:
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
    origin: InitialWeights | None = Field(None, exclude_if=lambda origin: origin is None)
    """The weights that it started from, with their checksums."""
    attempts: int
    files: tuple[FileRecord, ...]


def trained_seconds(rows: Iterable[Row]) -> float:
    """Seconds spent in steps, evaluations and checkpoints that count, whatever was repeated after a resume."""
    per_step = curve(rows := list(rows), "step", "step_seconds")
    stepping = sum((step - before) * per_step[step] for before, step in itertools.pairwise([0, *per_step]))
    pauses = [sum(curve(rows, kind, "seconds").values()) for kind in ("evaluation", "checkpoint")]
    return stepping + sum(pauses)
