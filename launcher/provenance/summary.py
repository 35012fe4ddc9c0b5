"""The public summary of a model's training content, which Article 53(1)(d) of the EU AI Act requires.

The sections are those of the template of the AI Office of 24 July 2025. Facts come from the manifests of the run and of
the runs whose weights it continues. Fields that only a person can fill in are marked.
https://digital-strategy.ec.europa.eu/en/library/explanatory-notice-and-template-public-summary-training-content-general-purpose-ai-models
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from launcher.provenance.dependencies import datasets_of, generations
from litgpt_demo.data.dataset import DatasetManifest
from litgpt_demo.documents import read_manifest
from litgpt_demo.export import FinalManifest
from litgpt_demo.runs import FINAL, RunDocument
from litgpt_demo.storage import Storage

_SIZES = ((10**9, "less than 1 billion tokens"), (10**13, "1 billion to 10 trillion tokens"))
_LARGEST = "more than 10 trillion tokens"


@dataclass(frozen=True)
class _Source:
    """A dataset that a run was trained on."""

    run: str
    corpus: dict[str, Any]
    """`data.corpus` of the run's config; empty if the config does not have it."""
    manifest: DatasetManifest

    @property
    def repository(self) -> str:
        """The repository of the Hugging Face Hub; empty for other sources."""
        names = {"hub": self.corpus.get("name"), "openwebtext": "Skylion007/openwebtext"}
        return names.get(self.corpus.get("kind", "")) or ""

    @property
    def row(self) -> str:
        manifest = self.manifest
        place = self.repository or ", ".join(map(str, self.corpus.get("paths", ()))) or self.corpus.get("path", "")
        corpus = f"{self.corpus.get('kind', 'unknown')} {place}".strip()
        sizes = f"{manifest.documents:,} | {manifest.tokens:,} | {manifest.text_bytes:,}"
        return f"| {manifest.name} | {corpus} | {sizes} | `{manifest.content_hash}` | {self.run} |"


def _todo(what: str) -> str:
    return f"[to be filled in by the provider: {what}]"


def summary_of(run: Storage) -> str:
    """Return the summary as Markdown."""
    documents = [document for _, document in generations(run)]
    sources = [source for document in documents for source in _sources(document)]
    final = read_manifest(run.within(FINAL), FinalManifest)
    lines = [*_general(documents, sources, final), *_data(sources), *_processing(sources)]
    return "\n".join(lines) + "\n"


def _sources(document: RunDocument) -> Iterator[_Source]:
    data: Any = document.run.get("data") or {}
    mixed = [source["corpus"] for source in data.get("mixture", ())]
    manifests = [manifest for _, manifest in datasets_of(document.training.dataset)]
    own = [manifest for manifest in manifests if manifest.mixture is None]
    corpora = mixed or [data.get("corpus") or {}]
    if len(corpora) != len(own):
        corpora = [{}] * len(own)
    for corpus, manifest in zip(corpora, own, strict=True):
        yield _Source(document.training.run, corpus, manifest)


def _general(
    documents: Sequence[RunDocument], sources: Sequence[_Source], final: FinalManifest | None
) -> Iterator[str]:
    spec = documents[0].training
    origins = [document.training.origin for document in documents]
    weights = [f"{origin.name} (`{origin.content_hash}`)" for origin in origins if origin is not None]
    tokens = sum({source.manifest.content_hash: source.manifest.train.tokens for source in sources}.values())
    size = next((text for limit, text in _SIZES if tokens < limit), _LARGEST)
    version, seen = spec.run, "unknown, the run has no model yet"
    if final is not None:
        version, seen = f"{spec.run}, step {final.step:,}", f"{final.tokens:,}"
    yield from (
        "# Public summary of training content",
        "",
        "Of the model below, by Article 53(1)(d) of Regulation (EU) 2024/1689 and the template of the AI Office.",
        "",
        "## 1. General information",
        "",
        "### 1.1 Provider identification",
        "",
        f"- Provider, with contact details: {_todo('name, address, e-mail')}",
        f"- Authorised representative: {_todo('only of a provider outside the Union')}",
        "",
        "### 1.2 Model identification",
        "",
        f"- Versioned model name: {version}",
        f"- Model dependencies: {', then '.join(weights) or 'none, its weights were random at first'}",
        f"- Date of placement on the Union market: {_todo('date')}",
        "",
        "### 1.3 Modalities and size of the training data",
        "",
        "- Modality: text",
        f"- Training data size: {size} ({tokens:,} tokens in the training splits)",
        f"- Tokens seen in training: {seen}",
        f"- Types of content: {_todo('for example fiction, scientific text, press, source code')}",
        f"- Latest date of acquisition: {_todo('month and year; whether the model is trained on new data later')}",
        f"- Languages and other characteristics: {_todo('languages, regions, groups of people')}",
        "",
    )


def _data(sources: Sequence[_Source]) -> Iterator[str]:
    yield from ("## 2. List of data sources", "", "All data that the manifests of the training name:", "")
    yield from ("| dataset | from | documents | tokens | bytes of text | content hash | run |", "|" + " --- |" * 7)
    yield from (source.row for source in sources)
    public = dict.fromkeys(source.repository for source in sources if source.repository)
    hub = [f"- https://huggingface.co/datasets/{name} {_todo('is it public? its licence')}" for name in public]
    yield from ("", "### 2.1 Publicly available datasets", "", *(hub or [_todo("datasets of the table, with links")]))
    for number, title, what in (
        (2, "Private datasets obtained from third parties", "licensed by rightholders, or from others"),
        (3, "Data crawled and scraped from online sources", "crawlers, period, the most used domain names"),
        (4, "User data", "services and modalities that it comes from"),
        (5, "Synthetic data", "models that made it"),
        (6, "Other sources of data", "for example digitised by the provider"),
    ):
        yield from ("", f"### 2.{number} {title}", "", _todo(f"datasets of the table, or none; {what}"))


def _processing(sources: Sequence[_Source]) -> Iterator[str]:
    yield from ("", "## 3. Data processing aspects", "")
    yield from ("### 3.1 Reservation of rights from text and data mining", "")
    yield from (_todo("measures to respect it, before and during collection; code of practice"), "")
    yield from ("### 3.2 Removal of illegal content", "", _todo("measures, such as block lists and classifiers"), "")
    yield from ("### 3.3 Other information", "")
    for source in sources:
        manifest = source.manifest
        settings = {name: value for name, value in manifest.filters.model_dump().items() if value}
        filters = ", ".join(f"{name}={value}" for name, value in settings.items()) or "none"
        dropped = ", ".join(f"{count:,} {reason}" for reason, count in sorted(manifest.dropped.items())) or "none"
        held_out = f"{manifest.validation.documents:,} documents were held out for validation"
        yield f"- {manifest.name}: filters {filters}; documents left out: {dropped}; {held_out}."
    yield f"- {_todo('anything else')}"
