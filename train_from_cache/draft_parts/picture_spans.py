"""Runs of picture tokens."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class PictureSpans:
    """The S runs of picture tokens of a batch, row by row, from left to right.

    Attributes:
        row: int64 ``[S]``.
        first: int64 ``[S]``, position of a run's first token.
        last: int64 ``[S]``, position of its last token.
        before: int64 ``[B, L]``, 1 + the index of the row's last run that ended before a position,
            0 where there is none.
    """

    row: Tensor
    first: Tensor
    last: Tensor
    before: Tensor


def picture_spans(is_picture: Tensor) -> PictureSpans:
    """Find them in a mask ``[B, L]`` (bool)."""
    padded = F.pad(is_picture, (1, 1))
    row, first = torch.nonzero(is_picture & ~padded[:, :-2], as_tuple=True)
    ends = is_picture & ~padded[:, 2:]
    last = torch.nonzero(ends, as_tuple=True)[1]
    ended = ends.cumsum(1) - ends.long()
    in_rows_above = ends.sum(1).cumsum(0) - ends.sum(1)
    before = torch.where(ended > 0, in_rows_above[:, None] + ended, 0)
    return PictureSpans(row, first, last, before)
