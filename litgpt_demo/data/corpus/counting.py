"""The number of documents of a shard where its files say it, without reading them."""

from __future__ import annotations

from pathlib import Path

from litgpt_demo.config import Corpus
from litgpt_demo.data.corpus.compression import compression_of
from litgpt_demo.data.corpus.fetching import local_copy
from litgpt_demo.data.corpus.layout import Layout
from litgpt_demo.data.corpus.parquet import row_groups
from litgpt_demo.data.corpus.shards import Part, Shard


def counted(corpus: Corpus, shard: Shard, *, scratch: Path) -> tuple[int, int] | None:
    """The documents of a shard, empty ones included, and about their bytes, from the footers of its parquet files.

    None where nothing but reading tells: other formats, compressed files, nulls, a limit.

    Raises:
        As `read_shard`.
    """
    layout = Layout.of(corpus)
    if shard.limit is not None or not all(_has_footer(part, layout) for part in shard.parts):
        return None
    documents = size = 0
    for part in shard.parts:
        with local_copy(part.source, scratch) as path:
            groups = row_groups(path, part.source, layout.column)[part.start : part.end]
        if any(group.nulls != 0 for group in groups):
            return None
        documents += sum(group.rows for group in groups)
        size += sum(group.bytes for group in groups)
    return documents, size


def _has_footer(part: Part, layout: Layout) -> bool:
    return layout.format_of(part.source) == "parquet" and compression_of(part.source.name) is None
