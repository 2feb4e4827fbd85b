"""Capturing one shard: encode its rows, run its batches, write each row in place, commit."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.capture.batching import plan_batches
from dspark.capture.collate import encode
from dspark.capture.conversation_file import ConversationFile
from dspark.capture.encoded_rows import EncodedRow, SkippedRow, encode_row
from dspark.capture.features import Features, capture_features
from dspark.capture.logits import prove_head, stored_logits
from dspark.capture.plan import CapturePlan
from dspark.capture.shard_writer import ShardWriter
from dspark.capture.target import Target
from dspark.schemas.dtypes import FLOAT_CODES, torch_dtype
from dspark.schemas.index import OK, SKIPPED, IndexRow, write_index
from dspark.schemas.manifest import Manifest
from dspark.schemas.paths import CachePaths


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
    conversations: ConversationFile,
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
        row = encode_row(sample, conversations, target, manifest.max_length)
        if isinstance(row, SkippedRow):
            index[sample] = _skipped(row, sample - samples.start)
            report(Step(1, 0, 0))
        else:
            encoded.append(row)

    head_error: float | None = None
    batches = plan_batches([len(r) for r in encoded], manifest.identity["batch_tokens"])
    with ShardWriter(paths.shard(shard), plan.layout) as writer:
        for number, batch in enumerate(batches):
            rows = [encoded[i] for i in batch]
            proving = manifest.logits == "head" and number == 0
            features = _run(rows, manifest, target, conversations, with_head=proving)
            if proving:
                head_error = prove_head(target, features)
            before = writer.bytes_written
            for row, tensors in _split(rows, features, manifest):
                position = row.sample - samples.start
                index[row.sample] = _write(writer, row, position, tensors)
            report(Step(len(rows), sum(len(r) for r in rows), writer.bytes_written - before))
        writer.commit()
    write_index(paths.index(shard), [index[s] for s in samples], {"head_error": head_error})


def _run(
    rows: list[EncodedRow],
    manifest: Manifest,
    target: Target,
    conversations: ConversationFile,
    *,
    with_head: bool,
) -> Features:
    inputs = encode([conversations.conversation(r.sample) for r in rows], target.processor)
    inputs.pop("loss_mask")
    lengths = [len(r) for r in rows]
    for i, row in enumerate(rows):
        # The same row alone and in its batch must be the same tokens, or its masks are not its own.
        assert torch.equal(inputs["input_ids"][i, : len(row)], row.input_ids), row.sample
    return capture_features(
        target,
        inputs,
        lengths,
        layers=manifest.layers,
        dtype=torch_dtype(FLOAT_CODES[manifest.dtype]),
        with_logits=with_head or manifest.logits != "head",
    )


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
