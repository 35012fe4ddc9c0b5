"""The user's settings for model, training and evaluation. Those for data are in litgpt_demo.data.settings, and those
for images and platforms in launcher.config.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    AfterValidator,
    AliasChoices,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from litgpt_demo.models import catalogue
from litgpt_demo.models.layouts import RankLayout
from litgpt_demo.settings import Count, Duration, PositiveCount, Settings, _whole_number, complete_fields, formerly

# --- model ------------------------------------------------------------------------------------------------------------


class ModelConfig(Settings):
    """Any LitGPT model by name, or one made of LitGPT's own config fields, or a named one with fields changed."""

    model_config = ConfigDict(title="Model")

    name: str | None = "pythia-14m"
    """A model of LitGPT's catalogue (pythia-160m, Llama-3.2-1B, …), transformer-100b, -175b; empty: `config` alone."""
    config: dict[str, JsonValue] = Field({}, json_schema_extra={"default": {}})
    """LitGPT Config fields, as {"n_layer": 4, "n_embd": 256}. Without a name the vocabulary is the data's."""
    sequence_length: Count = Field(512, gt=0)
    """Tokens per training sample; at most the model's block_size."""
    pretrained: str | None = Field(None, validation_alias=AliasChoices("from", "pretrained"))
    """`from`: the weights to start from, random ones if empty: a run of yours, by name or folder, a LitGPT or Hugging
    Face folder, on this machine or in a bucket, or `owner/name[@revision]` of the Hugging Face Hub. Without a name the
    model is theirs."""

    @model_validator(mode="before")
    @classmethod
    def _is_named_by_its_weights(cls, given: Any) -> Any:
        """Leave out the default name where there are weights, which say what model they are of."""
        has_weights = isinstance(given, Mapping) and (given.get("from") or given.get("pretrained"))
        return {"name": None, **given} if has_weights else given

    @model_serializer(mode="wrap")
    def _as_written(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Write `from`, and nothing where there is none: keys and checkpoints stay those of configs without it."""
        fields: dict[str, Any] = serialize(self)
        weights = fields.pop("pretrained", None)
        return fields | ({} if weights is None else {"from": weights})

    @property
    def is_open(self) -> bool:
        """Return True if the weights alone say what model it is."""
        return (
            self.pretrained is not None and self.name is None and not {"n_layer", "n_embd", "n_head"} & set(self.config)
        )

    @model_validator(mode="after")
    def _exists(self) -> Self:
        if self.is_open:
            return self
        fields = catalogue.settings(self.name, self.config)
        block_size = fields.get("block_size", self.sequence_length)
        if self.sequence_length > block_size:
            raise ValueError(
                f"model.sequence_length={self.sequence_length} is longer than the block_size of "
                f"{self.name or 'this config'}, {block_size}; lower it, or set model.config.block_size"
            )
        return self


# --- training ---------------------------------------------------------------------------------------------------------

Share = Annotated[float, Field(ge=0, lt=1)]
LoraTarget = Literal["query", "key", "value", "projection", "mlp"]


def _secret_name(name: str) -> str:
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]{0,63}", name):
        raise ValueError(  # without what was given: it may be the key
            "a secret's name is not in capitals; put the key into an environment variable, and name that here, as "
            "WANDB_API_KEY"
        )
    return name


SecretName = Annotated[str, AfterValidator(_secret_name)]


class WandbConfig(Settings):
    """The Weights & Biases project for the training. The key is never written here: a secret goes by its name."""

    model_config = ConfigDict(title="Weights & Biases", hide_input_in_errors=True)

    project: str = Field(min_length=1)
    """The project there."""
    entity: str | None = None
    """User or team; empty is the key's own."""
    secret: SecretName | None = "WANDB_API_KEY"
    """Name of the environment variable that holds the key where the run is submitted; empty keeps records offline."""


class MlflowConfig(Settings):
    """The MLflow run for the training; needs mlflow-skinny (`train-litgpt[mlflow]`) where the training runs."""

    model_config = ConfigDict(title="MLflow", hide_input_in_errors=True)

    uri: str = Field(pattern=r"^(https?://[^@\s]+|sqlite:///\S+)$")
    """The tracking server, as https://mlflow.example.com; or sqlite:///path/to/mlflow.db on one machine."""
    experiment: str = Field("train-litgpt", min_length=1)
    """The experiment there."""
    secret: SecretName | None = None
    """Name of the environment variable that holds the server's token where the run is submitted."""


MOST_PROFILED = 50
"""Steps of the longest profile: a timeline of a few hundred thousand operators is what a browser can show."""


class ProfileConfig(Settings):
    """The steps that are profiled, and the ranks that record."""

    model_config = ConfigDict(title="Profile")

    steps: str = Field(pattern=r"^[1-9][0-9]{0,11}(-[1-9][0-9]{0,11})?$")
    """The first and the last step, as `20-25`; the first ones compile, and show nothing of the others."""
    ranks: tuple[Count, ...] = Field((0,), min_length=1)
    """Ranks that record. Each makes the steps slower for all."""

    @property
    def numbers(self) -> range:
        """Return the steps, as the metrics count them."""
        first, _, last = self.steps.partition("-")
        return range(int(first), int(last or first) + 1)

    @model_validator(mode="after")
    def _some_steps(self) -> Self:
        if not 1 <= len(self.numbers) <= MOST_PROFILED:
            raise ValueError(
                f"train.profile.steps={self.steps} are {len(self.numbers):,} steps; give the first and the last of "
                f"{MOST_PROFILED} steps at most, as 20-25"
            )
        return self


class RestartRule(Settings):
    """The new attempts that one class of failures may have. A number alone is `attempts`."""

    model_config = ConfigDict(title="New attempts")

    attempts: Count | None = Field(None, ge=0)
    """New attempts; empty is `max_restarts`."""
    wait: float = Field(5.0, ge=0, le=86_400)
    """Seconds before the next one; twice as long after each attempt in a row that committed no new checkpoint."""
    forgive: bool = False
    """A new checkpoint clears the count, and an attempt that committed one is not counted."""


def _or_attempts(schema: dict[str, Any]) -> None:
    """Let Prefect accept a number for a rule, as `_over_defaults` does: its server checks by this schema alone."""
    for name, field in schema["properties"].items():
        if isinstance(RestartSettings.model_fields[name].default, RestartRule):
            rule = {"$ref": field.pop("$ref"), "title": "Rule"}
            field["anyOf"] = [rule, {"title": "Attempts", "type": "integer", "minimum": 0}]
    complete_fields(schema)


class RestartSettings(Settings):
    """The new attempts after one that ended badly. Each class has a count of its own; a user error always stops."""

    model_config = ConfigDict(title="Restarts", json_schema_extra=_or_attempts)

    node_fault: RestartRule = RestartRule(forgive=True)
    """A machine, or a process on it, died."""
    network_fault: RestartRule = RestartRule(wait=15, forgive=True)
    """Nodes lost each other. A switch that restarts needs some time."""
    preempted: RestartRule = RestartRule(forgive=True)
    """The machine was taken away."""
    hang: RestartRule = RestartRule()
    """A rank gave no sign of life."""
    out_of_memory: RestartRule = RestartRule(attempts=0)
    """A GPU or a machine had too little memory; the next attempt has as little."""
    disk_full: RestartRule = RestartRule(attempts=0)
    """A disk has no room, and does not empty itself."""
    data_error: RestartRule = RestartRule(attempts=0)
    """A dataset or checkpoint is not what it says it is."""
    unknown: RestartRule = RestartRule(attempts=0)
    """An exit code that is not ours: a crash in native code, or a bug."""
    longest_wait: float = Field(600.0, ge=0, le=86_400)
    """Seconds that no wait exceeds."""
    exclude_after: Count = Field(2, ge=0)
    """The number of attempts that must blame a machine before the next ones avoid it, where the platform can; 0 avoids
    none."""

    @model_validator(mode="before")
    @classmethod
    def _over_defaults(cls, given: Any) -> Any:
        """Read a number as so many attempts, and what a rule leaves out as the default of its class."""
        if not isinstance(given, Mapping):
            return given

        def completed(name: str, rule: Any) -> Any:
            default = cls.model_fields[name].default if name in cls.model_fields else None
            if not isinstance(default, RestartRule) or isinstance(rule, RestartRule):
                return rule
            return default.model_dump() | (dict(rule) if isinstance(rule, Mapping) else {"attempts": rule})

        return {name: completed(name, rule) for name, rule in given.items()}


class LoraConfig(Settings):
    """Low-rank adapters (LoRA): the weights stay as they are, and a product of two small matrices is added to some."""

    model_config = ConfigDict(title="LoRA")

    rank: int = Field(8, gt=0)
    """Columns of the one matrix and rows of the other."""
    alpha: int = Field(16, gt=0)
    """The product is scaled by alpha / rank."""
    dropout: Share = 0.0
    """Share of an adapter's inputs that a step leaves out."""
    targets: tuple[LoraTarget, ...] = Field(("query", "value"), min_length=1)
    """The layers that get adapters."""


Precision = Literal["32-true", "16-mixed", "bf16-mixed", "bf16-true", "16-true"]


class Sharding(Settings):
    """Weights, gradients and averages spread over processes; products and samples divided among neighbours."""

    model_config = ConfigDict(title="Sharding")

    kind: Literal["fsdp", "hybrid"]
    """`fsdp` spreads the state over all processes; `hybrid` over those of a node, each node with a copy."""
    tensor: PositiveCount = 1
    """Neighbouring processes that divide each product among them (tensor parallelism): at most those of a node."""
    context: PositiveCount = 1
    """Neighbouring processes that divide each sample among them (context parallelism), for long sequences."""

    @model_validator(mode="before")
    @classmethod
    def _no_pipeline(cls, given: Any) -> Any:
        if isinstance(given, Mapping) and "pipeline" in given:
            raise ValueError(
                "train.strategy.pipeline: there is no pipeline parallelism; spread the model by kind=fsdp, and "
                "divide its products by tensor=2, 4 or 8 within a node"
            )
        return given

    def layout(self, world_size: int, *, per_node: int) -> RankLayout:
        """Return how so many processes divide the work.

        Raises:
            ValueError: they cannot.
        """
        together = self.tensor * self.context
        whole = per_node if self.kind == "hybrid" else world_size
        if world_size % whole or whole % together:
            where = f"each node's {whole} processes" if self.kind == "hybrid" else f"{world_size} processes"
            raise ValueError(
                f"train.strategy divides a model among tensor x context = {self.tensor} x {self.context} = {together} "
                f"neighbours, and {where} are no multiple of it; lower them, or take another number of processes"
            )
        return RankLayout(
            replicas=world_size // whole, shards=whole // self.tensor, tensor=self.tensor, context=self.context
        )


class TrainConfig(Settings):
    """The settings of a training."""

    model_config = ConfigDict(title="Training", hide_input_in_errors=True)  # for what is written where a name belongs

    # These change what is written and when, not what the model becomes: a run may change them and go on.
    NOT_IN_KEY: ClassVar[frozenset[str]] = frozenset(
        {"checkpoint_every", "keep_last", "keep_best", "keep_every", "log_every", "max_restarts", "restarts"}
        | {"reshard_after_forward", "max_time", "on_not_finite", "hang_after", "warn_slower", "strategy"}
        | {"tensorboard", "wandb", "mlflow", "profile", "debug"}
    )

    global_batch: Count = Field(512, gt=0)
    """Sequences per optimizer step, summed over every process of the job."""
    micro_batch: Count = Field(8, gt=0)
    """Sequences per forward pass of one process; the rest of its share is accumulated."""
    max_steps: PositiveCount | None = None
    """Optimizer steps to train for. Give this or max_tokens; with neither, one pass over the data."""
    max_tokens: PositiveCount | None = None
    """Tokens to train for, rounded up to whole steps."""
    max_time: Duration | None = None
    """Time to train for, such as "8h" or "PT8H", over all attempts; when it is up the run saves and has ended well. The
    learning rate goes on as for the whole of the steps."""
    learning_rate: float = Field(6e-4, gt=0)
    """Highest learning rate, reached after the warm-up."""
    min_learning_rate: float | None = Field(None, ge=0)
    """The learning rate at the end of the cosine; empty is a tenth of the highest."""
    warmup_steps: Count = Field(100, ge=0)
    """Steps in which the learning rate rises in a straight line."""
    weight_decay: float = Field(0.1, ge=0)
    """AdamW's decay of matrices; biases and norms do not decay."""
    betas: tuple[Share, Share] = (0.9, 0.95)
    """AdamW's averaging factors."""
    clip_norm: float | None = Field(1.0, gt=0)
    """Gradients are scaled down to this norm; empty leaves them."""
    precision: Precision = "bf16-mixed"
    """Lightning Fabric's precision."""
    strategy: Literal["auto", "ddp", "fsdp"] | Sharding = "auto"
    """`auto`: one process alone trains plainly, several by DDP. `fsdp` shards weights and optimizer over them, and
    {kind: fsdp or hybrid, tensor: 2, context: 2} says how; a run may change it and go on."""
    balance_loss: float = Field(0.01, ge=0)
    """Weight of the load-balance loss of a mixture of experts, beside the loss that is told; 0 leaves it out."""
    reshard_after_forward: bool = True
    """Free a block's gathered weights until the backward pass (fsdp, hybrid). Off, each step gathers them once instead
    of twice, and every device holds all weights in the meantime."""
    activation_checkpointing: Annotated[Literal["none", "selective", "full"], formerly(full=True, none=False)] = "none"
    """The activations of each block that the backward pass recomputes: none, all but matrix products and attention
    (a few per cent more time), or everything (about a third more time)."""
    lora: LoraConfig | None = None
    """Train low-rank adapters alone, on weights that `model.from` names; empty trains all weights."""
    compile: Annotated[Literal["none", "blocks", "model"], formerly(model=True, none=False)] = "none"
    """The part that torch.compile makes faster: nothing, each block by itself (starts sooner), or the whole model."""
    float8: bool = False
    """Multiply in float8 inside the blocks, on GPUs that can (H100, L4 and newer); needs torchao and `compile`."""
    seed: int = Field(1337, ge=0)
    """Seed of the initial weights and of the order of the samples."""
    evaluate_every: Count = Field(500, gt=0)
    """Steps between two evaluations; the last step is always evaluated."""
    evaluation_windows: Count = Field(256, gt=0)
    """The number of validation samples that an evaluation takes, from the start of the validation split."""
    checkpoint_every: Count = Field(500, gt=0)
    """Steps between two checkpoints; the last step is always kept."""
    keep_last: Count = Field(2, gt=0)
    """Checkpoints kept by age. At least one that verifies is always there."""
    keep_best: Count = Field(1, ge=0)
    """Checkpoints kept by validation loss, besides those."""
    keep_every: PositiveCount | None = None
    """Checkpoints of every so many steps are kept forever, besides those."""
    log_every: Count = Field(1, gt=0)
    """Steps between two metrics lines."""
    on_not_finite: Literal["stop", "skip"] = "stop"
    """The answer to a loss or gradient that is not finite: stop and name the samples, or go back to the last checkpoint
    and leave that step's batch out (ten times in a run at most)."""
    hang_after: float = Field(900, gt=0)
    """Seconds without a sign of life after which a rank counts as hung: its stacks are kept, and the attempt ends."""
    warn_slower: float | None = Field(1.5, gt=1)
    """A warning names the rank that takes so many times as long alone as the others, for most of 16 steps; empty gives
    none."""
    tensorboard: bool = False
    """Also write TensorBoard's event files, into the run's folder; metrics.csv is always there."""
    wandb: WandbConfig | None = None
    """Also tell Weights & Biases."""
    mlflow: MlflowConfig | None = None
    """Also tell MLflow."""
    profile: ProfileConfig | None = None
    """Record a timeline and the memory of some steps; a training that runs is asked by `train-litgpt profile`."""
    debug: bool = False
    """Keep torch's flight recorder and NCCL's log of each rank, and let torch.distributed say more."""
    max_restarts: Count = Field(3, ge=0)
    """New attempts after each of node faults, network faults, hangs and preemptions; `restarts` may say otherwise."""
    restarts: RestartSettings = RestartSettings()
    """The rules of new attempts, by class of failure."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.max_steps is not None and self.max_tokens is not None:
            raise ValueError(
                f"train.max_steps={self.max_steps} and train.max_tokens={self.max_tokens} are both given, "
                "and they need not agree; keep one"
            )
        if self.global_batch < self.micro_batch:
            raise ValueError(
                f"train.global_batch={self.global_batch} is smaller than train.micro_batch={self.micro_batch}; "
                "are the two swapped? A micro-batch is one process's share of one forward pass"
            )
        if self.min_learning_rate is not None and self.min_learning_rate > self.learning_rate:
            raise ValueError(
                f"train.min_learning_rate={self.min_learning_rate} is above train.learning_rate={self.learning_rate}; "
                "the cosine goes down from the second to the first"
            )
        self._require_shardable()
        if self.float8 and self.compile == "none":
            raise ValueError(
                "train.float8=true without train.compile is slower than bfloat16; take train.compile=blocks"
            )
        if self.float8 and self.precision not in {"bf16-mixed", "bf16-true"}:
            raise ValueError(
                f"train.float8=true rounds what train.precision={self.precision} wants exact; take bf16-mixed"
            )
        if self.float8 and self.lora is not None:
            raise ValueError("train.float8=true would round the adapters of train.lora too; leave it off")
        if self.max_steps is not None and self.warmup_steps >= self.max_steps:
            raise ValueError(
                f"train.warmup_steps={self.warmup_steps} leaves nothing of train.max_steps={self.max_steps}; "
                "a tenth of the steps is a usual warm-up"
            )
        return self

    def _require_shardable(self) -> None:
        """Raise ValueError where weights are to be sharded and another setting does not know how."""
        if (sharding := self.sharding) is None:
            return
        if self.precision == "16-mixed":
            raise ValueError(
                f"train.strategy={sharding.kind} does not scale losses, which train.precision=16-mixed needs; "
                "take bf16-mixed"
            )
        if self.compile == "model":
            raise ValueError(
                f"train.compile=model sees through none of what train.strategy={sharding.kind} does between blocks; "
                "take train.compile=blocks"
            )
        if sharding.tensor * sharding.context > 1 and (self.compile != "none" or self.float8):
            raise ValueError(
                "train.strategy with tensor or context exchanges in the midst of a block, which train.compile and "
                "train.float8 have not been made to see; leave them off, or take neither"
            )
        if sharding.tensor > 1 and self.lora is not None:
            raise ValueError(
                f"train.strategy.tensor={sharding.tensor} divides LitGPT's plain layers and knows nothing of the "
                "adapters of train.lora; leave tensor out: fsdp and hybrid spread the weights too"
            )

    @property
    def sharding(self) -> Sharding | None:
        """The sharding of the state; None where each process has all of it."""
        if isinstance(self.strategy, Sharding):
            return self.strategy
        return Sharding(kind="fsdp") if self.strategy == "fsdp" else None

    def layout(self, world_size: int, *, per_node: int | None = None) -> RankLayout:
        """Return how so many processes divide the work, `per_node` of them on each node; all, where it is not said.

        Raises:
            ValueError: they cannot.
        """
        if self.sharding is None:
            return RankLayout(replicas=world_size)
        return self.sharding.layout(world_size, per_node=per_node or world_size)

    def steps(self, *, tokens: int, sequence_length: int) -> int:
        """Return the number of optimizer steps for a training split of `tokens` tokens."""
        if self.max_steps is not None:
            return self.max_steps
        per_step = self.global_batch * sequence_length
        if self.max_tokens is not None:
            return math.ceil(self.max_tokens / per_step)
        return max(1, tokens // per_step)

    def accumulation(self, world_size: int) -> int:
        """Forward passes of each process per optimizer step.

        Raises:
            ValueError: the global batch does not split over `world_size` processes in micro-batches.
        """
        readers = self.layout(world_size).readers
        share = readers * self.micro_batch
        if self.global_batch % share:
            who = "processes" if readers == world_size else "groups of processes that share their samples"
            raise ValueError(
                f"train.global_batch={self.global_batch} does not split over {readers} {who} in micro-batches "
                f"of train.micro_batch={self.micro_batch}; it must be a multiple of {share}, "
                f"for example {math.ceil(self.global_batch / share) * share}"
            )
        return self.global_batch // share

    def outcome(self) -> dict[str, JsonValue]:
        """The fields that decide what the model becomes: the part of the run's key that training contributes."""
        # A training without adapters keeps the key that it had before there were any.
        without = set(self.NOT_IN_KEY) | ({"lora"} if self.lora is None else set())
        return self.model_dump(mode="json", exclude=without)


# --- evaluation -------------------------------------------------------------------------------------------------------


class EvaluationConfig(Settings):
    """The scores of the trained model: bits per byte on the validation split, and tasks of lm-evaluation-harness."""

    model_config = ConfigDict(title="Evaluation")

    # These change how fast the scores come and when, not what they are.
    NOT_IN_KEY: ClassVar[frozenset[str]] = frozenset({"batch_size", "task_files", "every_checkpoints"})

    tasks: tuple[str, ...] = ()
    """Tasks and groups by the names that lm-evaluation-harness has for them: hellaswag, arc_easy, mmlu. Empty scores
    the validation split alone. They need the extra `evaluate` where the flow runs."""
    task_files: str | None = None
    """A folder of your own task files, YAML with the JSON that they read, of the machine where the flow runs. Paths in
    `data_files` begin there. A task file may run Python: take only what you trust."""
    limit: PositiveCount | None = None
    """Ask only so many questions of each task: quick, and no figure to compare with others'."""
    few_shot: Annotated[int, Field(ge=0), BeforeValidator(_whole_number)] | None = None
    """The number of solved examples before each question; empty takes each task's own."""
    validation_windows: Count = Field(256, gt=0)
    """The number of validation samples of each source that bits per byte and perplexity are measured on."""
    batch_size: Count = Field(8, gt=0)
    """Questions that the model reads at once."""
    every_checkpoints: PositiveCount | None = None
    """Score the training too, on its own nodes, at every so many checkpoints of train.checkpoint_every; empty scores
    the trained model alone. Tasks then need the extra `evaluate` on the nodes, and be of multiple choice."""


# --- what the nodes are told ------------------------------------------------------------------------------------------


class TrainingSpec(Settings):
    """A run with everything resolved: the `training` part of its config.json, which every rank reads."""

    run: str
    """`<name>-<key>`."""
    dataset: str
    """Address of the finished dataset."""
    dataset_key: str
    model: ModelConfig
    weights: str | None = None
    """Address of the staged weights to start from; None starts from random ones."""
    train: TrainConfig
    evaluation: EvaluationConfig | None = None
    """The scores, of which some may be asked for while it trains."""
    steps: int = Field(gt=0)
    """Optimizer steps of the whole run."""
    world_size: int = Field(gt=0)
    """Ranks that were asked for; a rank that finds itself among another number stops (DESIGN: never train alone)."""
