"""Anchors in any order, laid out row by row of the batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.train_from_cache.batch import Anchors


@dataclass(frozen=True)
class PackedAnchors:
    """Anchors as a rectangle: row b of the batch has its anchors first, then padding.

    Attributes:
        position: int64 ``[B, A]``, A being the most anchors of a row (at least 1); 0 where padding.
        keep: bool ``[B, A]``, False where padding.
        row: int64 ``[n]``, first index of each anchor in the rectangle.
        column: int64 ``[n]``, second index.
    """

    position: Tensor
    keep: Tensor
    row: Tensor
    column: Tensor

    def unpack(self, x: Tensor) -> Tensor:
        """``[B, A, …]`` to ``[n, …]``, in the order the anchors came in."""
        return x[self.row, self.column]


def pack_anchors(anchors: Anchors, rows: int) -> PackedAnchors:
    """Lay out anchors for a batch of ``rows`` rows."""
    row = anchors.row
    order = torch.argsort(row, stable=True)
    counts = torch.bincount(row, minlength=rows)
    first = counts.cumsum(0) - counts
    column = torch.empty_like(row)
    column[order] = torch.arange(len(row), device=row.device) - first[row[order]]
    width = max(int(counts.max()), 1)
    position = row.new_zeros(rows, width)
    position[row, column] = anchors.position
    keep = torch.zeros(rows, width, dtype=torch.bool, device=row.device)
    keep[row, column] = True
    return PackedAnchors(position, keep, row, column)
