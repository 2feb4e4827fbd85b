"""Finding the language backbone, its decoder layers and its head in any Hugging Face model."""

from typing import Any

from torch import nn

from dspark.schemas.errors import InputError

_INNER_NAMES = ("model", "decoder", "language_model", "text_model")
_LAYER_NAMES = ("layers", "h", "blocks")


def check_decoder_only(config: Any) -> None:
    """Check, before any weight is read, that a config is that of a decoder-only model.

    Raises:
        InputError: it is an encoder-decoder.
    """
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"{config.model_type} is an encoder-decoder model, whose decoder reads pictures by "
            "cross attention; dspark captures decoder-only models"
        )


def find_backbone(model: Any) -> nn.Module:
    """The module that holds the stack of decoder layers.

    Raises:
        InputError: the model has no ordinary decoder.
    """
    check_decoder_only(model.config)
    module: Any = model.get_decoder()
    for _ in range(4):
        if _layers_of(module) is not None:
            assert isinstance(module, nn.Module)
            return module
        inner = (getattr(module, name, None) for name in _INNER_NAMES)
        module = next((m for m in inner if isinstance(m, nn.Module)), None)
    raise InputError(f"{type(model).__name__}: no stack of decoder layers found in it")


def decoder_layers(backbone: nn.Module) -> nn.ModuleList:
    """The decoder layers of a backbone that ``find_backbone`` returned."""
    layers = _layers_of(backbone)
    assert layers is not None
    return layers


def _layers_of(module: Any) -> nn.ModuleList | None:
    found = (getattr(module, name, None) for name in _LAYER_NAMES)
    return next((m for m in found if isinstance(m, nn.ModuleList)), None)


def find_head(model: Any) -> nn.Module | None:
    """The language-model head: the one that the model names, or its only module ``lm_head``."""
    named: nn.Module | None = model.get_output_embeddings()
    if named is not None:
        return named
    heads = [m for name, m in model.named_modules() if name.split(".")[-1] == "lm_head"]
    return heads[0] if len(heads) == 1 else None


def name_of(model: nn.Module, module: nn.Module) -> str:
    """The path of a module inside a model."""
    return next(name for name, found in model.named_modules() if found is module)
