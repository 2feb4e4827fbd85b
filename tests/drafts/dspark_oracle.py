"""DSpark by loops over blocks, slots, heads and keys, in float64."""

import math
from dataclasses import dataclass

import torch
from draft_cases import HEAD_DIM, LAYERS, THETA
from oracle_parts import Weights, attend, heads, linear, mlp, rms_norm, rope, softmax
from torch import Tensor

Batch = dict[str, Tensor]


@dataclass
class Round:
    """One block: what the draft makes of it and how it is judged."""

    row: int
    anchor: int
    hidden: list[Tensor]
    logits: list[Tensor]
    confidence: list[Tensor]
    supervised: list[bool]


def candidates(batch: Batch, row: int) -> list[int]:
    mask = batch["loss_mask"][row].tolist()
    return [t for t in range(len(mask) - 1) if mask[t] and mask[t + 1]]


def run_block(w: Weights, batch: Batch, row: int, anchor: int, config: object) -> Round:
    size = config.block_size
    ids = batch["input_ids"][row].tolist()
    hidden = block_hidden(w, batch, row, anchor, config)
    logits, confidence, supervised = [], [], []
    state = torch.zeros(config.markov_rank, dtype=torch.float64)
    alive = True
    for k in range(size):
        prev = ids[min(anchor + k, len(ids) - 1)]
        e = w["markov_head.markov_w1.weight"][prev]
        if config.markov_head_type == "vanilla":
            latent = e
        elif config.markov_head_type == "gated":
            gate = linear(w, "markov_head.gate_proj", torch.cat([hidden[k], e]))
            latent = e / (1 + torch.exp(-gate))
        else:
            joint = linear(w, "markov_head.joint_proj", torch.cat([state, e, hidden[k]]))
            r = len(e)
            g = 1 / (1 + torch.exp(-joint[:r]))
            state = g * state + (1 - g) * torch.tanh(joint[r : 2 * r])
            latent = torch.tanh(joint[2 * r :])
        logits.append(linear(w, "lm_head", hidden[k]) + w["markov_head.markov_w2.weight"] @ latent)
        if config.enable_confidence_head:
            seen = torch.cat([hidden[k], e]) if config.confidence_head_with_markov else hidden[k]
            confidence.append(linear(w, "confidence_head.proj", seen)[0])
        t = anchor + 1 + k
        alive = alive and t < len(ids) and bool(batch["loss_mask"][row, t])
        supervised.append(alive)
    return Round(row, anchor, hidden, logits, confidence, supervised)


def block_hidden(w: Weights, batch: Batch, row: int, anchor: int, config: object) -> list[Tensor]:
    """Hidden states of the slots, after the final norm."""
    context = {}
    for s in range(anchor):
        if batch["attention_mask"][row, s]:
            features = [batch[f"hidden_states.{k}"][row, s].double() for k in LAYERS]
            context[s] = rms_norm(linear(w, "fc", torch.cat(features)), w["hidden_norm.weight"])
    first = int(batch["input_ids"][row, anchor])
    ids = [first] + [config.mask_token_id] * (config.block_size - 1)
    slots = [w["embed_tokens.weight"][i] for i in ids]
    for layer in range(config.num_hidden_layers):
        slots = _layer(w, f"layers.{layer}", slots, context, anchor)
    return [rms_norm(x, w["norm.weight"]) for x in slots]


def _layer(
    w: Weights, name: str, slots: list[Tensor], context: dict[int, Tensor], anchor: int
) -> list[Tensor]:
    normed = [rms_norm(x, w[f"{name}.input_layernorm.weight"]) for x in slots]
    seen = [*context.items(), *((anchor + k, x) for k, x in enumerate(normed))]
    keys, values = [], []
    for position, x in seen:
        parts = heads(linear(w, f"{name}.self_attn.k_proj", x), HEAD_DIM)
        norm = w[f"{name}.self_attn.k_norm.weight"]
        keys.append([rope(rms_norm(part, norm), position, THETA) for part in parts])
        values.append(heads(linear(w, f"{name}.self_attn.v_proj", x), HEAD_DIM))
    out = []
    for k, x in enumerate(slots):
        parts = heads(linear(w, f"{name}.self_attn.q_proj", normed[k]), HEAD_DIM)
        attended = []
        for h, part in enumerate(parts):
            query = rms_norm(part, w[f"{name}.self_attn.q_norm.weight"])
            shared = h // (len(parts) // len(keys[0]))
            attended.append(
                attend(
                    rope(query, anchor + k, THETA),
                    [key[shared] for key in keys],
                    [value[shared] for value in values],
                )
            )
        x = x + linear(w, f"{name}.self_attn.o_proj", torch.cat(attended))
        post = rms_norm(x, w[f"{name}.post_attention_layernorm.weight"])
        out.append(x + mlp(w, f"{name}.mlp", post))
    return out


def all_rounds(w: Weights, batch: Batch, config: object) -> list[Round]:
    return [
        run_block(w, batch, row, anchor, config)
        for row in range(len(batch["input_ids"]))
        for anchor in candidates(batch, row)
    ]


def acceptance(batch: Batch, block: Round, k: int) -> tuple[Tensor, Tensor]:
    """Sum of the absolute differences, and the acceptance rate, of a supervised slot."""
    p = softmax(block.logits[k])
    q = softmax(batch["logits"][block.row, block.anchor + k].double())
    l1 = sum(abs(a - b) for a, b in zip(p, q, strict=True))
    return l1, 1 - l1 / 2


def loss_sums(batch: Batch, rounds: list[Round], config: object) -> dict[str, Tensor]:
    """Weighted sums of the three terms, and of the weights."""
    sums = dict.fromkeys(("ce", "l1", "confidence", "weight"), torch.zeros((), dtype=torch.float64))
    for block in rounds:
        for k in range(config.block_size):
            if not block.supervised[k]:
                continue
            weight = math.exp(-k / config.loss_gamma)
            label = int(batch["input_ids"][block.row, block.anchor + 1 + k])
            l1, accepted = acceptance(batch, block, k)
            sums["ce"] = sums["ce"] - weight * torch.log(softmax(block.logits[k])[label])
            sums["l1"] = sums["l1"] + weight * l1
            if block.confidence:
                c, rate = 1 / (1 + torch.exp(-block.confidence[k])), accepted.detach()
                bce = -(rate * torch.log(c) + (1 - rate) * torch.log(1 - c))
                sums["confidence"] = sums["confidence"] + weight * bce
            sums["weight"] = sums["weight"] + weight
    return sums


def tau(batch: Batch, rounds: list[Round]) -> float:
    """Mean tokens per round: 1 + the expected accepted prefix."""
    total = 0.0
    for block in rounds:
        total, prefix = total + 1, 1.0
        for k, supervised in enumerate(block.supervised):
            if not supervised:
                break
            prefix *= float(acceptance(batch, block, k)[1])
            total += prefix
    return total / len(rounds)
