"""Vectors in 8-bit floats (E4M3, without infinities) with one scale each."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dspark.schemas.fields import is_scale, scale_key

FLOAT8 = torch.float8_e4m3fn
RELATIVE_ERROR = 2**-4
"""Largest error of a number, relative to it, where it is at least ``SMALLEST`` of the largest of
its vector. Smaller ones are off by at most ``SMALLEST * RELATIVE_ERROR`` of that largest one. (Of
vectors without a number of 2**-109, all that is certain is that they stay as small.)"""
SMALLEST = 2**-13

_LARGEST_FRACTION = 0.875  # the largest E4M3 number is 448 = 0.875 * 2**9
_LARGEST_EXPONENT = 9
_TOO_LARGE = 2.0**127  # may be rounded up to what is infinite in bfloat16
_LEAST_SCALE = -117  # so that the smallest number, 2**-9 of the scale, is normal in bfloat16


def to_float8(vectors: Tensor) -> tuple[Tensor, Tensor]:
    """Round vectors to 8 bits.

    Each scale is a power of two, the smallest that keeps the vector's largest number in range, so
    numbers are rounded once, and ``from_float8`` is exact.

    Args:
        vectors: ``[…, H]`` of any float type.

    Returns:
        float8_e4m3fn ``[…, H]``, and float32 scales ``[…]``, not a number where the vector has one
        that is not finite or is 2**127 or more.
    """
    vectors = vectors.float()
    largest = vectors.abs().amax(-1)
    fraction, exponent = torch.frexp(largest)
    exponent = exponent - _LARGEST_EXPONENT + (fraction > _LARGEST_FRACTION)
    scale = torch.ldexp(torch.ones_like(largest), exponent.clamp(min=_LEAST_SCALE))
    scale = scale.where(largest < _TOO_LARGE, torch.nan)
    return (vectors / scale[..., None]).to(FLOAT8), scale


def from_float8(stored: Tensor, scale: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The numbers that ``to_float8`` stored, without any error of their own.

    Args:
        stored: float8_e4m3fn ``[…, H]``.
        scale: float32 ``[…]``.
        dtype: of the result, bfloat16 or float32.
    """
    return stored.to(dtype) * scale.to(dtype)[..., None]


def without_float8(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Fields of a row or batch by name, those in 8 bits in bfloat16 and without their scales."""
    return {
        name: from_float8(x, tensors[scale_key(name)]) if x.dtype == FLOAT8 else x
        for name, x in tensors.items()
        if not is_scale(name)
    }
