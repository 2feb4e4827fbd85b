"""Medusa: a head for each token ahead, all reading the same hidden state of the target.

After "Medusa: Simple LLM Inference Acceleration Framework with Multiple Decoding Heads"
(arXiv 2401.10774). Head i of K turns the target's post-norm hidden state g[t] into

    y ← g[t],  then n times  y ← y + SiLU(W y + b),  then the logits h_i[t] = U_i y

and predicts ``x[t+2+i]`` (``x[t+1]`` is the target's own). It starts as the target's head: W and b
at zero, U_i a copy. With q the target's distribution of that token, softmax(z[t+1+i]), the loss is

    Σ_i 0.8^i mean_t ((1 - λ) CE(x[t+2+i], h_i[t]) + λ CE(q, h_i[t]))

over the slots t whose token t+2+i is supervised, λ being the share of distillation, by default 0.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init

from dspark.schemas.errors import InputError
from dspark.schemas.manifest import Manifest
from dspark.train_from_cache.batch import Anchors, Batch, LossTerm
from dspark.train_from_cache.cache import Cache
from dspark.train_from_cache.draft_parts.layers import at_least_float32
from dspark.train_from_cache.draft_parts.overrides import apply_overrides, at_least
from dspark.train_from_cache.draft_parts.row_random import RowRandom
from dspark.train_from_cache.draft_parts.shared_weights import check_head, copy_head
from dspark.train_from_cache.draft_parts.slot_losses import sum_over_slots
from dspark.train_from_cache.drafts.base import Draft
from dspark.train_from_cache.target_head import TargetHead
from dspark.train_from_cache.teacher import Teacher


class MedusaConfig(PreTrainedConfig):
    """Config of a Medusa draft under the names that vLLM reads.

    Attributes:
        hidden_size: H.
        vocab_size: V.
        num_heads: K. A head has H x V weights of its own, 545 million for H = 3584 and V = 152064,
            and brings less the further ahead it looks: where each accepts 60 %, a fifth head adds
            0.6^5 = 0.08 tokens to a round.
        num_hidden_layers: n, residual blocks of a head.
        medusa_fc_bias: whether there is b.
        decay: head i weighs ``decay^i``.
        distill: λ, from 0 to 1.
    """

    model_type = "medusa"

    hidden_size: int = 4096
    vocab_size: int = 32000
    num_heads: int = 4
    num_hidden_layers: int = 1
    medusa_fc_bias: bool = True
    decay: float = 0.8
    distill: float = 0.0

    def __post_init__(self, **kwargs: Any) -> None:
        whole = kwargs.pop("truncated_vocab_size", None) in (None, self.vocab_size)
        if kwargs.pop("original_lm_head", False) or not whole:
            raise InputError(
                "a Medusa checkpoint with original_lm_head=true or a truncated_vocab_size is not "
                "read: each head must have its own weights over the whole vocabulary"
            )
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Entries as they stand in ``config.json``."""
        return {
            **super().to_dict(),
            "architectures": ["MedusaModel"],
            "truncated_vocab_size": self.vocab_size,
            "original_lm_head": False,
        }


class ResidualBlocks(nn.Module):
    """What a head does before its logits."""

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__()
        size, bias = config.hidden_size, config.medusa_fc_bias
        self.layers = nn.ModuleList(
            nn.Linear(size, size, bias=bias) for _ in range(config.num_hidden_layers)
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """``[…, H]`` to the same shape."""
        for layer in self.layers:
            hidden = hidden + F.silu(layer(hidden))
        return hidden


class MedusaDraft(Draft):
    """A Medusa draft. Tensor names are those of vLLM."""

    arch = "medusa"
    config_class = MedusaConfig

    # ── config ──

    @classmethod
    def config_from_cache(cls, manifest: Manifest, overrides: dict[str, Any]) -> MedusaConfig:
        fresh, target = MedusaConfig(), manifest.target
        names = ("num_heads", "num_hidden_layers", "medusa_fc_bias", "decay", "distill")
        defaults = {name: getattr(fresh, name) for name in names}
        entries = apply_overrides(cls.arch, defaults, overrides)
        at_least(entries, {"num_heads": 1, "num_hidden_layers": 0, "decay": 0, "distill": 0})
        if entries["distill"] > 1:
            raise InputError(f"-c distill={entries['distill']}: must be at most 1")
        return MedusaConfig(
            hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            eos_token_id=target.eos_token_ids,
            pad_token_id=target.pad_token_id,
            **entries,
        )

    # ── needed fields ──

    @classmethod
    def needed_fields(cls, config: MedusaConfig) -> list[str]:
        return ["input_ids", "last_hidden_state", "loss_mask"]

    # ── module ──

    def __init__(self, config: MedusaConfig) -> None:
        super().__init__(config)
        hidden, vocab = config.hidden_size, config.vocab_size
        self.blocks = nn.ModuleList(ResidualBlocks(config) for _ in range(config.num_heads))
        self.lm_heads = nn.ModuleList(
            nn.Linear(hidden, vocab, bias=False) for _ in range(config.num_heads)
        )
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init.zeros_(module.weight)
            if module.bias is not None:
                init.zeros_(module.bias)

    def attach_head(self, head: TargetHead) -> None:
        if head.bias is not None:
            raise InputError(
                "--arch medusa: the target's language-model head has a bias, for which the Medusa "
                "checkpoint has no place; use --arch msd"
            )
        check_head(self.config.vocab_size, self.config.hidden_size, head.weight)

    def start(self, cache: Cache, rows: Sequence[int], head: TargetHead) -> dict[str, float]:
        for lm_head in self.lm_heads:
            assert isinstance(lm_head, nn.Linear)
            copy_head(lm_head, head.weight)
        return {}

    @property
    def depth(self) -> int:
        return int(self.config.num_heads)

    def _logits(self, i: int, hidden: Tensor) -> Tensor:
        """Logits ``[n, V]`` of head i on hidden states ``[n, H]``."""
        return at_least_float32(self.lm_heads[i](self.blocks[i](hidden.to(self.dtype))))

    # ── loss ──

    def forward(self, batch: Batch, teacher: Teacher, random: RowRandom) -> dict[str, LossTerm]:
        decay = self.config.decay
        return {
            f"head_{i}": LossTerm(*self._head_loss(i, batch, teacher), decay**i)
            for i in range(self.depth)
        }

    def _head_loss(self, i: int, batch: Batch, teacher: Teacher) -> tuple[Tensor, Tensor]:
        """Sum of a head's losses, and over how many slots."""
        share = self.config.distill
        row, t = torch.nonzero(batch["loss_mask"][:, 2 + i :], as_tuple=True)

        def losses(hidden: Tensor, row: Tensor, t: Tensor) -> Tensor:
            log_draft = torch.log_softmax(self._logits(i, hidden), -1)
            loss = log_draft.new_zeros(len(row))
            if share < 1:
                label = batch["input_ids"][row, t + 2 + i].long()
                loss = loss + (1 - share) * F.nll_loss(log_draft, label, reduction="none")
            if share > 0:
                with torch.no_grad():
                    target = torch.softmax(at_least_float32(teacher.logits(row, t + 1 + i)), -1)
                loss = loss - share * (target * log_draft).sum(-1)
            return loss.sum()[None]

        hidden = batch["last_hidden_state"][row, t]
        total = sum_over_slots(losses, (hidden, row, t), self.config.vocab_size)[0]
        return total, torch.tensor(float(len(row)), device=total.device)

    # ── prediction ──

    @torch.no_grad()
    def predict(self, batch: Batch, anchors: Anchors) -> Tensor:
        hidden = batch["last_hidden_state"][anchors.row, (anchors.position - 1).clamp(min=0)]
        # At the start of a row there is no hidden state yet.
        hidden = hidden * (anchors.position > 0)[:, None]
        return torch.stack([self._logits(i, hidden) for i in range(self.depth)], 1)
