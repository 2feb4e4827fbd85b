"""How pictures and text enter a language backbone, seen in forward passes."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dspark.capture.targets.backbone_input import FROM_ARGUMENT
from dspark.capture.targets.features import Features
from dspark.capture.targets.target import Target
from dspark.schemas.errors import InputError

_NAMED_IDS = 8


def where_pictures_enter(target: Target, ids: Tensor, one: Features, other: Features) -> str:
    """Where a picture enters the language backbone, seen by changing it.

    Args:
        target: the frozen model.
        ids: int64 ``[R]``, the same in both passes.
        one: features with a picture.
        other: features with another picture.

    Returns:
        ``inputs_embeds``, or ``side_inputs`` where a picture enters the backbone beside them alone.

    Raises:
        InputError: it enters in no way that a draft can follow, or not at all.
    """
    if one.last_hidden.shape != other.last_hidden.shape:
        raise InputError(
            f"--target {target.id}: two pictures of one size give different numbers of tokens, so "
            "their positions cannot be checked; this target cannot be captured"
        )
    embeds = one.stored["inputs_embeds"] != other.stored["inputs_embeds"]
    changed = embeds.any(-1).cpu()
    if (changed & (ids != target.image_token_id)).any():
        raise InputError(
            f"--target {target.id}: pictures enter at tokens other than its image token "
            f"(id {target.image_token_id}), so picture positions cannot be told"
        )
    if changed.any():
        return "inputs_embeds"
    if torch.equal(one.last_hidden, other.last_hidden):
        raise InputError(
            f"--target {target.id}: its features do not depend on the picture, so its pictures do "
            "not reach it"
        )
    if one.embeds_source != FROM_ARGUMENT or not one.side_inputs:
        raise InputError(
            f"--target {target.id}: pictures enter neither at its backbone's input nor beside it "
            "(cross attention, perhaps), so no draft can see them in what dspark stores"
        )
    return "side_inputs"


def embedded_otherwise(
    target: Target, ids: Tensor, features: Features, dtype: torch.dtype
) -> list[int]:
    """Text ids whose ``inputs_embeds`` are not what the input embedding returns, sorted.

    Args:
        target: the frozen model.
        ids: int64 ``[R]``.
        features: of these ids.
        dtype: of the stored floats.
    """
    expected = target.embed(ids).to(dtype)
    stored = features.stored["inputs_embeds"]
    differs = (expected.to(stored.device) != stored).any(-1).cpu()
    return sorted(set(ids[differs & (ids != _no_id(target.image_token_id))].tolist()))


def check_embeds(embeds: str, observed: Mapping[str, Any]) -> None:
    """Refuse ``--embeds pictures`` of a target whose text does not come from its embedding table.

    Args:
        embeds: ``all`` or ``pictures``.
        observed: of the target, for the manifest.

    Raises:
        InputError: some ids have vectors of their own.
    """
    if embeds == "pictures" and (ids := observed["embedded_otherwise"]):
        raise InputError(
            f"--embeds pictures: the target's backbone receives other vectors for the text tokens "
            f"{', '.join(map(str, ids[:_NAMED_IDS]))}{', …' if len(ids) > _NAMED_IDS else ''} than "
            "its embedding table has, so they cannot be looked up there; use --embeds all"
        )


def _no_id(image_id: int | None) -> int:
    return -1 if image_id is None else image_id
