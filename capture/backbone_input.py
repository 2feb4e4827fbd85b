"""What a language backbone is called with, seen from outside by a hook."""

import inspect
from typing import Any

from torch import Tensor, nn

from dspark.schemas.errors import InputError


class BackboneInput:
    """Records the arguments of the one backbone call of a forward pass.

    Use as a context manager around the forward pass of the whole model.
    """

    def __init__(self, backbone: nn.Module) -> None:
        self._backbone = backbone
        self._signature = inspect.signature(backbone.forward)
        self._calls: list[dict[str, Any]] = []

    def __enter__(self) -> "BackboneInput":
        self._calls.clear()
        self._handle = self._backbone.register_forward_pre_hook(self._record, with_kwargs=True)
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.remove()

    def _record(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._calls.append(self._signature.bind(*args, **kwargs).arguments)

    @property
    def _arguments(self) -> dict[str, Any]:
        if len(self._calls) != 1:
            raise InputError(
                f"{type(self._backbone).__name__} ran {len(self._calls)} times in one forward "
                "pass; dspark captures models that run it once"
            )
        return self._calls[0]

    @property
    def inputs_embeds(self) -> Tensor:
        """``[B, L, H]``, text and picture embeddings fused.

        Raises:
            InputError: the backbone does not receive them, so pictures enter elsewhere.
        """
        embeds = self._arguments.get("inputs_embeds")
        if not isinstance(embeds, Tensor):
            raise InputError(
                f"{type(self._backbone).__name__} receives no inputs_embeds, so its features do "
                "not come from fused text and picture embeddings; this target cannot be captured"
            )
        return embeds

    @property
    def position_ids(self) -> Tensor | None:
        """``[B, L]`` or ``[R, B, L]`` (multi-axis rotary), or None: the backbone counts from 0."""
        positions = self._arguments.get("position_ids")
        return positions if isinstance(positions, Tensor) else None
