"""EAGLE, the first and the second (which differ in how proposals become a tree, not in training):
one decoder layer that predicts the target's next hidden state from its last one and the next
token's embedding.

After "EAGLE: Speculative Sampling Requires Rethinking Feature Uncertainty" (arXiv 2401.15077) and
"EAGLE-2" (arXiv 2406.16858). Of a row with embeddings E and post-norm hidden states g, slot t reads

    u[t] = W_fc [E[t+1]; g[t]] + b_fc

whether token t+1 is a word or a picture's, and gives d[t], which stands for g[t+1];
softmax(W_lm d[t]) is then the distribution of x[t+2]. The loss is the mean over slots t with a
supervised token t+1 of

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


class EagleConfig(FeatureConfig):
    """Config of an EAGLE draft. Attention has no biases: servers build it as Llama's.

    Attributes:
        fc_bias: whether ``fc`` has a bias, as in the paper's code and in SGLang, which fills a
            missing one with noise. vLLM has no place for one and refuses it: set false to serve
            there.
        smooth_l1_weight: of the regression on the target's hidden state.
        soft_ce_weight: of the cross-entropy with the target's distribution.
    """

    fc_bias: bool = True
    smooth_l1_weight: float = 1.0
    soft_ce_weight: float = 0.1

    def to_dict(self) -> dict[str, Any]:
        """Entries as they stand in ``config.json``."""
        # SGLang and vLLM each take the name that they know.
        names = ["LlamaForCausalLMEagle", "EagleLlamaForCausalLM"]
        return {**super().to_dict(), "architectures": names}


class EagleDraft(FeatureDraft):
    """An EAGLE draft. Tensor names are those of the published checkpoints, without the head."""

    arch = "eagle"
    config_class = EagleConfig

    # ── config ──

    @classmethod
    def config_from_cache(cls, manifest: Manifest, overrides: dict[str, Any]) -> EagleConfig:
        fresh = EagleConfig()
        names = ("fc_bias", "smooth_l1_weight", "soft_ce_weight")
        own = {name: getattr(fresh, name) for name in names}
        return EagleConfig(**feature_entries(cls.arch, manifest, own, overrides))

    # ── needed fields ──

    @classmethod
    def needed_fields(cls, config: EagleConfig) -> list[str]:
        return ["inputs_embeds", "last_hidden_state", "attention_mask", "loss_mask"]

    # ── module ──

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(config, fc_bias=config.fc_bias)
        self.post_init()
        self.freeze()

    def _fuse(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        fused: Tensor = self.fc(torch.cat([embedding, hidden], -1))
        return fused

    def _slots(self, batch: Batch, hidden: Tensor) -> Slots:
        embedding = shift_left(batch["inputs_embeds"]).to(self.dtype)
        return self._every_slot(batch, self._fuse(embedding, hidden))

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
        slots = self._slots(batch, batch["last_hidden_state"].to(self.dtype))
        return self._roll_out(
            batch, anchors, slots, lambda at, hidden: self._fuse(embeds[at], hidden)
        )
