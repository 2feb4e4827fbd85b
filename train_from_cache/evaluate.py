"""The metrics of drafts on rows of a cache."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from dspark.schemas.fields import Field
from dspark.train_from_cache.batch import Anchors, Batch, supervised_anchors
from dspark.train_from_cache.cache import Cache, require_fields
from dspark.train_from_cache.calibration import Confidences
from dspark.train_from_cache.decode import decoded, with_decoding_fields
from dspark.train_from_cache.drafts.base import Draft
from dspark.train_from_cache.grounding import number_ids
from dspark.train_from_cache.metrics import Meter, accepted, eval_mask
from dspark.train_from_cache.ranks import Ranks
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
        *teacher_fields(cache.manifest.best_logits),
        "input_ids",
        "loss_mask",
    ]
    fields = require_fields(cache, list(dict.fromkeys(names)), draft.arch)
    return with_decoding_fields(fields, cache.manifest)


def fields_of(cache: Cache, drafts: Iterable[Draft]) -> list[Field]:
    """What any of the drafts reads, each field once; errors as of ``draft_fields``."""
    read = (draft_fields(cache, type(draft), draft.config) for draft in drafts)
    return list({field.name: field for fields in read for field in fields}.values())


def without_hidden_states(batch: Batch) -> Batch:
    """The batch with ``last_hidden_state`` and ``hidden_states.*`` zeroed: a control, in which a
    draft gets nothing from the target but tokens and embeddings."""
    return {
        name: torch.zeros_like(x)
        if name == "last_hidden_state" or name.startswith("hidden_states.")
        else x
        for name, x in batch.items()
    }


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
    subject = Subject(draft, zero_hidden_states)
    return evaluate_together([subject], cache, head, rows, batch_size=batch_size)[0]


@dataclass(frozen=True)
class Subject:
    """A draft to measure.

    Attributes:
        draft: on the device to compute on.
        zero_hidden_states: give it zeros for the target's hidden states.
        calibrate: measure the confidence that it states, too.
    """

    draft: Draft
    zero_hidden_states: bool = False
    calibrate: bool = False


@torch.no_grad()
def evaluate_together(
    subjects: Sequence[Subject],
    cache: Cache,
    head: TargetHead,
    rows: Sequence[int],
    *,
    batch_size: int = 8,
    ranks: Ranks | None = None,
) -> list[dict[str, Any]]:
    """Measure several drafts, reading each row once. See ``evaluate``.

    Args:
        subjects: the drafts.
        cache: the target's features.
        head: of the same target, on the same device as the drafts.
        rows: dataset rows, none of them skipped.
        batch_size: rows read at a time.
        ranks: the processes that share the rows; each gets the metrics of all. Calibration is not
            shared.

    Returns:
        For each draft the metrics; those to calibrate also have ``calibration`` (see
        ``calibration.py``), None where the draft states no confidence.
    """
    gauges = [_Gauge(subject) for subject in subjects]
    numbers = number_ids(cache.root, cache.manifest.target.vocab_size)
    fields = fields_of(cache, [subject.draft for subject in subjects])
    own = ranks.share(rows) if ranks else rows
    batches = (list(own[i : i + batch_size]) for i in range(0, len(own), batch_size))
    device = head.weight.device
    # Temperatures are fitted on every other row.
    fit_rows = torch.tensor(rows[::2], dtype=torch.int64, device=device)
    with BatchStream(
        cache, fields, batches, batch_size=batch_size, trim=True, device=device
    ) as stream:
        for batch in decoded(stream, fields, head.embeddings):
            samples = batch["sample"]
            picture = torch.from_numpy(cache.image_tokens[samples.cpu().numpy()] > 0).to(device)
            kinds = _Kinds(
                picture=picture,
                grounded=_is_number(batch["input_ids"], numbers) & picture[:, None],
                fit=torch.isin(samples, fit_rows),
            )
            _measure(gauges, batch, Teacher(batch, head), kinds, head)
    results = []
    for subject, gauge in zip(subjects, gauges, strict=True):
        if ranks:
            gauge.meter.totals = ranks.sum(gauge.meter.totals)
        result = gauge.meter.result() | {"rows": len(rows)}
        if numbers is None:
            result |= {"agreement_grounded": None, "grounded_anchors": None, "grounded": None}
        if subject.calibrate:
            result["calibration"] = gauge.confidences.result()
        results.append(result)
    return results


@torch.no_grad()
def quick_tau(
    draft: Draft, batch: Batch, teacher: Teacher, ranks: Ranks | None = None, limit: int = 64
) -> float | None:
    """τ over at most ``limit`` anchors of one batch, evenly spaced; for a look during training.

    Returns:
        Of the batches of all ``ranks`` together; None for batches without an anchor.
    """
    anchors = supervised_anchors(batch["loss_mask"])
    chosen = torch.linspace(0, max(0, len(anchors) - 1), min(limit, len(anchors))).long()
    chosen = chosen.to(anchors.row.device)
    training = draft.training
    gauge = _Gauge(Subject(draft))
    if len(chosen):
        anchors = Anchors(anchors.row[chosen], anchors.position[chosen])
        gauge.add(batch, anchors, _logits(teacher, batch, anchors, draft.depth), _none(batch))
    draft.train(training)
    if ranks:
        gauge.meter.totals = ranks.sum(gauge.meter.totals)
    tau: float | None = gauge.meter.result()["tau"]
    return tau


@dataclass(frozen=True)
class _Kinds:
    """What the rows and tokens of a batch are.

    Attributes:
        picture: bool ``[B]``, rows with a picture.
        grounded: bool ``[B, L]``, picture-grounded tokens.
        fit: bool ``[B]``, rows on which temperatures are fitted.
    """

    picture: Tensor
    grounded: Tensor
    fit: Tensor


def _none(batch: Batch) -> _Kinds:
    rows = torch.zeros_like(batch["sample"], dtype=torch.bool)
    return _Kinds(rows, torch.zeros_like(batch["loss_mask"], dtype=torch.bool), rows)


class _Gauge:
    """A draft and what has been measured of it."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject
        self.draft = subject.draft.eval()
        self.meter = Meter(self.draft.depth)
        self.confidences = Confidences()

    def add(self, batch: Batch, anchors: Anchors, teacher: Tensor, kinds: _Kinds) -> None:
        """Measure at some anchors, sorted by row.

        Args:
            batch: with all that the draft reads.
            anchors: n of them.
            teacher: the target's logits there, ``[n, ≥ K, V]``.
            kinds: of the batch.
        """
        depth = self.draft.depth
        mask = eval_mask(batch, anchors, depth)
        # Rows without an anchor here would cost a pass over their context for nothing.
        first, end = int(anchors.row[0]), int(anchors.row[-1]) + 1
        own_rows = {name: x[first:end] for name, x in batch.items()}
        if self.subject.zero_hidden_states:
            own_rows = without_hidden_states(own_rows)
        own = Anchors(anchors.row - first, anchors.position)
        accept = accepted(self.draft.predict(own_rows, own), teacher[:, :depth], mask)
        grounded = kinds.grounded[anchors.row, anchors.position + 1]
        self.meter.update(accept, mask, kinds.picture[anchors.row], grounded)
        if self.subject.calibrate:
            logits = self.draft.confidence_logits(own_rows, own)
            if logits is not None:
                self.confidences.update(logits, accept[:, 0], mask, kinds.fit[anchors.row])


def _measure(
    gauges: Sequence[_Gauge], batch: Batch, teacher: Teacher, kinds: _Kinds, head: TargetHead
) -> None:
    """Measure at all anchors of a batch."""
    depth = max(gauge.draft.depth for gauge in gauges)
    for anchors in _chunks(supervised_anchors(batch["loss_mask"]), depth, head):
        logits = _logits(teacher, batch, anchors, depth)
        for gauge in gauges:
            gauge.add(batch, anchors, logits, kinds)


def _logits(teacher: Teacher, batch: Batch, anchors: Anchors, depth: int) -> Tensor:
    """The target's logits ``[n, depth, V]`` of what drafts propose at the anchors."""
    position = anchors.position[:, None]
    # Slots beyond the row are masked; they only need some position to read.
    last = batch["loss_mask"].shape[1] - 1
    slots = (position + torch.arange(depth, device=position.device)).clamp(max=last)
    return teacher.logits(anchors.row[:, None].expand_as(slots), slots)


def _is_number(ids: Tensor, numbers: Tensor | None) -> Tensor:
    """bool ``[B, L]``: tokens whose id is marked in ``numbers``, ``[V]``."""
    if numbers is None:
        return torch.zeros_like(ids, dtype=torch.bool)
    ids = ids.long()
    known = ids.clamp(max=len(numbers) - 1)
    return numbers.to(ids.device)[known] & (known == ids)


def _chunks(anchors: Anchors, depth: int, head: TargetHead) -> Iterator[Anchors]:
    size = min(_ANCHORS, max(1, _LOGITS // (depth * head.weight.shape[0])))
    for start in range(0, len(anchors), size):
        yield Anchors(anchors.row[start : start + size], anchors.position[start : start + size])
