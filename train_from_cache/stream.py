"""Batches streamed from a cache: rows are read ahead by a few threads into reused buffers."""

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

import torch
from torch import Tensor

from dspark.schemas.dtypes import torch_dtype
from dspark.schemas.errors import InputError
from dspark.schemas.fields import Field
from dspark.train_from_cache.batch import Batch
from dspark.train_from_cache.cache import Cache

# Batches in memory: one with the consumer, the others being read.
RING = 3
THREADS = 4


class BatchStream:
    """Iterates once over batches of rows; a context manager that stops its threads on leaving.

    Only the given fields and only real rows are read. On the CPU the tensors of a batch lie in the
    ring: they are valid until the next batch is asked for. A read that fails raises its error here,
    in the place of its batch.

    Attributes:
        bytes_read: bytes of all batches handed out so far, as read from the shards.
    """

    def __init__(
        self,
        cache: Cache,
        fields: Sequence[Field],
        batches: Iterable[Sequence[int]],
        *,
        batch_size: int,
        device: torch.device | None = None,
    ) -> None:
        """Prepare the ring; reading starts with the iteration.

        Args:
            cache: where rows are read from.
            fields: what to read of each row.
            batches: dataset rows of each batch, in order.
            batch_size: B, rows of the largest batch.
            device: where the tensors shall lie; the CPU by default.

        Raises:
            InputError: the ring does not fit into memory.
        """
        self.bytes_read = 0
        self._cache = cache
        self._fields = list(fields)
        self._batches = iter(batches)
        self._device = device or torch.device("cpu")
        longest = int(cache.lengths.max(initial=0))
        self._ring = [
            {f.name: self._buffer(f, batch_size, longest) for f in fields} for _ in range(RING)
        ]
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="dspark-read")

    def _buffer(self, field: Field, batch_size: int, longest: int) -> Tensor:
        token = math.prod(field.row_shape) // field.row_shape[field.token_axis]
        try:
            return torch.empty(
                batch_size * longest * token,
                dtype=torch_dtype(field.dtype),
                pin_memory=self._device.type == "cuda",
            )
        except (RuntimeError, TypeError) as error:  # no memory; more than a size can be
            raise InputError(
                f"--batch-size {batch_size}: {RING} batches of that many rows of up to {longest:,} "
                f"tokens do not fit into memory; give a smaller one ({error})"
            ) from None

    def __enter__(self) -> "BatchStream":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._cache.abandon()
        self._pool.shutdown(cancel_futures=True)

    def __iter__(self) -> Iterator[Batch]:
        """Yield each batch, trimmed to its longest row (see ``Batch``)."""
        free = deque(self._ring)
        reading: deque[tuple[dict[str, Tensor], Batch, list[Future[int]]]] = deque()
        while True:
            while free and (rows := next(self._batches, None)) is not None:
                buffers = free.popleft()
                reading.append((buffers, *self._start(rows, buffers)))
            if not reading:
                return
            buffers, batch, reads = reading.popleft()
            self.bytes_read += sum(read.result() for read in reads)
            if self._device.type == "cuda":
                batch = {k: v.to(self._device, non_blocking=True) for k, v in batch.items()}
                copied = torch.cuda.Event()
                copied.record(torch.cuda.current_stream(self._device))
                yield batch
                copied.synchronize()  # the ring may be overwritten only now
            else:
                yield {k: v.to(self._device) for k, v in batch.items()}
            free.append(buffers)

    def _start(
        self, rows: Sequence[int], buffers: dict[str, Tensor]
    ) -> tuple[Batch, list[Future[int]]]:
        """Begin to read ``rows`` into ``buffers``: the batch to be, and what to wait for."""
        lengths = torch.from_numpy(self._cache.lengths[list(rows)])
        longest = int(lengths.max())
        batch: Batch = {}
        for field in self._fields:
            shape = [len(rows), *field.row_shape]
            shape[1 + field.token_axis] = longest
            batch[field.name] = buffers[field.name][: math.prod(shape)].view(shape)
        reads = [
            self._pool.submit(self._read, row, {f.name: batch[f.name][i] for f in self._fields})
            for i, row in enumerate(rows)
        ]
        batch["length"] = lengths.long()
        batch["sample"] = torch.tensor(rows, dtype=torch.int64)
        return batch, reads

    def _read(self, row: int, out: dict[str, Tensor]) -> int:
        """Read one row and clear what an earlier batch left behind it. Returns the bytes read."""
        length = int(self._cache.lengths[row])
        size = 0
        for field in self._fields:
            tensor = out[field.name]
            size += self._cache.read_row(row, field, tensor)
            padding = tensor.shape[field.token_axis] - length
            tensor.narrow(field.token_axis, length, padding).zero_()
        return size
