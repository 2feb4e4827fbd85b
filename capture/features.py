"""One forward pass of the target and the tensors that a cache stores, real rows only."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dspark.capture.backbone_input import BackboneInput
from dspark.capture.target import Target
from dspark.schemas.errors import InputError
from dspark.schemas.layers import hidden_state_key


@dataclass(frozen=True)
class Features:
    """What one batch gave, on the target's device. R is the number of real positions, row by row.

    Attributes:
        stored: ``inputs_embeds``, ``hidden_states.K``, ``last_hidden_state`` ``[R, H]`` in the
            stored type.
        position_ids: int32 ``[rows, R]``, one row or those of multi-axis rotary positions.
        last_hidden: ``[R, H]`` in the target's own type.
        logits: ``[R, V]``, the target's own, in its own type; None unless asked for.
    """

    stored: dict[str, Tensor]
    position_ids: Tensor
    last_hidden: Tensor
    logits: Tensor | None


@torch.inference_mode()
def capture_features(
    target: Target,
    inputs: dict[str, Tensor],
    lengths: Sequence[int],
    *,
    layers: Sequence[int],
    dtype: torch.dtype,
    with_logits: bool,
) -> Features:
    """Run the target once and keep what enters and leaves its language backbone.

    Hooks gather and cast the real rows at once: a copy, so nothing that the model does later (some
    add picture features to the residual stream in place) can change what was taken.

    Args:
        target: the frozen model.
        inputs: all keys of the processor, right-padded ``[B, L]``.
        lengths: B real lengths.
        layers: decoder layers to take, each as what the next layer receives.
        dtype: of the stored floats.
        with_logits: also apply the language-model head, to the real rows alone.

    Raises:
        InputError: the model is not one that can be captured faithfully.
    """
    inputs = {k: v.to(target.device) for k, v in inputs.items()}
    columns = torch.arange(inputs["input_ids"].shape[1], device=target.device)
    real = columns < torch.as_tensor(lengths, device=target.device)[:, None]
    taken: dict[str, Tensor] = {}
    last_hidden: list[Tensor] = []

    def take_layer_input(key: str) -> Any:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = args[0] if args else kwargs["hidden_states"]
            if hidden.shape[:-1] != real.shape:
                raise InputError(
                    f"{target.id}: its decoder layers pass on {tuple(hidden.shape)} for "
                    f"{tuple(real.shape)} tokens (several streams); this target cannot be captured"
                )
            taken[key] = hidden[real].to(dtype)

        return hook

    def take_last(_: nn.Module, __: Any, output: Any) -> None:
        last_hidden.append(output[0][real])

    def feed_head(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        hidden = args[0][real][None] if with_logits else args[0][:, :1]
        return (hidden, *args[1:])

    with ExitStack() as stack:
        backbone_input = stack.enter_context(BackboneInput(target.backbone))
        for k in layers:
            module = target.backbone.layers[k + 1]
            hook = take_layer_input(hidden_state_key(k))
            handle = module.register_forward_pre_hook(hook, with_kwargs=True)
            stack.callback(handle.remove)
        stack.callback(target.backbone.register_forward_hook(take_last).remove)
        if target.head is not None:
            stack.callback(target.head.register_forward_pre_hook(feed_head).remove)
        output = target.model(**inputs, use_cache=False)

    embeds = backbone_input.inputs_embeds
    if embeds.shape[:2] != real.shape:
        raise InputError(
            f"{target.id}: its backbone receives {tuple(embeds.shape[:2])} positions for "
            f"{tuple(real.shape)} tokens; this target cannot be captured"
        )
    return Features(
        stored={
            "inputs_embeds": embeds[real].to(dtype),
            **{hidden_state_key(k): taken[hidden_state_key(k)] for k in layers},
            "last_hidden_state": last_hidden[0].to(dtype),
        },
        position_ids=_positions(backbone_input.position_ids, real),
        last_hidden=last_hidden[0],
        logits=_real_logits(output.logits, real) if with_logits else None,
    )


def _positions(position_ids: Tensor | None, real: Tensor) -> Tensor:
    """int32 ``[rows, R]`` of positions as the backbone used them."""
    if position_ids is None:
        position_ids = torch.arange(real.shape[1], device=real.device)[None]
    if position_ids.ndim == 2:
        position_ids = position_ids[None]
    expanded = position_ids.expand(position_ids.shape[0], *real.shape)
    return expanded[:, real].int()


def _real_logits(logits: Tensor, real: Tensor) -> Tensor:
    """``[R, V]``, whether or not the head went through the hook that packs the real rows."""
    return logits[real] if logits.shape[:2] == real.shape else logits[0]
