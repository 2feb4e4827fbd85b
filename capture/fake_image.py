"""A picture for conversations that have none, so that every rank enters the vision tower."""

from typing import Any

import torch
from PIL import Image
from torch import Tensor

from dspark.schemas.conversations import Conversation

_SIZE = (64, 64)


def has_image(conversation: Conversation) -> bool:
    return any(
        part.get("type") in ("image", "image_url")
        for message in conversation
        if not isinstance(message["content"], str)
        for part in message["content"]
    )


def inject_fake_image(conversation: Conversation) -> Conversation:
    """A copy with a grey picture in front of the first user turn's content."""
    out: Conversation = []
    injected = False
    for message in conversation:
        if message["role"] == "user" and not injected:
            content: Any = message["content"]
            if isinstance(content, str):
                content = [{"type": "text", "text": content}]
            picture = Image.new("RGB", _SIZE, (128, 128, 128))
            message = {**message, "content": [{"type": "image", "image": picture}, *content]}
            injected = True
        out.append(message)
    return out


def mask_fake_tokens(with_fake: Tensor, without: Tensor) -> Tensor:
    """Which tokens of a row the fake picture brought in.

    Args:
        with_fake: int64 ``[L]``, ids of the conversation with the fake picture.
        without: int64 ``[L']``, ids of the conversation itself, ``L' < L``.

    Returns:
        bool ``[L]``.

    Raises:
        ValueError: the picture changed more of the row than one run of tokens.
    """
    inserted = len(with_fake) - len(without)
    same = torch.cumprod((with_fake[: len(without)] == without).long(), 0)
    start = int(same.sum())
    fake = torch.zeros(len(with_fake), dtype=torch.bool)
    fake[start : start + inserted] = True
    if inserted <= 0 or not torch.equal(with_fake[~fake], without):
        raise ValueError(
            "the chat template renders a conversation differently with a picture, so the tokens of "
            "a fake one cannot be told apart"
        )
    return fake
