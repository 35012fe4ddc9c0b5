"""A run worked out from its config: its key, its place, its attempts, its job."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from pydantic import JsonValue

from launcher.checks.cost import listed_price
from launcher.config import RunConfig, ScriptConfig
from launcher.images.identity import SoftwareIdentity
from launcher.images.sbom import SBOM, bill_of_materials
from launcher.job import Job
from launcher.runs.code import CodeArchive, pack_code
from launcher.runs.index import Index
from litgpt_demo.config import ModelConfig, TrainConfig, TrainingSpec
from litgpt_demo.data.dataset import (
    UNKNOWN,
    DatasetManifest,
    PlannedDataset,
    plan_dataset,
    preview_dataset,
    require_sample,
    sources_of,
)
from litgpt_demo.errors import UserError
from litgpt_demo.manifests import FileRecord
from litgpt_demo.metrics import PAUSES, Row, curve
from litgpt_demo.models import catalogue
from litgpt_demo.pretrained import Pretrained, look_at_weights, weights_model
from litgpt_demo.runs import ATTEMPTS, RunDocument, write_document
from litgpt_demo.settings import Settings, key_of
from litgpt_demo.storage import Storage, open_storage
from litgpt_demo.storage.private import make_temporary

FORMAT = 1
"""Part of every run's key: raise it when the same settings mean another training."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training whose key is known, though perhaps nothing of it exists yet."""

    config: RunConfig
    dataset: PlannedDataset
    key: str
    model: ModelConfig
    """The model that the config names, or that its weights are of."""
    weights: Pretrained | None = None
    """The weights to start from."""

    @property
    def resolved(self) -> RunConfig:
        """Return the config with that model."""
        return self.config.model_copy(update={"model": self.model})

    @property
    def weights_path(self) -> str | None:
        """Return where the weights are staged, below the root."""
        return None if self.weights is None else self.weights.path(self.model)

    @property
    def name(self) -> str:
        return f"{self.config.name}-{self.key}"

    @property
    def root(self) -> Storage:
        return open_storage(self.config.root)

    @property
    def storage(self) -> Storage:
        return self.root.within(f"runs/{self.name}")


def plan_run(config: RunConfig) -> Run:
    """The run that this config means.

    The key holds what decides the trained model: dataset, model, weights to start from, training. Neither platform nor
    node count: the samples do not depend on them, and a run that lost half its machines must be able to go on with the
    other half.

    Raises:
        UserError: the corpus or the tokenizer is not there.
    """
    return run_of(config, plan_dataset(config.data))


def preview_run(config: RunConfig) -> Run:
    """Return the run that this config means, to be looked at: its key is UNKNOWN where its dataset's is.

    Raises:
        UserError: the corpus or the tokenizer is not there.
    """
    return run_of(config, preview_dataset(config.data))


def look_at_start(address: str) -> Pretrained:
    """Return the weights at `address`.

    Raises:
        UserError: there are none that can be read.
    """
    return look_at_weights(address, make_temporary("weights"))


def _start_address(words: str, root: str) -> str:
    """Return the address that `model.from` means: of the one run under the root with that name, or as it is written.

    Raises:
        UserError: several runs have the name.
    """
    if "/" in words or Path(words).is_dir():
        return words
    index = Index.of(root)
    runs = [name for name in index.runs() if words in (name, name.rpartition("-")[0])]
    if len(runs) > 1:
        raise UserError(
            f"model.from={words} is the name of {len(runs)} runs under {index.root.address()}; give one of them whole: "
            f"{', '.join(runs)}"
        )
    return index.root.address(f"runs/{runs[0]}") if runs else words


def run_of(config: RunConfig, dataset: PlannedDataset, look: Callable[[str], Pretrained] = look_at_start) -> Run:
    """Return the run of a config whose dataset is planned already: planning looks at every file of the corpus.

    Args:
        look: tells what weights there are at an address.

    Raises:
        UserError: there are no weights at `model.from`, or several runs have that name, or nobody says what model they
            are of.
    """
    weights = None if config.model.pretrained is None else look(_start_address(config.model.pretrained, config.root))
    model = config.model if weights is None else weights_model(config.model, weights)
    decisive: dict[str, JsonValue] = {
        "fields": catalogue.settings(model.name, model.config),
        "length": model.sequence_length,
    }
    if weights is not None:
        decisive["weights"] = weights.key(model)
    key = UNKNOWN if dataset.unknown else key_of(FORMAT, dataset.key, decisive, config.train.outcome())
    return Run(config=config, dataset=dataset, key=key, model=model, weights=weights)


def training_spec(run: Run, dataset: DatasetManifest) -> TrainingSpec:
    """Return the settings that the nodes get.

    Raises:
        UserError: a split is too short for one sample, or the run for its warm-up.
    """
    config, several = run.config, bool(dataset.parts)
    for source, one in sources_of(dataset).items():
        for split, name in ((one.train, "the training split"), (one.validation, "the validation split")):
            where = f"{name} of {f'{source} in ' if several else ''}{run.root.address(run.dataset.path)}"
            require_sample(split.tokens, length=config.model.sequence_length, where=where)
    steps = config.train.steps(tokens=dataset.train.tokens, sequence_length=config.model.sequence_length)
    if config.train.warmup_steps >= steps:
        raise UserError(
            f"train.warmup_steps={config.train.warmup_steps} leaves nothing of the run's {steps} steps; "
            "a tenth of the steps is a usual warm-up"
        )
    _require_stages(dataset, steps)
    return TrainingSpec(
        run=run.name,
        dataset=run.root.address(run.dataset.path),
        dataset_key=dataset.key,
        # Where the weights came from is in the run's key by their content; the same ones may lie elsewhere by now.
        model=run.model.model_copy(update={"pretrained": None}),
        weights=None if run.weights_path is None else run.root.address(run.weights_path),
        train=config.train,
        evaluation=config.evaluation,
        steps=steps,
        world_size=config.world_size,
    )


def _require_stages(dataset: DatasetManifest, steps: int) -> None:
    """Check that each stage of a mixture has a step at least.

    Raises:
        UserError: one has none.
    """
    ends = [0, *(stage.end(steps) for stage in dataset.stages)]
    if dataset.stages and (ends[-1] != steps or ends != sorted(set(ends))):
        raise UserError(
            f"data.stages end after the steps {', '.join(map(str, ends[1:]))}, and the run has {steps} steps; each "
            "stage has to end after the one before, and the last but one before the run"
        )


def write_config(run: Run, spec: TrainingSpec, software: Mapping[str, JsonValue] | None = None) -> None:
    """Leave config.json in the run's folder: the config as written, what the nodes are told, their code and price."""
    written, price = run.config.model_dump(mode="json"), listed_price(run.config.platform)
    write_document(run.storage, RunDocument(run=written, training=spec, software=dict(software or {}), price=price))


def write_bill(run: Run, identity: SoftwareIdentity) -> None:
    """Leave the bill of materials of the run's code in its folder, where we know what its image holds."""
    bill = bill_of_materials(identity, run.config.image)
    if bill is not None:
        run.storage.write(SBOM, bill.encode())


def training_job(run: Run, *, attempt: int, image: str | None, labels: Mapping[str, str] | None = None) -> Job:
    """The job of one attempt at this run. It follows from the config alone: `render` shows it before anything runs."""
    return Job(
        name=run.name,
        attempt=attempt,
        nodes=run.config.platform.nodes,
        node_counts=run.config.node_counts,
        processes=run.config.platform.processes,
        program=("-m", "litgpt_demo", "train", "--run", run.storage.address()),
        directory=run.storage.address(f"{ATTEMPTS}/{attempt}"),
        secrets=secrets_of(run.config.train),
        image=image,
        stage=(run.root.address(run.dataset.path),),
        labels=labels or {},
        unknown=run.dataset.unknown,
    )


def secrets_of(train: TrainConfig) -> tuple[str, ...]:
    """The names of the secrets that these settings refer to."""
    trackers = (train.wandb, train.mlflow)
    return tuple(tracker.secret for tracker in trackers if tracker is not None and tracker.secret is not None)


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
        return f"{self.config.name}-{key_of(FORMAT, *parts, *((self.code.sha256,) if self.code else ()))}"

    @property
    def files(self) -> tuple[str, ...]:
        """Return the paths of the code that it mounts."""
        return self.code.paths if self.code else ()

    @property
    def root(self) -> Storage:
        return open_storage(self.config.root)


def plan_script(config: ScriptConfig) -> Script:
    """Return the script that this config means; the code that it mounts is read now.

    Raises:
        ConfigProblem: that cannot be mounted.
    """
    return Script(config=config, code=pack_code(config.code.mount, root=config.root) if config.code else None)


def script_job(script: Script, *, attempt: int, image: str | None) -> Job:
    """The job of one attempt at a user's own script."""
    config = script.config
    return Job(
        name=script.name,
        attempt=attempt,
        nodes=config.platform.nodes,
        node_counts=tuple(range(config.platform.least_nodes, config.platform.nodes + 1)),
        processes=config.platform.processes,
        program=config.program,
        directory=script.root.address(f"runs/{script.name}/{ATTEMPTS}/{attempt}"),
        env=config.env,
        image=image,
        code=script.root.address(script.code.path) if script.code else None,
    )


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
    """Seconds spent in steps, evaluations, scores and checkpoints that count, whatever was repeated after a resume."""
    per_step = curve(rows := list(rows), "step", "step_seconds")
    steps = [0, *per_step]
    stepping = sum((step - before) * per_step[step] for before, step in pairwise(steps))
    pauses = [sum(curve(rows, kind, "seconds").values()) for kind in PAUSES]
    return stepping + sum(pauses)
