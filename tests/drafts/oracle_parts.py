"""The arithmetic of decoder layers, one position and one head at a time, in float64.

Written from the formulas alone; imports nothing of the project.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

Weights = Mapping[str, Tensor]


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    mean_square = sum(v * v for v in x) / len(x)
    return weight * x / torch.sqrt(mean_square + eps)


def rope(x: Tensor, position: int, theta: float) -> Tensor:
    """Rotates the pairs (i, i + D/2) of one head's vector.

    Angles, cosines and sines are rounded to float32, as transformers computes them in every model.
    """
    half = len(x) // 2
    out: list[Tensor | None] = [None] * len(x)
    for i in range(half):
        angle = torch.tensor(float(position)) * torch.tensor(theta ** (-2 * i / len(x)))
        cos, sin = float(torch.cos(angle)), float(torch.sin(angle))
        out[i] = x[i] * cos - x[i + half] * sin
        out[i + half] = x[i + half] * cos + x[i] * sin
    return torch.stack([v for v in out if v is not None])


def attend(query: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor]) -> Tensor:
    """One query over the keys it may see, and no others."""
    scores = [query @ key / math.sqrt(len(query)) for key in keys]
    top = max(float(s.detach()) for s in scores)
    weights = [torch.exp(s - top) for s in scores]
    total = sum(weights)
    return sum(w / total * v for w, v in zip(weights, values, strict=True))


def linear(w: Weights, name: str, x: Tensor) -> Tensor:
    out = w[f"{name}.weight"] @ x
    return out + w[f"{name}.bias"] if f"{name}.bias" in w else out


def mlp(w: Weights, name: str, x: Tensor) -> Tensor:
    gate = linear(w, f"{name}.gate_proj", x)
    gate = gate / (1 + torch.exp(-gate))
    return linear(w, f"{name}.down_proj", gate * linear(w, f"{name}.up_proj", x))


def heads(x: Tensor, head_dim: int) -> list[Tensor]:
    return [x[i : i + head_dim] for i in range(0, len(x), head_dim)]


def softmax(x: Tensor) -> Tensor:
    powers = torch.exp(x - x.max().detach())
    return powers / powers.sum()


def double_weights(module: torch.nn.Module) -> dict[str, Tensor]:
    """Leaf copies of a module's parameters by name, for the oracles to differentiate."""
    return {
        name: p.detach().double().clone().requires_grad_(p.requires_grad)
        for name, p in module.named_parameters()
    }
