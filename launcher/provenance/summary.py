"""The public summary of a model's training content, which Article 53(1)(d) of the EU AI Act requires.

The sections are those of the template of the AI Office of 24 July 2025. Facts come from the manifests of the run and of
the runs whose weights it continues. Fields that only a person can fill in are marked.
https://digital-strategy.ec.europa.eu/en/library/explanatory-notice-and-template-public-summary-training-content-general-purpose-ai-models
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from launcher.provenance.dependencies import datasets_of, generations
from litgpt_demo.documents import read_manifest
from litgpt_demo.export import FinalManifest
from litgpt_demo.runs import FINAL, RunDocument, dataset_address
from litgpt_demo.storage import Storage

_SIZES = ((10**9, "less than 1 billion tokens"), (10**13, "1 billion to 10 trillion tokens"))
"""The template's sizes of text, each below a number of tokens."""


def summary_of(run: Storage) -> str:
    """Return the summary as Markdown."""
    from jinja2 import StrictUndefined, Template

    found = list(generations(run))
    documents = [document for _, document in found]
    sources = [source for each, document in found for source in _sources(each, document)]
    origins = [document.training.origin for document in documents]
    tokens = sum({source["data"].content_hash: source["data"].train.tokens for source in sources}.values())
    text = Path(__file__).with_name("templates").joinpath("summary.md").read_text("utf-8")
    template: Template = Template(
        text, keep_trailing_newline=True, lstrip_blocks=True, trim_blocks=True, undefined=StrictUndefined
    )
    return template.render(
        run=documents[0].training.run,
        final=read_manifest(run.within(FINAL), FinalManifest),
        weights=[f"{origin.name} (`{origin.content_hash}`)" for origin in origins if origin is not None],
        tokens=tokens,
        size=next((name for limit, name in _SIZES if tokens < limit), "more than 10 trillion tokens"),
        sources=sources,
        repositories=list(dict.fromkeys(source["repository"] for source in sources if source["repository"])),
    )


def _sources(run: Storage, document: RunDocument) -> Iterator[dict[str, Any]]:
    """Yield each dataset of a run. Its corpus is unknown if the run's config does not have it."""
    data: Any = document.run.get("data") or {}
    corpora = [source["corpus"] for source in data.get("mixture", ())] or [data.get("corpus") or {}]
    address = dataset_address(run, document.training.dataset)
    manifests = [manifest for _, manifest in datasets_of(address) if manifest.mixture is None]
    if len(corpora) != len(manifests):
        corpora = [{}] * len(manifests)
    for corpus, manifest in zip(corpora, manifests, strict=True):
        kind = corpus.get("kind", "unknown")
        repository = {"hub": corpus.get("name"), "openwebtext": "Skylion007/openwebtext"}.get(kind)
        place = repository or ", ".join(corpus.get("paths", ())) or corpus.get("path", "")
        yield {
            "run": document.training.run,
            "data": manifest,
            "repository": repository,
            "origin": f"{kind} {place}".strip(),
            "filters": [f"{name}={value}" for name, value in manifest.filters.model_dump().items() if value],
            "dropped": [f"{count:,} {reason}" for reason, count in sorted(manifest.dropped.items())],
        }
