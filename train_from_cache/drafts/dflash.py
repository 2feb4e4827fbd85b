"""DFlash: a block of tokens in one parallel pass, each guessed without knowing the others.

After "DFlash: Block Diffusion for Flash Speculative Decoding" (arXiv 2602.06036) and its published
checkpoints. A block of B slots begins at an anchor a: slot 0 holds ``x[a]``, the others a mask
token; slot k predicts ``x[a+k]`` from its hidden state n_k, and slot 0, whose token is known,
nothing:

    logits_k = W_lm n_k + b_lm          k = 1 … B-1

With p_k = softmax(logits_k) and q the target's distribution of the same token, the loss is

    (1.0 Σ w CE(x[a+k], p_k) + distill_weight Σ w CE(q_k, p_k)) / Σ w,   w = exp(-(k-1)/γ)

over all slots of all blocks whose token x[a+k] is supervised. Anchors are those of the metrics: a
and a+1 are supervised. Published trainers want whole blocks (``a + B <= L``), which leaves rows
with short answers without an anchor; here what lies beyond the row is not supervised.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config

from dspark.schemas.draft_layers import draft_layers, spread_layers
from dspark.schemas.errors import InputError
from dspark.schemas.manifest import Manifest
from dspark.train_from_cache.batch import Anchors, Batch, LossTerm
from dspark.train_from_cache.draft_parts.block_anchors import draw_blocks, take
from dspark.train_from_cache.draft_parts.dflash_backbone import (
    BlockDraft,
    block_entries,
    block_fields,
)
from dspark.train_from_cache.draft_parts.layers import at_least_float32, init_matrix
from dspark.train_from_cache.draft_parts.overrides import at_least
from dspark.train_from_cache.draft_parts.packed_anchors import pack_anchors
from dspark.train_from_cache.draft_parts.row_random import RowRandom
from dspark.train_from_cache.draft_parts.shared_weights import check_head
from dspark.train_from_cache.draft_parts.slot_losses import sum_over_slots
from dspark.train_from_cache.target_head import TargetHead
from dspark.train_from_cache.teacher import Teacher

_NESTED = ("mask_token_id", "target_layer_ids")


class DFlashConfig(Qwen3Config):
    """Config of a DFlash draft, written as z-lab's checkpoints have it.

    Attributes:
        block_size: B, slots of a block; it proposes one token less.
        mask_token_id: id that stands for the unknown tokens of a block.
        target_layer_ids: layers read, by output (-1 is what layer 0 receives).
        num_target_layers: decoder layers of the target.
        num_anchors: A, most blocks of a sequence in a training step.
        loss_gamma: γ; 0 for the published one of ``block_size``.
        ce_weight: of the cross-entropy with the true token.
        distill_weight: of the cross-entropy with the target's distribution.
    """

    num_hidden_layers: int = 5
    block_size: int = 16
    mask_token_id: int = 151669
    target_layer_ids: list[int] | None = None
    num_target_layers: int = 36
    num_anchors: int = 512
    loss_gamma: float = 0.0
    ce_weight: float = 1.0
    distill_weight: float = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        nested = dict(kwargs.pop("dflash_config", None) or {})
        nested["is_causal"] = kwargs.pop("is_causal", None)
        for key in (*_NESTED, "block_size", "num_target_layers"):
            if key in nested:
                setattr(self, key, nested.pop(key))
        variants = ", ".join(f"{key}={value}" for key, value in nested.items() if value)
        if variants:
            raise InputError(f"dflash_config with {variants}: this variant of DFlash is not known")
        if self.target_layer_ids is None:  # as in the first published checkpoints
            self.target_layer_ids = spread_layers(self.num_target_layers, self.num_hidden_layers)
        super().__post_init__(**kwargs)

    @property
    def gamma(self) -> float:
        """7, 5 and 4 for blocks of 16, 10 and 8, as published; between and beyond, the formula
        through these three, min(B/2, 3 + B/4)."""
        return self.loss_gamma or min(self.block_size / 2, 3 + self.block_size / 4)

    def to_dict(self) -> dict[str, Any]:
        """Entries as they stand in ``config.json``."""
        entries: dict[str, Any] = super().to_dict()
        return {
            **{key: value for key, value in entries.items() if key not in _NESTED},
            "architectures": ["DFlashDraftModel"],
            "rope_theta": self.rope_parameters["rope_theta"],
            "dflash_config": {key: entries[key] for key in _NESTED},
        }


class DFlashDraft(BlockDraft):
    """A DFlash draft. Tensor names are those of z-lab's checkpoints.

    The target's embeddings and head are needed for the loss and for predictions but are no part of
    the checkpoint: call ``attach_head`` first.
    """

    arch = "dflash"
    config_class = DFlashConfig
    embed_weight: Tensor | None
    head_weight: Tensor | None
    head_bias: Tensor | None

    # ── config ──

    @classmethod
    def config_from_cache(cls, manifest: Manifest, overrides: dict[str, Any]) -> DFlashConfig:
        fresh = DFlashConfig()
        names = ("block_size", "num_anchors", "loss_gamma", "ce_weight", "distill_weight")
        defaults = {name: getattr(fresh, name) for name in names}
        defaults["target_layer_ids"] = draft_layers([cls.arch], manifest.target.num_layers)
        entries = block_entries(cls.arch, manifest, defaults, overrides)
        at_least(entries, {"block_size": 2})
        at_least(entries, dict.fromkeys(("loss_gamma", "ce_weight", "distill_weight"), 0))
        return DFlashConfig(**entries)

    # ── needed fields ──

    @classmethod
    def needed_fields(cls, config: DFlashConfig) -> list[str]:
        return block_fields(config)

    # ── module ──

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__(config)
        self.register_buffer("embed_weight", None, persistent=False)
        self.register_buffer("head_weight", None, persistent=False)
        self.register_buffer("head_bias", None, persistent=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init_matrix(module)
        else:
            super()._init_weights(module)

    def attach_head(self, head: TargetHead) -> None:
        check_head(self.config.vocab_size, self.config.hidden_size, head.weight)
        self.embed_weight = head.embeddings.detach().to(self.fc.weight)
        self.head_weight = head.weight.detach().to(self.fc.weight)
        self.head_bias = None if head.bias is None else head.bias.detach().to(self.fc.weight)

    @property
    def embeddings(self) -> Tensor:
        assert self.embed_weight is not None, "call attach_head first"
        return self.embed_weight

    @property
    def depth(self) -> int:
        return int(self.config.block_size) - 1

    def _slots(self, batch: Batch, anchor: Tensor, keep: Tensor) -> Tensor:
        """Hidden states of all slots but the blocks' first, ``[B, A, K, H]``."""
        return self.encode(batch, anchor, keep)[:, :, 1:]

    def _logits(self, hidden: Tensor) -> Tensor:
        assert self.head_weight is not None, "call attach_head first"
        return at_least_float32(F.linear(hidden, self.head_weight, self.head_bias))

    # ── loss ──

    def forward(self, batch: Batch, teacher: Teacher, random: RowRandom) -> dict[str, LossTerm]:
        config = self.config
        mask = batch["loss_mask"].bool()
        anchor, keep = draw_blocks(mask, config.num_anchors, random)
        hidden = self._slots(batch, anchor, keep)
        predicted = anchor[..., None] + torch.arange(1, config.block_size, device=anchor.device)
        supervised = take(mask, predicted) & (predicted < mask.shape[1]) & keep[..., None]
        row, _, k = slot = torch.nonzero(supervised, as_tuple=True)
        position = predicted[slot]
        label = batch["input_ids"][row, position].long()
        weight = torch.exp(-k.to(torch.float32) / config.gamma)

        def losses(
            hidden: Tensor, row: Tensor, position: Tensor, label: Tensor, weight: Tensor
        ) -> Tensor:
            log_draft = torch.log_softmax(self._logits(hidden), -1)
            terms = [F.nll_loss(log_draft, label, reduction="none")]
            if config.distill_weight:
                with torch.no_grad():
                    logits = at_least_float32(teacher.logits(row, position - 1))
                    target = torch.softmax(logits, -1)
                terms.append(-(target * log_draft).sum(-1))
            return torch.stack([(weight * term).sum() for term in terms])

        slots = (hidden[slot], row, position, label, weight)
        sums = sum_over_slots(losses, slots, config.vocab_size)
        names = ["ce", "distill"][: len(sums)]
        return {
            name: LossTerm(total, weight.sum(), getattr(config, f"{name}_weight"))
            for name, total in zip(names, sums, strict=True)
        }

    # ── prediction ──

    @torch.no_grad()
    def predict(self, batch: Batch, anchors: Anchors) -> Tensor:
        packed = pack_anchors(anchors, len(batch["input_ids"]))
        hidden = self._slots(batch, packed.position, packed.keep)
        return self._logits(packed.unpack(hidden))
