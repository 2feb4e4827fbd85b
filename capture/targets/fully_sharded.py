"""A target whose weights are stored in parts on several workers (FSDP2).

Units that are gathered and freed on their own are the decoder layers alone. All else is one unit
with the root, which every forward pass gathers: a worker whose batch has no picture does not enter
the vision tower, so a unit inside it would wait there for ever. This costs each worker a full copy
of the vision tower, the input embedding and the head.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from dspark.capture.targets.backbone import decoder_layers, find_backbone, find_head, name_of
from dspark.schemas.errors import InputError


def sharding_plan(skeleton: Any) -> dict[str, str]:
    """The units beside the root, in the form of transformers.

    Args:
        skeleton: the model on the meta device.
    """
    layers = decoder_layers(find_backbone(skeleton))
    return {f"{name_of(skeleton, layers)}.*": "free_full_weight"}


def without_own_plans(config: Any) -> Any:
    """A copy of a config that makes transformers follow ``sharding_plan`` alone.

    Its own plans would reach into vision towers.
    """
    copy = deepcopy(config)
    for part in (copy, *_inner_configs(copy)):
        part.base_model_fsdp_plan = None
    return copy


def _inner_configs(config: Any) -> Iterator[Any]:
    for name in config.sub_configs:
        if (inner := getattr(config, name, None)) is not None:
            yield inner
            yield from _inner_configs(inner)


def check_units(name: str, model: Any) -> None:
    """Check that every unit is one that each forward pass enters.

    transformers gives weights that it keeps in another number type units of their own.

    Raises:
        InputError: one is not.
    """
    layers = decoder_layers(find_backbone(model))
    entered = {model, model.get_input_embeddings(), find_head(model), *layers.modules()}
    for part, module in model.named_modules():
        if isinstance(module, FSDPModule) and module not in entered:
            raise InputError(
                f"--fsdp: --target {name} keeps {part} in another number type than the rest, which "
                "cannot be split for batches with and without pictures; use --tp or --device-map"
            )


def original_class(model: nn.Module) -> type:
    """The class of a model, also when FSDP2 has put its own in front."""
    return next(c for c in type(model).__mro__ if not issubclass(c, FSDPModule))


@contextmanager
def gathered(model: nn.Module, layers: nn.Module) -> Iterator[None]:
    """All weights outside ``layers`` in full, as plain tensors; a collective of the replica.

    Does nothing to a model that is not sharded this way.
    """
    inside = set(layers.modules())
    units = [m for m in model.modules() if isinstance(m, FSDPModule) and m not in inside]
    for unit in units:
        unit.unshard()
    yield
    for unit in units:
        unit.reshard()
