"""Capturing one shard: encode its rows, run its batches, write each row in place, commit."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace

from dspark.capture.batch import run_batch, split_batch
from dspark.capture.batching import plan_batches
from dspark.capture.new_shard import NewShard
from dspark.capture.progress import Step
from dspark.capture.rendering.batch_inputs import batch_inputs
from dspark.capture.rendering.encoded_rows import EncodedRow
from dspark.capture.shard_writer import ShardWriter
from dspark.capture.workers.lockstep import LockStep
from dspark.schemas.index import OK, IndexRow, write_index
from dspark.schemas.paths import CachePaths


def capture_shard(
    shard: NewShard,
    writer: ShardWriter | None,
    paths: CachePaths,
    step: LockStep,
    progress: Callable[[Step], None],
) -> None:
    """Capture and commit one shard.

    Batches never cross a shard and depend on its rows alone, so the shard's bytes do not depend on
    who captures it or when.

    Args:
        shard: its rows.
        writer: of the claimed shard; None in a worker that only helps to run the target.
        paths: of the part of the cache that is written.
        step: of the workers that share the target.
        progress: told of each batch.
    """
    plan, target, conversations = shard.plan, shard.target, shard.conversations
    manifest = plan.manifest
    encoded: list[EncodedRow] = []
    index: dict[int, IndexRow] = {}
    with writer or nullcontext():
        for row in shard.encode():
            if isinstance(row, IndexRow):
                index[row.sample] = row
                progress(Step(samples=1))
            else:
                encoded.append(row)

        first = True
        head_error: float | None = None
        batches = plan_batches([len(r) for r in encoded], manifest.identity["batch_tokens"])
        for batch in batches:
            rows = [encoded[i] for i in batch]
            for inputs in batch_inputs(rows, conversations, target, fake_image=plan.fake_image):
                step.before_forward(inputs.tensors, [row.sample for row in inputs.rows])
                with_head = first and shard.needs_logits
                features = run_batch(inputs, manifest, target, with_head=with_head)
                if first:
                    head_error = shard.check_first_batch(inputs.rows, features)
                    first = False
                if writer is None:
                    continue
                before = writer.bytes_written
                for row, tensors in split_batch(inputs.rows, features, manifest):
                    floats = (t for t in tensors.values() if t.is_floating_point())
                    entry = shard.index_row(row, finite=all(t.isfinite().all() for t in floats))
                    if entry.status == OK:
                        entry = replace(entry, digests=writer.write_row(entry.row, tensors))
                    index[row.sample] = entry
                tokens = sum(len(r) for r in inputs.rows)
                progress(Step(len(inputs.rows), tokens, writer.bytes_written - before))
        if writer is not None:
            writer.commit()
            facts = {"head_error": head_error, "identity": manifest.identity_hash}
            write_index(paths.index(shard.number), [index[s] for s in shard.samples], facts)
            progress(Step(shards=1))
