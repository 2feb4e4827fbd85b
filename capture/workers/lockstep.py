"""Keeping the workers that share a target in step: the same forward passes in the same order."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from dspark.capture.targets.features import capture_features
from dspark.capture.targets.probe import PICTURES, probe_inputs
from dspark.capture.targets.target import Target
from dspark.capture.workers.replica import Replica, reaching_peers
from dspark.schemas.errors import InputError

_NAMED_ROWS = 8
_NO_SHARD = -1


class LockStep:
    """What a worker does around its shards and forward passes. Alone with its target: nothing.

    Attributes:
        writes: whether this worker writes the shards that it captures.
        draws_ahead: whether it may ask for its next shard before it has run the last batch of one.
    """

    writes = True
    draws_ahead = True

    def agree(self, shard: int | None) -> int | None:
        """The next shard of this worker, None when there is none."""
        return shard

    def before_forward(self, inputs: Mapping[str, Any], rows: Sequence[int]) -> None:
        """Call right before each forward pass on rows of a shard.

        Args:
            inputs: of the model.
            rows: dataset rows in it.

        Raises:
            InputError: the workers are not in step.
        """

    def drain(self) -> None:
        """Call after the last shard: waits for the others, and leaves them; the target is done."""


class SameBatches(LockStep):
    """Tensor parallel: all workers of a replica compute every batch, and the leader writes."""

    draws_ahead = False  # the draws of all must fall between the same batches

    def __init__(self, replica: Replica, device: torch.device) -> None:
        self.writes = replica.is_leader
        self._device = device

    def agree(self, shard: int | None) -> int | None:
        """The leader's shard reaches the others, whose own argument is ignored."""
        number = torch.tensor([_NO_SHARD if shard is None else shard], device=self._device)
        with reaching_peers():
            dist.broadcast(number, src=0)
        agreed = int(number.item())
        return None if agreed == _NO_SHARD else agreed

    def before_forward(self, inputs: Mapping[str, Any], rows: Sequence[int]) -> None:
        """Check that all workers are about to compute the same."""
        digest = _digest(inputs)
        bounds = torch.tensor([digest, -digest], device=self._device)
        with reaching_peers():
            dist.all_reduce(bounds, op=dist.ReduceOp.MAX)
        largest, smallest = bounds[0].item(), -bounds[1].item()
        if largest != smallest:
            named = ", ".join(map(str, rows[:_NAMED_ROWS])) + (", …" if rows[_NAMED_ROWS:] else "")
            raise InputError(
                f"--tp: the workers of a replica made different inputs of rows {named}; --data, "
                "its pictures and the target's processor must be the same for all of them"
            )

    def drain(self) -> None:
        dist.destroy_process_group()


class OwnBatches(LockStep):
    """FSDP: each worker has its own shards, and every forward pass gathers weights from all.

    A worker that has run out of shards computes a small conversation along with the others.
    """

    def __init__(self, target: Target) -> None:
        self._target = target

    def before_forward(self, inputs: Mapping[str, Any], rows: Sequence[int]) -> None:
        self._any_works(True)

    def drain(self) -> None:
        inputs = probe_inputs(self._target, PICTURES[0])
        lengths = [inputs["input_ids"].shape[1]]
        while self._any_works(False):
            with reaching_peers():
                capture_features(
                    self._target, inputs, lengths, layers=(), dtype=torch.float32, with_logits=False
                )
        dist.destroy_process_group()

    def _any_works(self, this_one: bool) -> bool:
        working = torch.tensor([int(this_one)], device=self._target.device)
        with reaching_peers():
            dist.all_reduce(working)
        return bool(working.item())


def lock_step(replica: Replica | None, target: Target) -> LockStep:
    """How a worker of this replica keeps in step; None for one that holds a whole target."""
    if replica is None:
        return LockStep()
    if replica.kind == "tp":
        return SameBatches(replica, target.device)
    return OwnBatches(target)


def _digest(inputs: Mapping[str, Any]) -> int:
    """xxh3-64 of everything in nested inputs, as a non-negative int64."""
    state = xxhash.xxh3_64()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            state.update(f"{value.dtype}{list(value.shape)}".encode())
            state.update(value.contiguous().flatten().view(torch.uint8).numpy().data)
        elif isinstance(value, Mapping):
            add([[key, value[key]] for key in sorted(value)])
        elif isinstance(value, list | tuple):
            state.update(f"{len(value)}".encode())
            for v in value:
                add(v)
        else:
            state.update(repr(value).encode())

    add(inputs)
    return state.intdigest() >> 1
