"""How fast this machine captures, measured on a few real batches that are not written."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from dspark.capture.batch import run_batch, split_batch
from dspark.capture.batching import plan_batches
from dspark.capture.conversations import Conversations
from dspark.capture.estimate.rows import sampled_rows
from dspark.capture.plan import CapturePlan
from dspark.capture.rendering.batch_inputs import batch_inputs
from dspark.capture.rendering.encoded_rows import EncodedRow, SkippedRow
from dspark.capture.targets.target import Target
from dspark.schemas.digest import field_digest
from dspark.schemas.errors import InputError
from dspark.schemas.manifest import Manifest

_BATCHES = 8
_SEED = 1  # other rows than those of the estimate, so that no file is warm from reading them


@dataclass(frozen=True)
class Speed:
    """Of one worker.

    Attributes:
        device: that it ran on.
        rows: that were read and tokenised.
        row_seconds: for these.
        batches: that were run.
        tokens: real ones, in these.
        batch_seconds: for these, from reading the pictures to the digests of what is stored.
    """

    device: str
    rows: int
    row_seconds: float
    batches: int
    tokens: int
    batch_seconds: float

    def seconds(self, rows: int, tokens: int) -> float:
        """What one worker takes for so many rows of so many tokens."""
        return rows * self.row_seconds / self.rows + tokens * self.batch_seconds / self.tokens


def busiest_worker_share(shards: int, workers: int) -> float:
    """Share of the work that the busiest of equally fast workers has, each taking whole shards."""
    return -(-shards // workers) / shards


def measure_speed(
    plan: CapturePlan,
    target: Target,
    conversations: Conversations,
    encode: Callable[[int], EncodedRow | SkippedRow],
) -> Speed:
    """Capture a few batches, cut as a shard of these rows would be; the first one is not timed.

    Raises:
        InputError: no row of the sample can be captured, or the target fails on a batch.
    """
    chosen = sampled_rows(plan.manifest.num_samples, _SEED)
    start = time.perf_counter()
    encoded = [row for sample in chosen if isinstance(row := encode(sample), EncodedRow)]
    row_seconds = time.perf_counter() - start
    if not encoded:
        raise InputError(
            f"--measure: none of {len(chosen)} rows of --data {conversations.path} can be "
            "captured, so there is nothing to measure; leave --measure out to see why"
        )
    batches = _batches(encoded, plan.manifest)
    _run(max(batches, key=_tokens), plan, target, conversations)
    count = min(_BATCHES, len(batches))
    timed = [batches[i * len(batches) // count] for i in range(count)]
    start = time.perf_counter()
    for batch in timed:
        _run(batch, plan, target, conversations)
    return Speed(
        device=_device(target.device),
        rows=len(chosen),
        row_seconds=row_seconds,
        batches=count,
        tokens=sum(map(_tokens, timed)),
        batch_seconds=time.perf_counter() - start,
    )


def _batches(rows: list[EncodedRow], manifest: Manifest) -> list[list[EncodedRow]]:
    """The rows in batches, as if they lay in shards of the planned size."""
    batches = []
    for start in range(0, len(rows), manifest.rows_per_shard):
        shard = rows[start : start + manifest.rows_per_shard]
        planned = plan_batches([len(r) for r in shard], manifest.identity["batch_tokens"])
        batches += [[shard[i] for i in batch] for batch in planned]
    return batches


def _run(
    batch: list[EncodedRow], plan: CapturePlan, target: Target, conversations: Conversations
) -> None:
    """All that a capture does to a batch but writing it."""
    manifest = plan.manifest
    for inputs in batch_inputs(batch, conversations, target, fake_image=plan.fake_image):
        features = run_batch(inputs, manifest, target, with_head=False)
        for _, tensors in split_batch(inputs, features, manifest):
            for tensor in tensors.values():
                field_digest(tensor.contiguous().view(torch.uint8).numpy().data)


def _tokens(batch: list[EncodedRow]) -> int:
    return sum(map(len, batch))


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type}, {torch.get_num_threads()} threads"
