"""The rows of a shard, rendered and tokenised one by one: which can be captured, which not."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.capture.bad_row import BadRowError
from dspark.capture.collate import encode
from dspark.capture.conversation_file import ConversationFile
from dspark.capture.target import Target


@dataclass(frozen=True)
class EncodedRow:
    """A row that can be captured.

    Attributes:
        sample: dataset row.
        id: the dataset's own id.
        input_ids: int64 ``[L]``.
        loss_mask: bool ``[L]``.
        image_mask: bool ``[L]``.
    """

    sample: int
    id: str
    input_ids: Tensor
    loss_mask: Tensor
    image_mask: Tensor

    def __len__(self) -> int:
        return self.input_ids.shape[0]


@dataclass(frozen=True)
class SkippedRow:
    """A row that cannot be captured, and why."""

    sample: int
    id: str
    reason: str


def encode_row(
    sample: int, conversations: ConversationFile, target: Target, max_length: int
) -> EncodedRow | SkippedRow:
    """Read, render and tokenise one dataset row."""
    row_id = conversations.id(sample)
    try:
        return _encode(sample, row_id, conversations, target.processor, target, max_length)
    except BadRowError as error:
        return SkippedRow(sample, row_id, str(error))


def _encode(
    sample: int,
    row_id: str,
    conversations: ConversationFile,
    processor: Any,
    target: Target,
    max_length: int,
) -> EncodedRow:
    conversation = conversations.conversation(sample)
    try:
        inputs = encode([conversation], processor)
    except (ValueError, TypeError, IndexError, KeyError) as error:
        first_line = str(error).strip().split("\n")[0]
        raise BadRowError("the processor refuses it", first_line) from None
    ids = inputs["input_ids"][0]
    if len(ids) > max_length:
        raise BadRowError(
            "longer than --max-length", f"{len(ids)} tokens, --max-length is {max_length}"
        )
    loss_mask = inputs["loss_mask"][0].bool()
    if not loss_mask.any():
        raise BadRowError("no supervised token")
    image_id = target.image_token_id
    image_mask = torch.zeros_like(loss_mask) if image_id is None else ids == image_id
    return EncodedRow(sample, row_id, ids, loss_mask, image_mask)
