"""Texts that the model writes during its training, for people who watch it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tokenizers import Tokenizer as HfTokenizer

from litgpt_demo import timeouts
from litgpt_demo.errors import UserError
from litgpt_demo.metrics import MOST_TEXT
from litgpt_demo.training.setup import Training


class Sampler:
    """Continues each of `train.sample_prompts` by the likeliest token, so that a text depends only on the weights."""

    def __init__(self, training: Training) -> None:
        """Encode the prompts. A UserError if one fills a whole sample."""
        train, length = training.spec.train, training.spec.model.sequence_length
        self._training, self._end_of_text = training, training.data.manifest.end_of_text
        self._tokenizer = HfTokenizer.from_file(str(training.data.tokenizer))
        # The tokenizer may have no id for a text. Then the model begins a document.
        self._prompts = [self._tokenizer.encode(prompt).ids or [self._end_of_text] for prompt in train.sample_prompts]
        longest = max(map(len, self._prompts))
        if longest >= length:
            what = f"train.sample_prompts has a prompt of {longest} tokens, but model.sequence_length={length}"
            raise UserError(what, fix="shorten it")

    @torch.no_grad()
    def texts(self, done: int) -> list[str]:
        """Return the continuation of each prompt after `done` steps, to its document's end or `train.sample_tokens`.

        Every rank must call this, and makes the same number of forward passes, because FSDP's are collective.
        """
        size, texts = self._training.spec.train.micro_batch, list[str]()
        self._training.model.eval()
        for start in range(0, len(self._prompts), size):
            prompts = self._prompts[start : start + size]
            texts += map(self._text, prompts, self._continuations(prompts, done))
        self._training.model.train()
        return texts

    def _continuations(self, prompts: Sequence[list[int]], done: int) -> list[list[int]]:
        training, train, device = self._training, self._training.spec.train, self._training.fabric.device
        # The shape of an evaluation's batch, so nothing is compiled again. No token sees the padding behind it.
        size, length = train.micro_batch, training.spec.model.sequence_length
        padded = torch.full((size, length), self._end_of_text)
        for row, prompt in enumerate(prompts):
            padded[row, : len(prompt)] = torch.tensor(prompt)
        starts = [len(prompt) for prompt in prompts]
        tokens, rows = padded.to(device), torch.arange(size, device=device)
        ends = torch.tensor(starts + [1] * (size - len(starts)), device=device)
        for _ in range(min(train.sample_tokens, length - min(starts))):
            limit = max(timeouts.FIRST_PASS, train.hang_timeout)
            training.heart.beat(done, "sampling", max_silence=limit)
            tokens[rows, ends] = training.model(tokens, positions=ends - 1).argmax(dim=-1)
            ends = (ends + 1).clamp(max=length - 1)  # a full row writes its last token again
        written = zip(tokens.tolist(), starts, strict=False)
        return [row[start : start + train.sample_tokens] for row, start in written]

    def _text(self, prompt: list[int], written: list[int]) -> str:
        if self._end_of_text in written:
            written = written[: written.index(self._end_of_text)]
        # Alone, the written part would lose the space before its first word with some tokenizers.
        text: str = self._tokenizer.decode([*prompt, *written])
        return text.removeprefix(self._tokenizer.decode(prompt))[:MOST_TEXT]
