"""The public summary of a model's training content, which Article 53(1)(d) of the EU AI Act requires.

The sections are those of the template of the AI Office of 24 July 2025. Facts come from the manifests of the run and of
the runs whose weights it continues. Fields that only a person can fill in are marked.
https://digital-strategy.ec.europa.eu/en/library/explanatory-notice-and-template-public-summary-training-content-general-purpose-ai-models
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from launcher.provenance.dependencies import datasets_of, generations
from litgpt_demo.data.dataset import DatasetManifest
from litgpt_demo.documents import read_manifest
from litgpt_demo.export import FinalManifest
from litgpt_demo.runs import FINAL, RunDocument
from litgpt_demo.storage import Storage

_SIZES = ((10**9, "less than 1 billion tokens"), (10**13, "1 billion to 10 trillion tokens"))
"""The template's sizes of text, each below a number of tokens."""


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
    def origin(self) -> str:
        place = self.repository or ", ".join(self.corpus.get("paths", ())) or self.corpus.get("path", "")
        return f"{self.corpus.get('kind', 'unknown')} {place}".strip()

    @property
    def filters(self) -> str:
        return ", ".join(f"{name}={value}" for name, value in self.manifest.filters.model_dump().items() if value)

    @property
    def dropped(self) -> str:
        return ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.manifest.dropped.items()))


def summary_of(run: Storage) -> str:
    """Return the summary as Markdown."""
    from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape

    documents = [document for _, document in generations(run)]
    sources = [source for document in documents for source in _sources(document)]
    origins = [document.training.origin for document in documents]
    tokens = sum({source.manifest.content_hash: source.manifest.train.tokens for source in sources}.values())
    environment = Environment(
        loader=PackageLoader("launcher", "provenance/templates"),
        autoescape=select_autoescape(),  # not of Markdown
        keep_trailing_newline=True,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    return environment.get_template("summary.md").render(
        run=documents[0].training.run,
        final=read_manifest(run.within(FINAL), FinalManifest),
        weights=[f"{origin.name} (`{origin.content_hash}`)" for origin in origins if origin is not None],
        tokens=tokens,
        size=next((name for limit, name in _SIZES if tokens < limit), "more than 10 trillion tokens"),
        sources=sources,
        repositories=list(dict.fromkeys(source.repository for source in sources if source.repository)),
    )


def _sources(document: RunDocument) -> Iterator[_Source]:
    data: Any = document.run.get("data") or {}
    corpora = [source["corpus"] for source in data.get("mixture", ())] or [data.get("corpus") or {}]
    manifests = [manifest for _, manifest in datasets_of(document.training.dataset) if manifest.mixture is None]
    if len(corpora) != len(manifests):
        corpora = [{}] * len(manifests)
    for corpus, manifest in zip(corpora, manifests, strict=True):
        yield _Source(document.training.run, corpus, manifest)
