"""The road from text to batches: corpora, preparation, datasets, tokenizers."""
