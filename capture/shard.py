"""Capturing one shard: encode its rows, run its batches, write each row in place, commit."""

from collections.abc import Callable
from contextlib import nullcontext

from torch import Tensor

from dspark.capture.bad_row import stop_if_asked
from dspark.capture.batch import run_batch, split_batch
from dspark.capture.batching import plan_batches
from dspark.capture.conversations import Conversations
from dspark.capture.plan import CapturePlan
from dspark.capture.progress import Step
from dspark.capture.rendering.batch_inputs import batch_inputs
from dspark.capture.rendering.encoded_rows import EncodedRow, SkippedRow, encode_row
from dspark.capture.shard_writer import ShardWriter
from dspark.capture.targets.logits import prove_head
from dspark.capture.targets.target import Target
from dspark.capture.workers.lockstep import LockStep
from dspark.schemas.index import OK, SKIPPED, IndexRow, write_index
from dspark.schemas.paths import CachePaths

NON_FINITE = "non-finite features"
"""Why a row is skipped that the target ran on, in its batch."""


def capture_shard(
    shard: int,
    writer: ShardWriter | None,
    plan: CapturePlan,
    paths: CachePaths,
    target: Target,
    step: LockStep,
    conversations: Conversations,
    progress: Callable[[Step], None],
) -> None:
    """Capture and commit one shard.

    Batches never cross a shard and depend on its rows alone, so the shard's bytes do not depend on
    who captures it or when.

    Args:
        shard: its number.
        writer: of the claimed shard; None in a worker that only helps to run the target.
        plan: of the capture.
        paths: of the cache.
        target: the frozen target.
        step: of the workers that share the target.
        conversations: the dataset.
        progress: told of each batch.
    """
    manifest = plan.manifest
    samples = manifest.rows_of(shard)
    encoded: list[EncodedRow] = []
    index: dict[int, IndexRow] = {}
    with writer or nullcontext():
        for sample in samples:
            row = encode_row(sample, conversations, target, manifest.max_length, plan.options)
            if isinstance(row, SkippedRow):
                index[sample] = _skipped(row, sample - samples.start)
                progress(Step(samples=1))
            else:
                encoded.append(row)

        head_error: float | None = None
        batches = plan_batches([len(r) for r in encoded], manifest.identity["batch_tokens"])
        for batch in batches:
            rows = [encoded[i] for i in batch]
            for inputs in batch_inputs(rows, conversations, target, fake_image=plan.fake_image):
                step.before_forward(inputs.tensors, [row.sample for row in inputs.rows])
                proving = manifest.logits == "head" and head_error is None
                features = run_batch(inputs, manifest, target, with_head=proving)
                if proving:
                    head_error = prove_head(target, features)
                if writer is None:
                    continue
                before = writer.bytes_written
                for row, tensors in split_batch(inputs.rows, features, manifest):
                    position = row.sample - samples.start
                    index[row.sample] = entry = _write(writer, row, position, tensors)
                    if entry.status == SKIPPED:
                        on_bad_row = plan.options.on_bad_row
                        stop_if_asked(on_bad_row, conversations, row.sample, entry.reason)
                tokens = sum(len(r) for r in inputs.rows)
                progress(Step(len(inputs.rows), tokens, writer.bytes_written - before))
        if writer is not None:
            writer.commit()
            facts = {"head_error": head_error, "identity": manifest.identity_hash}
            write_index(paths.index(shard), [index[s] for s in samples], facts)
            progress(Step(shards=1))


def _write(
    writer: ShardWriter, row: EncodedRow, position: int, tensors: dict[str, Tensor]
) -> IndexRow:
    if not all(t.isfinite().all() for t in tensors.values() if t.is_floating_point()):
        return _skipped(SkippedRow(row.sample, row.id, NON_FINITE), position)
    return IndexRow(
        sample=row.sample,
        row=position,
        id=row.id,
        status=OK,
        length=len(row),
        image_tokens=int(row.image_mask.sum()),
        loss_tokens=int(row.loss_mask.sum()),
        digests=writer.write_row(position, tensors),
    )


def _skipped(row: SkippedRow, position: int) -> IndexRow:
    return IndexRow(row.sample, position, row.id, SKIPPED, reason=row.reason)
