"""Instruction data: what is shown and what is learned of a conversation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from litgpt_demo.data.batches import NOT_LEARNED, Windows
from litgpt_demo.data.conversations import UNLEARNED, ConversationEncoder, chat_template
from litgpt_demo.data.corpus.messages import conversation_text
from litgpt_demo.data.tokens import TokenizerFiles, assemble
from litgpt_demo.errors import DataError, UserError

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer() -> Callable[..., TokenizerFiles]:
    """Makes byte-level tokenizers whose id of an ASCII character is known."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<|endoftext|>"])

    def make(template: str | None = None) -> TokenizerFiles:
        config: dict[str, Any] = {"eos_token": "<|endoftext|>"} | ({"chat_template": template} if template else {})
        files = {"tokenizer.json": made.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
        return assemble(files, origin="a test")

    return make


def shown(files: TokenizerFiles, record: dict[str, Any]) -> tuple[str, str]:
    """What is not learned of a conversation, and what is."""
    import pyarrow as pa
    from tokenizers import Tokenizer

    texts = pa.array([conversation_text(record)], pa.large_string())
    ids, lengths = ConversationEncoder(files).encode(texts)
    assert lengths.tolist() == [len(ids)]
    reader = Tokenizer.from_str(files.files["tokenizer.json"].decode())
    apart = [
        [int(id) & ~UNLEARNED for id in ids if bool(int(id) & UNLEARNED) is unlearned] for unlearned in (True, False)
    ]
    unlearned, learned = (reader.decode(part, skip_special_tokens=False) for part in apart)
    return unlearned, learned


def test_without_a_template_prompt_and_response_stand_as_they_are(tokenizer: Callable[..., TokenizerFiles]) -> None:
    assert shown(tokenizer(), {"prompt": "six? ", "response": "seven"}) == ("six? ", "seven<|endoftext|>")
    with pytest.raises(UserError, match="no chat template"):
        shown(tokenizer(), {"messages": [{"role": "assistant", "content": "hello"}]})


def test_a_template_writes_every_turn_and_responses_alone_are_learned(tokenizer: Callable[..., TokenizerFiles]) -> None:
    turns = [("system", "Be kind."), ("user", "six?"), ("assistant", "seven"), ("user", "8?"), ("assistant", "9")]
    record = {"messages": [{"role": role, "content": content} for role, content in turns]}
    unlearned, learned = shown(tokenizer(TEMPLATE), record)
    assert unlearned == "<|system|>Be kind.<|user|>six?<|assistant|><|user|>8?<|assistant|>"
    assert learned == "seven<|endoftext|>9<|endoftext|>"


def test_text_cannot_forge_the_end_of_a_turn(tokenizer: Callable[..., TokenizerFiles]) -> None:
    forged = {"prompt": "a<|endoftext|>b", "response": "c"}
    assert shown(tokenizer(), forged) == ("a<|endoftext|>b", "c<|endoftext|>")
    with pytest.raises(DataError, match="a special token of the tokenizer, which would end its turn"):
        shown(tokenizer(TEMPLATE), forged)


def test_a_template_in_a_file_of_its_own_is_read(tokenizer: Callable[..., TokenizerFiles]) -> None:
    files = assemble({**tokenizer().files, "chat_template.jinja": TEMPLATE.encode()}, origin="a test")
    assert chat_template(files) == TEMPLATE
    assert "chat_template.jinja" not in files.files


@pytest.mark.parametrize(
    "record", [{"prompt": "a"}, {"prompt": "a", "response": ""}, {"messages": []}, {"messages": [{"role": "me"}]}, "a"]
)
def test_what_is_no_conversation_is_refused(record: object) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (pydantic's, and ours)
        conversation_text(record)


def test_windows_hide_the_targets_that_are_not_learned(tmp_path: Path) -> None:
    ids = np.array([1 | UNLEARNED, 2 | UNLEARNED, 3, 4, 5 | UNLEARNED], dtype="<u4")
    windows = Windows(files=[ids], length=2, masked=True)
    inputs, targets = windows.read(np.arange(2, dtype=np.uint64))
    assert inputs.tolist() == [[1, 2], [3, 4]]
    assert targets.tolist() == [[NOT_LEARNED, 3], [4, NOT_LEARNED]]
    assert windows.learned_share(np.arange(2, dtype=np.uint64)) == 0.5
