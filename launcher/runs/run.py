"""A run as its config defines it: its id, its folder and its job."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

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
    require_document_ends,
    require_sample,
)
from litgpt_demo.documents import FileRecord, read_manifest, write_manifest
from litgpt_demo.errors import NetworkError, Unreachable, UserError
from litgpt_demo.export import FinalManifest
from litgpt_demo.metrics import Row, curve
from litgpt_demo.models import estimates
from litgpt_demo.runs import ATTEMPTS, FINAL, RecordedPrice, RunDocument, write_document
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.training.origins import find_initial_weights

FORMAT = 1
"""Part of every run id: raise it when the same settings mean another training."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training with a known run id; it does not need to exist yet."""

    config: RunConfig
    dataset: PlannedDataset
    id: str
    origin: InitialWeights | None = None
    """The weights that it starts from; None for random ones."""

    @property
    def name(self) -> str:
        return f"{self.config.name}-{self.id}"

    @property
    def root(self) -> Storage:
        return open_storage(self.config.root)

    @property
    def storage(self) -> Storage:
        return self.root.within(f"runs/{self.name}")

    @property
    def parameters(self) -> int:
        """A lower bound of the number of the model's parameters: the vocabulary counts as one token."""
        model = self.config.model
        gpt = catalogue.config_of(model.name, model.config, sequence_length=model.sequence_length, vocab_size=1)
        return estimates.parameters(gpt)

    def job(self, *, attempt: int, image: str | None, labels: Mapping[str, str] | None = None) -> Job:
        wandb = self.config.train.wandb
        secrets = []
        if wandb is not None and wandb.secret is not None:
            secrets.append(wandb.secret)
        return Job(
            name=self.name,
            root=self.root.address(),
            attempt=attempt,
            nodes=self.config.platform.nodes,
            processes=self.config.platform.processes_per_node,
            program=("-m", "litgpt_demo", "train", "--run", self.storage.address(), "--attempt", str(attempt)),
            directory=self.storage.address(f"{ATTEMPTS}/{attempt}"),
            secrets=tuple(secrets),
            image=image,
            stage=(self.root.address(self.dataset.path),),
            labels=labels or {},
            unknown=self.dataset.unknown,
        )


def plan_run(config: RunConfig) -> Run:
    """Return the run that this config means. Its id depends on the dataset, the model and the training, but neither on
    platform nor node count: a run that has lost half of its machines must be able to continue on the others."""
    return run_of(config, plan_dataset(config.data), origin_of(config))


def origin_of(config: RunConfig) -> InitialWeights | None:
    return find_initial_weights(config.model.init_from, config.model.load_optimizer_state, config.root)


def preview_run(config: RunConfig) -> Run:
    """Return the run that this config means, for inspection: its id is UNKNOWN if its dataset's content hash is."""
    dataset, origin = preview_dataset(config.data), None
    try:
        origin = origin_of(config)
    except (NetworkError, Unreachable) as error:
        dataset = replace(dataset, unknown=str(error))
    return run_of(config, dataset, origin)


def run_of(config: RunConfig, dataset: PlannedDataset, origin: InitialWeights | None = None) -> Run:
    """Return the run of a config whose dataset and initial weights were read already, which takes long."""
    train = config.train.run_id_settings()
    fields = catalogue.settings(config.model.name, config.model.config)
    model: dict[str, JsonValue] = {"fields": fields, "length": config.model.sequence_length}
    if origin is not None:
        model["origin"] = origin.content_hash
    run_id = UNKNOWN if dataset.unknown else content_hash(FORMAT, dataset.content_hash, model, dict(train))
    return Run(config=config, dataset=dataset, id=run_id, origin=origin)


def model_of(config: RunConfig, vocab_size: int | None) -> Any:
    """Return LitGPT's Config of the model; None if it needs the vocabulary of a tokenizer that is not known yet."""
    model = config.model
    if vocab_size is None and catalogue.padded_vocabulary(model.name, model.config) is None:
        return None
    length = model.sequence_length
    return catalogue.config_of(model.name, model.config, sequence_length=length, vocab_size=vocab_size)


def steps_of(config: RunConfig, *, tokens: int | None, vocab_size: int | None) -> int | None:
    """Return the optimizer steps of a run; None if they depend on the `tokens` of the training split or on the
    vocabulary, and that is None."""
    train, parameters = config.train, 0
    if train.tokens_per_parameter is not None:
        model = model_of(config, vocab_size)
        if model is None:
            return None
        parameters = estimates.parameters(model)
    elif tokens is None and train.max_steps is None and train.max_tokens is None:
        return None
    return train.steps(tokens=tokens or 0, sequence_length=config.model.sequence_length, parameters=parameters)


def training_spec(run: Run, dataset: DatasetManifest) -> TrainingSpec:
    """Return the settings for the nodes. Raises UserError if a split is too short for a sample, or the run for its
    warm-up, or if documents have no ends to attend within."""
    config = run.config
    for split, name in ((dataset.train, "the training split"), (dataset.validation, "the validation split")):
        where = f"{name} of {run.root.address(run.dataset.path)}"
        require_sample(split.tokens, length=config.model.sequence_length, where=where)
    for source in dataset.mixture.sources if dataset.mixture else ():
        where = f"the smaller split of {source.name}, of data.mixture,"
        require_sample(min(source.train, source.validation), length=config.model.sequence_length, where=where)
    if config.train.attention == "documents":
        require_document_ends(dataset)
    steps = steps_of(config, tokens=dataset.train.tokens, vocab_size=dataset.vocab_size)
    assert steps is not None
    for what, fix in config.train.step_problems(steps, f"the run's {steps} steps").values():
        raise UserError(what, fix=fix)
    return TrainingSpec(
        run=run.name,
        dataset=run.root.address(run.dataset.path),
        dataset_hash=dataset.content_hash,
        model=config.model,
        train=config.train,
        steps=steps,
        origin=run.origin,
        world_size=config.world_size,
    )


def write_config(
    run: Run, spec: TrainingSpec, identity: SoftwareIdentity | None = None, *, attempt: int | None = None
) -> None:
    """Write config.json in the attempt's folder, for its nodes, and in the run's, with the bill of materials if it is
    known. Only the creator of an attempt calls this, because a follower's config may differ."""
    platform, recorded_price = run.config.platform, None
    price = platform.price
    if price is not None:
        name = platform.hardware or f"a node ({platform.kind})"
        recorded_price = RecordedPrice(machine=name, usd=price.usd, region=price.region, date=price.date)
    document = RunDocument(
        run=run.config.model_dump(mode="json"),
        training=spec,
        software=asdict(identity) if identity else {},
        price=recorded_price,
    )
    if attempt is not None:
        write_document(run.storage.within(f"{ATTEMPTS}/{attempt}"), document)
    write_document(run.storage, document)
    if identity is not None:
        bill = bill_of_materials(identity, run.config.image)
        if bill is not None:
            run.storage.write(SBOM, bill.encode())


@dataclass(frozen=True, kw_only=True)
class Script:
    """A user's own script whose run id is known."""

    config: ScriptConfig
    code: CodeArchive | None
    """Its present code, if the config mounts any."""

    @property
    def name(self) -> str:
        """The same for the same script, arguments, environment and code, so that a live job is found."""
        parts: list[JsonValue] = [list(self.config.program), dict(self.config.env)]
        if self.code:
            parts.append(self.code.sha256)
        return f"{self.config.name}-{content_hash(FORMAT, *parts)}"

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
            processes=config.platform.processes_per_node,
            program=config.program,
            directory=self.root.address(f"runs/{self.name}/{ATTEMPTS}/{attempt}"),
            env=config.env,
            image=image,
            stage=config.datasets,
            code=self.root.address(self.code.path) if self.code else None,
        )


def plan_script(config: ScriptConfig) -> Script:
    """Return the script that this config means, with the present code that it mounts."""
    code = pack_code(config.code.folder, root=config.root) if config.code else None
    return Script(config=config, code=code)


class RunManifest(Settings):
    """A finished run: trained, collected, reported. It is written last into the run's folder."""

    run: str
    run_id: str
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


def models_of(final: FinalManifest) -> tuple[FileRecord, ...]:
    """Return the files of a collected model, with paths below the run's folder."""
    return tuple(record.model_copy(update={"path": f"{FINAL}/{record.path}"}) for record in final.files)


def renew_manifest(run: Storage, records: Sequence[FileRecord]) -> None:
    """Put the records of all files of `final`, which was written again, into the manifest of a finished run."""
    manifest = read_manifest(run, RunManifest)
    if manifest is None:
        return
    others = [record for record in manifest.files if not record.path.startswith(f"{FINAL}/")]
    renewed = manifest.model_copy(update={"files": (*records, *others)})
    if renewed != manifest:
        write_manifest(run, renewed)


def trained_seconds(rows: Iterable[Row]) -> float:
    """Return the seconds of steps, evaluations, texts and checkpoints, without those repeated after a resume."""
    rows = list(rows)
    per_step = curve(rows, "step", "step_seconds")
    stepping = sum((step - before) * per_step[step] for before, step in itertools.pairwise([0, *per_step]))
    pauses = [sum(curve(rows, kind, "seconds").values()) for kind in ("evaluation", "sample", "checkpoint")]
    return stepping + sum(pauses)
