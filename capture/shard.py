"""Capturing one shard: encode its rows, run its batches, write each row in place, commit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.capture.bad_row import stop_if_asked
from dspark.capture.batching import plan_batches
from dspark.capture.conversations import Conversations
from dspark.capture.plan import CapturePlan
from dspark.capture.rendering.batch_inputs import BatchInputs, batch_inputs
from dspark.capture.rendering.encoded_rows import EncodedRow, SkippedRow, encode_row
from dspark.capture.shard_writer import ShardWriter
from dspark.capture.targets.features import Features, capture_features
from dspark.capture.targets.logits import prove_head, stored_logits
from dspark.capture.targets.target import Target
from dspark.schemas.dtypes import FLOAT_CODES, torch_dtype
from dspark.schemas.errors import InputError
from dspark.schemas.index import OK, SKIPPED, IndexRow, write_index
from dspark.schemas.manifest import Manifest
from dspark.schemas.paths import CachePaths

_NAMED_ROWS = 8


@dataclass(frozen=True)
class Step:
    """Progress made: finished dataset rows, their stored tokens and the bytes written for them."""

    samples: int
    tokens: int
    bytes: int


def capture_shard(
    shard: int,
    plan: CapturePlan,
    paths: CachePaths,
    target: Target,
    conversations: Conversations,
    report: Callable[[Step], None],
) -> None:
    """Capture and commit one shard.

    Batches never cross a shard and depend on its rows alone, so the shard's bytes do not depend on
    who captures it or when.
    """
    manifest = plan.manifest
    samples = manifest.rows_of(shard)
    encoded: list[EncodedRow] = []
    index: dict[int, IndexRow] = {}
    for sample in samples:
        row = encode_row(sample, conversations, target, manifest.max_length, plan.options)
        if isinstance(row, SkippedRow):
            index[sample] = _skipped(row, sample - samples.start)
            report(Step(1, 0, 0))
        else:
            encoded.append(row)

    head_error: float | None = None
    batches = plan_batches([len(r) for r in encoded], manifest.identity["batch_tokens"])
    with ShardWriter(paths.shard(shard), plan.layout) as writer:
        for batch in batches:
            rows = [encoded[i] for i in batch]
            before = writer.bytes_written
            for inputs in batch_inputs(rows, conversations, target, fake_image=plan.fake_image):
                proving = manifest.logits == "head" and head_error is None
                features = _run(inputs, manifest, target, with_head=proving)
                if proving:
                    head_error = prove_head(target, features)
                for row, tensors in _split(inputs.rows, features, manifest):
                    position = row.sample - samples.start
                    index[row.sample] = entry = _write(writer, row, position, tensors)
                    if entry.status == SKIPPED:
                        on_bad_row = plan.options.on_bad_row
                        stop_if_asked(on_bad_row, conversations, row.sample, entry.reason)
            report(Step(len(rows), sum(len(r) for r in rows), writer.bytes_written - before))
        writer.commit()
    facts = {"head_error": head_error, "identity": manifest.identity_hash}
    write_index(paths.index(shard), [index[s] for s in samples], facts)


def _run(inputs: BatchInputs, manifest: Manifest, target: Target, *, with_head: bool) -> Features:
    try:
        return capture_features(
            target,
            inputs.tensors,
            [len(row) for row in inputs.rows],
            layers=manifest.layers,
            dtype=torch_dtype(FLOAT_CODES[manifest.dtype]),
            with_logits=with_head or manifest.logits != "head",
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
        numbers = sorted(row.sample for row in inputs.rows)
        rows = ", ".join(map(str, numbers[:_NAMED_ROWS]))
        more = ", …" if len(numbers) > _NAMED_ROWS else ""
        first_line = (str(error).strip() or "no message").splitlines()[0]
        raise InputError(
            f"--target {target.id}: its forward pass fails on --data {manifest.data}, rows "
            f"{rows}{more} ({type(error).__name__}: {first_line})"
        ) from error


def _split(
    rows: list[EncodedRow], features: Features, manifest: Manifest
) -> Iterator[tuple[EncodedRow, dict[str, Tensor]]]:
    """Each row of the batch with its stored tensors, ``[L, …]``, on the CPU."""
    packed = dict(features.stored)
    if manifest.logits != "head":
        assert features.logits is not None
        dtype = torch_dtype(FLOAT_CODES[manifest.dtype])
        packed |= stored_logits(features.logits, manifest.logits, dtype)
    packed = {k: v.cpu() for k, v in packed.items()}
    positions = features.position_ids.cpu()
    start = 0
    for row in rows:
        where = slice(start, start + len(row))
        start += len(row)
        tensors = {k: v[where] for k, v in packed.items()}
        tensors |= {
            "input_ids": row.input_ids.int(),
            "position_ids": _positions(positions[:, where], manifest),
            "attention_mask": torch.ones(len(row), dtype=torch.uint8),
            "loss_mask": row.loss_mask.to(torch.uint8),
            "image_mask": row.image_mask.to(torch.uint8),
        }
        yield row, tensors


def _positions(positions: Tensor, manifest: Manifest) -> Tensor:
    """As stored; a batch without pictures may have one row of positions where others have 3."""
    field: Any = manifest.field("position_ids")
    if len(field.row_shape) == 1:
        return positions[0]
    return positions.expand(field.row_shape[0], -1)


def _write(
    writer: ShardWriter, row: EncodedRow, position: int, tensors: dict[str, Tensor]
) -> IndexRow:
    if not all(t.isfinite().all() for t in tensors.values() if t.is_floating_point()):
        return _skipped(SkippedRow(row.sample, row.id, "non-finite features"), position)
    return IndexRow(
        sample=row.sample,
        row=position,
        id=row.id,
        status=OK,
        length=len(row),
        image_tokens=int(row.image_mask.sum()),
        loss_tokens=int(row.loss_mask.sum()),
        digest=writer.write_row(position, tensors),
    )


def _skipped(row: SkippedRow, position: int) -> IndexRow:
    return IndexRow(row.sample, position, row.id, SKIPPED, reason=row.reason)
