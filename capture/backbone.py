"""Finding the language backbone and the picture token of any Hugging Face model."""

from typing import Any

from torch import nn

from dspark.schemas.errors import InputError

_INNER_NAMES = ("model", "decoder", "language_model", "text_model")
_IMAGE_ID_KEYS = ("image_token_id", "image_token_index", "image_patch_id")
_VIDEO_ID_KEYS = ("video_token_id", "video_token_index")


def find_backbone(model: Any) -> nn.Module:
    """The module whose ``layers`` are the decoder layers.

    Raises:
        InputError: the model has no ordinary decoder.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise InputError(
            f"{type(model).__name__} is an encoder-decoder model; dspark captures decoder-only ones"
        )
    module = model.get_decoder()
    for _ in range(4):
        if isinstance(getattr(module, "layers", None), nn.ModuleList):
            assert isinstance(module, nn.Module)
            return module
        inner = (getattr(module, name, None) for name in _INNER_NAMES)
        module = next((m for m in inner if isinstance(m, nn.Module)), None)
    raise InputError(f"{type(model).__name__}: no stack of decoder layers found in it")


def _first_int(config: Any, keys: tuple[str, ...]) -> int | None:
    values = (getattr(config, key, None) for key in keys)
    return next((int(v) for v in values if isinstance(v, int)), None)


def image_token_id(config: Any) -> int | None:
    """The id that stands at every picture position of ``input_ids``."""
    return _first_int(config, _IMAGE_ID_KEYS)


def video_token_id(config: Any) -> int | None:
    """The id that stands at every video position of ``input_ids``."""
    return _first_int(config, _VIDEO_ID_KEYS)
