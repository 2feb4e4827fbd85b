"""What a language backbone is called with, seen from outside by hooks."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from dspark.capture.targets.backbone import decoder_layers
from dspark.schemas.errors import InputError

# Arguments that every backbone may have; any other tensor is a side input.
_ORDINARY = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "cache_position"}

FROM_ARGUMENT, FROM_EMBEDDING, FROM_LAYER_0 = "argument", "embedding", "layer_0"


class BackboneInput:
    """Records the arguments of the one backbone call of a forward pass.

    Use as a context manager around the forward pass of the whole model.

    Attributes:
        source: where ``inputs_embeds`` came from: the backbone's ``argument`` of that name, or, for
            a backbone that embeds tokens itself, the output of its ``embedding`` in a text-only
            target, and what ``layer_0`` receives in one that takes pictures.
        width: H of it.
    """

    def __init__(
        self,
        backbone: nn.Module,
        *,
        embedding: nn.Module | None = None,
        keep: Callable[[Tensor], Tensor] = Tensor.clone,
    ) -> None:
        """Args:
        backbone: as found by ``find_backbone``.
        embedding: the input embedding, for a text-only target.
        keep: makes of ``inputs_embeds`` what is kept of it: a copy, since the model may go on to
            change it in place.
        """
        self._backbone = backbone
        self._embedding = embedding
        self._keep = keep
        self._signature = inspect.signature(backbone.forward)
        self._rest = next(
            (p.name for p in self._signature.parameters.values() if p.kind is p.VAR_KEYWORD), ""
        )
        self._calls: list[dict[str, Any]] = []
        self._embeds: Tensor | None = None
        self.width = 0
        self.source = FROM_ARGUMENT

    def __enter__(self) -> "BackboneInput":
        self._calls.clear()
        self._embeds = None
        self._handles = [
            self._backbone.register_forward_pre_hook(self._record, with_kwargs=True),
            decoder_layers(self._backbone)[0].register_forward_pre_hook(
                self._record_layer_0, with_kwargs=True
            ),
        ]
        if self._embedding is not None:
            self._handles.append(self._embedding.register_forward_hook(self._record_embedding))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()

    def _record(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = dict(self._signature.bind(*args, **kwargs).arguments)
        arguments |= arguments.pop(self._rest, {})
        self._calls.append(arguments)
        embeds = arguments.get("inputs_embeds")
        if isinstance(embeds, Tensor):
            self._take(embeds, FROM_ARGUMENT)

    def _record_embedding(self, _: nn.Module, __: Any, output: Any) -> None:
        if self._calls and self._embeds is None:
            self._take(output, FROM_EMBEDDING)

    def _record_layer_0(
        self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._embeds is None:
            self._take(layer_input(layer, args, kwargs), FROM_LAYER_0)

    def _take(self, embeds: Tensor, source: str) -> None:
        self._embeds = self._keep(embeds)
        self.width = embeds.shape[-1]
        self.source = source

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
        """``[B, L, H]``, text and picture embeddings fused; what ``keep`` made of it.

        Raises:
            InputError: the backbone did not run exactly once, or reads pictures by cross attention.
        """
        for name in self.side_inputs:
            if "cross_attention" in name or name.startswith("encoder_hidden"):
                raise InputError(
                    f"{type(self._backbone).__name__} reads pictures through cross attention "
                    f"({name}), so no draft can see them in what dspark stores; dspark captures "
                    "targets whose pictures enter at token positions"
                )
        assert self._embeds is not None
        return self._embeds

    @property
    def position_ids(self) -> Tensor | None:
        """``[B, L]`` or ``[R, B, L]`` (multi-axis rotary), or None: the backbone counts from 0."""
        positions = self._arguments.get("position_ids")
        return positions if isinstance(positions, Tensor) else None

    @property
    def side_inputs(self) -> list[str]:
        """Arguments with tensors that shape the features beside ``inputs_embeds``, sorted."""
        arguments = self._arguments.items()
        return sorted(k for k, v in arguments if k not in _ORDINARY and any(_tensors(v)))


def layer_input(layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
    """The residual stream that a decoder layer is called with: its first argument."""
    if args:
        hidden = args[0]
    else:
        hidden = kwargs.get("hidden_states")
        if hidden is None:
            hidden = kwargs[next(iter(inspect.signature(layer.forward).parameters))]
    assert isinstance(hidden, Tensor)
    return hidden


def _tensors(value: Any) -> Iterator[bool]:
    """True for each tensor in nested lists and dicts."""
    if isinstance(value, Tensor):
        yield True
    elif isinstance(value, Mapping):
        for v in value.values():
            yield from _tensors(v)
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _tensors(v)
