"""Instruction data: conversations as token ids, of which only those of the responses are learned.

A line of the corpus has become its messages (litgpt_demo.data.corpus.messages); here those become ids. An id that is
not learned has its highest bit set, so that bins of conversations go the way of all others: split, joined, compared and
staged.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from jinja2.exceptions import TemplateError

from litgpt_demo.data.corpus.messages import Message, messages_in
from litgpt_demo.data.tokens import TokenizerFiles
from litgpt_demo.errors import DataError, UserError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

UNLEARNED = 1 << 31
"""The bit of an id that is shown to the model and not learned. No vocabulary has so many ids."""
DTYPE = "<u4"


def chat_template(tokenizer: TokenizerFiles) -> str | None:
    """Return the template by which a tokenizer writes conversations; None where it has none."""
    found = tokenizer.config.get("chat_template")
    if isinstance(found, list):  # several, by name
        found = next((one["template"] for one in found if one.get("name") == "default"), None)
    return found if isinstance(found, str) else None


def template_identity(tokenizer: TokenizerFiles | None) -> str | None:
    """Return the template's part in a dataset's key."""
    template = None if tokenizer is None else chat_template(tokenizer)
    return None if template is None else sha256(template.encode()).hexdigest()


class ConversationEncoder:
    """Conversations to ids, each closed by end-of-text; as `litgpt_demo.data.tokens.Encoder`, for JSON of messages.

    Prompts and responses are encoded apart, as they are when the model is used. What a message says is text: a special
    token that its characters spell would end its turn, and is refused with a template and plain text without one.
    """

    dtype = DTYPE

    def __init__(self, tokenizer: TokenizerFiles) -> None:
        from tokenizers import Tokenizer as HfTokenizer

        self._files, self._template = tokenizer, chat_template(tokenizer)
        self._tokenizer = HfTokenizer.from_str(tokenizer.files["tokenizer.json"].decode())
        self._tokenizer.encode_special_tokens = self._template is None
        added = self._tokenizer.get_added_tokens_decoder().values()
        self._special = sorted(token.content for token in added if token.special)

    def encode(self, texts: Any) -> tuple[npt.NDArray[np.unsignedinteger[Any]], npt.NDArray[np.int64]]:
        """The ids of all conversations behind one another, and each one's number of ids.

        Raises:
            UserError: a conversation needs a template, and the tokenizer has none.
            DataError: a message spells a special token, or the template does not keep turns apart.
        """
        import numpy as np

        documents = [self._ids(messages_in(text)) for text in texts.to_pylist()]
        lengths = np.array([len(ids) for ids in documents], dtype=np.int64)
        return np.array([id for ids in documents for id in ids], dtype=self.dtype), lengths

    def _ids(self, messages: Sequence[Message]) -> list[int]:
        ids: list[int] = []
        for text, learned in self._segments(messages):
            encoded = self._tokenizer.encode(text, add_special_tokens=False).ids
            ids += encoded if learned else [id | UNLEARNED for id in encoded]
        return ids if ids[-1:] == [self._files.end_of_text] else [*ids, self._files.end_of_text]

    def _segments(self, messages: Sequence[Message]) -> Iterator[tuple[str, bool]]:
        """Yield the text up to each response, which is not learned, and the response, which is."""
        if self._template is None:
            if [message.role for message in messages] != ["user", "assistant"]:
                raise UserError(
                    "data.corpus: a conversation has other turns than a prompt and its response, and the tokenizer has "
                    "no chat template to write them with; take the tokenizer of a chat model, or lines of prompt and "
                    "response"
                )
            yield messages[0].content, False
            yield messages[1].content, True
            return
        self._require_text(messages)
        done = ""
        for number, message in enumerate(messages):
            if message.role != "assistant":
                continue
            before = self._written(messages[:number], prompt=True)
            after = self._written(messages[: number + 1], prompt=False)
            if not (before.startswith(done) and after.startswith(before)):
                raise DataError(
                    "the tokenizer's chat template writes a conversation otherwise when it goes on, so that its "
                    "responses cannot be told from the rest; take another tokenizer, or lines of one response each"
                )
            yield before[len(done) :], False
            yield after[len(before) :], True
            done = after

    def _require_text(self, messages: Sequence[Message]) -> None:
        for message in messages:
            if (found := next((token for token in self._special if token in message.content), None)) is not None:
                raise DataError(
                    f"a message of the role {message.role} holds {found!r}, a special token of the tokenizer, which "
                    f"would end its turn; take it out of the corpus: {message.content[:60]!r}"
                )

    def _written(self, messages: Sequence[Message], *, prompt: bool) -> str:
        plain = [message.model_dump() for message in messages]
        try:
            return str(self._compiled.render(messages=plain, add_generation_prompt=prompt, **self._names))
        except TemplateError as error:
            roles = ", ".join(message.role for message in messages)
            raise DataError(
                f"the tokenizer's chat template refuses a conversation of the roles {roles} ({error}); mend or drop it"
            ) from error

    @cached_property
    def _names(self) -> Mapping[str, str]:
        """The tokens that templates know by these names."""
        tokens = {name: self._files.config.get(name) for name in ("bos_token", "eos_token", "unk_token", "pad_token")}
        return {
            name: str(token["content"] if isinstance(token, dict) else token) for name, token in tokens.items() if token
        }

    @cached_property
    def _compiled(self) -> Any:
        """The template as transformers compiles it (5.3, utils/chat_template_utils.py), but without the time of day."""
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def refuse(message: str) -> None:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
        environment.globals["raise_exception"] = refuse
        try:
            return environment.from_string(self._template or "")
        except TemplateError as error:
            raise UserError(f"data.tokenizer: its chat template is none ({error}); take another tokenizer") from error
