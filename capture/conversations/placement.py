"""Where the pictures that lie beside the messages belong."""

from typing import Any

from dspark.capture.bad_row import BadRowError
from dspark.capture.conversations.messages import Hole
from dspark.schemas.conversations import Conversation, Part

PLACEHOLDER = "<image>"
_MISMATCH = "pictures and placeholders do not match"


def place_pictures(
    messages: Conversation, pictures: list[Any], *, marked: bool, leading: bool
) -> Conversation:
    """Messages with every picture in its place.

    Image parts without a picture of their own take those beside the messages. Where there is no
    such part, the text ``<image>`` stands for a picture, if it occurs once for each of them.

    Args:
        messages: their image parts may be ``Hole``s.
        pictures: those beside the messages.
        marked: ``<image>`` is never plain text.
        leading: pictures without any placeholder come first in the first user turn.

    Raises:
        BadRowError: pictures and placeholders do not match.
    """
    holes = [p for m in messages for p in m["content"] if isinstance(p.get("image"), Hole)]
    if holes:
        _fill(holes, pictures)
        return messages
    count = sum(
        part.get("text", "").count(PLACEHOLDER)
        for message in messages
        if message["role"] != "assistant"
        for part in message["content"]
    )
    if count == len(pictures):
        return _split_texts(messages, pictures) if count else messages
    if count and not marked and not pictures:
        return messages
    if leading and not count:
        return _put_first(messages, pictures)
    raise BadRowError(_MISMATCH, f"{len(pictures)} pictures, {count} times {PLACEHOLDER}")


def _fill(holes: list[Part], pictures: list[Any]) -> None:
    if len(holes) != len(pictures):
        raise BadRowError(_MISMATCH, f"{len(pictures)} pictures, {len(holes)} image parts")
    indices = [i if h["image"].index is None else h["image"].index for i, h in enumerate(holes)]
    if sorted(indices) != list(range(len(pictures))):
        raise BadRowError(_MISMATCH, f"{len(pictures)} pictures, image parts ask for {indices}")
    for hole, index in zip(holes, indices, strict=True):
        hole["image"] = pictures[index]


def _split_texts(messages: Conversation, pictures: list[Any]) -> Conversation:
    remaining = iter(pictures)
    return [
        message
        if message["role"] == "assistant"
        else {
            **message,
            "content": [p for part in message["content"] for p in _split(part, remaining)],
        }
        for message in messages
    ]


def _split(part: Part, pictures: Any) -> list[Part]:
    """A part cut at its placeholders.

    A line break between a placeholder and the text belongs to the placeholder: LLaVA's data puts it
    there, and its chat template writes it again.
    """
    if PLACEHOLDER not in part.get("text", ""):
        return [part]
    pieces = part["text"].split(PLACEHOLDER)
    out: list[Part] = []
    for i, text in enumerate(pieces):
        if i:
            out.append({"type": "image", "image": next(pictures)})
            text = text.removeprefix("\n")
        if i < len(pieces) - 1:
            text = text.removesuffix("\n")
        if text:
            out.append({"type": "text", "text": text})
    return out


def _put_first(messages: Conversation, pictures: list[Any]) -> Conversation:
    user = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
    if user is None:
        raise BadRowError(_MISMATCH, f"{len(pictures)} pictures, no user turn")
    images: list[Part] = [{"type": "image", "image": picture} for picture in pictures]
    content = [*images, *messages[user]["content"]]
    return [*messages[:user], {**messages[user], "content": content}, *messages[user + 1 :]]
