"""The exponential moving average of a draft's weights."""

import torch
from torch import Tensor, nn


class Ema:
    """``average = d average + (1 - d) weights`` after every update, with
    ``d = min(decay, (1 + step) / (10 + step))``, so that the first, untrained weights are soon
    forgotten.

    Attributes:
        averages: by name of the trainable parameter.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self._weights = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._decay = decay
        self.averages: dict[str, Tensor] = {
            name: p.detach().clone() for name, p in self._weights.items()
        }

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take in the weights after the update of ``step``, from 0."""
        decay = min(self._decay, (1 + step) / (10 + step))
        for name, weight in self._weights.items():
            self.averages[name].lerp_(weight, 1 - decay)

    @torch.no_grad()
    def become_weights(self) -> None:
        """Make the averages the model's weights, for good."""
        for name, weight in self._weights.items():
            weight.copy_(self.averages[name])
