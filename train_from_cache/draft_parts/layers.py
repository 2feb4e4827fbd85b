"""Parts that several drafts are built of."""

import math

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers import initialization as init
from transformers.models.qwen3.modeling_qwen3 import rotate_half


class RMSNorm(nn.Module):
    """Root-mean-square norm with a learned scale, computed in float32 or wider.

    transformers' own narrows float64 to float32, which would hide errors from the tests.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """``[…, size]`` to the same shape and type."""
        y = at_least_float32(x)
        y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * y.to(x.dtype)


class AttentionProjections(nn.Module):
    """The projections of grouped-query attention under the names that servers load.

    Args:
        config: with ``hidden_size``, ``num_attention_heads``, ``num_key_value_heads``, ``head_dim``
            and ``attention_bias``.
        output_bias: whether the output has a bias.
        input_size: width of what queries, keys and values are made of; ``hidden_size`` by default.
    """

    def __init__(
        self, config: PreTrainedConfig, output_bias: bool, input_size: int | None = None
    ) -> None:
        super().__init__()
        hidden, self.head_dim = config.hidden_size, config.head_dim
        input_size = input_size or hidden
        width = config.num_attention_heads * self.head_dim
        kv_width = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(input_size, width, bias=config.attention_bias)
        self.k_proj = nn.Linear(input_size, kv_width, bias=config.attention_bias)
        self.v_proj = nn.Linear(input_size, kv_width, bias=config.attention_bias)
        self.o_proj = nn.Linear(width, hidden, bias=output_bias)


class RotaryProjections(AttentionProjections):
    """The same with rotary positions. Slots are ``[B, n, input_size]``."""

    def query(self, slots: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """``[B, heads, n, D]``."""
        return rotate(split_heads(self.q_proj(slots), self.head_dim), rotary)

    def key_value(self, slots: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """``[B, kv_heads, n, D]`` each."""
        value = split_heads(self.v_proj(slots), self.head_dim)
        return rotate(split_heads(self.k_proj(slots), self.head_dim), rotary), value


def at_least_float32(x: Tensor) -> Tensor:
    """``x`` in a type fit for sums over a vocabulary."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary positions.

    Args:
        x: ``[B, heads, n, D]``.
        rotary: cosines and sines, ``[B or 1, n, D]`` each.
    """
    cos, sin = (part.unsqueeze(1) for part in rotary)
    rotated: Tensor = x * cos + rotate_half(x) * sin
    return rotated


def split_heads(x: Tensor, head_dim: int) -> Tensor:
    """``[B, n, heads * D]`` to ``[B, heads, n, D]``."""
    return x.unflatten(-1, (-1, head_dim)).transpose(1, 2)


def merge_heads(x: Tensor) -> Tensor:
    """``[B, heads, n, D]`` to ``[B, n, heads * D]``."""
    return x.transpose(1, 2).flatten(-2)


def init_matrix(module: nn.Linear | nn.Embedding) -> None:
    """Start a matrix so that it keeps the size of what passes through it, at any width.

    Normal with standard deviation ``1/sqrt(columns)``; the bias starts at zero. Weights that were
    loaded are left alone.
    """
    init.normal_(module.weight, std=1 / math.sqrt(module.weight.shape[1]))
    if isinstance(module, nn.Linear) and module.bias is not None:
        init.zeros_(module.bias)
