"""The messages of a conversation: a line of instruction data in its one form."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, Field, TypeAdapter
from pydantic_core import from_json


class Message(BaseModel):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant"]
    content: str


class _Pair(BaseModel):
    prompt: str
    response: str = Field(min_length=1)


class _Conversation(BaseModel):
    messages: list[Message] = Field(min_length=1)


_RECORD: TypeAdapter[_Pair | _Conversation] = TypeAdapter(_Pair | _Conversation)
_MESSAGES = TypeAdapter(list[Message])


def conversation_text(record: object) -> str:
    """Return the messages of a line's JSON object as JSON: its `messages`, or a prompt and its response.

    Raises:
        ValueError: it has neither, or nothing to learn.
    """
    found = _RECORD.validate_python(record)
    if isinstance(found, _Pair):
        found = _Conversation(
            messages=[Message(role="user", content=found.prompt), Message(role="assistant", content=found.response)]
        )
    if not any(message.role == "assistant" and message.content for message in found.messages):
        raise ValueError("no message of the role assistant, so there is nothing to learn")
    return _MESSAGES.dump_json(found.messages).decode()


def messages_in(text: str) -> list[Message]:
    """Return the messages of what `conversation_text` wrote."""
    return _MESSAGES.validate_python(from_json(text))
