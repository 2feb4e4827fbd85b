"""A conversation: the messages that a chat template renders, pictures in place."""

from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict


class Part(TypedDict):
    """A piece of a message: ``{"type": "text", "text": …}`` or ``{"type": "image", "image": …}``.

    ``image`` is a PIL picture in mode RGB.
    """

    type: str
    text: NotRequired[str]
    image: NotRequired[Any]


class Message(TypedDict):
    """One turn. ``role`` is ``system``, ``user``, ``assistant`` or ``tool``.

    The optional keys are those that chat templates read; a key that a row does not have is absent,
    never None. ``tool_calls`` is a list of ``{type: "function", function: {name, arguments}}``,
    with ``arguments`` a mapping wherever the file's text is a JSON object.
    """

    role: str
    content: list[Part]
    reasoning_content: NotRequired[str]
    tool_calls: NotRequired[list[dict[str, Any]]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]


Conversation = list[Message]


@dataclass(frozen=True)
class ConversationRow:
    """One row of a dataset.

    Attributes:
        id: the dataset's own id, or an empty string.
        messages: at least one of them the assistant's.
        tools: JSON schemas of the functions that the assistant may call, or None.
    """

    id: str
    messages: Conversation
    tools: list[dict[str, Any]] | None = None
