"""How far floats may be from those that the same target gave before."""

import torch
from torch import Tensor

from dspark.schemas.manifest import Manifest

TOLERANCE_16_BIT = 0.1
TOLERANCE_32_BIT = 1e-3
"""Largest error of a token's vector, relative to its length (both L2). On one kind of device and
number of threads all is bit-equal; elsewhere sums are taken in another order and their rounding
adds up over the layers. Measured on small targets: up to 0.0013 with other attention kernels (fp32,
stored as bf16), 0.025 in bfloat16, and 1.3 or more with another picture or other weights."""

_TINY = 1e-12


def tolerance(manifest: Manifest) -> float:
    """The largest ``token_error`` of a cache of this number type and of a target of its own."""
    short = manifest.dtype != "fp32" or manifest.identity.get("target.dtype") != "float32"
    return TOLERANCE_16_BIT if short else TOLERANCE_32_BIT


def token_error(old: Tensor, new: Tensor) -> float:
    """Largest L2 error of a token's vector ``[L, …]``, relative to the length of the old one.

    Infinite where the new one is no number.
    """
    old, new = (x.float().reshape(len(x), -1) for x in (old, new))
    off = (new - old).abs().nan_to_num(nan=torch.inf)
    return float((off.norm(dim=1) / old.norm(dim=1).clamp_min(_TINY)).max())
