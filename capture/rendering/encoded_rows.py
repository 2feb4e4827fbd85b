"""The rows of a shard, rendered and tokenised one by one: which can be captured, which not."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.capture.bad_row import BadRowError, stop_if_asked
from dspark.capture.conversations import Conversations
from dspark.capture.rendering.encode import encode_batch
from dspark.capture.rendering.truncate import TOO_LONG, kept_length
from dspark.capture.settings import RowOptions
from dspark.capture.targets.target import Target


@dataclass(frozen=True)
class EncodedRow:
    """A row that can be captured, cut to ``--max-length`` if it was longer and is to be truncated.

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
    sample: int,
    conversations: Conversations,
    target: Target,
    max_length: int,
    options: RowOptions,
) -> EncodedRow | SkippedRow:
    """Read, render and tokenise one dataset row.

    Raises:
        InputError: the row is bad, and bad rows are errors.
    """
    row_id = conversations.id(sample)
    try:
        return _encode(sample, row_id, conversations, target, max_length, options)
    except BadRowError as error:
        stop_if_asked(options.on_bad_row, conversations, sample, str(error))
        return SkippedRow(sample, row_id, str(error))


def _encode(
    sample: int,
    row_id: str,
    conversations: Conversations,
    target: Target,
    max_length: int,
    options: RowOptions,
) -> EncodedRow:
    row = conversations.read(sample)
    encoded = encode_batch(
        [row.messages], target.processor, [row.tools], mask_reasoning=options.mask_reasoning
    )
    ids = encoded.tensors["input_ids"][0]
    loss_mask = encoded.tensors["loss_mask"][0].bool()
    image_id = target.image_token_id
    image_mask = torch.zeros_like(loss_mask) if image_id is None else ids == image_id
    length = len(ids)
    if length > max_length and options.overlong == "skip":
        raise BadRowError(TOO_LONG, f"{length} tokens, --max-length is {max_length}")
    if not loss_mask.any():
        raise BadRowError("no supervised token")
    if length > max_length:
        special = _special_ids(target)
        length = kept_length(ids, image_mask, loss_mask, max_length, special)
    return EncodedRow(sample, row_id, ids[:length], loss_mask[:length], image_mask[:length])


def _special_ids(target: Target) -> set[int]:
    added = target.tokenizer.added_tokens_decoder
    return {int(i) for i, token in added.items() if token.special}
