"""Losses over the vocabulary without holding the logits of all slots at once."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# 0.5 GiB of float32 for each tensor of logits' shape.
MAX_LOGITS = 2**27


def sum_over_slots(
    losses: Callable[..., Tensor], slots: Sequence[Tensor], vocab_size: int
) -> Tensor:
    """``losses(*slots)``, in parts where the logits would be large.

    Parts are recomputed in the backward pass, so that memory does not grow with the slots.

    Args:
        losses: from tensors such as ``slots`` to sums over their slots, ``[terms]``. Called once
            with no slots if there are none, which keeps every parameter in the graph.
        slots: ``[n, …]`` each.
        vocab_size: V.
    """
    step = max(1, MAX_LOGITS // vocab_size)
    if slots[0].shape[0] <= step:
        return losses(*slots)
    parts = zip(*(x.split(step) for x in slots), strict=True)
    return torch.stack([checkpoint(losses, *part, use_reentrant=False) for part in parts]).sum(0)
