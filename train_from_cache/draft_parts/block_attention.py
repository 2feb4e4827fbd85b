"""Attention of many short blocks over one sequence: what DFlash and DSpark train with.

A query of block b sees the sequence's keys before the block's anchor and every key of its own
block, in both directions, and nothing else.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

# Triton's matrix product takes no shorter heads.
_FLEX_MIN_HEAD_DIM = 16


@dataclass(frozen=True)
class BlockLayout:
    """Who sees whom. Keys are the sequence's L, then the blocks' own A * K.

    Attributes:
        anchor: int64 ``[B, A]``; block b sees sequence keys at positions below its anchor.
        keep: bool ``[B, A]``; a block that is not kept sees only itself.
        context_mask: bool ``[B, L]``; sequence keys that nobody sees where False.
        block_size: K.
    """

    anchor: Tensor
    keep: Tensor
    context_mask: Tensor
    block_size: int

    @cached_property
    def dense_mask(self) -> Tensor:
        """bool ``[B, 1, A*K, L + A*K]``: True where the query sees the key."""
        device = self.anchor.device
        position = torch.arange(self.context_mask.shape[1], device=device)
        context = position < self.anchor[..., None]
        context = context & self.keep[..., None] & self.context_mask[:, None]
        own = torch.eye(self.anchor.shape[1], dtype=torch.bool, device=device)
        own = own.repeat_interleave(self.block_size, 1).expand(len(context), -1, -1)
        seen = torch.cat([context, own], -1)
        return seen.repeat_interleave(self.block_size, 1).unsqueeze(1)

    @cached_property
    def flex_mask(self) -> BlockMask:
        """The same for flex attention."""
        length = self.context_mask.shape[1]
        anchor, keep, context_mask = self.anchor, self.keep, self.context_mask
        block_size = self.block_size

        def sees(batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            block = query // block_size
            # Clamped because both sides of the choice are evaluated for every key.
            visible = context_mask[batch, key.clamp(max=length - 1)]
            context = (key < anchor[batch, block]) & keep[batch, block] & visible
            return torch.where(key < length, context, (key - length) // block_size == block)

        blocks, rows = self.anchor.shape[1], self.anchor.shape[0]
        queries = blocks * block_size
        create: Callable[..., BlockMask] = create_block_mask
        if anchor.is_cuda:
            create = _compiled(create_block_mask)
        return create(sees, rows, None, queries, length + queries, device=str(anchor.device))


def block_attention(query: Tensor, key: Tensor, value: Tensor, layout: BlockLayout) -> Tensor:
    """Attend, on CUDA with flex attention and elsewhere with a dense mask.

    Args:
        query: ``[B, heads, A*K, D]``.
        key: ``[B, kv_heads, L + A*K, D]``; heads is a multiple of kv_heads.
        value: as ``key``.
        layout: who sees whom.

    Returns:
        ``[B, heads, A*K, D]``, scores scaled by ``1/sqrt(D)``.
    """
    if query.is_cuda and query.shape[-1] >= _FLEX_MIN_HEAD_DIM:
        return flex(query, key, value, layout)
    return dense(query, key, value, layout)


def dense(query: Tensor, key: Tensor, value: Tensor, layout: BlockLayout) -> Tensor:
    """``block_attention`` with a mask of queries x keys."""
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=layout.dense_mask, enable_gqa=True
    )


def flex(query: Tensor, key: Tensor, value: Tensor, layout: BlockLayout) -> Tensor:
    """``block_attention`` that skips unseen keys. On the CPU forward only, and slow."""
    attend: Callable[..., Tensor] = flex_attention
    if query.is_cuda:
        attend = _compiled(flex_attention)
    return attend(query, key, value, block_mask=layout.flex_mask, enable_gqa=True)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)
