"""MSD: one decoder layer that predicts the target's next hidden state from its last one and the
next token's embedding; picture positions bypass the fusion of the two.

After "Speculative Decoding Reimagined for Multimodal Large Language Models" (arXiv 2505.14260). Of
a row with embeddings E and post-norm hidden states g, slot t reads

    u[t] = E[t+1]                       if token t+1 is a picture's
           W_fc [E[t+1]; g[t]] + b_fc   otherwise

and gives d[t], which stands for g[t+1]; softmax(W_lm d[t]) is then the distribution of x[t+2]. The
loss is the mean over slots t with a supervised token t+1 of

    1.0 SmoothL1(d[t], g[t+1]) + 0.1 CE(softmax z[t+1], W_lm d[t])

z being the target's logits. The row's last slot has no token t+1 and is never supervised.
"""

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
from dspark.train_from_cache.draft_parts.shared_weights import check_head, copy_embeddings
from dspark.train_from_cache.draft_parts.slot_losses import sum_over_slots
from dspark.train_from_cache.draft_parts.target_dims import check_dims, target_dims
from dspark.train_from_cache.drafts.base import Draft
from dspark.train_from_cache.target_head import TargetHead
from dspark.train_from_cache.teacher import Teacher


class MSDConfig(LlamaConfig):
    """Config of an MSD draft: the target's dimensions with one layer.

    Attributes:
        attention_bias: whether queries, keys and values (not the output) have a bias.
        num_draft_tokens: K, steps of a rollout.
        feature_noise: amplitude of the noise on the input hidden states in training: uniform on
            ``feature_noise * 512 / L * [-0.5, 0.5)``, L being the padded length. 0 for none.
        smooth_l1_weight: of the regression on the target's hidden state.
        soft_ce_weight: of the cross-entropy with the target's distribution.
    """

    num_hidden_layers: int = 1
    num_draft_tokens: int = 5
    feature_noise: float = 0.2
    smooth_l1_weight: float = 1.0
    soft_ce_weight: float = 0.1

    def to_dict(self) -> dict[str, Any]:
        """Entries as they stand in ``config.json``."""
        return {
            **super().to_dict(),
            "architectures": ["MSDModel"],
            "rope_theta": self.rope_parameters["rope_theta"],
        }


class MSDAttention(AttentionProjections):
    """Projections of causal attention. Slots are ``[B, n, H]``."""

    def __init__(self, config: MSDConfig) -> None:
        super().__init__(config, output_bias=False)

    def query(self, slots: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """``[B, heads, n, D]``."""
        return rotate(split_heads(self.q_proj(slots), self.head_dim), rotary)

    def key_value(self, slots: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """``[B, kv_heads, n, D]`` each."""
        value = split_heads(self.v_proj(slots), self.head_dim)
        return rotate(split_heads(self.k_proj(slots), self.head_dim), rotary), value


class MSDLayer(nn.Module):
    """A Llama decoder layer without its first norm."""

    def __init__(self, config: MSDConfig) -> None:
        super().__init__()
        self.self_attn = MSDAttention(config)
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


class MSDDraft(Draft):
    """An MSD draft.

    The target's head is needed for the loss and for predictions but is no part of the checkpoint:
    call ``attach_head`` first.
    """

    arch = "msd"
    config_class = MSDConfig
    frozen = ("embed_tokens",)
    head_weight: Tensor | None
    head_bias: Tensor | None

    # ── config ──

    @classmethod
    def config_from_cache(cls, manifest: Manifest, overrides: dict[str, Any]) -> MSDConfig:
        target = manifest.target
        bias = target.text.get("attention_bias")
        if bias is None:
            bias = target.text_model_type.startswith("qwen2")
        fresh = MSDConfig()
        names = ("num_draft_tokens", "feature_noise", "smooth_l1_weight", "soft_ce_weight")
        defaults = {name: getattr(fresh, name) for name in names}
        defaults |= {"attention_bias": bool(bias), **target_dims(manifest)}
        entries = apply_overrides(cls.arch, defaults, overrides)
        at_least(entries, {"num_draft_tokens": 1, "feature_noise": 0})
        at_least(entries, dict.fromkeys(("smooth_l1_weight", "soft_ce_weight"), 0))
        check_dims(entries)
        return MSDConfig(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            bos_token_id=None,
            eos_token_id=target.eos_token_ids,
            pad_token_id=target.pad_token_id,
            **entries,
        )

    # ── needed fields ──

    @classmethod
    def needed_fields(cls, config: MSDConfig) -> list[str]:
        return ["inputs_embeds", "last_hidden_state", "attention_mask", "loss_mask", "image_mask"]

    # ── module ──

    def __init__(self, config: MSDConfig) -> None:
        super().__init__(config)
        hidden = config.hidden_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.fc = nn.Linear(2 * hidden, hidden)
        self.layers = nn.ModuleList([MSDLayer(config)])
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.register_buffer("head_weight", None, persistent=False)
        self.register_buffer("head_bias", None, persistent=False)
        self.post_init()
        self.freeze()

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
    def _layer(self) -> MSDLayer:
        layer = self.layers[0]
        assert isinstance(layer, MSDLayer)
        return layer

    def _fuse(self, embedding: Tensor, hidden: Tensor, is_image: Tensor) -> Tensor:
        """A slot's input: a picture's embedding as it is, else the fusion with the hidden state."""
        fused = self.fc(torch.cat([embedding, hidden], -1))
        return torch.where(is_image[..., None], embedding, fused)

    def _inputs(self, batch: Batch, hidden: Tensor) -> Tensor:
        """The inputs of all slots, ``[B, L, H]``, from hidden states of that shape."""
        embedding = shift_left(batch["inputs_embeds"]).to(self.dtype)
        return self._fuse(embedding, hidden, shift_left(batch["image_mask"]).bool())

    def _logits(self, hidden: Tensor) -> Tensor:
        assert self.head_weight is not None, "call attach_head first"
        return at_least_float32(F.linear(hidden, self.head_weight, self.head_bias))

    # ── loss ──

    def forward(
        self, batch: Batch, teacher: Teacher, generator: torch.Generator
    ) -> dict[str, LossTerm]:
        hidden = batch["last_hidden_state"].to(self.dtype)
        if self.training and self.config.feature_noise:
            hidden = hidden + self._noise(hidden, generator)
        predicted = self._encode(batch, hidden)
        row, t = torch.nonzero(shift_left(batch["loss_mask"]), as_tuple=True)

        def losses(predicted: Tensor, row: Tensor, t: Tensor) -> Tensor:
            with torch.no_grad():
                target = torch.softmax(at_least_float32(teacher.logits(row, t + 1)), -1)
            wide = at_least_float32(predicted)
            feature = teacher.hidden[row, t + 1].to(wide.dtype)
            regression = F.smooth_l1_loss(wide, feature, reduction="none").mean(-1)
            soft_ce = -(target * torch.log_softmax(self._logits(predicted), -1)).sum(-1)
            return torch.stack([regression.sum(), soft_ce.sum()])

        sums = sum_over_slots(losses, (predicted[row, t], row, t), self.config.vocab_size)
        count = torch.tensor(float(len(row)), device=sums.device)
        return {
            "smooth_l1": LossTerm(sums[0], count, self.config.smooth_l1_weight),
            "soft_ce": LossTerm(sums[1], count, self.config.soft_ce_weight),
        }

    def _noise(self, hidden: Tensor, generator: torch.Generator) -> Tensor:
        scale = self.config.feature_noise * 512 / hidden.shape[1]
        if hidden.device.type != "cpu":
            seed = int(torch.randint(2**62, (), generator=generator))
            generator = torch.Generator(hidden.device).manual_seed(seed)
        shape, device = hidden.shape, hidden.device
        uniform = torch.rand(shape, generator=generator, device=device, dtype=torch.float32)
        return ((uniform - 0.5) * scale).to(hidden.dtype)

    def _encode(self, batch: Batch, hidden: Tensor) -> Tensor:
        """Predicted hidden states of all slots, ``[B, L, H]``."""
        slots = self._inputs(batch, hidden)
        length = slots.shape[1]
        rotary = self.rotary_emb(slots, torch.arange(length, device=slots.device)[None])
        layer = self._layer
        key, value = layer.self_attn.key_value(slots, rotary)
        query = layer.self_attn.query(slots, rotary)
        causal = torch.ones(length, length, dtype=torch.bool, device=slots.device).tril()
        itself = torch.eye(length, dtype=torch.bool, device=slots.device)
        # A masked slot sees itself, so that no row of scores is empty.
        seen = causal & batch["attention_mask"].bool()[:, None] | itself
        attended = F.scaled_dot_product_attention(
            query.to(value.dtype), key.to(value.dtype), value, seen[:, None], enable_gqa=True
        )
        encoded: Tensor = layer.after_attention(slots, attended)
        return encoded

    # ── prediction ──

    @torch.no_grad()
    def predict(self, batch: Batch, anchors: Anchors) -> Tensor:
        hidden = batch["last_hidden_state"].to(self.dtype)
        embeds = batch["inputs_embeds"].to(self.dtype)
        is_image = batch["image_mask"].bool()
        rows, length = is_image.shape
        packed = pack_anchors(anchors, rows)
        anchor = packed.position
        row = torch.arange(rows, device=anchor.device)[:, None]
        layer = self._layer

        slots = self._inputs(batch, hidden)
        position = torch.arange(length, device=slots.device)
        context = layer.self_attn.key_value(slots, self.rotary_emb(slots, position[None]))
        # Slot a-1 is the chain's own first step, so the context ends before it.
        seen = (position < anchor[..., None] - 1) & batch["attention_mask"].bool()[:, None]

        # At the start of a row there is no hidden state yet.
        feature = hidden[row, (anchor - 1).clamp(min=0)] * (anchor > 0)[..., None]
        chain: list[tuple[Tensor, Tensor]] = []
        logits = []
        for step in range(self.depth):
            token = (anchor + step).clamp(max=length - 1)
            slot = self._fuse(embeds[row, token], feature, is_image[row, token])
            rotary = self.rotary_emb(slot, anchor - 1 + step)
            chain.append(layer.self_attn.key_value(slot, rotary))
            query = layer.self_attn.query(slot, rotary)
            feature = layer.after_attention(slot, chain_attention(query, context, seen, chain))
            logits.append(self._logits(packed.unpack(feature)))
        return torch.stack(logits, 1)
