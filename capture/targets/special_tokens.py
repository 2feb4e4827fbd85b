"""Which ids stand for pictures, videos and the end of a turn."""

from typing import Any

_IMAGE_ID_KEYS = ("image_token_id", "image_token_index", "image_patch_id")
_VIDEO_ID_KEYS = ("video_token_id", "video_token_index")


def image_token_id(config: Any, processor: Any = None) -> int | None:
    """The id that stands at every picture position of ``input_ids``.

    By the model's config, else by the processor or its tokenizer; None where none of them has one.
    """
    return _first_id((config, processor, getattr(processor, "tokenizer", None)), _IMAGE_ID_KEYS)


def video_token_id(config: Any, processor: Any = None) -> int | None:
    """The id that stands at every video position of ``input_ids``, found likewise."""
    return _first_id((config, processor, getattr(processor, "tokenizer", None)), _VIDEO_ID_KEYS)


def _first_id(owners: tuple[Any, ...], keys: tuple[str, ...]) -> int | None:
    values = (getattr(owner, key, None) for owner in owners for key in keys)
    ids = (v for v in values if isinstance(v, int) and not isinstance(v, bool))
    return next((v for v in ids if v >= 0), None)  # some configs mark pictures with -200


def eos_token_ids(model: Any, tokenizer: Any) -> list[int]:
    """Every id that ends a turn, by the generation config or the tokenizer, sorted."""
    configured = getattr(model.generation_config, "eos_token_id", None)
    ids = configured if isinstance(configured, list) else [configured]
    return sorted({int(i) for i in [*ids, tokenizer.eos_token_id] if i is not None})
