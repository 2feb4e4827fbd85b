"""The metrics of a draft on rows of a cache."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from dspark.schemas.fields import Field
from dspark.train_from_cache.batch import Anchors, Batch, supervised_anchors
from dspark.train_from_cache.cache import Cache, require_fields
from dspark.train_from_cache.drafts.base import Draft
from dspark.train_from_cache.grounding import number_ids
from dspark.train_from_cache.metrics import Meter, eval_mask
from dspark.train_from_cache.stream import BatchStream
from dspark.train_from_cache.target_head import TargetHead
from dspark.train_from_cache.teacher import Teacher, teacher_fields

# Bounds what one prediction holds in memory: logits (256 MiB in float32), and anchors.
_LOGITS = 2**26
_ANCHORS = 512


def draft_fields(cache: Cache, draft: type[Draft], config: PreTrainedConfig) -> list[Field]:
    """All stored fields that training and evaluating a draft reads.

    Raises:
        IncompatibleCacheError: the cache lacks one.
    """
    names = [
        *draft.needed_fields(config),
        *teacher_fields(cache.manifest.logits),
        "input_ids",
        "loss_mask",
    ]
    return require_fields(cache, list(dict.fromkeys(names)), draft.arch)


def without_hidden_states(batch: Batch) -> Batch:
    """The batch with ``last_hidden_state`` and ``hidden_states.*`` zeroed: a control, in which a
    draft gets nothing from the target but tokens and embeddings."""
    return {
        name: torch.zeros_like(x)
        if name == "last_hidden_state" or name.startswith("hidden_states.")
        else x
        for name, x in batch.items()
    }


@torch.no_grad()
def evaluate(
    draft: Draft,
    cache: Cache,
    head: TargetHead,
    rows: Sequence[int],
    *,
    batch_size: int = 8,
    zero_hidden_states: bool = False,
) -> dict[str, Any]:
    """Measure a draft over all anchors of some rows. Deterministic; leaves the draft in eval mode.

    Args:
        draft: on the device to compute on.
        cache: the target's features.
        head: of the same target, on the same device.
        rows: dataset rows, none of them skipped.
        batch_size: rows read at a time.
        zero_hidden_states: give the draft zeros for the target's hidden states.

    Returns:
        The metrics of ``metrics.py`` and ``rows``, as JSON values (None where nothing could be
        measured).

    Raises:
        IncompatibleCacheError: the cache lacks a field that the draft reads.
    """
    draft.eval()
    meter = Meter(draft.depth)
    numbers = number_ids(cache.root, cache.manifest.target.vocab_size)
    fields = draft_fields(cache, type(draft), draft.config)
    batches = [list(rows[i : i + batch_size]) for i in range(0, len(rows), batch_size)]
    device = head.weight.device
    with BatchStream(cache, fields, batches, batch_size=batch_size, device=device) as stream:
        for batch in stream:
            grounded = _grounded(batch, cache, numbers)
            teacher = Teacher(batch, head)
            inputs = without_hidden_states(batch) if zero_hidden_states else batch
            for anchors in _chunks(supervised_anchors(batch["loss_mask"]), draft.depth, head):
                _measure(meter, draft, inputs, teacher, anchors, grounded)
    result = meter.result()
    if numbers is None:
        result |= {"agreement_grounded": None, "grounded_anchors": None}
    return result | {"rows": len(rows)}


@torch.no_grad()
def quick_tau(draft: Draft, batch: Batch, teacher: Teacher, limit: int = 64) -> float | None:
    """τ over at most ``limit`` anchors of one batch, evenly spaced; for a look during training.

    Returns:
        None for a batch without an anchor.
    """
    anchors = supervised_anchors(batch["loss_mask"])
    chosen = torch.linspace(0, max(0, len(anchors) - 1), min(limit, len(anchors))).long()
    chosen = chosen.to(anchors.row.device)
    training = draft.training
    draft.eval()
    meter = Meter(draft.depth)
    if len(chosen):
        anchors = Anchors(anchors.row[chosen], anchors.position[chosen])
        grounded = torch.zeros_like(batch["loss_mask"], dtype=torch.bool)
        _measure(meter, draft, batch, teacher, anchors, grounded)
    draft.train(training)
    tau: float | None = meter.result()["tau"]
    return tau


def _measure(
    meter: Meter, draft: Draft, inputs: Batch, teacher: Teacher, anchors: Anchors, grounded: Tensor
) -> None:
    """Add anchors, sorted by row, to the meter. ``grounded`` is bool ``[B, L]``."""
    row, position = anchors.row[:, None], anchors.position[:, None]
    # Slots beyond the row are masked; they only need some position to read.
    last = inputs["loss_mask"].shape[1] - 1
    slots = (position + torch.arange(draft.depth, device=position.device)).clamp(max=last)
    # Rows without an anchor here would cost a pass over their context for nothing.
    first, end = int(anchors.row[0]), int(anchors.row[-1]) + 1
    own_rows = {name: x[first:end] for name, x in inputs.items()}
    meter.update(
        draft.predict(own_rows, Anchors(anchors.row - first, anchors.position)),
        teacher.logits(row.expand_as(slots), slots),
        eval_mask(inputs, anchors, draft.depth),
        grounded[anchors.row, anchors.position + 1],
    )


def _grounded(batch: Batch, cache: Cache, numbers: Tensor | None) -> Tensor:
    """bool ``[B, L]``: number tokens of rows with a picture."""
    ids = batch["input_ids"].long()
    if numbers is None:
        return torch.zeros_like(ids, dtype=torch.bool)
    pictures = torch.from_numpy(cache.image_tokens[batch["sample"].cpu().numpy()] > 0)
    known = ids.clamp(max=len(numbers) - 1) == ids
    numeric = numbers.to(ids.device)[ids.clamp(max=len(numbers) - 1)] & known
    return numeric & pictures.to(ids.device)[:, None]


def _chunks(anchors: Anchors, depth: int, head: TargetHead) -> Iterator[Anchors]:
    size = min(_ANCHORS, max(1, _LOGITS // (depth * head.weight.shape[0])))
    for start in range(0, len(anchors), size):
        yield Anchors(anchors.row[start : start + size], anchors.position[start : start + size])
