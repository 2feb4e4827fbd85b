"""Muon for the matrices inside the blocks, AdamW for everything else."""

import math
from collections.abc import Iterable

import torch
from torch import nn

WARM_UP = 40
"""Steps during which the learning rate rises."""
FLOOR = 0.03
"""The learning rate at the end, as a fraction of its peak."""


class Optimizer:
    """Two optimizers that step together, with one schedule over `total` steps.

    `peak` scales the learning rates.
    """

    def __init__(self, model: nn.Module, total: int, peak: float = 1.0) -> None:
        matrices, tables, scales = _groups(model.named_parameters())
        self._parameters = matrices + tables + scales
        self._total = total
        decayed = {"params": tables, "weight_decay": 0.05}
        plain = {"params": scales, "weight_decay": 0.0}
        self._optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=peak * 5e-3, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW([decayed, plain], lr=peak * 3e-3, betas=(0.9, 0.98)),
        ]
        self._schedules = [
            torch.optim.lr_scheduler.LambdaLR(optimizer, self._factor)
            for optimizer in self._optimizers
        ]

    def step(self, loss: torch.Tensor) -> None:
        """Goes back through `loss`, a scalar, and takes one step."""
        loss.backward()
        nn.utils.clip_grad_norm_(self._parameters, 1.0)
        for optimizer, schedule in zip(self._optimizers, self._schedules, strict=True):
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    def _factor(self, step: int) -> float:
        falling = 0.5 * (1 + math.cos(math.pi * min(1.0, step / self._total)))
        return min(1.0, (step + 1) / WARM_UP) * (FLOOR + (1 - FLOOR) * falling)


def _groups(
    named: Iterable[tuple[str, nn.Parameter]],
) -> tuple[list[nn.Parameter], list[nn.Parameter], list[nn.Parameter]]:
    """Matrices inside blocks, tables at either end, and everything of one dimension."""
    matrices, tables, scales = [], [], []
    for name, parameter in named:
        if parameter.ndim < 2:
            scales.append(parameter)
        elif parameter.ndim > 2 or "embed_tokens" in name or "lm_head" in name:
            tables.append(parameter)
        else:
            matrices.append(parameter)
    return matrices, tables, scales
