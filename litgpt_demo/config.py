"""The user's settings for data, model and training. The parts about images and platforms are in launcher.config.

Every model is frozen and refuses unknown keys, because a misspelt key that is silently ignored costs a training.
The docstring under a field is its help text: in the Prefect form, in the JSON schema, in error messages.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import posixpath
import re
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from enum import Enum
from fractions import Fraction
from functools import cache
from hashlib import sha256
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple, Self, TypeAlias, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    JsonValue,
    Tag,
    model_validator,
)
from pydantic.annotated_handlers import GetCoreSchemaHandler
from pydantic.fields import FieldInfo
from pydantic.json_schema import WithJsonSchema
from pydantic_core import CoreSchema

from litgpt_demo import catalogue
from litgpt_demo.optimizers import OPTIMIZERS, OptimizerKind
from litgpt_demo.schedules import DECAY_SHAPES, SCHEDULES, Schedule, in_steps, schedule_problem


@cache
def _docstrings(module: str) -> dict[tuple[str, str], str]:
    """Return the docstrings below the annotated names of a module's classes, by the names of class and attribute."""
    found = {}
    source = ""  # an installation of only bytecode has no help texts
    with suppress(OSError, TypeError):
        source = inspect.getsource(sys.modules[module])
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef):
            for attribute, below in pairwise(node.body):
                if isinstance(attribute, ast.AnnAssign) and isinstance(below, ast.Expr):
                    name = ast.unparse(attribute.target)
                    found[node.name, name] = inspect.cleandoc(ast.literal_eval(below.value))
    return found


def described(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the fields of a settings class, each with its docstring as its description. Pydantic's option
    `use_attribute_docstrings` does so for every class at import, which takes 0.2 s of every process."""
    for kind in model.__mro__:
        if issubclass(kind, Settings):
            for name, field in model.model_fields.items():
                field.description = field.description or _docstrings(kind.__module__).get((kind.__name__, name))
    return model.model_fields


def arrange_form(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Add the description, the position and the title of each field for Prefect's form.

    Postgres does not keep the order of keys. Pydantic gives no title to a field that is a section, so several sections
    of one class would all have the title of the class.
    """
    for position, (name, field) in enumerate(schema.get("properties", {}).items()):
        description = described(model)[name].description
        if description is not None:
            field["description"] = description
        field["position"] = position
        field.setdefault("title", name.replace("_", " ").title())


# Prefect's server writes every response with orjson, which supports integers of 64 bits. A larger integer in the
# parameters of one flow run would make each list with that flow run an error 500 (prefect/server/api/flow_runs.py).
INTEGERS = range(-(2**63), 2**64)


def bounded(schema: Any) -> Any:
    """Return a schema of pydantic-core in which integers without tighter bounds have those of INTEGERS."""
    if isinstance(schema, list | tuple):
        return type(schema)(map(bounded, schema))
    if not isinstance(schema, dict):
        return schema
    result = dict(schema)
    for name in result.keys() - {"default", "metadata"}:
        result[name] = bounded(result[name])
    if result.get("type") == "int":
        result.setdefault("le", INTEGERS[-1])
        if "gt" not in result:
            result.setdefault("ge", INTEGERS[0])
    return result


def _writable(value: JsonValue) -> JsonValue:
    if isinstance(value, int) and value not in INTEGERS:
        raise ValueError(f"an integer is out of range; give one from {INTEGERS[0]} to {INTEGERS[-1]}")
    parts: Iterable[JsonValue] = ()
    if isinstance(value, dict):
        parts = value.values()
    elif isinstance(value, list):
        parts = value
    for part in parts:
        _writable(part)
    return value


FreeValue: TypeAlias = Annotated[JsonValue, AfterValidator(_writable)]
"""Any value that a file of settings can hold."""


class Settings(BaseModel):
    """Base of all settings that a user can write."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        json_schema_extra=arrange_form,
        defer_build=True,  # a command uses a few of the hundred settings classes
    )

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Refuse integers that Prefect cannot write, in any field of any settings."""
        schema: CoreSchema = bounded(handler(source))
        return schema


def content_hash(*inputs: BaseModel | JsonValue) -> str:
    """Return a short hash of the inputs that decide an output. It names the output's folder and job."""
    plain = [item.model_dump(mode="json") if isinstance(item, BaseModel) else item for item in inputs]
    return sha256(json.dumps(plain, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:10]


def slug(text: str, limit: int = 40) -> str:
    """Return `text` in lower-case letters, digits and single dashes: fit for paths, job names and artifact keys."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:limit].strip("-")


def _whole_number(value: object) -> object:
    """Accept "20e9" for a count: YAML 1.1 reads the bare word as a string."""
    if isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return value


Count = Annotated[int, BeforeValidator(_whole_number)]
# If None is allowed too, pydantic writes a bound on the whole field as `gt`, which is not a keyword of JSON schema.
PositiveCount = Annotated[int, Field(gt=0), BeforeValidator(_whole_number)]


def _share_or_steps(value: object) -> object:
    """Return a share of a run, which is below 1, as it is, and whole steps as an integer, which a run id needs."""
    number = _whole_number(value)
    if not isinstance(number, float):
        return number
    if number.is_integer():
        return int(number)
    if number >= 1:
        raise ValueError(f"{number} is neither a share of the run, which is below 1, nor whole steps")
    return number


_NUMBER = WithJsonSchema({"type": "number", "minimum": 0})  # else a form offers a choice of two kinds
Steps = Annotated[int | float, BeforeValidator(_share_or_steps), Field(ge=0), _NUMBER]


def _duration(value: object) -> object:
    """Accept 8h, 90m, 30s, 2d and 8:00 (hours), besides pydantic's own forms: seconds and ISO 8601's "PT8H"."""
    if not isinstance(value, str):
        return value
    clock = re.fullmatch(r"\s*(\d+):(\d\d)(?::(\d\d))?\s*", value)
    if clock is not None:
        return timedelta(hours=int(clock[1]), minutes=int(clock[2]), seconds=int(clock[3] or 0))
    count = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([smhd]?)\s*", value)
    if count is None:
        return value
    return float(count[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[count[2]]


# A form takes a string, as pydantic's schema says. A config may have a number of seconds too.
Duration = Annotated[timedelta, Field(gt=timedelta()), BeforeValidator(_duration)]


def _seconds(value: object) -> object:
    duration = _duration(value)
    if isinstance(duration, timedelta):
        return duration.total_seconds()
    return duration


Seconds = Annotated[float, BeforeValidator(_seconds)]
"""A number of seconds, or a text as 90s, 5m and 2h."""
WholeSeconds = Annotated[int, BeforeValidator(_seconds)]


def _written_out(path: str) -> str:
    variable = re.search(r"\$(\w+|\{\w+\})", path)
    if variable is not None:
        raise ValueError(f"{path!r} has {variable[0]}, which no shell has replaced; write it out, or begin with ~")
    return path


PathOrUri = Annotated[str, AfterValidator(_written_out)]


def discriminator(name: str) -> Any:
    """Return the field that names a union's branch. It is required, so `{}` fits no branch; Prefect's form fills it."""
    return Field(json_schema_extra={"default": name})


class _Corpus(Settings):
    kind: str
    is_tokenized: ClassVar[bool] = False
    """True for token ids instead of text."""

    @property
    def label(self) -> str:
        """The name of its datasets."""
        return self.kind


class StdlibCorpus(_Corpus, title="Python standard library"):
    """The source files of the running Python's standard library: real text that every machine has, no download."""

    kind: Literal["stdlib"] = discriminator("stdlib")
    max_bytes: PositiveCount | None = None
    """Stop after the document that reaches this many bytes of text. Empty takes all of it (tens of MB)."""


class FileCorpus(_Corpus, title="Files"):
    """Files of text, JSON lines or parquet, plain or compressed, on this machine or in a bucket."""

    kind: Literal["files"] = discriminator("files")
    paths: tuple[PathOrUri, ...] = Field(min_length=1)
    """Files, folders or patterns: `data/*.parquet`, `gs://bucket/texts/**/*.jsonl.zst`. Their order does not matter."""
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """`auto` decides by the file name: .parquet, .jsonl, .ndjson or .json (an object a line). All others are text."""
    column: str = "text"
    """Field of a JSON line or column of a parquet file that holds the document."""
    separator: str | None = Field(None, min_length=1)
    """The separator of two documents in text files. Empty takes each file as one document."""
    max_bytes: PositiveCount | None = None
    """Stop after the document that reaches this many bytes of text. Empty takes everything."""

    @property
    def label(self) -> str:
        # The last part that is not a pattern: a folder and a pattern of its files are one dataset.
        first = re.sub(r"/?[^/]*[*?\[].*", "", self.paths[0]).rstrip("/").rsplit("/", 1)[-1]
        return slug(first.split(".")[0]) or "files"


class HubCorpus(_Corpus, title="Hugging Face dataset"):
    """A dataset repository of the Hugging Face Hub, by name."""

    kind: Literal["hub"] = discriminator("hub")
    name: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    """`owner/name` of the dataset repository."""
    revision: str = "main"
    """Branch, tag or commit. The dataset's content hash depends on the files, not on this name."""
    files: str = "**/*.parquet"
    """Pattern of the files to take. The default takes all parquet files."""
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """`auto` decides by the file name: .parquet, .jsonl, .ndjson or .json (an object a line). All others are text."""
    column: str = "text"
    """Column or JSON field that holds the document."""
    max_bytes: PositiveCount | None = None
    """Stop after the document that reaches this many bytes of text. Empty takes everything."""

    @property
    def label(self) -> str:
        return slug(self.name)


class OpenWebTextCorpus(_Corpus, title="OpenWebText"):
    """OpenWebText, 54 GB of web pages. With the GPT-2 tokenizer its known totals are required."""

    kind: Literal["openwebtext"] = discriminator("openwebtext")
    max_bytes: ClassVar[int | None] = None  # its totals are those of all of it
    revision: str = "main"
    """Branch, tag or commit of Skylion007/openwebtext."""


class TokensCorpus(_Corpus, title="Token ids"):
    """Files of token ids, as nanoGPT makes them: train.bin and val.bin. They are read in place."""

    kind: Literal["tokens"] = discriminator("tokens")
    is_tokenized: ClassVar[bool] = True
    max_bytes: ClassVar[int | None] = None
    path: PathOrUri = Field(min_length=1)
    """The folder of the files, on this machine or in a bucket."""
    train: Annotated[str, AfterValidator(posixpath.normpath)] = Field("train*.bin", min_length=1)
    """Pattern of the training split's files in that folder. Several are read as one, in the order of their numbers:
    train_2.bin before train_10.bin."""
    validation: Annotated[str, AfterValidator(posixpath.normpath)] = Field("val*.bin", min_length=1)
    """Pattern of the validation split's files."""
    dtype: Literal["uint16", "uint32"] | None = None
    """The type of an id, little-endian. Empty is uint16 for a tokenizer of up to 65,536 ids, and uint32 for others."""

    @property
    def label(self) -> str:
        return slug(self.path.rstrip("/").rsplit("/", 1)[-1]) or self.kind


# Prefect's form opens the first branch that has most of the names given: one whose names another has too comes first.
Corpus = Annotated[
    StdlibCorpus | FileCorpus | OpenWebTextCorpus | HubCorpus | TokensCorpus, Field(discriminator="kind")
]


class TrainedTokenizer(Settings, title="Train on the corpus"):
    """A byte-level BPE tokenizer trained on the corpus itself."""

    kind: Literal["train"] = discriminator("train")
    vocab_size: Count = Field(4096, ge=257)
    """Number of token ids, the end-of-text token included. 256 are the bytes themselves."""
    sample_bytes: Count = Field(8_000_000, gt=0)
    """The bytes from the start of the corpus on which the tokenizer is trained."""


class TokenizerFile(Settings, title="tokenizer.json"):
    """A `tokenizer.json` on this machine or in a bucket."""

    kind: Literal["file"] = discriminator("file")
    path: PathOrUri
    """The path of the file. A `tokenizer_config.json` next to it can name its end-of-text token."""
    end_of_text: str | None = None
    """The token that closes a document. Empty takes the one that tokenizer_config.json names, or `<|endoftext|>`."""


class LitgptTokenizer(Settings, title="LitGPT checkpoint"):
    """The tokenizer of a LitGPT checkpoint directory."""

    kind: Literal["litgpt"] = discriminator("litgpt")
    path: PathOrUri
    """The checkpoint directory, as `litgpt download` leaves it."""


class HubTokenizer(Settings, title="Hugging Face tokenizer"):
    """A tokenizer of the Hugging Face Hub, by name."""

    kind: Literal["hub"] = discriminator("hub")
    name: str = Field("openai-community/gpt2", pattern=r"^[\w.-]+(/[\w.-]+)?$")
    """`owner/name` of the model repository."""
    revision: str = "main"
    """Branch, tag or commit."""


Tokenizer = Annotated[TrainedTokenizer | LitgptTokenizer | TokenizerFile | HubTokenizer, Field(discriminator="kind")]


class Filters(Settings, title="Filters"):
    """Filters of documents. The dataset's manifest counts what each filter dropped."""

    min_characters: PositiveCount | None = None
    """Documents with fewer characters are left out. Without this setting, only documents without text are."""
    max_characters: PositiveCount | None = None
    """Documents with more characters are left out. Empty sets no limit."""
    min_letter_ratio: float | None = Field(None, gt=0, le=1)
    """Least share of letters, of any script, among a document's characters other than white space. Prose has 0.8."""
    drop_duplicates: bool = False
    """Keep only the first of several documents with exactly the same text."""

    @model_validator(mode="after")
    def _leave_something(self) -> Self:
        low, high = self.min_characters, self.max_characters
        if low is not None and high is not None and low > high:
            raise ValueError(f"data.filters.min_characters={low} is above max_characters={high}; are the two swapped?")
        return self


MIXTURE_CYCLE = 1000
"""Every N samples in a row of a mixture have the same number of samples of each source."""


def largest_remainder(weights: Sequence[float]) -> tuple[int, ...]:
    """Return the samples in MIXTURE_CYCLE for each weight. Of equal remainders the first one is rounded up."""
    exact = [MIXTURE_CYCLE * Fraction(weight) / sum(map(Fraction, weights)) for weight in weights]
    shares = [math.floor(share) for share in exact]
    order = sorted(range(len(exact)), key=lambda number: shares[number] - exact[number])
    for number in order[: MIXTURE_CYCLE - sum(shares)]:
        shares[number] += 1
    return tuple(shares)


Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class MixtureSource(Settings, title="Source"):
    """A source of a mixture. It is prepared as a dataset of its own, once for all mixtures."""

    corpus: Corpus
    """The source of the text."""
    weight: Weight
    """The source's share of the samples is this divided by the sum of all weights, rounded to thousandths."""
    name: str | None = Field(None, pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")
    """Its name in metrics and reports. Empty is the name of its dataset."""
    filters: Filters | None = None
    """Filters of its documents. Empty is `data.filters`."""
    validation_fraction: float | None = Field(None, gt=0, lt=1)
    """Share of its documents kept for validation. Empty is `data.validation_fraction`."""

    @property
    def label(self) -> str:
        return self.name or self.corpus.label


class MixtureStage(Settings, title="Stage"):
    """Other weights from some point of the run on, for example to anneal on the best text at its end."""

    after: float = Field(gt=0, lt=1)
    """The share of the run after which these weights hold, between 0 and 1."""
    weights: tuple[Weight, ...]
    """A weight for each source of `data.mixture`, in the same order. 0 leaves a source out."""


MAX_DOCUMENT_BYTES = 1 << 30


_STDLIB = StdlibCorpus(kind="stdlib", max_bytes=None)


class DataConfig(Settings, title="Data"):
    """The dataset: its text, its tokenizer, and its split."""

    corpus: Annotated[Corpus, BeforeValidator(lambda value: _STDLIB if value is None else value)] = _STDLIB
    """The source of the text. null means the default, so an override can remove the corpus of a config."""
    tokenizer: Tokenizer = TrainedTokenizer(kind="train", vocab_size=4096, sample_bytes=8_000_000)
    """The tokenizer that turns the text into tokens."""
    filters: Filters = Filters()
    """The documents that are left out."""
    on_bad_document: Literal["fail", "skip"] = "fail"
    """The response to a document that is null, too long, not UTF-8 or not JSON. `fail` stops there. `skip` leaves it
    out and records its place in the manifest."""
    max_document_bytes: PositiveCount = MAX_DOCUMENT_BYTES
    """A document of more bytes is too long. A book has 1 MB. Without a limit, one small compressed file could take all
    memory."""
    validation_fraction: float = Field(0.0005, gt=0, lt=1)
    """Share of the documents kept for validation. The default is OpenWebText's customary split."""
    split_seed: int = Field(2357, ge=0)
    """Seed of the permutation that picks the validation documents."""
    max_file_bytes: PositiveCount = 32_000_000_000
    """The most bytes of a token file. A larger split becomes several: train-00000.bin and so on. A document may begin
    in one file and end in the next. With the default, OpenWebText's 18 GB are one file."""

    mixture: tuple[MixtureSource, ...] = Field((), max_length=32, exclude_if=lambda sources: not sources)
    """Several sources instead of `corpus`, each with a weight. Empty trains on `corpus`."""
    stages: tuple[MixtureStage, ...] = Field((), exclude_if=lambda stages: not stages)
    """Other weights of the mixture for later parts of the run. Empty keeps the first weights."""

    @property
    def label(self) -> str:
        """The name of the dataset."""
        return slug("-".join(source.label for source in self.mixture)) or self.corpus.label

    @property
    def parts(self) -> tuple[DataConfig, ...]:
        """Return the settings of each source of a mixture, as those of a dataset without a mixture."""
        common = dict(self) | {"mixture": (), "stages": ()}
        parts = []
        for source in self.mixture:
            changes = {name: value for name, value in source if name in common and value is not None}
            parts.append(DataConfig(**common | changes))
        return tuple(parts)

    @property
    def schedule(self) -> tuple[tuple[float, tuple[int, ...]], ...]:
        """Return the share of the run at which each stage of a mixture begins, and its samples of each source."""
        first = (0.0, largest_remainder([source.weight for source in self.mixture]))
        return (first, *((stage.after, largest_remainder(stage.weights)) for stage in self.stages))

    @model_validator(mode="after")
    def _tokenizer_exists(self) -> Self:
        if not isinstance(self.tokenizer, TrainedTokenizer):
            return self
        fix = "set one, such as {kind: hub, name: openai-community/gpt2} or {kind: file, path: …}"
        if self.corpus.is_tokenized:
            raise ValueError(f"data.tokenizer: token ids need the tokenizer that made them; {fix}")
        if self.mixture:
            raise ValueError(f"data.tokenizer: a mixture cannot train its tokenizer; {fix}")
        return self

    @model_validator(mode="after")
    def _filters_have_text(self) -> Self:
        if self.corpus.is_tokenized and self.filters != Filters():
            raise ValueError("data.filters drop documents of text, but data.corpus.kind=tokens has none; remove it")
        return self

    @model_validator(mode="after")
    def _corpus_or_mixture(self) -> Self:
        if self.mixture and self.corpus != type(self).model_fields["corpus"].default:
            problem = "data.corpus and data.mixture are both given"
            raise ValueError(f"{problem}; make the corpus a source of the mixture, and set data.corpus=null")
        return self

    @model_validator(mode="after")
    def _stages_are_sorted(self) -> Self:
        starts = [stage.after for stage in self.stages]
        if starts and not self.mixture:
            raise ValueError("data.stages need data.mixture, but that is empty; set it, or remove the stages")
        if starts != sorted(set(starts)):
            raise ValueError(f"data.stages begin after {starts} of the run; sort them, and let no two be equal")
        return self

    @model_validator(mode="after")
    def _sources_have_names(self) -> Self:
        names = [source.label for source in self.mixture]
        if len(names) > len(set(names)):
            raise ValueError(f"data.mixture has two sources with one name ({', '.join(names)}); give each a `name`")
        return self

    @model_validator(mode="after")
    def _weights_fit_the_sources(self) -> Self:
        if not self.mixture:
            return self
        names = [source.label for source in self.mixture]
        first = tuple(source.weight for source in self.mixture)
        for weights in (first, *(stage.weights for stage in self.stages)):
            if len(weights) != len(names) or not any(weights):
                fix = f"give one for each of {', '.join(names)}, at least one of them above 0"
                raise ValueError(f"data.mixture has weights {weights}; {fix}")
            for name, weight, count in zip(names, weights, largest_remainder(weights), strict=True):
                if weight and not count:
                    problem = f"{name} has less than 1 of {MIXTURE_CYCLE} samples"
                    raise ValueError(f"data.mixture: {problem}; raise its weight")
        return self

    @model_validator(mode="after")
    def _sources_are_datasets(self) -> Self:
        _ = self.parts  # making each one checks it
        return self


class ModelConfig(Settings, title="Model"):
    """Any LitGPT model by name, or one made of LitGPT's own config fields, or a named one with fields changed."""

    name: str | None = "pythia-14m"
    """A model of LitGPT's catalogue (pythia-160m, Llama-3.2-1B, …), transformer-100b or -175b. Empty uses `config`."""
    config: dict[str, FreeValue] = Field({}, json_schema_extra={"default": {}})
    """Fields of LitGPT's Config, as {"n_layer": 4, "n_embd": 256}. Without a name the vocabulary is the tokenizer's."""
    sequence_length: Count = Field(512, gt=0)
    """Tokens per training sample, at most the model's block_size."""
    init_from: PathOrUri | None = Field(None, exclude_if=lambda weights: weights is None)
    """Weights to start from: a run by its name, a checkpoint's folder, a LitGPT or Hugging Face folder, or the Hub's
    `owner/name`. Empty starts from random ones."""
    load_optimizer_state: bool = Field(False, exclude_if=lambda wanted: not wanted)
    """Also load the optimizer's state from a run or its checkpoint, and continue that training: a dataset with the same
    `train.seed` continues at the sample at which the weights stood."""

    @model_validator(mode="after")
    def _exists(self) -> Self:
        if self.load_optimizer_state and self.init_from is None:
            raise ValueError("model.load_optimizer_state=true needs weights to start from; set model.init_from")
        fields = catalogue.settings(self.name, self.config)
        block_size = fields.get("block_size", self.sequence_length)
        if self.sequence_length > block_size:
            raise ValueError(
                f"model.sequence_length={self.sequence_length} is longer than the block_size of "
                f"{self.name or 'this config'}, {block_size}; lower it, or set model.config.block_size"
            )
        return self


UnitInterval = Annotated[float, Field(ge=0, lt=1)]


def _is_a_name(secret: str | None) -> str | None:
    if secret is not None and not re.fullmatch(r"[A-Z_][A-Z0-9_]{0,63}", secret):
        raise ValueError(  # without what was given: it may be the key
            "train.wandb.secret is not the name of a variable in capitals; put the key into an environment variable, "
            "and give its name here, such as WANDB_API_KEY"
        )
    return secret


class WandbConfig(Settings, title="Weights & Biases", hide_input_in_errors=True):
    """The Weights & Biases project for the training. `secret` is the name of a variable, never the key itself."""

    project: str = Field(min_length=1)
    """The name of the project."""
    entity: str | None = None
    """User or team. Empty is the key's own."""
    secret: Annotated[str | None, AfterValidator(_is_a_name)] = "WANDB_API_KEY"
    """Name of the environment variable that holds the key where the run is submitted. Empty keeps records offline."""


class ProfilerConfig(Settings, title="Profiler"):
    """The steps that torch's profiler records, into the run's `profile/`. Recorded steps are slower."""

    steps: Annotated[str, BeforeValidator(lambda value: str(value) if isinstance(value, int) else value)] = Field(
        "20-25", pattern=r"^[1-9][0-9]{0,8}(-[1-9][0-9]{0,8})?$"
    )
    """The first and the last step, numbered as in the metrics: 20-25."""
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = Field((0,), min_length=1)
    """The ranks that record. Each writes its own trace."""

    @property
    def numbers(self) -> range:
        first, _, last = self.steps.partition("-")
        return range(int(first), int(last or first) + 1)

    @model_validator(mode="after")
    def _is_short(self) -> Self:
        if not 1 <= len(self.numbers) <= 100:
            raise ValueError(f"train.profiler.steps={self.steps} must be 1 to 100 steps, first-last, such as 20-25")
        return self


class RestartRule(Settings, title="New attempts"):
    """The new attempts that one class of failures may have. A number sets only `attempts`."""

    attempts: Count | None = Field(None, ge=0)
    """The number of new attempts. Empty is `train.max_restarts`."""
    wait: Seconds = Field(5.0, ge=0, le=86_400)
    """Seconds before the next attempt, doubled after each attempt in a row that committed no new checkpoint."""
    reset_on_progress: bool = False
    """True if a new checkpoint resets the count. An attempt that committed one is not counted."""


class RestartSettings(Settings, title="Restarts"):
    """The new attempts after a failed one. Each class has its own count. A user error always stops the run."""

    node_fault: RestartRule = RestartRule(reset_on_progress=True)
    """A machine, or a process on it, died."""
    network_fault: RestartRule = RestartRule(wait=15, reset_on_progress=True)
    """Nodes lost each other. A switch that restarts needs some time."""
    preempted: RestartRule = RestartRule(reset_on_progress=True)
    """The platform took the machine away."""
    hang: RestartRule = RestartRule()
    """A rank sent no heartbeat."""
    out_of_memory: RestartRule = RestartRule(attempts=0)
    """A GPU or a machine had too little memory. The next attempt would have as little."""
    disk_full: RestartRule = RestartRule(attempts=0)
    """A disk is full."""
    data_error: RestartRule = RestartRule(attempts=0)
    """A dataset or checkpoint does not match its checksums."""
    unknown: RestartRule = RestartRule(attempts=0)
    """An unknown exit code: a crash in native code, or a bug."""
    longest_wait: float = Field(600.0, ge=0, le=86_400)
    """The longest wait before an attempt, in seconds."""
    exclude_machine_after: Count = Field(2, ge=0)
    """The number of attempts that must blame a machine before the next ones avoid it, where the platform can. 0 avoids
    none."""

    @model_validator(mode="before")
    @classmethod
    def _over_defaults(cls, value: Any) -> Any:
        """Read a number as `attempts`, and fill what a rule omits with the defaults of its class of failure."""
        if not isinstance(value, Mapping):
            return value
        rules = dict(value)
        for name, field in cls.model_fields.items():
            rule = rules.get(name, field.default)
            if not isinstance(field.default, RestartRule) or isinstance(rule, RestartRule):
                continue
            if not isinstance(rule, Mapping):
                rule = {"attempts": rule}
            rules[name] = {**field.default.model_dump(), **rule}
        return rules


class RunIdRole(Enum):
    """The part that a field of `train` has in the id of a run. Every field is marked with one of the two.

    A run whose settings have another id is another run. A SHAPES_MODEL field enters the id only if its value differs
    from its default, so a new field leaves the ids of all runs as they are. A changed default keeps the ids, but it
    changes what they mean: then raise FORMAT in launcher/runs/run.py.
    """

    SHAPES_MODEL = "decides what the model becomes, beyond rounding"
    TUNES_RUN = "changes speed, memory, records or retries: a run may change it and continue"


T = TypeVar("T")
ShapesModel: TypeAlias = Annotated[T, RunIdRole.SHAPES_MODEL]
TunesRun: TypeAlias = Annotated[T, RunIdRole.TUNES_RUN]


class BatchStage(Settings, title="Batch"):
    """The batch from some step of the run on, for a batch that grows during the run."""

    batch: PositiveCount
    """Sequences per optimizer step, summed over every process of the job."""
    after: Steps = 0
    """Steps after which this batch begins. A number below 1 is a share of the run. The first stage has 0."""


def _form_of_batch(value: object) -> str:
    return "stages" if isinstance(value, list | tuple) else "number"


# With a discriminator, an error is of the form that was written, and not of both.
GlobalBatch: TypeAlias = Annotated[
    Annotated[PositiveCount, Tag("number")] | Annotated[tuple[BatchStage, ...], Field(min_length=2), Tag("stages")],
    Discriminator(_form_of_batch),
]

# The choices are the registry's, which a type checker does not see.
if TYPE_CHECKING:
    DecayShape: TypeAlias = str
    OptimizerName: TypeAlias = str
    ScheduleName: TypeAlias = str
else:
    DecayShape = Literal[tuple(DECAY_SHAPES)]
    OptimizerName = Literal[tuple(OPTIMIZERS)]
    ScheduleName = Literal[tuple(SCHEDULES)]


SamplePrompt = Annotated[str, Field(min_length=1, max_length=1024)]


# The input is hidden because of what is written where a name belongs.
class TrainConfig(Settings, title="Training", hide_input_in_errors=True, allow_inf_nan=False):
    """The settings of a training."""

    global_batch: ShapesModel[GlobalBatch] = 512
    """Sequences per optimizer step, summed over every process of the job. A list of stages lets it grow during the run:
    `[{batch: 128}, {batch: 512, after: 0.1}]`."""
    micro_batch: TunesRun[Count] = Field(8, gt=0)
    """Sequences per forward pass of one process. It accumulates gradients over its share of `global_batch`."""
    max_steps: ShapesModel[PositiveCount | None] = None
    """Optimizer steps to train for. Give this, `max_tokens` or `tokens_per_parameter`. Without them, the run is one
    pass over the data."""
    max_tokens: ShapesModel[PositiveCount | None] = None
    """Tokens to train for, rounded up to whole steps."""
    tokens_per_parameter: ShapesModel[float | None] = Field(None, gt=0)
    """Tokens to train for, for each parameter of the model, embeddings included. About 20 give the lowest loss for the
    arithmetic (https://arxiv.org/abs/2203.15556)."""
    max_time: TunesRun[Duration | None] = None
    """Time to train for over all attempts, such as 8h, 90m, 8:30 (hours and minutes) or PT8H. Then the run saves and
    counts as finished. The learning rate is computed for the full number of steps."""
    optimizer: ShapesModel[OptimizerName] = Field(
        "adamw",
        description="The optimizer: " + ", ".join(f"`{name}` {kind.help}" for name, kind in OPTIMIZERS.items()) + ".",
    )
    learning_rate: ShapesModel[float] = Field(6e-4, gt=0)
    """Highest learning rate, reached after the warm-up."""
    muon_learning_rate: ShapesModel[float | None] = Field(None, gt=0)
    """With optimizer=muon, the highest learning rate of the blocks' matrices. The schedule changes it too. Empty is
    `learning_rate`, because updates are scaled to AdamW's usual size."""
    min_learning_rate: ShapesModel[float | None] = Field(None, ge=0)
    """The learning rate of the last step, if the schedule falls. Empty is a tenth of the highest."""
    schedule: ShapesModel[ScheduleName] = Field(
        "cosine",
        description="The learning rate after the warm-up: "
        + ", ".join(f"with `{name}` it {schedule.help}" for name, schedule in SCHEDULES.items())
        + ".",
    )
    warmup_steps: ShapesModel[Steps] = 100
    """Steps in which the learning rate rises in a straight line. A number below 1 is a share of the run."""
    decay_steps: ShapesModel[Steps] = Field(0.2, gt=0)
    """With schedule=wsd, the last steps, in which the learning rate falls. A number below 1 is a share of the run."""
    decay_shape: ShapesModel[DecayShape] = "linear"
    """With schedule=wsd, the fall in these steps: `linear`, half a `cosine`, or `sqrt`, which falls by the square root
    of the decay's share that is done: fast at first, and then ever slower."""
    weight_decay: ShapesModel[float] = Field(0.1, ge=0)
    """The optimizer's decay of matrices. Biases and norms do not decay."""
    betas: ShapesModel[tuple[UnitInterval, UnitInterval]] = (0.9, 0.95)
    """AdamW's two averaging factors, of gradients and of their squares, each from 0 to below 1."""
    clip_norm: ShapesModel[float | None] = Field(1.0, gt=0)
    """Gradients with a larger norm are scaled down to this one. Empty does not clip."""
    z_loss: ShapesModel[float] = Field(0.0, ge=0)
    """The weight of log(Z)^2 in the loss that is trained, where Z normalises the probabilities of a token. It keeps the
    logits small: 1e-4 is usual. Losses are reported without it. 0 leaves it out."""
    attention: ShapesModel[Literal["causal", "documents"]] = "causal"
    """The earlier tokens that a token sees. With `causal` it sees all of its sample, also of other documents. With
    `documents` it sees those of its own document. The dataset is the same."""
    precision: ShapesModel[Literal["32-true", "16-mixed", "bf16-mixed", "bf16-true", "16-true"]] = "bf16-mixed"
    """Lightning Fabric's precision. `-mixed` computes in 16 bits with weights of 32. `-true` has one type for both.
    GPUs from A100 on multiply 32-bit numbers in TF32, which rounds them to 10 bits of mantissa."""
    strategy: TunesRun[Literal["auto", "ddp", "fsdp", "hybrid"]] = "auto"
    """`ddp` copies weights and optimizer to each process, `fsdp` shards them over all, `hybrid` over those of a node,
    with a copy for each node. `auto` takes the one that fits and sends least over the network. `plan` reports it."""
    reshard_after_forward: TunesRun[bool] = True
    """Free a block's gathered weights until the backward pass (fsdp, hybrid). Off, each step gathers them once instead
    of twice, and every device holds all weights in the meantime."""
    activation_checkpointing: TunesRun[Literal["none", "selective", "full"]] = "none"
    """The activations of each block that the backward pass recomputes: none, all but matrix products and attention
    (a few per cent more time), or everything (about a third more time)."""
    compile: TunesRun[Literal["auto", "none", "blocks", "model"]] = "auto"
    """The part that torch.compile compiles: none, each block on its own (starts sooner), or the whole model. `auto` is
    `blocks` on a GPU of a machine with a C compiler, else `none`."""
    deterministic: TunesRun[bool] = False
    """Use only kernels of a GPU that give the same bits each time, also for attention. They are slower. A run on the
    same machines then repeats bit for bit. On a CPU every kernel does."""
    weight_average: ShapesModel[UnitInterval | None] = Field(None, gt=0)
    """Also keep a moving average of the weights, of which each step keeps this share, such as 0.999. `train-litgpt
    collect --average` exports it as a model of its own. Empty keeps none."""
    float8: ShapesModel[bool] = False
    """Multiply in float8 inside the blocks, on GPUs that can (H100, L4 and newer). This needs `compile` and the extra
    `float8`, which installs torchao."""
    seed: ShapesModel[int] = Field(1337, ge=0)
    """Seed of the initial weights and of the order of the samples."""
    evaluate_every: TunesRun[Count] = Field(500, gt=0)
    """Steps between two evaluations. The last step is always evaluated."""
    evaluation_samples: TunesRun[Count] = Field(256, gt=0)
    """The number of validation samples of each source in an evaluation, drawn from its whole validation split. A source
    with fewer samples gives each of them once."""
    sample_every: TunesRun[PositiveCount | None] = None
    """Steps between two times at which the model continues `sample_prompts`, with the likeliest token each time. The
    last step does too. Each token of `sample_tokens` costs a forward pass of a micro-batch. Empty writes no texts."""
    sample_prompts: TunesRun[tuple[SamplePrompt, ...]] = Field(("Once upon a time",), min_length=1, max_length=8)
    """The beginnings that the model continues, 1 to 8. Each has fewer bytes than `model.sequence_length`."""
    sample_tokens: TunesRun[Count] = Field(64, gt=0, le=512)
    """The most tokens that continue a prompt. A text also ends with its document, or where a sample would be full."""
    checkpoint_every: TunesRun[Count] = Field(500, gt=0)
    """Steps between two checkpoints. The last step is always saved."""
    keep_last: TunesRun[Count] = Field(2, gt=0)
    """The number of newest checkpoints to keep. At least one that verifies is always kept."""
    keep_best: TunesRun[Count] = Field(1, ge=0)
    """The number of checkpoints with the lowest validation loss to keep, besides the `keep_last` newest. A resume needs
    the newest, so it is always kept."""
    keep_every: TunesRun[PositiveCount | None] = None
    """Also keep the checkpoint of every N-th step forever. Empty keeps none."""
    log_every: TunesRun[Count] = Field(1, gt=0)
    """Steps between two metrics lines."""
    on_nonfinite: TunesRun[Literal["stop", "skip"]] = "stop"
    """The response to a loss or gradient that is not finite. `stop` ends the run and names the samples. `skip` omits
    the update of that step and stops at the tenth in a row."""
    hang_timeout: TunesRun[Seconds] = Field(900, gt=0)
    """Time without a heartbeat (90s, 5m) after which a rank counts as hung. Its stacks are kept, the attempt ends."""
    tensorboard: TunesRun[bool] = False
    """Also write TensorBoard's event files into the run's folder. metrics.csv is always written."""
    wandb: TunesRun[WandbConfig | None] = None
    """Also record the run in Weights & Biases. Empty does not."""
    profiler: TunesRun[ProfilerConfig | None] = None
    """Also record some steps with torch's profiler. Empty records none."""
    max_restarts: TunesRun[Count] = Field(3, ge=0)
    """New attempts after each of node faults, network faults, hangs and preemptions. `restart_policy` overrides it."""
    restart_policy: TunesRun[RestartSettings] = RestartSettings()
    """The rules of new attempts, by class of failure."""

    @model_validator(mode="after")
    def _length_is_given_once(self) -> Self:
        lengths = [
            f"train.{name}={getattr(self, name)}"
            for name in ("max_steps", "max_tokens", "tokens_per_parameter")
            if getattr(self, name) is not None
        ]
        if len(lengths) > 1:
            raise ValueError(f"{' and '.join(lengths)} are both given; keep one")
        return self

    @model_validator(mode="after")
    def _batch_holds_a_micro_batch(self) -> Self:
        smallest = self.batch_stages[0].batch
        if smallest < self.micro_batch:
            problem = f"train.global_batch={smallest} is below train.micro_batch={self.micro_batch}"
            raise ValueError(f"{problem}; are the two swapped?")
        return self

    @model_validator(mode="after")
    def _batch_grows(self) -> Self:
        starts, batches = [stage.after for stage in self.batch_stages], self.batch_sizes
        if any(later <= earlier for earlier, later in pairwise(batches)):
            raise ValueError(f"train.global_batch has the batches {batches}; let each be larger than the one before")
        if starts[0] != 0 or any(later <= earlier for earlier, later in pairwise(starts)):
            fix = "leave out `after` of the first stage, and let the others rise"
            raise ValueError(f"the stages of train.global_batch begin after {starts}; {fix}")
        if len({start < 1 for start in starts[1:]}) > 1:
            raise ValueError(f"the stages of train.global_batch begin after {starts}; give all in steps or as shares")
        return self

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        high, low, steps = self.learning_rate, self.min_learning_rate, self.max_steps
        if low is not None and low > high:
            raise ValueError(f"train.min_learning_rate={low} is above train.learning_rate={high}; are they swapped?")
        if steps is not None:
            for problem, fix in self.step_problems(steps, f"train.max_steps={steps}").values():
                raise ValueError(f"{problem}; {fix}")
        return self

    @model_validator(mode="after")
    def _settings_are_read(self) -> Self:
        registries: dict[str, Mapping[str, Schedule | OptimizerKind]] = {"schedule": SCHEDULES, "optimizer": OPTIMIZERS}
        for field, kinds in registries.items():
            read_by_some = frozenset[str]().union(*(kind.settings for kind in kinds.values()))
            choice = getattr(self, field)
            for name in sorted(read_by_some - kinds[choice].settings):
                value = getattr(self, name)
                if value != type(self).model_fields[name].default:
                    readers = " or ".join(key for key, kind in kinds.items() if name in kind.settings)
                    unread = f"train.{field}={choice} does not use train.{name}={value}"
                    raise ValueError(f"{unread}; leave that out, or set train.{field}={readers}")
        return self

    @model_validator(mode="after")
    def _sharding_fits(self) -> Self:
        if self.strategy not in {"fsdp", "hybrid"}:
            return self
        sharding = f"train.strategy={self.strategy}"
        if self.precision == "16-mixed":
            raise ValueError(f"train.precision=16-mixed scales losses, but {sharding} cannot; take bf16-mixed")
        if self.compile == "model":
            raise ValueError(f"train.compile=model does not work with {sharding}; take train.compile=blocks")
        return self

    @model_validator(mode="after")
    def _float8_fits(self) -> Self:
        if self.float8 and self.compile == "none":
            raise ValueError("train.float8=true is slower than bfloat16 without train.compile=blocks; set that too")
        if self.float8 and self.precision not in {"bf16-mixed", "bf16-true"}:
            raise ValueError(f"train.float8=true needs bf16-mixed or bf16-true, but train.precision={self.precision}")
        return self

    @model_validator(mode="after")
    def _prompts_are_read(self) -> Self:
        if self.sample_every is None:
            for name in ("sample_prompts", "sample_tokens"):
                if getattr(self, name) != type(self).model_fields[name].default:
                    raise ValueError(f"train.{name} is not used without train.sample_every; set that, or leave it out")
        return self

    @model_validator(mode="after")
    def _profiled_steps_exist(self) -> Self:
        steps, profiler = self.max_steps, self.profiler
        if steps is not None and profiler is not None and profiler.numbers.start > steps:
            raise ValueError(f"train.profiler.steps={profiler.steps} begin after train.max_steps={steps}; lower them")
        return self

    def attention_end(self, end_of_text: int) -> int | None:
        """Return the id that ends what a token sees, of a dataset with this `end_of_text`; None if no id does."""
        return end_of_text if self.attention == "documents" else None

    def steps(self, *, tokens: int, sequence_length: int, parameters: int) -> int:
        """Return the optimizer steps of a model of `parameters` for a training split of `tokens` tokens."""
        if self.max_steps is not None:
            return self.max_steps

        def samples(steps: int) -> int:
            return self.samples_after(steps, steps=steps)

        most = self.max_tokens
        if self.tokens_per_parameter is not None:
            most = math.ceil(self.tokens_per_parameter * parameters)
        # Each step has at least one sample, and a longer run has more samples, because the batch never falls.
        if most is not None:
            needed = -(-most // sequence_length)
            return bisect_left(range(needed), needed, key=samples)
        available = tokens // sequence_length
        return max(1, bisect_right(range(available + 1), available, key=samples) - 1)

    @property
    def batch_stages(self) -> tuple[BatchStage, ...]:
        """Return the stages of the batch: a single one if the batch is a number."""
        if isinstance(self.global_batch, tuple):
            return self.global_batch
        return (BatchStage(batch=self.global_batch),)

    @property
    def batch_sizes(self) -> list[int]:
        """Return the sequences per optimizer step of each stage. The last one is the largest."""
        return [stage.batch for stage in self.batch_stages]

    def samples_after(self, done: int, *, steps: int) -> int:
        """Return the samples that the first `done` steps of a run of `steps` see. Nothing else adds up batches."""
        samples, end = 0, done
        for stage in reversed(self.batch_stages):
            start = min(end, in_steps(stage.after, steps))
            samples, end = samples + (end - start) * stage.batch, start
        return samples

    def step_problems(self, steps: int, steps_text: str) -> dict[str, tuple[str, str]]:
        """Return the settings that do not fit the run's steps, each with an error and its fix; `steps_text` names the
        steps."""
        problems = {}
        schedule = schedule_problem(self, steps, steps_text)
        if schedule is not None:
            problems["train.warmup_steps"] = schedule
        starts = [in_steps(stage.after, steps) for stage in self.batch_stages]
        if any(earlier >= later for earlier, later in pairwise([*starts, steps])):
            what = f"the stages of train.global_batch begin after {starts} steps, so one has no step of {steps_text}"
            problems["train.global_batch"] = what, "lower `after`, or give a number instead of stages"
        return problems

    def shard_degree(self, nodes: int, processes: int) -> int:
        """Return the number of ranks that share one copy of the model; `processes` are those of each node."""
        return {"fsdp": nodes * processes, "hybrid": processes}.get(self.strategy, 1)

    def gradient_accumulation_steps(self, world_size: int) -> int:
        """Return the forward passes of each process per optimizer step, with the largest batch."""
        samples = world_size * self.micro_batch
        for batch in self.batch_sizes:
            if batch % samples:
                raise ValueError(
                    f"train.global_batch={batch} does not split over {world_size} processes in micro-batches "
                    f"of train.micro_batch={self.micro_batch}; it must be a multiple of {samples}, "
                    f"for example {math.ceil(batch / samples) * samples}"
                )
        return self.batch_sizes[-1] // samples

    def shaping_settings(self) -> dict[str, JsonValue]:
        """Return the settings that decide what the model becomes, defaults included: for records of a run."""
        return self.model_dump(mode="json", include=_fields_marked(type(self), RunIdRole.SHAPES_MODEL))

    def run_id_settings(self) -> dict[str, JsonValue]:
        """Return the part of a run id that training has: the shaping settings that differ from their defaults."""
        fields = type(self).model_fields
        changed = {name for name, field in fields.items() if getattr(self, name) != field.default}
        return self.model_dump(mode="json", include=changed & _fields_marked(type(self), RunIdRole.SHAPES_MODEL))


def _fields_marked(settings: type[BaseModel], role: RunIdRole) -> set[str]:
    return {name for name, field in settings.model_fields.items() if role in field.metadata}


class EvaluationConfig(Settings, title="Evaluation"):
    """The tasks of lm-evaluation-harness that the collected model is scored by. They need the extra `evaluate`."""

    tasks: tuple[str, ...] = Field(min_length=1)
    """Names of tasks, groups or tags: `lm-eval ls tasks` lists them."""
    every_checkpoints: PositiveCount | None = None
    """Also score every N-th checkpoint while the training continues. Empty scores only the collected model."""
    task_folder: PathOrUri | None = None
    """A folder of this machine with your own task files and their data, whose paths are relative to it. A task file may
    run Python, so use only files that you trust."""
    limit: PositiveCount | None = None
    """Samples of each task, from its start. Empty takes all."""
    few_shot: Count | None = Field(None, ge=0)
    """Solved examples before each question. Empty takes the task's own number."""
    batch_size: Count = Field(8, gt=0)
    """Samples in one forward pass."""

    @property
    def folder(self) -> Path | None:
        if self.task_folder is None:
            return None
        return Path(self.task_folder).expanduser().resolve()


class SeenSamples(NamedTuple):
    """An order of samples, and how many of them weights have seen, from the first on."""

    dataset: str
    """The content hash of the dataset. With the seed it decides the order."""
    seed: int
    samples: int | None = None
    """Epoch after epoch. Checkpoints of earlier versions do not have this number, nor the next one."""
    length: int | None = None
    """Tokens of a sample."""


class InitialWeights(Settings):
    """The weights that a training starts from, with their checksums when they were found."""

    kind: Literal["checkpoint", "litgpt", "huggingface"]
    name: str
    """The address where they were found, or `owner/name@commit` of the Hub."""
    address: str
    """The folder where they are read."""
    files: dict[str, tuple[int, str]]
    """Name of each file to its bytes and their crc32c. For files of the Hub, until they are fetched, the checksum is
    the one that the Hub lists."""
    listed_as: str | None = Field(None, exclude_if=lambda listed_as: listed_as is None)
    """The content hash of weights that were fetched from the Hub, made of the checksums that it lists."""
    optimizer: bool = False
    """True if the optimizer's state is loaded too."""
    trained_with: str | None = Field(None, exclude_if=lambda optimizer: optimizer is None)
    """The `train.optimizer` of a checkpoint's run."""
    trained_on: tuple[SeenSamples, ...] = ()
    """The samples that a checkpoint's weights have seen."""

    def first_sample(self, dataset: str, *, seed: int, length: int) -> int:
        """Return the place in an order of samples at which a training begins: where the weights stood if it continues
        them with their optimizer, else 0."""
        if not self.optimizer:
            return 0
        orders = {(seen.dataset, seen.seed, seen.length): seen.samples for seen in self.trained_on}
        return orders.get((dataset, seed, length)) or 0

    @property
    def content_hash(self) -> str:
        """Their part in a run id. The same weights have the same hash in every bucket and folder, and on the Hub."""
        files: JsonValue = {name: list(file) for name, file in self.files.items()}
        return self.listed_as or content_hash(self.kind, files, self.optimizer)


class TrainingSpec(Settings):
    """A run with everything resolved: the `training` part of its config.json, which every rank reads."""

    run: str
    """Its name: `<name>-<run id>`."""
    dataset: str
    """Address of the finished dataset."""
    dataset_hash: str
    model: ModelConfig
    train: TrainConfig
    steps: int = Field(gt=0)
    """Optimizer steps of the whole run."""
    origin: InitialWeights | None = Field(None, exclude_if=lambda origin: origin is None)
    """The weights that it starts from; None for random ones."""
    world_size: int = Field(gt=0)
    """The number of ranks of the run. A rank that sees another number exits instead of training by itself."""

    def first_sample(self, dataset: str) -> int:
        """Return the place in the order of a dataset's samples at which the run begins."""
        if self.origin is None:
            return 0
        return self.origin.first_sample(dataset, seed=self.train.seed, length=self.model.sequence_length)

    def samples_after(self, done: int) -> int:
        """Return the samples that the first `done` steps of the run see."""
        return self.train.samples_after(done, steps=self.steps)

    def tokens_after(self, done: int) -> int:
        """Return the tokens that the first `done` steps of the run see."""
        return self.samples_after(done) * self.model.sequence_length
