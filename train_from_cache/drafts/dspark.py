"""DSpark: a block of tokens in one parallel pass, with a Markov head for the order inside the block
and a confidence head for how far to trust it.

After "DSpark: Confidence-Scheduled Speculative Decoding with Semi-Autoregressive Generation"
(DeepSeek-AI) and its published checkpoints. A block begins at an anchor a; slot k of K predicts
``x[a+1+k]`` from its hidden state n_k and the token before, prev_k = ``x[a+k]``:

    logits_k = W_lm n_k + b_k           b: ``markov_head``
    c_k      = w [n_k; W1[prev_k]]      the confidence, a logit

Against the target's q_k, its distribution at position a+k, with p_k = softmax(logits_k) and
α_k = 1 - ½ ‖p_k - q_k‖₁, the loss is

    (0.1 Σ ω CE(x[a+1+k], p_k) + 0.9 Σ ω ‖p_k - q_k‖₁ + 1.0 Σ ω BCE(c_k, α_k)) / Σ ω

over all slots of all blocks, ω = exp(-k/4) where all of the block's tokens up to this one are
supervised, else 0; no gradient flows through α into the draft.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3Config
from transformers import initialization as init

from dspark.schemas.draft_layers import draft_layers
from dspark.schemas.errors import InputError
from dspark.schemas.manifest import Manifest
from dspark.train_from_cache.batch import Anchors, Batch, LossTerm
from dspark.train_from_cache.draft_parts.block_anchors import draw_blocks, supervised_prefix, take
from dspark.train_from_cache.draft_parts.dflash_backbone import (
    BlockDraft,
    block_entries,
    block_fields,
)
from dspark.train_from_cache.draft_parts.layers import at_least_float32, init_matrix
from dspark.train_from_cache.draft_parts.markov_head import HEAD_TYPES, make_markov_head
from dspark.train_from_cache.draft_parts.overrides import at_least, one_of
from dspark.train_from_cache.draft_parts.packed_anchors import pack_anchors
from dspark.train_from_cache.draft_parts.row_random import RowRandom
from dspark.train_from_cache.draft_parts.shared_weights import copy_embeddings, copy_head
from dspark.train_from_cache.draft_parts.slot_losses import sum_over_slots
from dspark.train_from_cache.target_head import TargetHead
from dspark.train_from_cache.teacher import Teacher


class DSparkConfig(Qwen3Config):
    """Config of a DSpark draft, written so that vLLM and SGLang find every key where they look.

    Attributes:
        block_size: K, draft tokens of a block.
        mask_token_id: id that stands for the unknown tokens of a block.
        target_layer_ids: layers read, by output (-1 is what layer 0 receives).
        num_target_layers: decoder layers of the target.
        num_anchors: A, most blocks of a sequence in a training step.
        markov_rank: r.
        markov_head_type: ``vanilla``, ``gated`` or ``rnn``.
        enable_confidence_head: whether there is a confidence head.
        confidence_head_with_markov: whether it reads the previous token's Markov embedding too.
        loss_gamma: slot k weighs ``exp(-k / loss_gamma)``.
        ce_weight: of the cross-entropy with the true token.
        l1_weight: of the L1 distance to the target's distribution.
        confidence_weight: of the confidence head's cross-entropy.
    """

    block_size: int = 7
    mask_token_id: int = 151669
    target_layer_ids: list[int] | None = None
    num_target_layers: int = 36
    num_anchors: int = 512
    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    loss_gamma: float = 4.0
    ce_weight: float = 0.1
    l1_weight: float = 0.9
    confidence_weight: float = 1.0

    def __post_init__(self, **kwargs: Any) -> None:
        kwargs.pop("dflash_config", None)  # mirrors of entries that are read at top level
        if kwargs.pop("sample_from_anchor", True) is False:
            raise InputError(
                "sample_from_anchor=false: a DSpark checkpoint whose slot k predicts x[a+k] cannot "
                "be read as one whose slot k predicts x[a+1+k]"
            )
        if self.target_layer_ids is None:
            self.target_layer_ids = draft_layers(["dspark"], self.num_target_layers)
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Entries as they stand in ``config.json``."""
        entries: dict[str, Any] = super().to_dict()
        mirrored = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers")
        return {
            **entries,
            "architectures": ["Qwen3DSparkModel"],
            "rope_theta": self.rope_parameters["rope_theta"],
            "sample_from_anchor": True,
            "dflash_config": {key: entries[key] for key in mirrored},
        }


class DSparkDraft(BlockDraft):
    """A DSpark draft. Tensor names are those of DeepSpec's checkpoints."""

    arch = "dspark"
    config_class = DSparkConfig
    frozen = ("embed_tokens", "lm_head")

    # ── config ──

    @classmethod
    def config_from_cache(cls, manifest: Manifest, overrides: dict[str, Any]) -> DSparkConfig:
        fresh = DSparkConfig(num_target_layers=manifest.target.num_layers)
        names = (
            *("block_size", "num_anchors", "target_layer_ids", "loss_gamma"),
            *("markov_rank", "markov_head_type"),
            *("enable_confidence_head", "confidence_head_with_markov"),
            *("ce_weight", "l1_weight", "confidence_weight"),
        )
        defaults = {name: getattr(fresh, name) for name in names}
        entries = block_entries(cls.arch, manifest, defaults, overrides)
        at_least(entries, {"markov_rank": 1, "loss_gamma": 1e-3})
        at_least(entries, dict.fromkeys(("ce_weight", "l1_weight", "confidence_weight"), 0))
        one_of(entries, "markov_head_type", HEAD_TYPES)
        return DSparkConfig(**entries)

    # ── needed fields ──

    @classmethod
    def needed_fields(cls, config: DSparkConfig) -> list[str]:
        return block_fields(config)

    # ── module ──

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__(config)
        vocab, hidden, rank = config.vocab_size, config.hidden_size, config.markov_rank
        self.embed_tokens = nn.Embedding(vocab, hidden)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        self.markov_head = make_markov_head(config.markov_head_type, vocab, hidden, rank)
        if config.enable_confidence_head:
            width = hidden + rank if config.confidence_head_with_markov else hidden
            self.confidence_head = nn.ModuleDict({"proj": nn.Linear(width, 1)})
        self.post_init()
        self.freeze()

    def _init_weights(self, module: nn.Module) -> None:
        from_target = module is self.embed_tokens or module is self.lm_head
        if from_target or module is self.markov_head.markov_w2:
            init.zeros_(module.weight)
        elif isinstance(module, (nn.Linear, nn.Embedding)):
            init_matrix(module)
        else:
            super()._init_weights(module)

    def attach_head(self, head: TargetHead) -> None:
        if head.bias is not None:
            raise InputError(
                "--arch dspark: the target's language-model head has a bias, for which the DSpark "
                "checkpoint has no place; use --arch msd"
            )
        copy_embeddings(self.embed_tokens, head.embeddings)
        copy_head(self.lm_head, head.weight)

    @property
    def embeddings(self) -> Tensor:
        return self.embed_tokens.weight

    @property
    def depth(self) -> int:
        return int(self.config.block_size)

    def _slots(self, batch: Batch, anchor: Tensor, keep: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Hidden states ``[B, A, K, H]``, Markov embeddings and latents ``[B, A, K, r]`` of blocks,
        the tokens before each slot being the true ones."""
        hidden = self.encode(batch, anchor, keep)
        position = anchor[..., None] + torch.arange(self.depth, device=anchor.device)
        prev = take(batch["input_ids"], position).long().clamp(max=self.config.vocab_size - 1)
        embedded = self.markov_head.embed(prev)
        return hidden, embedded, self.markov_head.latents(hidden, embedded)

    def _logits(self, hidden: Tensor, latents: Tensor) -> Tensor:
        return at_least_float32(self.lm_head(hidden) + self.markov_head.bias(latents))

    def _confidence(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        if self.config.confidence_head_with_markov:
            hidden = torch.cat([hidden, embedded], -1)
        return at_least_float32(self.confidence_head["proj"](hidden)).squeeze(-1)

    # ── loss ──

    def forward(self, batch: Batch, teacher: Teacher, random: RowRandom) -> dict[str, LossTerm]:
        config = self.config
        mask = batch["loss_mask"].bool()
        anchor, keep = draw_blocks(mask, config.num_anchors, random)
        hidden, embedded, latents = self._slots(batch, anchor, keep)
        supervised = supervised_prefix(mask, anchor, keep, self.depth)
        row, block, k = slot = torch.nonzero(supervised, as_tuple=True)
        position = anchor[row, block] + k
        label = batch["input_ids"][row, position + 1].long()
        weight = torch.exp(-k.to(torch.float32) / config.loss_gamma)

        def losses(
            hidden: Tensor,
            embedded: Tensor,
            latents: Tensor,
            row: Tensor,
            position: Tensor,
            label: Tensor,
            weight: Tensor,
        ) -> Tensor:
            with torch.no_grad():
                target = torch.softmax(at_least_float32(teacher.logits(row, position)), -1)
            log_draft = torch.log_softmax(self._logits(hidden, latents), -1)
            ce = F.nll_loss(log_draft, label, reduction="none")
            l1 = (log_draft.exp() - target).abs().sum(-1)
            terms = [ce, l1]
            if config.enable_confidence_head:
                accepted = 1 - 0.5 * l1.detach()
                logits = self._confidence(hidden, embedded)
                terms.append(
                    F.binary_cross_entropy_with_logits(
                        logits, accepted.to(logits.dtype), reduction="none"
                    )
                )
            return torch.stack([(weight * term).sum() for term in terms])

        sums = sum_over_slots(
            losses,
            (hidden[slot], embedded[slot], latents[slot], row, position, label, weight),
            config.vocab_size,
        )
        names = ["ce", "l1", "confidence"][: len(sums)]
        return {
            name: LossTerm(total, weight.sum(), getattr(config, f"{name}_weight"))
            for name, total in zip(names, sums, strict=True)
        }

    # ── prediction ──

    @torch.no_grad()
    def predict(self, batch: Batch, anchors: Anchors) -> Tensor:
        packed = pack_anchors(anchors, len(batch["input_ids"]))
        hidden, _, latents = self._slots(batch, packed.position, packed.keep)
        return self._logits(packed.unpack(hidden), packed.unpack(latents))

    @torch.no_grad()
    def confidence_logits(self, batch: Batch, anchors: Anchors) -> Tensor | None:
        if not self.config.enable_confidence_head:
            return None
        packed = pack_anchors(anchors, len(batch["input_ids"]))
        hidden, embedded, _ = self._slots(batch, packed.position, packed.keep)
        return self._confidence(packed.unpack(hidden), packed.unpack(embedded))
