"""An endless stream of training batches, each of conversations of about one length."""

import random
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor
from transformers import ProcessorMixin

from .conversations import Conversation
from .encode import encode

POOL = 8
"""Batches drawn at once and sorted by length; random batches are half padding."""


def batches(
    processor: ProcessorMixin,
    rng: random.Random,
    draw: Callable[[], Conversation],
    size: int,
) -> Iterator[dict[str, Tensor]]:
    """Yields batches of `size` conversations for ever, as `encode` gives them."""
    while True:
        pool = sorted((draw() for _ in range(POOL * size)), key=_length)
        groups = [pool[start : start + size] for start in range(0, len(pool), size)]
        rng.shuffle(groups)
        for group in groups:
            yield encode_all(processor, group)


def encode_all(
    processor: ProcessorMixin, conversations: Sequence[Conversation]
) -> dict[str, Tensor]:
    """Encodes whole conversations with their right answers."""
    messages = [conversation.messages(conversation.answers) for conversation in conversations]
    images = [[picture.image for picture in c.pictures] for c in conversations]
    return encode(processor, messages, images)


def _length(conversation: Conversation) -> int:
    """About how many characters the target will see, a token being some four of them."""
    text = sum(len(turn.question.text) + len(turn.question.answer) for turn in conversation.turns)
    return text + 2 * sum(picture.cells.size for picture in conversation.pictures)
