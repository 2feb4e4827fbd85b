"""What the drafts and the trainer hand each other."""

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

Batch: TypeAlias = dict[str, Tensor]
"""Stored fields by name, ``[B, L, …]`` (``[B, 3, L]`` for mRoPE positions), with zeros at all
positions beyond a row's length; ``length`` and ``sample`` (dataset row) int64 ``[B]``. Float fields
have the cache's type, or bfloat16 where that is fp8 (see ``decode``). L is T, the most tokens that
a row of the cache may have, or the longest row of the batch where batches are trimmed; their
tensors are views with gaps between the rows."""


@dataclass(frozen=True)
class LossTerm:
    """One term of a draft's loss, not yet divided, so that all ranks can divide by the same number.

    The trainer's loss is the sum over terms of ``weight * numerator / (denominator of all ranks)``.

    Attributes:
        numerator: scalar with gradient, the weighted sum over this rank's positions.
        denominator: scalar without gradient, the sum of the positions' weights on this rank.
        weight: of this term in the loss.
    """

    numerator: Tensor
    denominator: Tensor
    weight: float


@dataclass(frozen=True)
class Anchors:
    """Where drafting starts: the last verified token, whose features are not known yet.

    Attributes:
        row: int64 ``[n]``, row of the batch.
        position: int64 ``[n]``, position ``a`` of the anchor token ``x[a]``. Draft token k (from 0)
            stands for ``x[a + 1 + k]``.
    """

    row: Tensor
    position: Tensor

    def __len__(self) -> int:
        return self.row.shape[0]


def supervised_anchors(loss_mask: Tensor) -> Anchors:
    """All anchors of a batch, in order: ``a`` and ``a + 1`` are both supervised.

    Args:
        loss_mask: ``[B, L]``, unshifted.
    """
    mask = loss_mask.bool()
    row, position = torch.nonzero(mask[:, :-1] & mask[:, 1:], as_tuple=True)
    return Anchors(row, position)
