"""The user's settings for the dataset: corpus, tokenizer, filters, curation, and several sources that are mixed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    JsonValue,
    model_validator,
)

from litgpt_demo.data.weighing import mixture_problems
from litgpt_demo.settings import Count, Kind, PositiveCount, Settings, slug


class StdlibCorpus(Settings):
    """The source files of the running Python's standard library: real text that every machine has, no download."""

    model_config = ConfigDict(title="Python standard library")

    kind: Literal["stdlib"] = Kind("stdlib")
    max_bytes: PositiveCount | None = None
    """Stop after the document that reaches this many bytes of text; empty takes all of it (tens of MB)."""

    @property
    def label(self) -> str:
        return "stdlib"


def label_of(paths: Sequence[str]) -> str:
    """Return what a dataset of these files is called."""
    first = paths[0].rstrip("/*").rsplit("/", 1)[-1]
    return slug(first.split(".")[0]) or "files"


class FileCorpus(Settings):
    """Files of text, JSON lines or parquet; plain, .gz or .zst; on this machine or in a bucket."""

    model_config = ConfigDict(title="Files")

    kind: Literal["files"] = Kind("files")
    paths: tuple[str, ...] = Field(min_length=1)
    """Files, folders or patterns: `data/*.parquet`, `gs://bucket/texts/**/*.jsonl.zst`. Their order does not matter."""
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """`auto` goes by the file name: .parquet, .jsonl or .ndjson, anything else is text."""
    column: str = "text"
    """Field of a JSON line or column of a parquet file that holds the document."""
    separator: str | None = Field(None, min_length=1)
    """The separator of two documents in text files. Empty takes each file as one document."""
    max_bytes: PositiveCount | None = None
    """Stop after the document that reaches this many bytes of text; empty takes everything."""

    @property
    def label(self) -> str:
        return label_of(self.paths)


class HubCorpus(Settings):
    """A dataset repository of the Hugging Face Hub, by name."""

    model_config = ConfigDict(title="Hugging Face dataset")

    kind: Literal["hub"] = Kind("hub")
    name: str = Field(pattern=r"^[\w.-]+/[\w.-]+$")
    """`owner/name` of the dataset repository."""
    revision: str = "main"
    """Branch, tag or commit. What counts in the dataset's key is the content of the files it stands for."""
    files: str = "**/*.parquet"
    """Pattern of the files to take."""
    column: str = "text"
    """Column or JSON field that holds the document."""
    max_bytes: PositiveCount | None = None
    """Stop after the document that reaches this many bytes of text; empty takes everything."""

    @property
    def label(self) -> str:
        return slug(self.name)


class OpenWebTextCorpus(Settings):
    """OpenWebText, 54 GB of web pages. With the GPT-2 tokenizer its known totals are required."""

    model_config = ConfigDict(title="OpenWebText")

    kind: Literal["openwebtext"] = Kind("openwebtext")
    revision: str = "main"
    """Branch, tag or commit of Skylion007/openwebtext."""

    max_bytes: ClassVar[None] = None

    @property
    def label(self) -> str:
        return "openwebtext"

    def as_hub(self) -> HubCorpus:
        return HubCorpus(kind="hub", name="Skylion007/openwebtext", revision=self.revision, files="**/*.parquet")


class TokensCorpus(Settings):
    """Tokens that exist already, on this machine or in a bucket: nanoGPT's and LitGPT's train.bin and val.bin, or
    folders of litdata or MosaicML's streaming."""

    model_config = ConfigDict(title="Tokens")

    kind: Literal["tokens"] = Kind("tokens")
    path: str = Field(min_length=1)
    """The folder that holds them. Files that the nodes can read there are never copied."""
    train: str = Field("train*.bin", min_length=1)
    """File or pattern of the training split, below the folder; several files are read as one, in the order of their
    names. Or a folder with an index.json: train/ if there is one."""
    validation: str = Field("val*.bin", min_length=1)
    """The same of the validation split; val/ if that has an index.json."""
    dtype: Literal["auto", "uint16", "uint32"] = "auto"
    """The type of the ids, little-endian. `auto`: uint16 if the tokenizer has at most 65,536 ids, else uint32."""

    max_bytes: ClassVar[None] = None

    @property
    def label(self) -> str:
        return slug(self.path.rstrip("/").rsplit("/", 1)[-1]) or "tokens"


class InstructionCorpus(Settings):
    """Conversations as JSON lines, each with `prompt` and `response`, or `messages` of roles; responses are learned."""

    model_config = ConfigDict(title="Instructions")

    kind: Literal["instructions"] = Kind("instructions")
    paths: tuple[str, ...] = Field(min_length=1)
    """Files, folders or patterns, as those of text files; plain, .gz or .zst. Their order does not matter."""
    max_bytes: PositiveCount | None = None
    """Stop after the conversation that reaches this many bytes; empty takes everything."""

    @property
    def label(self) -> str:
        return label_of(self.paths)


Corpus = Annotated[
    StdlibCorpus | FileCorpus | HubCorpus | OpenWebTextCorpus | TokensCorpus | InstructionCorpus,
    Field(discriminator="kind"),
]


class TrainedTokenizer(Settings):
    """A byte-level BPE tokenizer trained on the corpus itself."""

    model_config = ConfigDict(title="Train on the corpus")

    kind: Literal["train"] = Kind("train")
    vocab_size: Count = Field(4096, ge=257)
    """Number of token ids, the end-of-text token included. 256 are the bytes themselves."""
    sample_bytes: Count = Field(8_000_000, gt=0)
    """The bytes from the start of the corpus on which the tokenizer is trained."""


class TokenizerFile(Settings):
    """A `tokenizer.json` on this machine or in a bucket."""

    model_config = ConfigDict(title="tokenizer.json")

    kind: Literal["file"] = Kind("file")
    path: str
    """The path of the file; a `tokenizer_config.json` next to it names its end-of-text token."""
    end_of_text: str | None = None
    """The token that closes a document, where no tokenizer_config.json names it."""


class LitgptTokenizer(Settings):
    """The tokenizer of a LitGPT checkpoint directory."""

    model_config = ConfigDict(title="LitGPT checkpoint")

    kind: Literal["litgpt"] = Kind("litgpt")
    path: str
    """The checkpoint directory, as `litgpt download` leaves it."""


class HubTokenizer(Settings):
    """A tokenizer of the Hugging Face Hub, by name."""

    model_config = ConfigDict(title="Hugging Face tokenizer")

    kind: Literal["hub"] = Kind("hub")
    name: str = Field("openai-community/gpt2", pattern=r"^[\w.-]+(/[\w.-]+)?$")
    """`owner/name` of the model repository."""
    revision: str = "main"
    """Branch, tag or commit."""


Tokenizer = Annotated[
    TrainedTokenizer | TokenizerFile | LitgptTokenizer | HubTokenizer,
    Field(discriminator="kind"),
]


class Filters(Settings):
    """Filters of documents. The dataset's manifest counts what each filter dropped."""

    model_config = ConfigDict(title="Filters")

    min_characters: PositiveCount | None = None
    """Documents of fewer characters are left out; empty ones always are."""
    max_characters: PositiveCount | None = None
    """Documents of more characters are left out."""
    min_letter_ratio: float | None = Field(None, gt=0, le=1)
    """Least share of letters, of any script, among a document's characters other than white space; prose has 0.8."""
    drop_duplicates: bool = False
    """Keep only the first of documents with the very same text."""

    @model_validator(mode="after")
    def _leave_something(self) -> Self:
        low, high = self.min_characters, self.max_characters
        if low is not None and high is not None and low > high:
            raise ValueError(
                f"data.filters.min_characters={low} is above data.filters.max_characters={high}, "
                "so that no document passes; are the two swapped?"
            )
        return self


class CurationFilter(Settings):
    """A filter of datatrove, which decides by a document's text alone."""

    model_config = ConfigDict(title="datatrove filter")

    name: Literal[
        "C4ParagraphFilter",
        "C4QualityFilter",
        "FineWebQualityFilter",
        "GopherQualityFilter",
        "GopherRepetitionFilter",
        "RegexFilter",
    ]
    """The name of its class. C4QualityFilter also cuts lines out of documents that stay."""
    arguments: dict[str, JsonValue] = Field({}, json_schema_extra={"default": {}})
    """Arguments of the class, {"min_doc_words": 20}; its own defaults stand for the others."""


class Languages(Settings):
    """The languages of the documents that stay, as a fasttext model identifies them."""

    model_config = ConfigDict(title="Languages")

    keep: tuple[str, ...] = Field(min_length=1)
    """The model's names of the languages: `en` for ft176, `eng_Latn` for glotlid."""
    threshold: float = Field(0.65, ge=0, lt=1)
    """A document stays if one of these languages has a higher score."""
    model: str = Field("ft176", min_length=1)
    """`ft176` or `glotlid`, which datatrove downloads once, or the path of a fasttext model on this machine."""


class NearDuplicates(Settings):
    """The MinHash of datatrove: of documents that share most of their word sequences, one stays."""

    model_config = ConfigDict(title="Near-duplicates")

    n_grams: PositiveCount = 5
    """The words in a sequence; shorter documents have none and always stay."""
    num_buckets: PositiveCount = 14
    """Documents are near-duplicates if all hashes of one bucket agree; more buckets find less similar ones."""
    hashes_per_bucket: PositiveCount = 8
    """More hashes find only more similar ones. 14 buckets of 8 find 92 % of the pairs that share 80 % of
    their sequences."""
    seed: int = Field(1, ge=0, lt=2**32)
    """Seed of the hashes."""


class Curation(Settings):
    """Documents are chosen by datatrove, after data.filters; needs `train-litgpt[curation]` where they are read."""

    model_config = ConfigDict(title="Curation")

    language: str = Field("eng", min_length=1)
    """The language whose rules cut the text into words and sentences, as datatrove names it."""
    languages: Languages | None = None
    """The languages of the documents that stay; empty keeps all."""
    filters: tuple[CurationFilter, ...] = ()
    """The filters, in their order."""
    near_duplicates: NearDuplicates | None = None
    """The search for documents that are nearly the same; empty keeps them all. `{}` takes datatrove's own values."""

    @property
    def edits(self) -> bool:
        """Return True if documents that stay may lose lines."""
        return any(chosen.name == "C4QualityFilter" for chosen in self.filters)

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if not (self.filters or self.languages or self.near_duplicates):
            raise ValueError(
                "data.curation has no step; give languages, filters or near_duplicates, or leave data.curation out"
            )
        return self


MAX_DOCUMENT_BYTES = 1 << 30


Weight = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class MixtureSource(Settings):
    """One source of a mixture, which becomes a dataset of its own. `data` says for all of them what it leaves out."""

    model_config = ConfigDict(title="Source")

    name: str | None = Field(None, pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")
    """The name of the source in weights, metrics and reports; empty is the corpus's own."""
    weight: Weight = 1.0
    """Its share of the samples is its weight divided by the sum of all weights."""
    corpus: Corpus
    """The source of the text, or tokens that exist already."""
    filters: Filters | None = None
    """The documents that are left out; empty takes data.filters."""
    curation: Curation | None = None
    """The steps of datatrove; empty takes data.curation."""
    validation_fraction: float | None = Field(None, gt=0, lt=1)
    """Share of its documents kept for validation; empty takes data.validation_fraction."""

    @property
    def label(self) -> str:
        return self.name or self.corpus.label[:32].strip("-")


class MixtureStage(Settings):
    """A part of the training with weights of its own, as for annealing. The last one goes on to the end."""

    model_config = ConfigDict(title="Stage")

    until_step: PositiveCount | None = None
    """The last step of the stage. Give this or until_share, but neither for the last stage."""
    until_share: float | None = Field(None, gt=0, lt=1)
    """The share of the run's tokens that are trained on when the stage ends."""
    weights: dict[str, Weight] = Field({}, json_schema_extra={"default": {}})
    """Weights by the names of the sources, {"web": 1, "code": 3}; who is not named has none. Empty: their own."""


class DataConfig(Settings):
    """The dataset: its text, its tokenizer, and its split; or several datasets that are mixed."""

    model_config = ConfigDict(title="Data")

    corpus: Corpus = StdlibCorpus(kind="stdlib", max_bytes=None)
    """The source of the text."""
    tokenizer: Tokenizer = TrainedTokenizer(kind="train", vocab_size=4096, sample_bytes=8_000_000)
    """The tokenizer that turns the text into tokens."""
    filters: Filters = Filters()
    """The documents that are left out."""
    curation: Curation | None = None
    """Quality filters, language identification and removal of near-duplicates by datatrove; empty leaves them out."""
    on_bad_document: Literal["fail", "skip"] = "fail"
    """A document that is null, too long, not UTF-8 or no JSON: stop there, or leave it out and note its place in the
    manifest."""
    max_document_bytes: PositiveCount = MAX_DOCUMENT_BYTES
    """A document of more bytes is too long. A book has 1 MB, all of enwik9 1 GB; without a limit, one small compressed
    file could take all memory."""
    validation_fraction: float = Field(0.0005, gt=0, lt=1)
    """Share of the documents kept for validation; 0.0005 is OpenWebText's customary split."""
    split_seed: int = Field(2357, ge=0)
    """Seed of the permutation that picks the validation documents."""
    max_file_bytes: PositiveCount = 32_000_000_000
    """A larger split becomes files of about so many bytes: train-00000.bin and so on. OpenWebText's 18 GB stay one
    file."""
    mixture: tuple[MixtureSource, ...] = Field((), max_length=32)  # the metrics have a column for each
    """Several sources in the place of `corpus`; each batch has its share of each."""
    stages: tuple[MixtureStage, ...] = ()
    """The stages of a mixture whose weights change; empty is one stage with the sources' own weights."""

    @property
    def sources(self) -> dict[str, DataConfig]:
        """Return the settings of each dataset of a mixture, by name; empty where there is no mixture."""
        return {source.label: self._of_source(source) for source in self.mixture}

    def _of_source(self, source: MixtureSource) -> DataConfig:
        reads_tokens = isinstance(source.corpus, TokensCorpus)  # the others' settings are about text
        filters = Filters() if reads_tokens else self.filters
        curation = None if isinstance(source.corpus, TokensCorpus | InstructionCorpus) else self.curation
        return self.model_copy(
            update={
                "corpus": source.corpus,
                "filters": filters if source.filters is None else source.filters,
                "curation": curation if source.curation is None else source.curation,
                "validation_fraction": source.validation_fraction or self.validation_fraction,
                "mixture": (),
                "stages": (),
            }
        )

    @property
    def weights(self) -> list[list[float]]:
        """Return the weights of each stage, in the order of the sources."""
        own = {source.label: source.weight for source in self.mixture}
        stages = [stage.weights or own for stage in self.stages] or [own]
        return [[stage.get(name, 0.0) for name in own] for stage in stages]

    @model_validator(mode="after")
    def _mixture_can_be_mixed(self) -> Self:
        if not self.mixture:
            if self.stages:
                raise ValueError("data.stages weighs the sources of data.mixture, and there is none; give data.mixture")
            return self
        if self.corpus != StdlibCorpus(kind="stdlib"):
            raise ValueError(
                f"data.corpus (kind={self.corpus.kind}) and data.mixture are both given; leave data.corpus out, or "
                "make it a source of the mixture"
            )
        names, stages = [source.label for source in self.mixture], [stage.model_dump() for stage in self.stages]
        for problem in mixture_problems(names, self.weights, stages, self.tokenizer.kind):
            raise ValueError(problem)
        return self

    @model_validator(mode="after")
    def _tokens_have_their_tokenizer(self) -> Self:
        for data in self.sources.values() or [self]:
            if isinstance(data.corpus, TokensCorpus) and data.filters != Filters():
                raise ValueError("data.filters reads text, and data.corpus.kind=tokens has none; leave the filters out")
        if isinstance(self.corpus, TokensCorpus) and isinstance(self.tokenizer, TrainedTokenizer):
            raise ValueError(
                "data.tokenizer.kind=train has no text to be trained on where data.corpus.kind=tokens; give the "
                "tokenizer that made the tokens: {kind: hub, name: openai-community/gpt2}, or {kind: file, path: …}"
            )
        return self

    @model_validator(mode="after")
    def _curation_has_text(self) -> Self:
        for data in self.sources.values() or [self]:
            if data.curation is None:
                continue
            if isinstance(data.corpus, TokensCorpus | InstructionCorpus):
                raise ValueError(
                    f"data.curation judges prose, and data.corpus.kind={data.corpus.kind} has none; leave "
                    "data.curation out"
                )
            if data.filters.drop_duplicates and data.curation.near_duplicates:
                raise ValueError(
                    "data.filters.drop_duplicates and data.curation.near_duplicates are both given, and each may keep "
                    "another copy of a document; leave drop_duplicates out: near-duplicates include copies"
                )
        return self

    @model_validator(mode="after")
    def _instructions_are_for_a_model(self) -> Self:
        if isinstance(self.corpus, InstructionCorpus) and isinstance(self.tokenizer, TrainedTokenizer):
            raise ValueError(
                "data.tokenizer.kind=train would train a tokenizer on the JSON of data.corpus.kind=instructions, which "
                "is for a model that has one; give that model's, as {kind: litgpt, path: …} or {kind: hub, name: …}"
            )
        return self
