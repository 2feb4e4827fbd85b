"""What DFlash and DSpark drafts share: blocks of one known token and masks, encoded in one pass
over the target's features.

After "DFlash: Block Diffusion for Flash Speculative Decoding" (arXiv 2602.06036): the context is
c = RMSNorm(W_fc [h^1; …; h^n]) of the target's layers h, and in every Qwen3 layer the block's
queries attend to keys and values of [c; block].
"""

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RotaryEmbedding

from dspark.schemas.errors import InputError
from dspark.schemas.layers import hidden_state_key
from dspark.schemas.manifest import Manifest
from dspark.train_from_cache.batch import Batch
from dspark.train_from_cache.draft_parts.block_anchors import take
from dspark.train_from_cache.draft_parts.block_attention import BlockLayout, block_attention
from dspark.train_from_cache.draft_parts.layers import (
    AttentionProjections,
    RMSNorm,
    merge_heads,
    rotate,
    split_heads,
)
from dspark.train_from_cache.draft_parts.mask_token import choose_mask_token
from dspark.train_from_cache.draft_parts.overrides import apply_overrides, at_least
from dspark.train_from_cache.draft_parts.target_dims import check_dims, target_dims
from dspark.train_from_cache.drafts.base import Draft


def block_entries(
    arch: str, manifest: Manifest, defaults: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """Config entries of a fresh draft that encodes blocks.

    Args:
        arch: name of the draft, for messages.
        manifest: of the cache.
        defaults: entries that may be set beside the dimensions, the draft's layers and its mask
            token; ``block_size``, ``num_anchors`` and ``target_layer_ids`` are among them.
        overrides: what the user set.

    Raises:
        InputError: an override that there is not, or that does not fit the target.
    """
    target = manifest.target
    defaults = {**defaults, "num_hidden_layers": 5, "mask_token_id": -1, **target_dims(manifest)}
    entries = apply_overrides(arch, defaults, overrides)
    at_least(entries, dict.fromkeys(("block_size", "num_anchors", "num_hidden_layers"), 1))
    check_dims(entries)
    _check_layers(entries["target_layer_ids"], target.num_layers)
    if "mask_token_id" not in overrides:
        entries["mask_token_id"] = choose_mask_token(target)
    elif not 0 <= entries["mask_token_id"] < target.vocab_size:
        raise InputError(
            f"-c mask_token_id={entries['mask_token_id']}: must be an id of the target's "
            f"vocabulary, 0 to {target.vocab_size - 1}"
        )
    return {
        **entries,
        "num_target_layers": target.num_layers,
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "eos_token_id": target.eos_token_ids,
        "pad_token_id": target.pad_token_id,
    }


def block_fields(config: Qwen3Config) -> list[str]:
    """Stored fields that a draft of blocks reads."""
    layers = config.target_layer_ids or []
    return ["input_ids", "attention_mask", "loss_mask", *map(hidden_state_key, layers)]


def _check_layers(layers: list[int], num_layers: int) -> None:
    last = num_layers - 2
    if not layers or not all(-1 <= k <= last for k in layers):
        raise InputError(
            f"-c target_layer_ids={layers}: the target has {num_layers} decoder layers; name some "
            f"of -1 (what layer 0 receives) to {last}"
        )


class ContextAttention(AttentionProjections):
    """Queries from the blocks; keys and values from the target's features and the blocks."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config, output_bias=config.attention_bias)
        self.q_norm = RMSNorm(self.head_dim, config.rms_norm_eps)
        self.k_norm = RMSNorm(self.head_dim, config.rms_norm_eps)

    def forward(
        self, blocks: Tensor, context: Tensor, rotary: tuple[Tensor, Tensor], layout: BlockLayout
    ) -> Tensor:
        """
        Args:
            blocks: ``[B, A*K, H]``.
            context: ``[B, L, H]``.
            rotary: cosines and sines of the keys, ``[B, L + A*K, D]`` each.
            layout: who sees whom.

        Returns:
            ``[B, A*K, H]``.
        """
        seen = torch.cat([context, blocks], 1)
        cos, sin = rotary
        start = context.shape[1]
        query = self.q_norm(split_heads(self.q_proj(blocks), self.head_dim))
        key = self.k_norm(split_heads(self.k_proj(seen), self.head_dim))
        value = split_heads(self.v_proj(seen), self.head_dim)
        query = rotate(query, (cos[:, start:], sin[:, start:])).to(value.dtype)
        key = rotate(key, rotary).to(value.dtype)
        out: Tensor = self.o_proj(merge_heads(block_attention(query, key, value, layout)))
        return out


class BlockLayer(nn.Module):
    """A Qwen3 decoder layer whose attention also sees the target's features, which it does not
    normalise again."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = ContextAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Qwen3MLP(config)

    def forward(
        self, blocks: Tensor, context: Tensor, rotary: tuple[Tensor, Tensor], layout: BlockLayout
    ) -> Tensor:
        """As ``ContextAttention.forward``."""
        blocks = blocks + self.self_attn(self.input_layernorm(blocks), context, rotary, layout)
        out: Tensor = blocks + self.mlp(self.post_attention_layernorm(blocks))
        return out


class BlockDraft(Draft):
    """A draft that encodes blocks.

    Its config has, beside the Qwen3 dimensions, ``block_size``, ``mask_token_id`` and
    ``target_layer_ids``.
    """

    @property
    @abstractmethod
    def embeddings(self) -> Tensor:
        """The target's embedding table, ``[rows, H]``."""

    def __init__(self, config: Qwen3Config) -> None:
        if set(config.layer_types) != {"full_attention"}:
            raise InputError(f"layer_types {config.layer_types}: only full_attention is supported")
        super().__init__(config)
        hidden = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = RMSNorm(hidden, config.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(hidden, config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)

    def encode(self, batch: Batch, anchor: Tensor, keep: Tensor) -> Tensor:
        """Hidden states of blocks ``[x[a], MASK, …]``, after the final norm.

        Args:
            batch: ``input_ids``, ``attention_mask`` and the target's layers.
            anchor: int64 ``[B, A]``.
            keep: bool ``[B, A]``; blocks that are not kept give numbers without meaning.

        Returns:
            ``[B, A, K, H]``.
        """
        size, table = self.config.block_size, self.embeddings
        layers = [batch[hidden_state_key(k)] for k in self.config.target_layer_ids]
        context = self.hidden_norm(self.fc(torch.cat(layers, -1).to(self.dtype)))
        known = take(batch["input_ids"], anchor).long().clamp(max=len(table) - 1)
        ids = known[..., None].repeat(1, 1, size)
        ids[..., 1:] = self.config.mask_token_id
        blocks = F.embedding(ids, table).flatten(1, 2)

        rows, length = batch["input_ids"].shape
        in_context = torch.arange(length, device=anchor.device).expand(rows, -1)
        in_block = anchor[..., None] + torch.arange(size, device=anchor.device)
        rotary = self.rotary_emb(blocks, torch.cat([in_context, in_block.flatten(1)], 1))
        layout = BlockLayout(anchor, keep, batch["attention_mask"].bool(), size)
        for layer in self.layers:
            blocks = layer(blocks, context, rotary, layout)
        hidden: Tensor = self.norm(blocks).unflatten(1, (-1, size))
        return hidden
