"""Medusa by loops over heads and slots, in float64."""

import torch
from oracle_parts import Weights, linear, softmax
from torch import Tensor

Batch = dict[str, Tensor]


def head_logits(w: Weights, i: int, hidden: Tensor) -> Tensor:
    y = hidden
    n = 0
    while f"blocks.{i}.layers.{n}.weight" in w:
        step = linear(w, f"blocks.{i}.layers.{n}", y)
        y = y + step / (1 + torch.exp(-step))
        n += 1
    return linear(w, f"lm_heads.{i}", y)


def head_means(w: Weights, batch: Batch, heads: int, distill: float) -> list[tuple[Tensor, int]]:
    """Mean loss of each head, and over how many slots."""
    out = []
    for i in range(heads):
        total, count = torch.zeros((), dtype=torch.float64), 0
        for row, ids in enumerate(batch["input_ids"].tolist()):
            for t in range(len(ids)):
                token = t + 2 + i
                if token >= len(ids) or not batch["loss_mask"][row, token]:
                    continue
                count += 1
                p = softmax(head_logits(w, i, batch["last_hidden_state"][row, t].double()))
                q = softmax(batch["logits"][row, token - 1].double())
                total = total - (1 - distill) * torch.log(p[ids[token]])
                total = total - distill * sum(q[v] * torch.log(p[v]) for v in range(len(q)))
        out.append((total / max(count, 1), count))
    return out


def proposals(w: Weights, batch: Batch, row: int, anchor: int, heads: int) -> Tensor:
    hidden = batch["last_hidden_state"][row].double()
    seen = hidden[anchor - 1] if anchor else torch.zeros_like(hidden[0])
    return torch.stack([head_logits(w, i, seen) for i in range(heads)])
