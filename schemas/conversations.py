"""A conversation: the messages that a chat template renders, pictures in place."""

from typing import Any, NotRequired, TypedDict


class Part(TypedDict):
    """A piece of a message: ``{"type": "text", "text": …}`` or ``{"type": "image", "image": …}``.

    ``image`` is a PIL picture.
    """

    type: str
    text: NotRequired[str]
    image: NotRequired[Any]


class Message(TypedDict):
    """One turn. ``role`` is ``system``, ``user`` or ``assistant``."""

    role: str
    content: list[Part]


Conversation = list[Message]
