"""MSD by loops over slots, heads and keys, in float64."""

import torch
from draft_cases import HEAD_DIM, THETA
from oracle_parts import Weights, attend, heads, linear, mlp, rms_norm, rope, softmax
from torch import Tensor

Batch = dict[str, Tensor]


def slot_input(w: Weights, embedding: Tensor, hidden: Tensor, is_image: bool) -> Tensor:
    if is_image:
        return embedding
    return linear(w, "fc", torch.cat([embedding, hidden]))


def row_inputs(w: Weights, batch: Batch, hidden: Tensor, row: int) -> list[Tensor]:
    """Slot t fuses the embedding of token t + 1 with hidden state t; the tail has no token."""
    length = len(batch["input_ids"][row])
    out = []
    for t in range(length):
        last = t + 1 == length
        embedding = batch["inputs_embeds"][row, 0 if last else t + 1].double()
        embedding = torch.zeros_like(embedding) if last else embedding
        is_image = not last and bool(batch["image_mask"][row, t + 1])
        out.append(slot_input(w, embedding, hidden[row, t].double(), is_image))
    return out


def last_output(w: Weights, inputs: list[Tensor], allowed: list[bool], first: int = 0) -> Tensor:
    """The layer's output at the last of ``inputs``, which sees the ``allowed`` ones and itself.

    ``first`` is the position of the first input.
    """
    keys, values = [], []
    here = len(inputs) - 1
    for s, x in enumerate(inputs):
        if s == here or allowed[s]:
            parts = heads(linear(w, "layers.0.self_attn.k_proj", x), HEAD_DIM)
            keys.append([rope(part, first + s, THETA) for part in parts])
            values.append(heads(linear(w, "layers.0.self_attn.v_proj", x), HEAD_DIM))
    x = inputs[-1]
    attended = []
    parts = heads(linear(w, "layers.0.self_attn.q_proj", x), HEAD_DIM)
    for h, part in enumerate(parts):
        shared = h // (len(parts) // len(keys[0]))
        attended.append(
            attend(
                rope(part, first + here, THETA),
                [key[shared] for key in keys],
                [value[shared] for value in values],
            )
        )
    x = x + linear(w, "layers.0.self_attn.o_proj", torch.cat(attended))
    return x + mlp(w, "layers.0.mlp", rms_norm(x, w["layers.0.post_attention_layernorm.weight"]))


def loss_means(
    w: Weights, head: tuple[Tensor, Tensor], batch: Batch, hidden: Tensor, target: Tensor
) -> dict[str, Tensor]:
    """Both terms, averaged over supervised slots, and how many there are.

    ``hidden`` are the input hidden states, ``target`` the true ones, ``[B, L, H]`` each.
    """
    regression = soft_ce = torch.zeros((), dtype=torch.float64)
    count = 0
    for row in range(len(batch["input_ids"])):
        inputs = row_inputs(w, batch, hidden, row)
        allowed = [bool(v) for v in batch["attention_mask"][row]]
        for t in range(len(inputs) - 1):
            if not batch["loss_mask"][row, t + 1]:
                continue
            count += 1
            out = last_output(w, inputs[: t + 1], allowed)
            for a, b in zip(out, target[row, t + 1].double(), strict=True):
                gap = abs(a - b)
                term = 0.5 * gap * gap if float(gap.detach()) < 1 else gap - 0.5
                regression = regression + term / len(out)
            q = softmax(batch["logits"][row, t + 1].double())
            p = softmax(head[0] @ out + head[1])
            soft_ce = soft_ce - sum(q[v] * torch.log(p[v]) for v in range(len(q)))
    return {"smooth_l1": regression / count, "soft_ce": soft_ce / count, "count": count}


def rollout(
    w: Weights, head: tuple[Tensor, Tensor], batch: Batch, row: int, anchor: int, depth: int
) -> list[Tensor]:
    """Logits of each step of a literal rollout: the sequence grows and the layer runs again."""
    hidden = batch["last_hidden_state"].double()
    length = len(batch["input_ids"][row])
    allowed = [bool(v) for v in batch["attention_mask"][row]][: max(anchor - 1, 0)]
    inputs = row_inputs(w, batch, hidden, row)[: max(anchor - 1, 0)]
    feature = hidden[row, anchor - 1] if anchor else torch.zeros_like(hidden[row, 0])
    first = 0 if anchor else -1
    out = []
    for step in range(depth):
        t = anchor + step
        if t >= length:
            break
        embedding = batch["inputs_embeds"][row, t].double()
        inputs.append(slot_input(w, embedding, feature, bool(batch["image_mask"][row, t])))
        allowed.append(True)
        feature = last_output(w, inputs, allowed, first)
        out.append(head[0] @ feature + head[1])
    return out
