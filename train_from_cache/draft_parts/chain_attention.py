"""Attention of many chains over one sequence, each chain being rolled out one token at a time."""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.train_from_cache.draft_parts.layers import at_least_float32


def chain_attention(
    query: Tensor,
    context: tuple[Tensor, Tensor],
    seen: Tensor,
    chain: Sequence[tuple[Tensor, Tensor]],
) -> Tensor:
    """One step of every chain: it sees part of the sequence, and its own steps so far.

    Args:
        query: ``[B, heads, A, D]``, one query per chain.
        context: keys and values of the sequence, ``[B, kv_heads, L, D]`` each.
        seen: bool ``[B, A, L]``, which of them a chain sees.
        chain: keys and values of each step so far, this one included, ``[B, kv_heads, A, D]`` each.

    Returns:
        ``[B, heads, A, D]``, scores scaled by ``1/sqrt(D)``.
    """
    key, value = context
    own_key, own_value = (torch.stack(parts, 3) for parts in zip(*chain, strict=True))
    grouped = query.unflatten(1, (key.shape[1], -1)) * query.shape[-1] ** -0.5
    of_context = torch.einsum("bkgad,bkld->bkgal", grouped, key.to(query.dtype))
    of_context = of_context.masked_fill(~seen[:, None, None], -torch.inf)
    of_chain = torch.einsum("bkgad,bkasd->bkgas", grouped, own_key.to(query.dtype))
    scores = at_least_float32(torch.cat([of_context, of_chain], -1))
    weights = torch.softmax(scores, -1).to(value.dtype)
    length = value.shape[2]
    out = torch.einsum("bkgal,bkld->bkgad", weights[..., :length], value)
    out = out + torch.einsum("bkgas,bkasd->bkgad", weights[..., length:], own_value)
    return out.flatten(1, 2)
