"""Rotary positions of one axis, or of the three (time, height, width) of mRoPE."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from dspark.schemas.manifest import Manifest

AXES = 3


class MRotaryEmbedding(Qwen3RotaryEmbedding):
    """Cosines and sines of positions, each frequency turned by one of the position's axes.

    Attributes:
        axes: of each of the D/2 frequencies, as ``rope_parameters`` of the config say; all 0
            without ``mrope_section``.
    """

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.axes = frequency_axes(config.rope_parameters, config.head_dim // 2)

    def forward(self, x: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
        """
        Args:
            x: gives the type.
            position: int64 ``[B or 1, axes, n]``.

        Returns:
            ``[B or 1, n, D]`` each.
        """
        turned = position[:, self.axes].transpose(1, 2).float() * self.inv_freq.float()
        angle = torch.cat([turned, turned], -1)
        cos, sin = (part * self.attention_scaling for part in (angle.cos(), angle.sin()))
        return cos.to(x.dtype), sin.to(x.dtype)


def frequency_axes(rope: Mapping[str, Any], frequencies: int) -> list[int]:
    """The axis that turns each frequency.

    ``mrope_section`` says how many frequencies each axis turns. They lie one axis after the other
    (Qwen2-VL), or in turn where ``mrope_interleaved`` is set (Qwen3-VL).
    """
    section = rope.get("mrope_section")
    if not section:
        return [0] * frequencies
    if not rope.get("mrope_interleaved"):
        return [axis for axis, count in enumerate(section) for _ in range(count)]
    axes = [0] * frequencies
    for axis in range(1, AXES):
        for j in range(axis, AXES * section[axis], AXES):
            axes[j] = axis
    return axes


def target_mrope(manifest: Manifest) -> dict[str, Any]:
    """The target's mRoPE entries of ``rope_parameters``; empty if its positions have one axis, in
    the cache or in its config."""
    rope = manifest.target.text.get("rope_parameters") or {}
    rope = rope.get("full_attention") or rope  # nested where layer types differ in it
    stored = manifest.field("position_ids")
    if not rope.get("mrope_section") or stored is None or stored.row_shape[:-1] != (AXES,):
        return {}
    interleaved = {"mrope_interleaved": True} if rope.get("mrope_interleaved") else {}
    return {"mrope_section": list(rope["mrope_section"]), **interleaved}
