"""One forward pass of the target and the tensors that a cache stores, real rows only."""

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dspark.capture.targets.backbone import decoder_layers
from dspark.capture.targets.backbone_input import BackboneInput, layer_input
from dspark.capture.targets.head_parts import LogitParts, can_part
from dspark.capture.targets.streams import gather_rows
from dspark.capture.targets.target import Target
from dspark.schemas.errors import InputError
from dspark.schemas.fields import scale_key
from dspark.schemas.float8 import to_float8
from dspark.schemas.layers import hidden_state_key


@dataclass(frozen=True)
class Features:
    """What one batch gave, where the target computed it. R is the number of real positions.

    Attributes:
        stored: ``inputs_embeds``, ``hidden_states.K``, ``last_hidden_state`` ``[R, H]`` in the
            stored type, and float32 scales ``[R]`` of those in 8 bits; rows of the batch one after
            the other.
        position_ids: int32 ``[rows, R]``, one row or those of multi-axis rotary positions.
        last_hidden: ``[R, H]`` in the target's own type.
        logits: ``[R, V]``, the target's own, in its own type; None unless asked for. Those of the
            first rows, where all would be more than asked for at once.
        more_logits: those of the others, computed when they are iterated over.
        embeds_source: where ``inputs_embeds`` was taken (see ``BackboneInput``).
        side_inputs: other tensors that entered the backbone, by argument name.
        streams: residual streams of the layers that have several; their mean is stored.
    """

    stored: dict[str, Tensor]
    position_ids: Tensor
    last_hidden: Tensor
    logits: Tensor | None
    embeds_source: str
    side_inputs: list[str]
    streams: dict[str, int]
    more_logits: Iterable[Tensor] = ()


@torch.no_grad()
def capture_features(
    target: Target,
    inputs: dict[str, Any],
    lengths: Sequence[int],
    *,
    layers: Sequence[int],
    dtype: torch.dtype,
    with_logits: bool,
    logits_at_once: int | None = None,
    float8: bool = False,
    pictures_alone: bool = False,
) -> Features:
    """Run the target once and keep what enters and leaves its language backbone.

    Hooks gather and cast the real rows at once: a copy, so nothing that the model does later (some
    add picture features to the residual stream in place) can change what was taken.

    Args:
        target: the frozen model.
        inputs: all keys of the processor, right-padded ``[B, L]``. Floats, which are pixels, are
            cast to the target's type as servers do; some models cannot take them otherwise.
        lengths: B real lengths.
        layers: decoder layers to take, each as what the next layer receives.
        dtype: of the stored floats.
        with_logits: also apply the language-model head, to the real rows alone.
        logits_at_once: most rows that have logits at the same time; None for all.
        float8: store ``inputs_embeds`` and ``hidden_states.K`` in 8 bits instead (see
            ``schemas.float8``), from the target's own numbers.
        pictures_alone: give zeros for ``inputs_embeds`` of text, having made sure that the target's
            embedding returns them for its ids.

    Raises:
        InputError: the model is not one that can be captured faithfully.
    """
    number_type = target.embedding.weight.dtype
    assert isinstance(number_type, torch.dtype)
    kept = None if float8 else dtype
    inputs = {k: _prepared(v, target.device, number_type) for k, v in inputs.items()}
    columns = torch.arange(inputs["input_ids"].shape[1], device=target.device)
    real = columns < torch.as_tensor(lengths, device=target.device)[:, None]
    taken: dict[str, list[Tensor]] = {hidden_state_key(k): [] for k in layers}
    streams: dict[str, int] = {}
    last_hidden: list[Tensor] = []
    of_base: list[Any] = []

    def keep_embeds(embeds: Tensor) -> Tensor:
        if embeds.ndim != 3 or embeds.shape[:2] != real.shape:
            raise InputError(
                f"its backbone receives embeddings {list(embeds.shape)} for {list(real.shape)} "
                "tokens, so positions do not correspond; this target cannot be captured"
            )
        return embeds[real.to(embeds.device)].to(dtype=kept)

    def take_layer_input(key: str) -> Any:
        def hook(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            hidden = layer_input(layer, args, kwargs)
            rows, count = gather_rows(hidden, real, backbone_input.width)
            taken[key].append(rows.to(dtype=kept))
            if count > 1:
                streams[key] = count

        return hook

    def take_last(_: nn.Module, __: Any, output: Any) -> None:
        hidden = output if isinstance(output, Tensor) else output[0]
        last_hidden.append(hidden[real.to(hidden.device)])

    def take_base(_: nn.Module, __: Any, output: Any) -> None:
        if logits_at_once is not None and can_part(target.model, output, real.shape):
            of_base.append(output)

    def feed_head(_: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if not args or args[0].shape[:2] != real.shape:
            return None
        hidden = args[0]
        if not with_logits:
            return (hidden[:, :1], *args[1:])
        packed = hidden[real.to(hidden.device)]
        return ((packed[:logits_at_once] if of_base else packed)[None], *args[1:])

    backbone_input = BackboneInput(
        target.backbone,
        embedding=None if target.takes_pictures else target.embedding,
        keep=keep_embeds,
    )
    try:
        with ExitStack() as stack:
            stack.enter_context(backbone_input)
            for k in layers:
                module = decoder_layers(target.backbone)[k + 1]
                hook = take_layer_input(hidden_state_key(k))
                handle = module.register_forward_pre_hook(hook, with_kwargs=True)
                stack.callback(handle.remove)
            stack.callback(target.backbone.register_forward_hook(take_last).remove)
            stack.callback(target.model.base_model.register_forward_hook(take_base).remove)
            if target.head is not None:
                stack.callback(target.head.register_forward_pre_hook(feed_head).remove)
            output = target.model(**inputs, use_cache=False)
        embeds = backbone_input.inputs_embeds
        for key, calls in taken.items():
            if len(calls) != 1:
                raise InputError(
                    f"the layer that receives {key} ran {len(calls)} times in one forward pass, so "
                    "there is no one such tensor; use --layers none, or layers that run once"
                )
        if embeds.shape != last_hidden[0].shape:
            raise InputError(
                f"its backbone receives vectors of width {embeds.shape[-1]} and returns "
                f"{last_hidden[0].shape[-1]}; this target cannot be captured"
            )
        if pictures_alone:
            embeds = _without_text(target, inputs["input_ids"][real], embeds, dtype)
        positions = _positions(backbone_input.position_ids, real)
    except InputError as error:
        raise InputError(f"--target {target.id}: {error}") from None
    logits = _real_logits(output.logits, real, logits_at_once) if with_logits else None
    more: Iterable[Tensor] = ()
    if logits is not None and logits_at_once is not None and len(logits) < len(last_hidden[0]):
        hidden = of_base[0].last_hidden_state
        later = hidden[real.to(hidden.device)][len(logits) :]
        more = LogitParts(target.model, inputs, of_base[0], later, logits_at_once)
    vectors = {"inputs_embeds": embeds, **{key: calls[0] for key, calls in taken.items()}}
    return Features(
        stored={
            **(_in_8_bits(vectors) if float8 else vectors),
            "last_hidden_state": last_hidden[0].to(dtype),
        },
        position_ids=positions,
        last_hidden=last_hidden[0],
        logits=logits,
        embeds_source=backbone_input.source,
        side_inputs=backbone_input.side_inputs,
        streams=streams,
        more_logits=more,
    )


def _without_text(target: Target, ids: Tensor, embeds: Tensor, dtype: torch.dtype) -> Tensor:
    """``embeds`` ``[R, H]`` with zeros where ``ids`` ``[R]`` are of text.

    Raises:
        InputError: a text token's vector is not what the target's embedding returns for its id.
    """
    text = torch.ones_like(ids, dtype=torch.bool)
    if target.image_token_id is not None:
        text = ids != target.image_token_id
    ids, of_text = ids[text], text.to(embeds.device)
    looked_up = target.embed(ids).to(embeds.device, dtype)
    differs = (embeds[of_text].to(dtype) != looked_up).any(-1).cpu()
    if differs.any():
        raise InputError(
            f"--embeds pictures: its backbone receives another vector for text token "
            f"{int(ids[differs.to(ids.device)][0])} than its embedding table has, so it cannot be "
            "looked up there; use --embeds all"
        )
    return embeds.masked_fill(of_text[:, None], 0)


def _in_8_bits(vectors: dict[str, Tensor]) -> dict[str, Tensor]:
    stored = {}
    for name, rows in vectors.items():
        stored[name], stored[scale_key(name)] = to_float8(rows)
    return stored


def _prepared(value: Any, device: torch.device, number_type: torch.dtype) -> Any:
    """An input on the target's device, its floats in the target's type."""
    if isinstance(value, Tensor):
        return value.to(device, number_type if value.is_floating_point() else None)
    if isinstance(value, list | tuple):
        return type(value)(_prepared(v, device, number_type) for v in value)
    return value


def _positions(position_ids: Tensor | None, real: Tensor) -> Tensor:
    """int32 ``[rows, R]`` of positions as the backbone used them."""
    if position_ids is None:
        position_ids = torch.arange(real.shape[1], device=real.device)
    position_ids = position_ids.to(real.device)
    while position_ids.ndim < 3:
        position_ids = position_ids[None]
    try:
        expanded = position_ids.expand(position_ids.shape[0], *real.shape)
    except RuntimeError:
        raise InputError(
            f"its backbone receives position_ids {list(position_ids.shape)} for {list(real.shape)} "
            "tokens; dspark knows [B, L] and [axes, B, L]"
        ) from None
    return expanded[:, real].int()


def _real_logits(logits: Tensor, real: Tensor, at_once: int | None) -> Tensor:
    """``[R, V]``, or those of the first ``at_once`` rows, whether or not the head went through the
    hook that packs the real rows."""
    if logits.shape[:2] == real.shape:
        return logits[real.to(logits.device)]
    assert logits.shape[0] == 1 and logits.shape[1] in (int(real.sum()), at_once), logits.shape
    return logits[0]
