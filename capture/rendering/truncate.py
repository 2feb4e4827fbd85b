"""Cutting the tail of a row that is longer than ``--max-length``."""

from collections.abc import Set
from typing import Any

import torch
from torch import Tensor

from dspark.capture.bad_row import BadRowError

TOO_LONG = "longer than --max-length"


def kept_length(
    ids: Tensor, image_mask: Tensor, loss_mask: Tensor, max_length: int, special_ids: Set[int]
) -> int:
    """How many tokens are left of a row cut at ``max_length``.

    Only text after the last picture is cut: a picture whose tokens are not all there cannot be fed.

    Args:
        ids: int64 ``[L]``, L > ``max_length``.
        image_mask: bool ``[L]``.
        loss_mask: bool ``[L]``.
        max_length: T.
        special_ids: those that may close a picture.

    Raises:
        BadRowError: a picture does not fit, or no supervised token is left.
    """
    pictures = image_mask.nonzero()
    if len(pictures):
        end = int(pictures[-1]) + 1
        while end < len(ids) and int(ids[end]) in special_ids:
            end += 1
        if end > max_length:
            raise BadRowError(
                TOO_LONG,
                f"{len(ids)} tokens, --max-length is {max_length}, and its last picture ends at "
                f"token {end}",
            )
    if not loss_mask[:max_length].any():
        raise BadRowError("no supervised token", f"left within --max-length {max_length}")
    return max_length


def keep_tokens(
    tensors: dict[str, Any], keep: list[Tensor], pad_token_id: int | None
) -> dict[str, Any]:
    """A batch with some tokens of each row, padded on the right; vision tensors as they are.

    Args:
        tensors: ``input_ids`` ``[B, L]`` and every other key; those of shape ``[B, L, …]`` or
            ``[R, B, L]`` (positions) count tokens.
        keep: for each row, the positions to keep, rising.
        pad_token_id: of ``input_ids``.
    """
    rows, length = tensors["input_ids"].shape
    longest = max(len(k) for k in keep)
    out = {}
    for key, value in tensors.items():
        axis = _token_axis(value, rows, length)
        if axis is None:
            out[key] = value
            continue
        pad = (pad_token_id or 0) if key == "input_ids" else 0
        shape = [*value.shape]
        shape[axis] = longest
        cut = torch.full(shape, pad, dtype=value.dtype)
        for i, positions in enumerate(keep):
            row = value.select(axis - 1, i).index_select(axis - 1, positions)
            cut.select(axis - 1, i).narrow(axis - 1, 0, len(positions)).copy_(row)
        out[key] = cut
    return out


def _token_axis(value: Any, rows: int, length: int) -> int | None:
    """Which axis counts tokens: the one after that of the batch."""
    if not isinstance(value, Tensor):
        return None
    if value.shape[:2] == (rows, length):
        return 1
    if value.ndim == 3 and value.shape[1:] == (rows, length) and not value.is_floating_point():
        return 2
    return None
