"""One batch of a shard: run the target, then what is stored of each row."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, chain

import torch
from torch import Tensor

from dspark.capture.rendering.batch_inputs import BatchInputs
from dspark.capture.rendering.encoded_rows import EncodedRow
from dspark.capture.targets.features import Features, capture_features
from dspark.capture.targets.logits import LOGITS_AT_ONCE, stored_logits
from dspark.capture.targets.target import Target
from dspark.capture.workers.replica import LOST_PEER, is_lost_peer
from dspark.schemas.dtypes import FLOAT_CODES, torch_dtype
from dspark.schemas.errors import InputError
from dspark.schemas.fields import Field
from dspark.schemas.float8 import FLOAT8
from dspark.schemas.manifest import Manifest

_NAMED_ROWS = 8

FINITE = "finite"
"""Beside the fields of a packed batch."""


def run_batch(
    inputs: BatchInputs, manifest: Manifest, target: Target, *, with_head: bool
) -> Features:
    """Run the target on one batch.

    Args:
        inputs: the batch.
        manifest: of the cache that is written or compared with.
        target: the frozen target.
        with_head: compute logits even where the cache stores none.

    Raises:
        InputError: the forward pass fails; the message names the rows.
    """
    try:
        return capture_features(
            target,
            inputs.tensors,
            [len(row) for row in inputs.rows],
            layers=manifest.layers,
            dtype=torch_dtype(FLOAT_CODES[manifest.dtype]),
            float8=manifest.dtype == "fp8",
            pictures_alone=any(f.where for f in manifest.fields),
            with_logits=with_head or manifest.logits != "head",
            logits_at_once=_logits_at_once(manifest, target),
        )
    except InputError:
        raise
    except torch.OutOfMemoryError:
        raise InputError(
            f"--batch-tokens {manifest.identity['batch_tokens']}: a batch of that size does not "
            "fit into the device's memory; give a smaller number and another --out, or a device "
            "with more free memory"
        ) from None
    except Exception as error:  # what the code of models raises has no bound
        if is_lost_peer(error):
            raise InputError(LOST_PEER) from None
        numbers = sorted(row.sample for row in inputs.rows)
        rows = ", ".join(map(str, numbers[:_NAMED_ROWS]))
        more = ", …" if len(numbers) > _NAMED_ROWS else ""
        first_line = (str(error).strip() or "no message").splitlines()[0]
        raise InputError(
            f"--target {target.id}: its forward pass fails on --data {manifest.data}, rows "
            f"{rows}{more} ({type(error).__name__}: {first_line})"
        ) from error


def _logits_at_once(manifest: Manifest, target: Target) -> int | None:
    """Rows whose logits may be there at the same time."""
    if target.gathered is not None and manifest.logits != "head":
        return None  # its workers would run the head a different number of times
    return max(1, LOGITS_AT_ONCE // manifest.target.vocab_size)


def packed_batch(features: Features, manifest: Manifest) -> dict[str, Tensor]:
    """All floats and positions that the rows of a batch may store, rows one after the other, where
    the target computed them.

    Returns:
        Fields ``[R, …]``; ``position_ids`` ``[axes, R]``; and ``FINITE``, bool ``[R]``: whether all
        floats of a token are.
    """
    packed = dict(features.stored)
    if manifest.logits != "head":
        assert features.logits is not None
        dtype = torch_dtype(FLOAT_CODES[manifest.dtype])
        parts = chain([features.logits], features.more_logits)
        packed |= stored_logits(parts, manifest.logits, dtype)
    device = features.last_hidden.device
    finite = torch.ones(len(features.last_hidden), dtype=torch.bool, device=device)
    for field in packed.values():
        if field.is_floating_point() and field.dtype != FLOAT8:  # its scale tells
            rows = field.reshape(len(field), -1)
            # Both pass on what is not a number; isfinite() of all numbers takes far longer.
            finite &= (rows.amax(1).isfinite() & rows.amin(1).isfinite()).to(device)
    return packed | {"position_ids": features.position_ids, FINITE: finite}


def row_tensors(
    row: EncodedRow, ids: Tensor, packed: Mapping[str, Tensor], start: int, manifest: Manifest
) -> dict[str, Tensor]:
    """All tensors that one row may store, ``[L, …]``.

    Args:
        row: of the batch.
        ids: ``[L]``, its ``input_ids``.
        packed: of the batch (see ``packed_batch``), on the CPU.
        start: the row's first token in it.
        manifest: of the cache that is written or compared with.
    """
    where = slice(start, start + len(row))
    image_id = manifest.target.image_token_id
    image_mask = torch.zeros_like(ids) if image_id is None else ids == image_id
    tensors = {k: v[where] for k, v in packed.items() if k not in ("position_ids", FINITE)}
    tensors |= {
        "input_ids": ids.int(),
        "attention_mask": torch.ones(len(row), dtype=torch.uint8),
        "loss_mask": row.loss_mask(),
        "image_mask": image_mask.to(torch.uint8),
    }
    if (field := manifest.field("position_ids")) is not None:  # None in an extension
        tensors["position_ids"] = _positions(packed["position_ids"][:, where], field)
    return tensors


def split_batch(
    inputs: BatchInputs, features: Features, manifest: Manifest
) -> Iterator[tuple[EncodedRow, dict[str, Tensor]]]:
    """Each row of the batch with all tensors that it may store, ``[L, …]``, on the CPU."""
    packed = {k: v.cpu() for k, v in packed_batch(features, manifest).items()}
    for i, (row, start) in enumerate(zip(inputs.rows, row_starts(inputs.rows), strict=True)):
        ids = inputs.tensors["input_ids"][i, : len(row)]
        yield row, row_tensors(row, ids, packed, start, manifest)


def row_starts(rows: Sequence[EncodedRow]) -> list[int]:
    """Where each row of a batch starts among its packed tokens."""
    return [0, *accumulate(len(row) for row in rows)][:-1]


def _positions(positions: Tensor, field: Field) -> Tensor:
    """As stored; a batch without pictures may have one row of positions where others have 3."""
    if len(field.row_shape) == 1:
        return positions[0]
    return positions.expand(field.row_shape[0], -1)
