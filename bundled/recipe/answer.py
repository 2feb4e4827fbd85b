"""The target's own greedy answers, turn by turn, many conversations at a time."""

from collections.abc import Sequence

import torch
from transformers import ProcessorMixin, Qwen2_5_VLForConditionalGeneration

from .conversations import Conversation
from .encode import encode

BATCH = 64
LONGEST = 60
"""Tokens after which an answer counts as one that does not end."""


def answer_all(
    model: Qwen2_5_VLForConditionalGeneration,
    processor: ProcessorMixin,
    conversations: Sequence[Conversation],
) -> list[list[str] | None]:
    """Answers every turn of each conversation, earlier turns having the target's own answers.

    A conversation with an answer that does not end, or that holds a special token, gives None.
    """
    answers: list[list[str] | None] = [[] for _ in conversations]
    for turn in range(max(len(conversation.turns) for conversation in conversations)):
        waiting = [
            (k, conversation, given)
            for k, (conversation, given) in enumerate(zip(conversations, answers, strict=True))
            if given is not None and turn < len(conversation.turns)
        ]
        for start in range(0, len(waiting), BATCH):
            group = waiting[start : start + BATCH]
            texts = _next(model, processor, [(talk, given) for _, talk, given in group])
            for (k, _, given), text in zip(group, texts, strict=True):
                answers[k] = None if text is None else [*given, text]
    return answers


@torch.inference_mode()
def _next(
    model: Qwen2_5_VLForConditionalGeneration,
    processor: ProcessorMixin,
    group: Sequence[tuple[Conversation, list[str]]],
) -> list[str | None]:
    messages = [conversation.messages(given) for conversation, given in group]
    images = [
        [picture.image for turn in talk.turns[: len(given) + 1] for picture in turn.pictures]
        for talk, given in group
    ]
    inputs = encode(processor, messages, images, prompt=True)
    ids = model.generate(**inputs, max_new_tokens=LONGEST, do_sample=False)
    tokenizer = processor.tokenizer
    texts: list[str | None] = []
    for row in ids[:, inputs["input_ids"].shape[1] :].tolist():
        end = row.index(tokenizer.eos_token_id) if tokenizer.eos_token_id in row else None
        plain = end is not None and not set(row[:end]) & set(tokenizer.all_special_ids)
        texts.append(tokenizer.decode(row[:end]) if plain else None)
    return texts
