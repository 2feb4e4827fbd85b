"""A loss on the order in which a draft ranks the target's likeliest tokens."""

import torch
from torch import Tensor

RANKED = 10


def list_mle(logits: Tensor, target: Tensor) -> Tensor:
    """ListMLE over the ``RANKED`` likeliest tokens of the target.

    The negative log-likelihood, under Plackett and Luce's model of rankings, that the draft's
    logits s order these tokens v_1, v_2, … as the target does:

        Σ_i (log Σ_{j>=i} exp s[v_j] - s[v_i])

    Tokens to which the target gives no probability at all have no order and are left out.

    Args:
        logits: ``[n, V]``, the draft's.
        target: ``[n, V]``, the target's probabilities.

    Returns:
        ``[n]``.
    """
    likeliest = target.topk(min(RANKED, target.shape[-1]), -1)
    impossible = likeliest.values == 0
    scores = logits.gather(-1, likeliest.indices)
    scores = scores.masked_fill(impossible, torch.finfo(scores.dtype).min)
    tails = scores.flip(-1).logcumsumexp(-1).flip(-1)
    return (tails - scores).masked_fill(impossible, 0.0).sum(-1)
