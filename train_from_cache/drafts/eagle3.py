"""EAGLE-3: one decoder layer over three of the target's layers, trained on its own outputs.

After "EAGLE-3: Scaling up Inference Acceleration of Large Language Models via Training-Time Test"
(arXiv 2503.01840) and its published checkpoints. Of a row with tokens x, embeddings E and hidden
states h^a, h^b, h^c, slot t starts from ``d_{-1}[t] = W_fc [h^a; h^b; h^c][t]`` and takes S steps,
the training-time test:

    u_i[t] = [RMS_in(E[t+1+i]); RMS_hid(d_{i-1}[t])]
    r_i[t] = d_{i-1}[t] + attention(u_i[t] over u_0[<t], u_0[t] … u_i[t])
    d_i[t] = r_i[t] + MLP(RMS_post(r_i[t]))
    p_i[t] = softmax(W_d RMS(d_i[t]))           the distribution of x[t+2+i]

Queries and keys of step i stand at position ``pos[t] + i``. W_d has a row per id of the draft's own
vocabulary. With z the target's logits and q its distribution over that vocabulary, the loss is

    Σ_i 0.8^i (Σ_t M_i[t] CE(q[t+1+i], p_i[t])) / (Σ_t M_i[t])

where ``M_i[t] = mask[t+1+i]``, and zero where x[t+1+i] is beyond the row, ``argmax z[t+1+i]``
outside the vocabulary, or one of the tokens t to t+1+i masked (those of a fake picture). So slot t
is what a server runs at anchor t+1, and only slots with a supervised step are run.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from dspark.schemas.draft_layers import draft_layers
from dspark.schemas.errors import InputError
from dspark.schemas.layers import hidden_state_key
from dspark.schemas.manifest import Manifest
from dspark.schemas.shift import shift_left
from dspark.train_from_cache.batch import Anchors, Batch, LossTerm
from dspark.train_from_cache.cache import Cache
from dspark.train_from_cache.draft_parts.chain_attention import chain_attention
from dspark.train_from_cache.draft_parts.draft_vocab import (
    choose_ids,
    count_supervised,
    special_ids,
)
from dspark.train_from_cache.draft_parts.layers import (
    RMSNorm,
    RotaryProjections,
    at_least_float32,
    init_matrix,
    merge_heads,
)
from dspark.train_from_cache.draft_parts.mrope import AXES, MRotaryEmbedding, target_mrope
from dspark.train_from_cache.draft_parts.overrides import apply_overrides, at_least, one_of
from dspark.train_from_cache.draft_parts.packed_anchors import pack_anchors
from dspark.train_from_cache.draft_parts.row_random import RowRandom
from dspark.train_from_cache.draft_parts.shared_weights import check_head
from dspark.train_from_cache.draft_parts.slot_losses import sum_over_slots
from dspark.train_from_cache.draft_parts.target_dims import check_dims, target_dims
from dspark.train_from_cache.drafts.base import Draft
from dspark.train_from_cache.target_head import TargetHead
from dspark.train_from_cache.teacher import Teacher

# Servers give ``fc`` three layers, whatever the config says.
READ_LAYERS = 3
MAX_DRAFT_VOCAB = 32000


class Eagle3Config(LlamaConfig):
    """Config of an EAGLE-3 draft, written so that vLLM and SGLang find every key where they look.

    Attributes:
        target_layer_ids: layers read, by output. ``config.json`` has them for vLLM as
            ``eagle_aux_hidden_state_layer_ids`` (Hugging Face's index, one more) and for SGLang
            in ``eagle_config`` (by output). None in checkpoints that name none.
        target_hidden_size: H of the target.
        draft_vocab_size: ids that the draft predicts.
        norm_before_residual: the residual stream starts from RMS_hid(d), not from d.
        fc_norm: a norm for each layer read, before ``fc`` (EAGLE-3.1).
        norm_before_fc: one norm for all of them together.
        norm_output: a step is fed RMS(d) of the one before, not d.
        image_embeds: what the draft is fed for a picture's positions: ``merged``, the target's own
            embeddings (SGLang), or ``token``, that of the placeholder (vLLM).
        image_token_id: the placeholder.
        ttt_steps: S, steps of training-time test and of a round.
        ttt_decay: step i weighs ``ttt_decay ** i``.
        loss_mask: ``shifted``: slot t counts if token t+1 is supervised, so that the first draft
            of an answer is trained; ``unshifted``: if token t is (SpecForge, DeepSpec).
    """

    ignore_keys_at_rope_validation = {"mrope_section", "mrope_interleaved"}

    num_hidden_layers: int = 1
    target_layer_ids: list[int] | None = None
    target_hidden_size: int | None = None
    draft_vocab_size: int | None = None
    norm_before_residual: bool = False
    fc_norm: bool = False
    norm_before_fc: bool = False
    norm_output: bool = False
    image_embeds: str = "merged"
    image_token_id: int | None = None
    ttt_steps: int = 7
    ttt_decay: float = 0.8
    loss_mask: str = "shifted"

    def __post_init__(self, **kwargs: Any) -> None:
        by_input = kwargs.pop("eagle_aux_hidden_state_layer_ids", None)
        by_output = (kwargs.pop("eagle_config", None) or {}).get("eagle_aux_hidden_state_layer_ids")
        if self.target_layer_ids is None:
            self.target_layer_ids = [k - 1 for k in by_input] if by_input else by_output
        if self.target_hidden_size is None:
            self.target_hidden_size = self.hidden_size
        if self.draft_vocab_size is None:
            self.draft_vocab_size = self.vocab_size
        scaling = dict(kwargs.pop("rope_scaling", None) or {})
        if scaling.get("type") == "mrope":
            scaling = {**scaling, "rope_type": "default"}
            del scaling["type"]
        super().__post_init__(rope_scaling=scaling or None, **kwargs)

    def to_dict(self) -> dict[str, Any]:
        """Entries as they stand in ``config.json``."""
        rope = dict(self.rope_parameters)
        theta = rope.pop("rope_theta")
        mrope = {"type": "mrope", **rope} if "mrope_section" in rope else None
        layers = self.target_layer_ids
        read = {
            "eagle_aux_hidden_state_layer_ids": layers and [k + 1 for k in layers],
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": layers,
            },
        }
        return {
            **super().to_dict(),
            "architectures": ["LlamaForCausalLMEagle3"],
            "rope_theta": theta,
            "rope_scaling": mrope,
            **(read if layers else {}),
        }


class Eagle3Layer(nn.Module):
    """A Llama decoder layer whose attention sees embedding and hidden state side by side."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = RMSNorm(hidden, eps)
        self.hidden_norm = RMSNorm(hidden, eps)
        self.self_attn = RotaryProjections(config, config.attention_bias, input_size=2 * hidden)
        self.post_attention_layernorm = RMSNorm(hidden, eps)
        self.mlp = Qwen3MLP(config)

    def fuse(self, embedding: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Slots u ``[B, n, 2H]`` and the residual stream ``[B, n, H]``, from ``[B, n, H]`` each."""
        normed = self.hidden_norm(hidden)
        slots = torch.cat([self.input_layernorm(embedding), normed], -1)
        return slots, normed if self.norm_before_residual else hidden

    def after_attention(self, residual: Tensor, attended: Tensor) -> Tensor:
        """The layer's output d.

        Args:
            residual: ``[B, n, H]``.
            attended: ``[B, heads, n, D]``.
        """
        residual = residual + self.self_attn.o_proj(merge_heads(attended))
        out: Tensor = residual + self.mlp(self.post_attention_layernorm(residual))
        return out


class Eagle3Draft(Draft):
    """An EAGLE-3 draft. Embeddings are the target's and no part of the checkpoint.

    With ``image_embeds`` of ``token``, call ``attach_head`` first.
    """

    arch = "eagle3"
    config_class = Eagle3Config
    aliases = {"layers.0.": "midlayer."}
    d2t: Tensor
    t2d: Tensor
    image_embedding: Tensor | None

    # ── config ──

    @classmethod
    def config_from_cache(cls, manifest: Manifest, overrides: dict[str, Any]) -> Eagle3Config:
        target = manifest.target
        fresh = Eagle3Config()
        names = (
            *("ttt_steps", "ttt_decay", "loss_mask", "image_embeds", "attention_bias"),
            *("norm_before_residual", "fc_norm", "norm_before_fc", "norm_output"),
        )
        defaults = {name: getattr(fresh, name) for name in names}
        defaults |= {
            "draft_vocab_size": min(MAX_DRAFT_VOCAB, target.vocab_size),
            "target_layer_ids": draft_layers(["eagle3"], target.num_layers),
            "mrope_section": [],
            **target_dims(manifest),
        }
        mrope = target_mrope(manifest)
        entries = apply_overrides(cls.arch, defaults, overrides)
        at_least(entries, {"ttt_steps": 1, "ttt_decay": 0})
        one_of(entries, "loss_mask", ("shifted", "unshifted"))
        one_of(entries, "image_embeds", ("merged", "token"))
        check_dims(entries)
        if "target_layer_ids" in overrides:
            _check_layers(entries["target_layer_ids"], target.num_layers)
        least = len(special_ids(target))
        if not max(1, least) <= entries["draft_vocab_size"] <= target.vocab_size:
            raise InputError(
                f"-c draft_vocab_size={entries['draft_vocab_size']}: choose from {max(1, least)} "
                f"(the special ids) to {target.vocab_size}, all ids of the target"
            )
        rope = {"rope_type": "default", "rope_theta": entries.pop("rope_theta")}
        section = entries.pop("mrope_section")
        if "mrope_section" not in overrides:
            # Targets that turn a part of each head only have sections that do not fill a head.
            fits = sum(mrope.get("mrope_section", [])) == entries["head_dim"] // 2
            rope |= mrope if fits else {}
        elif section:
            _check_section(section, mrope, entries["head_dim"])
            rope |= mrope | {"mrope_section": section}
        return Eagle3Config(
            hidden_size=target.hidden_size,
            target_hidden_size=target.hidden_size,
            vocab_size=target.vocab_size,
            image_token_id=target.image_token_id,
            bos_token_id=None,
            eos_token_id=target.eos_token_ids,
            pad_token_id=target.pad_token_id,
            rope_parameters=rope,
            **entries,
        )

    # ── needed fields ──

    @classmethod
    def needed_fields(cls, config: Eagle3Config) -> list[str]:
        if config.target_layer_ids is None:
            raise InputError("the draft's config does not say which layers of the target it reads")
        return [
            *("inputs_embeds", "attention_mask", "loss_mask"),
            *map(hidden_state_key, config.target_layer_ids),
            *(["image_mask"] if config.image_embeds == "token" else []),
            *(["position_ids"] if "mrope_section" in config.rope_parameters else []),
        ]

    # ── module ──

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        hidden, width, eps = config.hidden_size, config.target_hidden_size, config.rms_norm_eps
        vocab = config.draft_vocab_size
        assert width is not None and vocab is not None
        if width != hidden:
            raise InputError(
                f"hidden_size {hidden}, target_hidden_size {width}: a draft that is not as wide as "
                "its target needs embeddings of its own, which is not supported"
            )
        read = len(config.target_layer_ids or range(READ_LAYERS))
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(RMSNorm(width, eps) for _ in range(read))
        if config.norm_before_fc:
            self.input_norm = RMSNorm(read * width, eps)
        self.fc = nn.Linear(read * width, hidden, bias=False)
        self.midlayer = Eagle3Layer(config)
        self.norm = RMSNorm(hidden, eps)
        self.lm_head = nn.Linear(hidden, vocab, bias=False)
        self.rotary_emb = MRotaryEmbedding(config)
        self.register_buffer("d2t", torch.zeros(vocab, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(config.vocab_size) < vocab)
        self.register_buffer("image_embedding", None, persistent=False)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            init_matrix(module)
        else:
            super()._init_weights(module)

    def attach_head(self, head: TargetHead) -> None:
        config = self.config
        check_head(config.vocab_size, config.target_hidden_size, head.weight)
        if config.image_embeds == "token" and config.image_token_id is not None:
            if config.image_token_id >= len(head.embeddings):
                raise InputError(
                    f"image_embeds=token: the target's embedding table has {len(head.embeddings)} "
                    f"rows, none for its placeholder {config.image_token_id}; use merged"
                )
            row = head.embeddings[config.image_token_id]
            self.image_embedding = row.detach().to(self.fc.weight)

    @torch.no_grad()
    def start(self, cache: Cache, rows: Sequence[int], head: TargetHead) -> dict[str, float]:
        """Choose the vocabulary from the training rows; W_d starts as the target's rows of it."""
        counts = count_supervised(cache, rows)
        target = cache.manifest.target
        used = choose_ids(
            counts[: target.vocab_size], self.config.draft_vocab_size, special_ids(target)
        )
        self.d2t.copy_(used - torch.arange(len(used)))
        self.t2d.zero_()[used] = True
        self.lm_head.weight.copy_(head.weight[used])
        return {"draft_vocab_coverage": float(counts[used].sum() / counts.sum())}

    @property
    def depth(self) -> int:
        return int(self.config.ttt_steps)

    @property
    def _used(self) -> Tensor:
        """The target's id of each draft id, ``[V_d]``."""
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def _embeddings(self, batch: Batch) -> Tensor:
        """What the draft is fed for each token, ``[B, L, H]``."""
        embeds = batch["inputs_embeds"].to(self.dtype)
        if self.config.image_embeds == "merged" or self.config.image_token_id is None:
            return embeds
        assert self.image_embedding is not None, "call attach_head first"
        return torch.where(batch["image_mask"].bool()[..., None], self.image_embedding, embeds)

    def _features(self, batch: Batch) -> Tensor:
        """``d_{-1}`` of all slots, ``[B, L, H]``."""
        layers = [batch[hidden_state_key(k)].to(self.dtype) for k in self.config.target_layer_ids]
        if self.config.fc_norm:
            layers = [norm(x) for norm, x in zip(self.fc_norm, layers, strict=True)]
        joined = torch.cat(layers, -1)
        if self.config.norm_before_fc:
            joined = self.input_norm(joined)
        features: Tensor = self.fc(joined)
        return features

    def _positions(self, batch: Batch) -> Tensor:
        """int64 ``[B, axes, L]``: as the target used them with mRoPE, else counted from 0."""
        rows, length = batch["attention_mask"].shape
        if "mrope_section" in self.config.rope_parameters:
            return batch["position_ids"].long()
        counted = torch.arange(length, device=batch["attention_mask"].device)
        return counted.expand(rows, 1, length)

    def _rollout(self, batch: Batch, anchors: Anchors) -> Tensor:
        """RMS(d_i) of the slots before the anchors, ``[n, S, H]``.

        Step i is fed the true token ``x[a+i]``, or the row's last one where that is beyond it.
        """
        rows, length = batch["attention_mask"].shape
        packed = pack_anchors(anchors, rows)
        anchor = packed.position
        row = torch.arange(rows, device=anchor.device)[:, None]
        layer, embeds = self.midlayer, self._embeddings(batch)
        hidden, position = self._features(batch), self._positions(batch)

        slots, _ = layer.fuse(shift_left(embeds), hidden)
        context = layer.self_attn.key_value(slots, self.rotary_emb(slots, position))
        # Slot a-1 is the chain's own first step, so the context ends before it.
        before = torch.arange(length, device=anchor.device) < anchor[..., None] - 1
        seen = before & batch["attention_mask"].bool()[:, None]

        # At the start of a row there is no hidden state yet.
        slot = (anchor - 1).clamp(min=0)
        hidden = hidden[row, slot] * (anchor > 0)[..., None]
        position = position.gather(2, slot[:, None].expand(-1, position.shape[1], -1))
        position = position - (anchor == 0)[:, None].long()
        chain: list[tuple[Tensor, Tensor]] = []
        outputs = []
        for step in range(self.depth):
            token = (anchor + step).clamp(max=length - 1)
            slots, residual = layer.fuse(embeds[row, token], hidden)
            rotary = self.rotary_emb(slots, position + step)
            chain.append(layer.self_attn.key_value(slots, rotary))
            query = layer.self_attn.query(slots, rotary)
            attended = chain_attention(query, context, seen, chain)
            hidden = layer.after_attention(residual, attended)
            normed = self.norm(hidden)
            outputs.append(packed.unpack(normed))
            if self.config.norm_output:
                hidden = normed
        return torch.stack(outputs, 1)

    def _logits(self, normed: Tensor) -> Tensor:
        """Over the draft's vocabulary, ``[…, V_d]``."""
        return at_least_float32(self.lm_head(normed))

    # ── loss ──

    def forward(self, batch: Batch, teacher: Teacher, random: RowRandom) -> dict[str, LossTerm]:
        """A term for each step i, divided by its number of slots, ``Σ_t M_i[t]``."""
        steps = self.depth
        judged = self._judged(batch)
        anchored = judged
        for _ in range(steps - 1):
            anchored = judged | shift_left(anchored)
        anchored[:, 0] = False
        anchors = Anchors(*torch.nonzero(anchored, as_tuple=True))
        hidden = self._rollout(batch, anchors)

        # What stands at position p is judged by z[p]: step i of the anchor p-i. All steps that one
        # z judges come together, so that z is computed once.
        row, position = torch.nonzero(judged, as_tuple=True)
        step = torch.arange(steps, device=row.device)
        anchor = position[:, None] - step
        index = torch.arange(judged.shape[1], device=row.device)
        masked = torch.where(batch["attention_mask"].bool(), -1, index).cummax(1).values
        run = anchor - 1 > masked[row, position][:, None]
        place = torch.zeros_like(anchored, dtype=torch.int64)
        place[anchors.row, anchors.position] = torch.arange(len(anchors), device=row.device)
        hidden = hidden[place[row[:, None], anchor.clamp(min=0)], step]

        def losses(hidden: Tensor, run: Tensor, row: Tensor, position: Tensor) -> Tensor:
            with torch.no_grad():
                logits = at_least_float32(teacher.logits(row, position))
                inside = self.t2d[logits.argmax(-1)][:, None]
                # Top-k logits may all be outside the vocabulary, and those inside minus infinity.
                target = torch.softmax(logits[:, self._used].masked_fill(~inside, 0.0), -1)
            log_draft = torch.log_softmax(self._logits(hidden), -1)
            soft_ce = -(target[:, None] * log_draft).sum(-1)
            counts = (run & inside).to(soft_ce.dtype)
            return torch.cat([(counts * soft_ce).sum(0), counts.sum(0)])

        width = self.config.vocab_size + steps * self.config.draft_vocab_size
        sums = sum_over_slots(losses, (hidden, run, row, position), width)
        return {
            f"step_{i}": LossTerm(sums[i], sums[steps + i].detach(), self.config.ttt_decay**i)
            for i in range(steps)
        }

    def _judged(self, batch: Batch) -> Tensor:
        """bool ``[B, L]``: positions p whose z[p] the draft is held to; ``M_i[t] = judged[t+1+i]``
        but for the vocabulary."""
        mask = batch["loss_mask"].bool()
        judged = torch.zeros_like(mask)
        if self.config.loss_mask == "unshifted":
            judged[:, 1:] = mask[:, :-1]
            index = torch.arange(mask.shape[1], device=mask.device)
            return judged & (index < batch["length"][:, None])
        judged[:, 1:] = mask[:, 1:]
        return judged

    # ── prediction ──

    @torch.no_grad()
    def predict(self, batch: Batch, anchors: Anchors) -> Tensor:
        logits = self._logits(self._rollout(batch, anchors))
        nowhere = torch.finfo(logits.dtype).min
        full = logits.new_full((*logits.shape[:-1], self.config.vocab_size), nowhere)
        full[..., self._used] = logits
        return full


def _check_layers(layers: list[int], num_layers: int) -> None:
    last = num_layers - 2
    distinct = len(layers) == len(set(layers)) == READ_LAYERS
    if not distinct or not all(-1 <= k <= last for k in layers):
        raise InputError(
            f"-c target_layer_ids={layers}: the target has {num_layers} decoder layers; name "
            f"{READ_LAYERS} of -1 (what layer 0 receives) to {last}"
        )


def _check_section(section: list[int], mrope: dict[str, Any], head_dim: int) -> None:
    if not mrope:
        raise InputError(
            f"-c mrope_section={section}: the target's positions have one axis; leave it out"
        )
    if len(section) != AXES or min(section) < 0 or sum(section) != head_dim // 2:
        raise InputError(
            f"-c mrope_section={section}: name how many of the {head_dim // 2} frequencies each "
            f"of the {AXES} axes turns, or [] for positions counted from 0"
        )
