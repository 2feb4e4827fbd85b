"""A draft's dimensions, taken from the target's language backbone."""

from collections.abc import Mapping
from typing import Any

from transformers.activations import ACT2FN

from dspark.schemas.errors import InputError
from dspark.schemas.manifest import Manifest
from dspark.train_from_cache.draft_parts.overrides import at_least, one_of

_LARGEST_SIZE = 2**31
_LARGEST_NUMBER = 1e18


def target_dims(manifest: Manifest) -> dict[str, Any]:
    """Dimensions that a draft copies from the target unless the user sets others.

    Returns:
        ``intermediate_size``, ``num_attention_heads``, ``num_key_value_heads``, ``head_dim``,
        ``hidden_act``, ``rms_norm_eps``, ``rope_theta``, ``max_position_embeddings``. What the
        manifest does not know, or has as what it cannot be, is what it means in Hugging Face's
        Llama; where layers differ, it is that of the widest.
    """
    text = manifest.target.text
    heads = _size(text, "num_attention_heads") or 1
    rope = _mapping(text, "rope_parameters")
    rope = _mapping(rope, "full_attention") or rope  # nested where layer types differ in it
    theta = _number(text, "rope_theta") or _number(rope, "rope_theta")
    return {
        "intermediate_size": _size(text, "intermediate_size") or 4 * manifest.target.hidden_size,
        "num_attention_heads": heads,
        "num_key_value_heads": _size(text, "num_key_value_heads") or heads,
        "head_dim": _size(text, "head_dim") or manifest.target.hidden_size // heads,
        "hidden_act": text.get("hidden_act") or "silu",
        "rms_norm_eps": _number(text, "rms_norm_eps") or 1e-6,
        "rope_theta": theta or 10000.0,
        "max_position_embeddings": _size(text, "max_position_embeddings") or manifest.max_length,
    }


def _size(values: Mapping[str, Any], key: str) -> int | None:
    value = values.get(key)
    if isinstance(value, list):
        value = max((v for v in value if type(v) is int), default=None)
    return value if type(value) is int and 1 <= value < _LARGEST_SIZE else None


def _number(values: Mapping[str, Any], key: str) -> float | None:
    value = values.get(key)
    if isinstance(value, int | float) and type(value) is not bool and 0 < value < _LARGEST_NUMBER:
        return float(value)
    return None


def _mapping(values: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = values.get(key)
    return value if isinstance(value, dict) else {}


def check_dims(entries: Mapping[str, Any]) -> None:
    """Check that a draft can be built with these dimensions.

    Raises:
        InputError: it cannot; the message names the entry.
    """
    sizes = (
        *("intermediate_size", "num_attention_heads", "num_key_value_heads"),
        "max_position_embeddings",
    )
    at_least(entries, {**dict.fromkeys(sizes, 1), "head_dim": 2, "rms_norm_eps": 1e-12})
    at_least(entries, {"rope_theta": 1})
    one_of(entries, "hidden_act", tuple(ACT2FN))
    heads, kv_heads = entries["num_attention_heads"], entries["num_key_value_heads"]
    if heads % kv_heads:
        raise InputError(
            f"-c num_key_value_heads={kv_heads}: must divide num_attention_heads={heads}"
        )
    if entries["head_dim"] % 2:
        raise InputError(
            f"-c head_dim={entries['head_dim']}: must be even, for rotary positions turn pairs"
        )
