"""DFlash by loops over blocks, slots, heads and keys, in float64."""

import math
from dataclasses import dataclass

import torch
from dspark_oracle import block_hidden
from oracle_parts import Weights, softmax
from torch import Tensor

Batch = dict[str, Tensor]


@dataclass
class Block:
    """Slots 1 to B-1 of one block: the logits of ``x[anchor + 1]`` and on, and what is judged."""

    row: int
    anchor: int
    logits: list[Tensor]
    supervised: list[bool]


def target_weights(head: torch.nn.Module) -> dict[str, Tensor]:
    """What a draft shares with the target, under names of its own."""
    bias = torch.zeros(len(head.weight)) if head.bias is None else head.bias
    return {
        "embed_tokens.weight": head.embeddings.double(),
        "lm_head.weight": head.weight.double(),
        "lm_head.bias": bias.double(),
    }


def run_block(w: Weights, batch: Batch, row: int, anchor: int, config: object) -> Block:
    mask = batch["loss_mask"][row].tolist()
    hidden = block_hidden(w, batch, row, anchor, config)
    logits, supervised = [], []
    for k in range(1, config.block_size):
        logits.append(w["lm_head.weight"] @ hidden[k] + w["lm_head.bias"])
        supervised.append(anchor + k < len(mask) and bool(mask[anchor + k]))
    return Block(row, anchor, logits, supervised)


def all_blocks(w: Weights, batch: Batch, config: object) -> list[Block]:
    blocks = []
    for row, mask in enumerate(batch["loss_mask"].tolist()):
        for anchor in range(len(mask) - 1):
            if mask[anchor] and mask[anchor + 1]:
                blocks.append(run_block(w, batch, row, anchor, config))
    return blocks


def loss_sums(batch: Batch, blocks: list[Block], gamma: float) -> dict[str, Tensor]:
    """Weighted sums of both terms, and of the weights."""
    sums = dict.fromkeys(("ce", "distill", "weight"), torch.zeros((), dtype=torch.float64))
    for block in blocks:
        for k, (logits, supervised) in enumerate(
            zip(block.logits, block.supervised, strict=True), start=1
        ):
            if not supervised:
                continue
            weight = math.exp(-(k - 1) / gamma)
            p = softmax(logits)
            q = softmax(batch["logits"][block.row, block.anchor + k - 1].double())
            label = int(batch["input_ids"][block.row, block.anchor + k])
            sums["ce"] = sums["ce"] - weight * torch.log(p[label])
            for v in range(len(p)):
                sums["distill"] = sums["distill"] - weight * q[v] * torch.log(p[v])
            sums["weight"] = sums["weight"] + weight
    return sums
