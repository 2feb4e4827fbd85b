"""Whether the tensor-parallel plan of transformers can split a target, before weights are read."""

import math
import re
from typing import Any

from dspark.capture.targets.backbone import decoder_layers, find_backbone, name_of
from dspark.schemas.errors import InputError

_SPLIT_SIZES = (
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "moe_intermediate_size",
)
_LEAST_SHARE = 0.5


def check_tensor_parallel(name: str, skeleton: Any, size: int) -> None:
    """Check that a target can be split and that the plan really splits its decoder layers.

    Args:
        name: of the target.
        skeleton: the model on the meta device.
        size: workers of a replica.

    Raises:
        InputError: it cannot; the message names sizes that fit, or ``--fsdp``.
    """
    if _split_share(skeleton) < _LEAST_SHARE:
        raise InputError(
            f"--tp {size}: transformers has no tensor-parallel plan that splits the decoder layers "
            f"of --target {name} (model type {skeleton.config.model_type}), so each worker would "
            "hold nearly all of them; use --fsdp"
        )
    sizes = _sizes(skeleton.config.get_text_config(decoder=True))
    if wrong := {k: v for k, v in sizes.items() if v % size}:
        fitting = math.gcd(*sizes.values())
        choices = [str(k) for k in range(2, fitting + 1) if fitting % k == 0]
        advice = (
            f"choose --tp {' or '.join(choices[:8])}, or use --fsdp" if choices else "use --fsdp"
        )
        raise InputError(
            f"--tp {size}: it must divide every size that is split, and --target {name} has "
            f"{', '.join(f'{k} {v}' for k, v in wrong.items())}; {advice}"
        )


def _sizes(config: Any) -> dict[str, int]:
    """What is cut into equal parts; of sizes by layer, what all layers have in common."""
    sizes: dict[str, int] = {}
    for key in _SPLIT_SIZES:
        value = getattr(config, key, None)
        values = value if isinstance(value, list | tuple) else [value]
        if counts := [v for v in values if isinstance(v, int) and v > 0]:
            sizes[key] = math.gcd(*counts)
    return sizes


def _split_share(skeleton: Any) -> float:
    """The share of the decoder layers' weights that the plan splits."""
    split = {
        k for k, style in (skeleton.tp_plan or {}).items() if re.search("colwise|rowwise", style)
    }
    layers = decoder_layers(find_backbone(skeleton))
    prefix = name_of(skeleton, layers)
    total = covered = 0
    for key, weight in layers.named_parameters():
        name = re.sub(r"\.\d+(?=\.)", ".*", f"{prefix}.{key}")
        total += weight.numel()
        if name in split or name.rpartition(".")[0] in split:
            covered += weight.numel()
    return covered / max(total, 1)
