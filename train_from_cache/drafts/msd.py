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
from torch import Tensor

from dspark.schemas.manifest import Manifest
from dspark.schemas.shift import shift_left
from dspark.train_from_cache.batch import Anchors, Batch, LossTerm
from dspark.train_from_cache.draft_parts.feature_draft import (
    FeatureConfig,
    FeatureDraft,
    Slots,
    feature_entries,
)
from dspark.train_from_cache.draft_parts.row_random import RowRandom
from dspark.train_from_cache.teacher import Teacher


class MSDConfig(FeatureConfig):
    """Config of an MSD draft.

    Attributes:
        smooth_l1_weight: of the regression on the target's hidden state.
        soft_ce_weight: of the cross-entropy with the target's distribution.
    """

    smooth_l1_weight: float = 1.0
    soft_ce_weight: float = 0.1

    def to_dict(self) -> dict[str, Any]:
        """Entries as they stand in ``config.json``."""
        return {**super().to_dict(), "architectures": ["MSDModel"]}


class MSDDraft(FeatureDraft):
    """An MSD draft. Tensor names are those of the published code."""

    arch = "msd"
    config_class = MSDConfig

    # ── config ──

    @classmethod
    def config_from_cache(cls, manifest: Manifest, overrides: dict[str, Any]) -> MSDConfig:
        target = manifest.target
        bias = target.text.get("attention_bias")
        if bias is None:
            bias = target.text_model_type.startswith("qwen2")
        fresh = MSDConfig()
        own = {name: getattr(fresh, name) for name in ("smooth_l1_weight", "soft_ce_weight")}
        own["attention_bias"] = bool(bias)
        return MSDConfig(**feature_entries(cls.arch, manifest, own, overrides))

    # ── needed fields ──

    @classmethod
    def needed_fields(cls, config: MSDConfig) -> list[str]:
        return ["inputs_embeds", "last_hidden_state", "attention_mask", "loss_mask", "image_mask"]

    # ── module ──

    def __init__(self, config: MSDConfig) -> None:
        super().__init__(config)
        self.post_init()
        self.freeze()

    def _fuse(self, embedding: Tensor, hidden: Tensor, is_image: Tensor) -> Tensor:
        """A slot's input: a picture's embedding as it is, else the fusion with the hidden state."""
        fused = self.fc(torch.cat([embedding, hidden], -1))
        return torch.where(is_image[..., None], embedding, fused)

    def _slots(self, batch: Batch, hidden: Tensor) -> Slots:
        embedding = shift_left(batch["inputs_embeds"]).to(self.dtype)
        is_image = shift_left(batch["image_mask"]).bool()
        return self._every_slot(batch, self._fuse(embedding, hidden, is_image))

    # ── loss ──

    def forward(self, batch: Batch, teacher: Teacher, random: RowRandom) -> dict[str, LossTerm]:
        predicted = self._encode(self._slots(batch, self._input_hidden(batch, random)))
        config = self.config
        weights = {"smooth_l1": config.smooth_l1_weight, "soft_ce": config.soft_ce_weight}
        return self._losses(batch, teacher, [predicted], weights)

    # ── prediction ──

    @torch.no_grad()
    def predict(self, batch: Batch, anchors: Anchors) -> Tensor:
        embeds = batch["inputs_embeds"].to(self.dtype)
        is_image = batch["image_mask"].bool()
        slots = self._slots(batch, batch["last_hidden_state"].to(self.dtype))
        return self._roll_out(
            batch,
            anchors,
            slots,
            lambda at, hidden: self._fuse(embeds[at], hidden, is_image[at]),
        )
