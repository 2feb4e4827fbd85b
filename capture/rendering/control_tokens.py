"""Texts that hold what the tokenizer takes for a control token.

Tokenised with the rest of a prompt, such a text would move a picture or end a turn.
"""

from collections.abc import Iterator
from typing import Any

from dspark.capture.bad_row import BadRowError
from dspark.capture.rendering.render import Renderer, Tools, texts_of
from dspark.schemas.conversations import Conversation

# Tags of reasoning are special tokens for some tokenizers, and the assistant does write them.
_REASONING_TAGS = frozenset({"<think>", "</think>", "[THINK]", "[/THINK]"})


def check_no_control_tokens(renderer: Renderer, messages: Conversation, tools: Tools) -> None:
    """Check every text of a conversation, those of tool calls and schemas of tools included.

    Text that looks like a tag and is no special token of this tokenizer is text.

    Raises:
        BadRowError: a text holds a special token, or the placeholder of a picture.
    """
    tokens = set(renderer.control_tokens)
    _check(_strings(tools), tokens)
    for message in messages:
        allowed = _REASONING_TAGS if message["role"] == "assistant" else frozenset()
        _check(iter(texts_of(message)), tokens - allowed)
        others = {k: v for k, v in message.items() if k not in ("role", "content")}
        _check(_strings(others), tokens - allowed)


def _check(texts: Iterator[str], tokens: set[str]) -> None:
    for text in texts:
        if found := next((t for t in sorted(tokens) if t in text), None):
            raise BadRowError("control token in a text", found)


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield str(key)
            yield from _strings(entry)
    elif isinstance(value, list | tuple):
        for entry in value:
            yield from _strings(entry)
