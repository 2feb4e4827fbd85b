"""The layouts of conversation files that are recognised, each a function from a record.

Every layout becomes messages in OpenAI style and pictures beside them; ``messages`` takes it from
there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.capture.bad_row import BadRowError
from dspark.capture.conversations.records import Record

_COLUMNS = ("messages", "conversation", "conversations")
_SPEAKERS = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "bot": "assistant",
    "system": "system",
    "tool": "tool",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
}
KNOWN = (
    "messages, conversation or conversations: a list of {role, content} or of {from, value}; "
    "texts: a list of {user, assistant}; prompt and completion; each with images or image beside "
    "it where there are pictures"
)


@dataclass(frozen=True)
class RawConversation:
    """Attributes:
    messages: in OpenAI style, as the file has them.
    pictures: those beside the messages, in order.
    marked: every picture beside the messages has a placeholder in a text, and every placeholder a
        picture.
    leading: pictures without any placeholder come first in the first user turn.
    tools: as the file has them.
    """

    messages: list[Any]
    pictures: list[Any]
    marked: bool = False
    leading: bool = False
    tools: Any = None


@dataclass(frozen=True)
class Layout:
    """Attributes:
    name: for a reader.
    fits: whether a record has this layout.
    read: the record's conversation; raises ``BadRowError`` where a field is missing.
    """

    name: str
    fits: Callable[[Record], bool]
    read: Callable[[Record], RawConversation]


def read_openai(record: Record) -> RawConversation:
    """``messages: [{role, content}]``, content being text or a list of parts."""
    _, turns = _turns(record, _COLUMNS)
    return RawConversation(turns, _pictures(record), tools=record.get("tools"))


def read_sharegpt(record: Record) -> RawConversation:
    """``conversations: [{from, value}]``, ``<image>`` in a value standing for a picture."""
    column, turns = _turns(record, _COLUMNS)
    messages = []
    for i, turn in enumerate(turns):
        where = f"{column}[{i}]"
        speaker = _field(turn, "from", where)
        role = _SPEAKERS.get(speaker) if isinstance(speaker, str) else None
        if role is None:
            raise BadRowError("unknown role", repr(speaker))
        messages.append({"role": role, "content": _field(turn, "value", where)})
    system = record.get("system")
    if isinstance(system, str) and system and not any(m["role"] == "system" for m in messages):
        messages.insert(0, {"role": "system", "content": system})
    return RawConversation(messages, _pictures(record), marked=True, tools=record.get("tools"))


def read_texts(record: Record) -> RawConversation:
    """``texts: [{user, assistant}]`` with ``images``, which come first."""
    column, turns = _turns(record, ("texts",))
    messages = [
        {"role": role, "content": _field(turn, role, f"{column}[{i}]")}
        for i, turn in enumerate(turns)
        for role in ("user", "assistant")
    ]
    return RawConversation(messages, _pictures(record), leading=True)


def read_prompt_completion(record: Record) -> RawConversation:
    """``prompt`` and ``completion``, each text or messages, with ``images``, which come first."""
    messages: list[Any] = []
    for column, role in (("prompt", "user"), ("completion", "assistant")):
        value = _field(record, column, "")
        if isinstance(value, str):
            value = [{"role": role, "content": value}]
        elif not isinstance(value, list):
            raise BadRowError("wrong field", f"{column} is neither text nor a list")
        messages += value
    return RawConversation(messages, _pictures(record), leading=True, tools=record.get("tools"))


def _has_turns(columns: Sequence[str], *keys: str) -> Callable[[Record], bool]:
    """A test for a column that is a list of objects with one of the keys."""

    def fits(record: Record) -> bool:
        turns = next((record[c] for c in columns if record.get(c) is not None), None)
        return isinstance(turns, list) and any(
            isinstance(turn, dict) and any(turn.get(k) is not None for k in keys) for turn in turns
        )

    return fits


def _has_prompt(record: Record) -> bool:
    return all(isinstance(record.get(c), (str, list)) for c in ("prompt", "completion"))


LAYOUTS = (
    Layout("messages of {role, content}", _has_turns(_COLUMNS, "role", "content"), read_openai),
    Layout("conversations of {from, value}", _has_turns(_COLUMNS, "from", "value"), read_sharegpt),
    Layout("images and texts", _has_turns(("texts",), "user", "assistant"), read_texts),
    Layout("prompt and completion", _has_prompt, read_prompt_completion),
)


def recognise(records: Sequence[Record], columns: Sequence[str]) -> Layout | None:
    """The layout of the first record that has one.

    Where no record says it, since all of them are empty, the columns do; None if they do not.
    """
    for record in records:
        for layout in LAYOUTS:
            if layout.fits(record):
                return layout
    openai, _, texts, prompt = LAYOUTS
    empty = not any(record.get(c) for record in records for c in (*_COLUMNS, "texts"))
    if empty and any(c in columns for c in _COLUMNS):
        return openai
    if empty and "texts" in columns:
        return texts
    return prompt if {"prompt", "completion"} <= {*columns} else None


def _field(record: Any, name: str, where: str) -> Any:
    if not isinstance(record, dict) or record.get(name) is None:
        raise BadRowError("missing field", f"{where}.{name}" if where else name)
    return record[name]


def _turns(record: Record, columns: Sequence[str]) -> tuple[str, list[Any]]:
    """The name and value of the first of the columns that is not null."""
    column = next((c for c in columns if record.get(c) is not None), None)
    if column is None:
        present = [c for c in columns if c in record]
        raise BadRowError("missing field", present[0] if present else columns[0])
    turns = record[column]
    if not isinstance(turns, list):
        raise BadRowError("wrong field", f"{column} is no list")
    return column, turns


def _pictures(record: Record) -> list[Any]:
    """``images`` or ``image``: a list, or one picture."""
    for column in ("video", "videos", "audio", "audios"):
        if record.get(column):
            raise BadRowError("video or audio", f"the row has {column}")
    value: Any = next((record[c] for c in ("images", "image") if record.get(c) is not None), [])
    return list(value) if isinstance(value, (list, tuple)) else [value]
