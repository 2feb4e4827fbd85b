"""The model's inputs for rows that were encoded one by one and now run together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dspark.capture.bad_row import BadRowError
from dspark.capture.conversations import Conversations
from dspark.capture.rendering.encode import Encoded, encode_batch
from dspark.capture.rendering.encoded_rows import EncodedRow, ids_digest
from dspark.capture.rendering.fake_image import fakes_last
from dspark.capture.rendering.render import pictures_of
from dspark.capture.rendering.truncate import keep_tokens
from dspark.capture.targets.processor import EncodesRows
from dspark.schemas.conversations import ConversationRow
from dspark.schemas.errors import InputError


@dataclass(frozen=True)
class BatchInputs:
    """What the target runs on.

    Attributes:
        rows: B rows, in the order of the batch.
        tensors: all keys of the processor, right-padded ``[B, L]``; tokens that a truncated row
            lost are not there, those of a fake picture come after the row's own.
    """

    rows: list[EncodedRow]
    tensors: dict[str, Any]


def batch_inputs(
    rows: Sequence[EncodedRow],
    conversations: Conversations,
    target: EncodesRows,
    *,
    fake_image: bool,
) -> Iterator[BatchInputs]:
    """Encode rows as one batch; as batches of one where a processor encodes a row differently in
    company, so that every row runs on the tokens that its masks were made for.

    Args:
        rows: of one batch.
        conversations: that they come from.
        target: the target.
        fake_image: give text-only rows a fake picture.

    Raises:
        InputError: a row's tokens are not the same twice.
    """
    read = [conversations.read(row.sample) for row in rows]
    if fake_image:
        order = fakes_last([not pictures_of(r.messages) for r in read])
        rows, read = [rows[i] for i in order], [read[i] for i in order]
    try:
        together = _encode(rows, read, target, fake_image)
    except BadRowError:
        together = None
    if together is not None:
        yield together
        return
    for row, conversation in zip(rows, read, strict=True):
        why = "its tokens are not the same twice"
        try:
            alone = _encode([row], [conversation], target, fake_image)
        except BadRowError as error:
            alone, why = None, str(error)
        if alone is None:
            raise InputError(
                f"{conversations.path}: row {row.sample} could be encoded once but not again "
                f"({why}); the target's processor cannot be used for a capture"
            )
        yield alone


def _encode(
    rows: Sequence[EncodedRow],
    read: Sequence[ConversationRow],
    target: EncodesRows,
    fake_image: bool,
) -> BatchInputs | None:
    """None if a row is not encoded as it was before."""
    encoded = encode_batch(
        [r.messages for r in read],
        target.processor,
        [r.tools for r in read],
        loss_mask=False,
        fake_image=fake_image,
    )
    ids = encoded.tensors["input_ids"]
    for i, row in enumerate(rows):
        if len(row) > encoded.lengths[i] or ids_digest(ids[i, : len(row)]) != row.ids_digest:
            return None
    tensors = encoded.tensors
    if any(len(row) < length for row, length in zip(rows, encoded.lengths, strict=True)):
        keep = [_kept(row, encoded, i) for i, row in enumerate(rows)]
        tensors = keep_tokens(tensors, keep, target.tokenizer.pad_token_id)
    return BatchInputs(list(rows), tensors)


def _kept(row: EncodedRow, encoded: Encoded, i: int) -> torch.Tensor:
    """The row's own tokens, then those of its fake picture."""
    own = torch.arange(len(row))
    fake = torch.arange(encoded.lengths[i], encoded.used[i])
    return torch.cat([own, fake])
