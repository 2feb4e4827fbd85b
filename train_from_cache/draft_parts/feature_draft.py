"""The form of EAGLE, MSD and ViSpec: one decoder layer that predicts the target's next hidden state
from its last one and the next token's embedding.

Of a row with embeddings E and post-norm hidden states g, slot t reads E[t+1] and g[t] and gives
d[t], which stands for g[t+1]; softmax(W_lm d[t]) is then the distribution of x[t+2]. The first slot
of a rollout reads the target's hidden state, every later one what the slot before it gave.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers import initialization as init
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RotaryEmbedding

from dspark.schemas.manifest import Manifest
from dspark.schemas.shift import shift_left
from dspark.train_from_cache.batch import Anchors, Batch, LossTerm
from dspark.train_from_cache.draft_parts.chain_attention import chain_attention
from dspark.train_from_cache.draft_parts.layers import (
    AttentionProjections,
    RMSNorm,
    at_least_float32,
    init_matrix,
    merge_heads,
    rotate,
    split_heads,
)
from dspark.train_from_cache.draft_parts.overrides import apply_overrides, at_least
from dspark.train_from_cache.draft_parts.packed_anchors import pack_anchors
from dspark.train_from_cache.draft_parts.ranking import list_mle
from dspark.train_from_cache.draft_parts.row_random import RowRandom
from dspark.train_from_cache.draft_parts.shared_weights import check_head, copy_embeddings
from dspark.train_from_cache.draft_parts.slot_losses import sum_over_slots
from dspark.train_from_cache.draft_parts.target_dims import check_dims, target_dims
from dspark.train_from_cache.drafts.base import Draft
from dspark.train_from_cache.target_head import TargetHead
from dspark.train_from_cache.teacher import Teacher


class FeatureConfig(LlamaConfig):
    """What the configs have in common: the target's dimensions with one layer.

    Attributes:
        attention_bias: whether queries, keys and values (not the output) have a bias.
        num_draft_tokens: K, steps of a rollout.
        feature_noise: amplitude of the noise on the input hidden states in training: uniform on
            ``feature_noise * 512 / T * [-0.5, 0.5)``, T being the row's length. 0 for none.
    """

    num_hidden_layers: int = 1
    num_draft_tokens: int = 5
    feature_noise: float = 0.2

    def to_dict(self) -> dict[str, Any]:
        """Entries as they stand in ``config.json``."""
        return {**super().to_dict(), "rope_theta": self.rope_parameters["rope_theta"]}


def feature_entries(
    arch: str, manifest: Manifest, own: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """All entries of a fresh config.

    Args:
        arch: name of the draft, for messages.
        manifest: of the cache.
        own: entries of this draft alone that may be set, with their defaults; those named
            ``…_weight`` must not be negative.
        overrides: what the user set.

    Raises:
        InputError: an override that this draft does not have or cannot take.
    """
    target, fresh = manifest.target, FeatureConfig()
    shared = {name: getattr(fresh, name) for name in ("num_draft_tokens", "feature_noise")}
    entries = apply_overrides(arch, {**shared, **target_dims(manifest), **own}, overrides)
    at_least(entries, {"num_draft_tokens": 1, "feature_noise": 0})
    at_least(entries, dict.fromkeys((name for name in own if name.endswith("_weight")), 0))
    check_dims(entries)
    return {
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "bos_token_id": None,
        "eos_token_id": target.eos_token_ids,
        "pad_token_id": target.pad_token_id,
        **entries,
    }


class FeatureAttention(AttentionProjections):
    """Projections of causal attention. Slots are ``[B, n, H]``."""

    def __init__(self, config: FeatureConfig) -> None:
        super().__init__(config, output_bias=False)

    def query(self, slots: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """``[B, heads, n, D]``."""
        return rotate(split_heads(self.q_proj(slots), self.head_dim), rotary)

    def key_value(self, slots: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """``[B, kv_heads, n, D]`` each."""
        value = split_heads(self.v_proj(slots), self.head_dim)
        return rotate(split_heads(self.k_proj(slots), self.head_dim), rotary), value


class FeatureLayer(nn.Module):
    """A Llama decoder layer without its first norm."""

    def __init__(self, config: FeatureConfig) -> None:
        super().__init__()
        self.self_attn = FeatureAttention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Qwen3MLP(config)

    def after_attention(self, slots: Tensor, attended: Tensor) -> Tensor:
        """The layer's output.

        Args:
            slots: its input, ``[B, n, H]``.
            attended: ``[B, heads, n, D]``.
        """
        slots = slots + self.self_attn.o_proj(merge_heads(attended))
        out: Tensor = slots + self.mlp(self.post_attention_layernorm(slots))
        return out


@dataclass(frozen=True)
class Slots:
    """What the layer reads of each row, in the row's order.

    Attributes:
        inputs: ``[B, n, H]``.
        position: int64 ``[B or 1, n]``, t of each slot.
        seen: bool ``[B, n]``, whether later slots attend to it.
    """

    inputs: Tensor
    position: Tensor
    seen: Tensor


@dataclass(frozen=True)
class Guess:
    """A draft on n slots beside the target.

    Attributes:
        hidden: ``[n, H]``, predicted.
        logits: ``[n, V]``, predicted.
        true_hidden: ``[n, H]``, the target's.
        target: ``[n, V]``, the target's probabilities.
    """

    hidden: Tensor
    logits: Tensor
    true_hidden: Tensor
    target: Tensor


def _smooth_l1(guess: Guess) -> Tensor:
    return F.smooth_l1_loss(guess.hidden, guess.true_hidden, reduction="none").mean(-1)


def _soft_ce(guess: Guess) -> Tensor:
    return -(guess.target * torch.log_softmax(guess.logits, -1)).sum(-1)


def _l1(guess: Guess) -> Tensor:
    return (torch.softmax(guess.logits, -1) - guess.target).abs().sum(-1)


def _list_mle(guess: Guess) -> Tensor:
    return list_mle(guess.logits, guess.target)


# Each gives ``[n]``.
_LOSSES: dict[str, Callable[[Guess], Tensor]] = {
    "smooth_l1": _smooth_l1,
    "soft_ce": _soft_ce,
    "l1": _l1,
    "list_mle": _list_mle,
}


class FeatureDraft(Draft):
    """A draft that predicts hidden states.

    The target's head is needed for the loss and for predictions but is no part of the checkpoint:
    call ``attach_head`` first. A subclass ends its own ``__init__`` with ``post_init`` and
    ``freeze``.
    """

    frozen = ("embed_tokens",)
    head_weight: Tensor | None
    head_bias: Tensor | None

    def __init__(self, config: FeatureConfig, *, fc_bias: bool = True) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.fc = nn.Linear(2 * hidden, hidden, bias=fc_bias)
        self.layers = nn.ModuleList([FeatureLayer(config)])
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.register_buffer("head_weight", None, persistent=False)
        self.register_buffer("head_bias", None, persistent=False)

    def _init_weights(self, module: nn.Module) -> None:
        if module is self.embed_tokens:
            init.zeros_(module.weight)
        elif isinstance(module, nn.Linear):
            init_matrix(module)
        else:
            super()._init_weights(module)

    def attach_head(self, head: TargetHead) -> None:
        check_head(self.config.vocab_size, self.config.hidden_size, head.weight)
        copy_embeddings(self.embed_tokens, head.embeddings)
        self.head_weight = head.weight.detach().to(self.fc.weight)
        self.head_bias = None if head.bias is None else head.bias.detach().to(self.fc.weight)

    @property
    def depth(self) -> int:
        return int(self.config.num_draft_tokens)

    @property
    def _layer(self) -> FeatureLayer:
        layer = self.layers[0]
        assert isinstance(layer, FeatureLayer)
        return layer

    def _every_slot(self, batch: Batch, inputs: Tensor) -> Slots:
        """One slot for each position, ``inputs`` being ``[B, L, H]``."""
        position = torch.arange(inputs.shape[1], device=inputs.device)[None]
        return Slots(inputs, position, batch["attention_mask"].bool())

    def _logits(self, hidden: Tensor) -> Tensor:
        assert self.head_weight is not None, "call attach_head first"
        return at_least_float32(F.linear(hidden, self.head_weight, self.head_bias))

    def _encode(self, slots: Slots) -> Tensor:
        """Predicted hidden states, ``[B, n, H]``."""
        inputs, layer = slots.inputs, self._layer
        length = inputs.shape[1]
        rotary = self.rotary_emb(inputs, slots.position)
        key, value = layer.self_attn.key_value(inputs, rotary)
        query = layer.self_attn.query(inputs, rotary)
        causal = torch.ones(length, length, dtype=torch.bool, device=inputs.device).tril()
        itself = torch.eye(length, dtype=torch.bool, device=inputs.device)
        # A masked slot sees itself, so that no row of scores is empty.
        seen = causal & slots.seen[:, None] | itself
        attended = F.scaled_dot_product_attention(
            query.to(value.dtype), key.to(value.dtype), value, seen[:, None], enable_gqa=True
        )
        return layer.after_attention(inputs, attended)

    def _input_hidden(self, batch: Batch, random: RowRandom) -> Tensor:
        """The target's hidden states as the draft reads them, ``[B, L, H]``: noisy in training."""
        hidden = batch["last_hidden_state"].to(self.dtype)
        if not (self.training and self.config.feature_noise):
            return hidden
        scale = self.config.feature_noise * 512 / batch["length"][:, None, None]
        noise = (random.uniform(*hidden.shape[1:]) - 0.5) * scale
        return hidden + noise.to(hidden.dtype)

    def _losses(
        self,
        batch: Batch,
        teacher: Teacher,
        passes: Sequence[Tensor],
        weights: Mapping[str, float],
    ) -> dict[str, LossTerm]:
        """The mean losses of the slots t whose token t+1 is supervised, against the target at t+1.
        The row's last slot has no such token.

        Args:
            batch: with ``loss_mask``.
            teacher: the target on it.
            passes: predicted hidden states, ``[B, L, H]`` each; the mean is over all of them.
            weights: the losses wanted, of ``smooth_l1`` (mean over H), ``soft_ce``, ``l1`` and
                ``list_mle``.
        """
        row, t = torch.nonzero(shift_left(batch["loss_mask"]), as_tuple=True)

        def losses(predicted: Tensor, row: Tensor, t: Tensor) -> Tensor:
            with torch.no_grad():
                target = torch.softmax(at_least_float32(teacher.logits(row, t + 1)), -1)
            wide = at_least_float32(predicted)
            true_hidden = teacher.hidden[row, t + 1].to(wide.dtype)
            guess = Guess(wide, self._logits(predicted), true_hidden, target)
            return torch.stack([_LOSSES[name](guess).sum() for name in weights])

        predicted = torch.cat([hidden[row, t] for hidden in passes])
        row, t = row.repeat(len(passes)), t.repeat(len(passes))
        sums = sum_over_slots(losses, (predicted, row, t), self.config.vocab_size)
        count = torch.tensor(float(len(row)), device=sums.device)
        return {
            name: LossTerm(total, count, weight)
            for total, (name, weight) in zip(sums, weights.items(), strict=True)
        }

    def _roll_out(
        self,
        batch: Batch,
        anchors: Anchors,
        slots: Slots,
        read: Callable[[tuple[Tensor, Tensor], Tensor], Tensor],
    ) -> Tensor:
        """What ``predict`` gives.

        Args:
            batch: with ``last_hidden_state``.
            anchors: n of them.
            slots: of the whole rows; a rollout attends to those before its own.
            read: the input ``[B, A, H]`` of a chain's next slot, from the token that it reads (an
                index for ``[B, L, …]``) and the hidden state before that, ``[B, A, H]``.
        """
        hidden = batch["last_hidden_state"].to(self.dtype)
        rows, length = hidden.shape[:2]
        packed = pack_anchors(anchors, rows)
        anchor = packed.position
        row = torch.arange(rows, device=anchor.device)[:, None]
        layer = self._layer

        rotary = self.rotary_emb(slots.inputs, slots.position)
        context = layer.self_attn.key_value(slots.inputs, rotary)
        # Slot a-1 is the chain's own first step, so the context ends before it.
        seen = (slots.position[:, None] < anchor[..., None] - 1) & slots.seen[:, None]

        # At the start of a row there is no hidden state yet.
        feature = hidden[row, (anchor - 1).clamp(min=0)] * (anchor > 0)[..., None]
        chain: list[tuple[Tensor, Tensor]] = []
        logits = []
        for step in range(self.depth):
            slot = read((row, (anchor + step).clamp(max=length - 1)), feature)
            rotary = self.rotary_emb(slot, anchor - 1 + step)
            chain.append(layer.self_attn.key_value(slot, rotary))
            query = layer.self_attn.query(slot, rotary)
            feature = layer.after_attention(slot, chain_attention(query, context, seen, chain))
            logits.append(self._logits(packed.unpack(feature)))
        return torch.stack(logits, 1)
