"""Where the blocks of DFlash and DSpark begin in training."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark.train_from_cache.draft_parts.row_random import RowRandom


def draw_blocks(loss_mask: Tensor, count: int, random: RowRandom) -> tuple[Tensor, Tensor]:
    """Draw up to ``count`` anchors of each row whose own and whose next token are supervised.

    Blocks may run over the row's end: what lies beyond is not supervised.

    Args:
        loss_mask: bool ``[B, L]``, unshifted.
        count: A.
        random: of the rows.

    Returns:
        As ``draw_anchors``.
    """
    candidates = F.pad(loss_mask[:, :-1] & loss_mask[:, 1:], (0, 1))
    # Accelerators want one shape for all steps, the CPU the least work.
    return draw_anchors(candidates, count, random, trim=loss_mask.device.type == "cpu")


def draw_anchors(
    candidates: Tensor, count: int, random: RowRandom, *, trim: bool
) -> tuple[Tensor, Tensor]:
    """Draw up to ``count`` candidates of each row, uniformly, without replacement.

    Args:
        candidates: bool ``[B, L]``.
        count: A.
        random: of the rows.
        trim: make A the most anchors that a row of this batch has, but at least 1. Otherwise A is
            ``count``, the same from step to step.

    Returns:
        int64 ``[B, A]`` positions, ascending, then zeros; bool ``[B, A]``, False at those zeros.
    """
    length = candidates.shape[1]
    order = random.uniform(length).masked_fill(~candidates, 2.0)
    width = min(count, length)
    if trim:
        width = min(width, max(int(candidates.sum(1).max()), 1))
        count = width
    # Stable, so that the choice between equal numbers does not depend on the padding either.
    drawn, position = (x[:, :width] for x in order.sort(stable=True))
    position = position.masked_fill(drawn > 1.0, length).sort().values
    position = F.pad(position, (0, count - width), value=length)
    keep = position < length
    return position.masked_fill(~keep, 0), keep


def supervised_prefix(loss_mask: Tensor, anchor: Tensor, keep: Tensor, block_size: int) -> Tensor:
    """Which draft tokens of each block are supervised: those before the first that is not.

    Args:
        loss_mask: bool ``[B, L]``, unshifted.
        anchor: int64 ``[B, A]``.
        keep: bool ``[B, A]``.
        block_size: K.

    Returns:
        bool ``[B, A, K]``; entry k stands for ``x[a + 1 + k]``.
    """
    length = loss_mask.shape[1]
    target = anchor[..., None] + 1 + torch.arange(block_size, device=anchor.device)
    supervised = take(loss_mask, target) & (target < length) & keep[..., None]
    return supervised.cumprod(-1).bool()


def take(x: Tensor, position: Tensor) -> Tensor:
    """``x[b, position[b, …]]``; positions beyond the row give its last entry.

    Args:
        x: ``[B, L]``.
        position: int64 ``[B, …]``, not negative.

    Returns:
        As ``position`` in shape, as ``x`` in type.
    """
    flat = position.clamp(max=x.shape[1] - 1).flatten(1)
    return x.gather(1, flat).view(position.shape)
