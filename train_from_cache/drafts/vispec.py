"""ViSpec: EAGLE for vision-language targets. Pictures are compressed to a few vectors, and every
word after a picture is told of it.

After "ViSpec: Accelerating Vision-Language Models with Vision-Aware Speculative Decoding"
(arXiv 2509.15235) and its published code. It is trained in two stages.

Stage 1 is EAGLE on a row's embeddings E and post-norm hidden states g: slot t reads

    u[t] = W_fc [E[t+1]; g[t]] + b_fc

and gives d[t], which stands for g[t+1]. The loss is, z being the target's logits,

    1.0 SmoothL1(d[t], g[t+1]) + 0.1 CE(softmax z[t+1], W_lm d[t]) + 0.01 ListMLE

Stage 2 adds two modules. The slots whose next token is a picture's come in runs; over the
embeddings of a run, ``imadpt`` lets Q learned queries attend, which gives v_1 … v_Q. The first Q-1
are u of the run's last Q-1 slots; its other slots are left out of the sequence and give zeros. The
last one, v, goes into the words that follow, until another run ends (v = 0 before the first run):

    u[t] = W_fc [E[t+1]; W_img [g[t]; v] + b_img] + b_fc

W_img starts as [I | 0]: at first, words are read as in stage 1. The draft runs over the sequence,
and then ``mtp_steps`` times again with its own d[t-1] in place of g[t] for t > 0. The loss is the
mean over all these passes of

    10 ‖softmax(W_lm d[t]) - softmax z[t+1]‖₁ + 0.1 ListMLE

Means are over slots t with a supervised token t+1; ListMLE ranks the target's 10 likeliest tokens.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init

from dspark.schemas.errors import InputError
from dspark.schemas.manifest import Manifest
from dspark.schemas.shift import shift_left
from dspark.train_from_cache.batch import Anchors, Batch, LossTerm
from dspark.train_from_cache.draft_parts.feature_draft import (
    FeatureConfig,
    FeatureDraft,
    Slots,
    feature_entries,
)
from dspark.train_from_cache.draft_parts.layers import merge_heads, split_heads
from dspark.train_from_cache.draft_parts.overrides import at_least
from dspark.train_from_cache.draft_parts.picture_spans import picture_spans
from dspark.train_from_cache.draft_parts.row_random import RowRandom
from dspark.train_from_cache.teacher import Teacher


class ViSpecConfig(FeatureConfig):
    """Config of a ViSpec draft. As in the published ones, queries, keys and values have biases, and
    there are as many key heads as query heads, whatever the target has.

    Attributes:
        stage: 1 or 2.
        num_query_tokens: Q, at least 2.
        mtp_steps: passes of stage 2 beside the first.
        smooth_l1_weight: stage 1, of the regression on the target's hidden state.
        soft_ce_weight: stage 1, of the cross-entropy with the target's distribution.
        text_list_mle_weight: stage 1, of ListMLE.
        l1_weight: stage 2, of the distance to the target's distribution.
        list_mle_weight: stage 2, of ListMLE.
    """

    attention_bias: bool = True
    stage: int = 2
    num_query_tokens: int = 2
    mtp_steps: int = 1
    smooth_l1_weight: float = 1.0
    soft_ce_weight: float = 0.1
    text_list_mle_weight: float = 0.01
    l1_weight: float = 10.0
    list_mle_weight: float = 0.1

    def to_dict(self) -> dict[str, Any]:
        """Entries as they stand in ``config.json``."""
        return {**super().to_dict(), "architectures": ["ViSpecModel"]}


class ImageAdaptor(nn.Module):
    """Learned queries that attend over the embeddings of a picture."""

    def __init__(self, config: ViSpecConfig) -> None:
        super().__init__()
        hidden, bias = config.hidden_size, config.attention_bias
        heads, self.head_dim = config.num_attention_heads, config.head_dim
        self.q = nn.Parameter(torch.empty(config.num_query_tokens, heads, self.head_dim))
        self.k_proj = nn.Linear(hidden, heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, hidden, bias=False)

    def forward(self, embedding: Tensor, real: Tensor) -> Tensor:
        """Compress S pictures.

        Args:
            embedding: ``[S, P, H]``.
            real: bool ``[S, P]``, False where padding.

        Returns:
            ``[S, Q, H]``.
        """
        key = split_heads(self.k_proj(embedding), self.head_dim)
        value = split_heads(self.v_proj(embedding), self.head_dim)
        query = self.q.transpose(0, 1).to(key.dtype).expand(len(key), -1, -1, -1)
        attended = F.scaled_dot_product_attention(query, key, value, real[:, None, None])
        compressed: Tensor = self.o_proj(merge_heads(attended))
        return compressed


@dataclass(frozen=True)
class Vision:
    """What the pictures of a batch give to its slots.

    Attributes:
        global_feature: ``[B, L, H]``, v of the last picture that ended before a slot, else 0.
        is_picture: bool ``[B, L]``, slots whose next token is a picture's.
        is_compressed: bool ``[B, L]``, those of them that stay in the sequence.
        compressed: ``[B, L, H]``, their inputs, and 0 elsewhere.
    """

    global_feature: Tensor
    is_picture: Tensor
    is_compressed: Tensor
    compressed: Tensor


class ViSpecDraft(FeatureDraft):
    """A ViSpec draft. Tensor names are those of the published code."""

    arch = "vispec"
    config_class = ViSpecConfig
    added = ("imadpt", "img_fc")

    # ── config ──

    @classmethod
    def config_from_cache(cls, manifest: Manifest, overrides: dict[str, Any]) -> ViSpecConfig:
        fresh = ViSpecConfig()
        names = (
            *("attention_bias", "stage", "num_query_tokens", "mtp_steps"),
            *("smooth_l1_weight", "soft_ce_weight", "text_list_mle_weight"),
            *("l1_weight", "list_mle_weight"),
        )
        own = {name: getattr(fresh, name) for name in names}
        entries = feature_entries(cls.arch, manifest, own, overrides)
        at_least(entries, {"stage": 1, "num_query_tokens": 2, "mtp_steps": 0})
        if entries["stage"] > 2:
            raise InputError(f"-c stage={entries['stage']}: must be 1 or 2")
        if "num_key_value_heads" not in overrides:
            entries["num_key_value_heads"] = entries["num_attention_heads"]
        return ViSpecConfig(**entries)

    # ── needed fields ──

    @classmethod
    def needed_fields(cls, config: ViSpecConfig) -> list[str]:
        fields = ["inputs_embeds", "last_hidden_state", "attention_mask", "loss_mask"]
        return fields if config.stage == 1 else [*fields, "image_mask"]

    # ── module ──

    def __init__(self, config: ViSpecConfig) -> None:
        super().__init__(config)
        if config.stage == 2:
            self.imadpt = ImageAdaptor(config)
            self.img_fc = nn.Linear(2 * config.hidden_size, config.hidden_size)
        self.post_init()
        self.freeze()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, ImageAdaptor):
            init.normal_(module.q, std=module.head_dim**-0.5)
        elif self.config.stage == 2 and module is self.img_fc:
            init.eye_(module.weight)
            init.zeros_(module.bias)
        else:
            super()._init_weights(module)

    def _vision(self, batch: Batch) -> Vision:
        embedding = shift_left(batch["inputs_embeds"]).to(self.dtype)
        is_picture = shift_left(batch["image_mask"]).bool()
        spans = picture_spans(is_picture)
        row, first, last = spans.row, spans.first, spans.last
        if not len(row):
            # Compress something that no slot refers to: the adaptor stays in the graph.
            row = first = last = row.new_zeros(1)
        inside = first[:, None] + torch.arange(int((last - first).max()) + 1, device=row.device)
        real = inside <= last[:, None]
        of_span = embedding[row[:, None], inside.clamp(max=embedding.shape[1] - 1)]
        vectors = self.imadpt(of_span, real)

        features = F.pad(vectors[:, -1], (0, 0, 1, 0))
        # A run shorter than Q-1 takes the last vectors.
        kept = vectors.shape[1] - 1
        slot = last[:, None] + 1 - kept + torch.arange(kept, device=row.device)
        placed = (slot >= first[:, None]) & is_picture[row[:, None], slot.clamp(min=0)]
        at = row[:, None].expand_as(slot)[placed], slot[placed]
        compressed = vectors.new_zeros(embedding.shape).index_put(at, vectors[:, :-1][placed])
        is_compressed = torch.zeros_like(is_picture)
        is_compressed[at] = True
        return Vision(features[spans.before], is_picture, is_compressed, compressed)

    def _fuse(self, embedding: Tensor, hidden: Tensor, global_feature: Tensor | None) -> Tensor:
        """A word's input; without a global feature, that of stage 1."""
        if global_feature is not None:
            hidden = self.img_fc(torch.cat([hidden, global_feature], -1))
        fused: Tensor = self.fc(torch.cat([embedding, hidden], -1))
        return fused

    def _text_slots(self, batch: Batch, hidden: Tensor) -> Slots:
        """The slots of stage 1."""
        embedding = shift_left(batch["inputs_embeds"]).to(self.dtype)
        return self._every_slot(batch, self._fuse(embedding, hidden, None))

    def _slots(self, batch: Batch, hidden: Tensor, vision: Vision) -> tuple[Slots, Tensor]:
        """The slots of stage 2: words and compressed pictures, then padding; and which are real,
        bool ``[B, n]``."""
        length = hidden.shape[1]
        inside = torch.arange(length, device=hidden.device) < batch["length"][:, None]
        stays = inside & ~vision.is_picture | vision.is_compressed
        count = stays.sum(1, keepdim=True)
        position = torch.argsort((~stays).byte(), dim=1, stable=True)[:, : int(count.max())]
        real = torch.arange(position.shape[1], device=hidden.device) < count

        def pick(x: Tensor) -> Tensor:
            return x.gather(1, position[..., None].expand(-1, -1, x.shape[-1]))

        embedding = shift_left(batch["inputs_embeds"]).to(self.dtype)
        fused = self._fuse(pick(embedding), pick(hidden), pick(vision.global_feature))
        compressed = vision.is_compressed.gather(1, position)[..., None]
        inputs = torch.where(compressed, pick(vision.compressed), fused)
        seen = batch["attention_mask"].bool().gather(1, position) & real
        return Slots(inputs, position, seen), real

    def _predicted(self, batch: Batch, hidden: Tensor, vision: Vision) -> Tensor:
        """Predicted hidden states ``[B, L, H]`` of stage 2."""
        slots, real = self._slots(batch, hidden, vision)
        encoded = self._encode(slots) * real[..., None]
        index = slots.position[..., None].expand_as(encoded)
        return torch.zeros_like(hidden, dtype=encoded.dtype).scatter(1, index, encoded)

    # ── loss ──

    def forward(self, batch: Batch, teacher: Teacher, random: RowRandom) -> dict[str, LossTerm]:
        config, hidden = self.config, self._input_hidden(batch, random)
        if config.stage == 1:
            weights = {
                "smooth_l1": config.smooth_l1_weight,
                "soft_ce": config.soft_ce_weight,
                "list_mle": config.text_list_mle_weight,
            }
            predicted = self._encode(self._text_slots(batch, hidden))
            return self._losses(batch, teacher, [predicted], weights)
        vision = self._vision(batch)
        passes = [self._predicted(batch, hidden, vision)]
        for _ in range(config.mtp_steps):
            own = torch.cat([hidden[:, :1], passes[-1][:, :-1]], 1)
            passes.append(self._predicted(batch, own, vision))
        weights = {"l1": config.l1_weight, "list_mle": config.list_mle_weight}
        return self._losses(batch, teacher, passes, weights)

    # ── prediction ──

    @torch.no_grad()
    def predict(self, batch: Batch, anchors: Anchors) -> Tensor:
        embeds = batch["inputs_embeds"].to(self.dtype)
        hidden = batch["last_hidden_state"].to(self.dtype)
        if self.config.stage == 1:
            slots = self._text_slots(batch, hidden)
            return self._roll_out(
                batch, anchors, slots, lambda at, hidden: self._fuse(embeds[at], hidden, None)
            )
        vision = self._vision(batch)
        slots, _ = self._slots(batch, hidden, vision)

        def read(at: tuple[Tensor, Tensor], hidden: Tensor) -> Tensor:
            row, token = at
            # The slot that reads a token is one before it. No picture ends before slot 0.
            seen = vision.global_feature[row, (token - 1).clamp(min=0)]
            return self._fuse(embeds[at], hidden, seen)

        return self._roll_out(batch, anchors, slots, read)
