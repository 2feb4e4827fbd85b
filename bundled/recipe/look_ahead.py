"""Throw-away heads that make the hidden states tell of tokens further on.

A large model's hidden state says something of the tokens after the next one; that is what a draft
lives on. One this small has no reason to, unless it is trained for it.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

OFFSETS = (2, 3)
WEIGHT = 0.5


class LookAhead(nn.Module):
    """One linear head for each of `OFFSETS`: hidden state t foretells token t + offset."""

    def __init__(self, hidden_size: int, vocab_size: int, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.heads = nn.ModuleList(nn.Linear(hidden_size, vocab_size) for _ in OFFSETS)

    def loss(self, hidden: Tensor, ids: Tensor, written: Tensor) -> Tensor:
        """The weighted mean cross-entropy, a scalar.

        `hidden` is float [B, L, H]; `ids` int64 [B, L]; `written` [B, L] marks what the assistant
        wrote, which alone is to be foretold.
        """
        losses = []
        for offset, head in zip(OFFSETS, self.heads, strict=True):
            told = written[:, offset:].bool()
            losses.append(F.cross_entropy(head(hidden[:, :-offset][told]), ids[:, offset:][told]))
        return WEIGHT * torch.stack(losses).mean()
