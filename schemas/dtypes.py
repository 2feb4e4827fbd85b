"""Names of number types: the ``--dtype`` option, safetensors codes, torch dtypes."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

FLOAT_CODES = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp8": "BF16"}
"""Of each ``--dtype``. ``fp8`` stores ``inputs_embeds`` and ``hidden_states.K`` in ``FLOAT8_CODE``
with scales, and its other floats in this type."""
FLOAT8_CODE = "F8_E4M3"
ITEMSIZE = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "I32": 4, "U8": 1}
_TORCH_NAMES = {
    "BF16": "bfloat16",
    "F16": "float16",
    "F32": "float32",
    "F8_E4M3": "float8_e4m3fn",
    "I32": "int32",
    "U8": "uint8",
}


def torch_dtype(code: str) -> "torch.dtype":
    """The torch dtype of a safetensors code, e.g. ``BF16`` -> ``torch.bfloat16``."""
    import torch

    dtype = getattr(torch, _TORCH_NAMES[code])
    assert isinstance(dtype, torch.dtype)
    return dtype
