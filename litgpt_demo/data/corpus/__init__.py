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

from litgpt_demo.data.corpus.fetching import forget as forget
from litgpt_demo.data.corpus.files import Source as Source
from litgpt_demo.data.corpus.lines import BadDocument as BadDocument
from litgpt_demo.data.corpus.lines import Batch as Batch
from litgpt_demo.data.corpus.listing import corpus_identity as corpus_identity
from litgpt_demo.data.corpus.listing import sources as sources
from litgpt_demo.data.corpus.shards import Shard as Shard
from litgpt_demo.data.corpus.shards import documents as documents
from litgpt_demo.data.corpus.shards import documents_by_footer as documents_by_footer
from litgpt_demo.data.corpus.shards import plan_shards as plan_shards
from litgpt_demo.data.corpus.shards import read_shard as read_shard
from litgpt_demo.data.corpus.shards import unseen_separator as unseen_separator
