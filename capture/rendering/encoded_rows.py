"""The rows of a shard, rendered and tokenised one by one: which can be captured, which not."""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dspark.capture.bad_row import BadRowError, stop_if_asked
from dspark.capture.conversations import Conversations
from dspark.capture.rendering.encode import encode_batch
from dspark.capture.rendering.truncate import TOO_LONG, kept_length
from dspark.capture.settings import RowOptions
from dspark.capture.targets.processor import EncodesRows
from dspark.schemas.digest import field_digest


@dataclass(frozen=True, slots=True)
class EncodedRow:
    """A row that can be captured, cut to ``--max-length`` if it was longer and is to be truncated.

    A capture keeps one for each row of a shard: a few hundred bytes, whatever the row's length.

    Attributes:
        sample: dataset row.
        id: the dataset's own id.
        length: L, its tokens.
        ids_digest: ``field_digest`` of its ``input_ids`` as they are stored (int32), by which its
            tokens are known again.
        image_tokens: positions filled by pictures.
        loss_tokens: supervised positions.
        loss_borders: int32, little-endian: where each run of supervised tokens starts and ends.
    """

    sample: int
    id: str
    length: int
    ids_digest: int
    image_tokens: int
    loss_tokens: int
    loss_borders: bytes

    @classmethod
    def of(
        cls, sample: int, row_id: str, ids: Tensor, loss_mask: Tensor, image_mask: Tensor
    ) -> "EncodedRow":
        """Args:
        sample: dataset row.
        row_id: the dataset's own id.
        ids: int64 ``[L]``.
        loss_mask: bool ``[L]``.
        image_mask: bool ``[L]``.
        """
        padded = np.pad(loss_mask.numpy().view(np.int8), 1)
        return cls(
            sample=sample,
            id=row_id,
            length=len(ids),
            ids_digest=ids_digest(ids),
            image_tokens=int(image_mask.sum()),
            loss_tokens=int(loss_mask.sum()),
            loss_borders=np.flatnonzero(np.diff(padded)).astype("<i4").tobytes(),
        )

    def __len__(self) -> int:
        return self.length

    def loss_mask(self) -> Tensor:
        """uint8 ``[L]``: 1 where the assistant wrote the token."""
        changes = np.zeros(self.length + 1, np.uint8)
        changes[np.frombuffer(self.loss_borders, "<i4")] = 1
        return torch.from_numpy(np.bitwise_xor.accumulate(changes)[:-1])


def ids_digest(ids: Tensor) -> int:
    """The digest that an index has of ``input_ids`` ``[L]``, whatever their integer type here."""
    return field_digest(ids.int().contiguous().numpy().view(np.uint8).data)


@dataclass(frozen=True, slots=True)
class SkippedRow:
    """A row that cannot be captured, and why."""

    sample: int
    id: str
    reason: str


def encode_row(
    sample: int,
    conversations: Conversations,
    target: EncodesRows,
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
    target: EncodesRows,
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
    kept = slice(length)
    return EncodedRow.of(sample, row_id, ids[kept], loss_mask[kept], image_mask[kept])


def _special_ids(target: EncodesRows) -> set[int]:
    added = target.tokenizer.added_tokens_decoder
    return {int(i) for i, token in added.items() if token.special}
