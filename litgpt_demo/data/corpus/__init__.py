"""Documents out of a corpus: which files it has, and the text in them, in one order on every machine.

`sources` lists the files and gives each a name and a version that say nothing about where it lies; `corpus_identity` is
what the dataset's key takes of that list. `plan_shards` cuts the corpus into pieces of work, `read_shard` reads one of
them in batches, `documents` all of it. A file whose content is no longer what was listed is an error, because the
dataset's key would then name a text that it does not hold.

    format     a document is                                  position in errors
    text       the file, or what stands between separators    byte of the (decompressed) text
    jsonl      the string in one field of each line           line
    parquet    a value of one column of strings               row group and row
"""

from litgpt_demo.data.corpus.fetching import forget
from litgpt_demo.data.corpus.listing import corpus_identity, sources
from litgpt_demo.data.corpus.reading import BATCH_BYTES, BadDocument, Batch, documents, documents_by_footer, read_shard
from litgpt_demo.data.corpus.shards import Part, Shard, plan_shards
from litgpt_demo.data.corpus.source import Source, matches

__all__ = [
    "BATCH_BYTES",
    "BadDocument",
    "Batch",
    "Part",
    "Shard",
    "Source",
    "corpus_identity",
    "documents",
    "documents_by_footer",
    "forget",
    "matches",
    "plan_shards",
    "read_shard",
    "sources",
]
