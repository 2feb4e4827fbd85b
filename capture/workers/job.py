"""The workers of one job, and the store through which they share shards, progress and failure."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import TracebackType

import torch
import torch.distributed as dist

from dspark.schemas.errors import FollowerError, InputError, StoppedError
from dspark.schemas.torchrun import torchrun_number, world_size

TIMEOUT = timedelta(minutes=30)
"""How long a worker waits for the first one to prepare the cache, and collectives for a peer."""

MEETING = timedelta(minutes=5)
"""How long a worker looks for the others."""

_POLL_SECONDS = 0.3
_PATIENCE_SECONDS = 30


class Job:
    """The processes that ``torchrun`` started together, or this one alone.

    Data-parallel workers need no collectives, only a store: whoever asks next gets the next shard.

    Attributes:
        rank: of this worker, from 0. The first one prepares and finishes the cache.
        size: workers.
        local_rank: of this worker on its machine.
        store: that all workers share.
    """

    def __init__(self, rank: int, size: int, local_rank: int, store: dist.Store) -> None:
        self.rank = rank
        self.size = size
        self.local_rank = local_rank
        self.store = store

    @classmethod
    def join(cls) -> "Job":
        """The job that the environment names (RANK, WORLD_SIZE, MASTER_ADDR …, as torchrun sets).

        Raises:
            InputError: it names no such job, or the other workers cannot be reached.
        """
        size = world_size()
        if size == 1:
            return cls(0, 1, 0, dist.HashStore())
        if (rank := torchrun_number("RANK", 0)) >= size:
            raise InputError(
                f"RANK is {rank} and WORLD_SIZE {size} in the environment, but workers are counted "
                "from 0; start them with torchrun"
            )
        waiting = threading.Timer(_PATIENCE_SECONDS, _say_that_it_waits, (rank, size))
        waiting.daemon = True
        waiting.start()
        try:
            store, rank, size = next(dist.rendezvous("env://", timeout=MEETING))
        except (ValueError, RuntimeError) as error:
            raise InputError(
                f"WORLD_SIZE is {size}, but the other workers cannot be reached ({error}); start "
                "them with torchrun"
            ) from None
        finally:
            waiting.cancel()
        # torchrun keeps its store when it starts the workers again.
        fresh = dist.PrefixStore(f"start/{restarts()}/{size}", store)
        return cls(rank, size, torchrun_number("LOCAL_RANK", 0), fresh)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def device(self, device: torch.device) -> torch.device:
        """This worker's own device of that kind.

        Raises:
            InputError: the machine has fewer devices than workers.
        """
        if device.type != "cuda" or self.size == 1:
            return device
        if self.local_rank >= (count := torch.cuda.device_count()):
            raise InputError(
                f"worker {self.local_rank} of this machine has no device of its own: torch finds "
                f"{count}; start no more with --nproc-per-node, or use --device cpu"
            )
        return torch.device("cuda", self.local_rank)

    def __enter__(self) -> "Job":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Let the first worker that fails speak, and the others be silent."""
        if error is None or self.size == 1:
            return
        if self._fails_first():
            _tell_torchrun(str(error) or type(error).__name__)
        elif isinstance(error, StoppedError):
            raise SystemExit(error.exit_code)
        elif isinstance(error, Exception):
            raise FollowerError from error

    def _fails_first(self) -> bool:
        try:
            return self.store.add("failed", 1) == 1
        except RuntimeError:  # the store is gone, and with it the worker that may have spoken
            return True

    def announce(self, facts: str) -> None:
        """As the first worker: the cache is prepared."""
        self.store.set("prepared", facts)

    def wait_until_prepared(self) -> str:
        """What the first worker announced.

        Raises:
            InputError: it did not within ``TIMEOUT``.
        """
        try:
            self.store.wait(["prepared"], TIMEOUT)
        except RuntimeError:
            raise InputError(
                f"worker {self.rank}: the first worker did not prepare the cache within "
                f"{TIMEOUT}; see its messages"
            ) from None
        return self.store.get("prepared").decode()

    def draw(self, shards: Sequence[int]) -> Iterator[int]:
        """Shards for this worker: each of ``shards`` goes to whoever asks next."""
        while (place := self.store.add("next", 1) - 1) < len(shards):
            yield shards[place]

    def done(self) -> None:
        """This worker has no more work."""
        self.store.add("done", 1)

    def wait_for_all(self, meanwhile: Callable[[], None]) -> None:
        """As the first worker: wait until every worker is done.

        A worker that dies ends the wait: torchrun stops all the others.
        """
        while self.store.add("done", 0) < self.size:
            meanwhile()
            time.sleep(_POLL_SECONDS)

    def count(self, name: str, amount: int) -> int:
        """Add to a number of the whole job; its value now."""
        return self.store.add(name, amount)


def _say_that_it_waits(rank: int, size: int) -> None:
    where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
    print(
        f"dspark: worker {rank} of {size} waits for the others at {where}, for {MEETING} at most "
        "(WORLD_SIZE, RANK, MASTER_ADDR and MASTER_PORT of the environment say so)",
        file=sys.stderr,
        flush=True,
    )


def restarts() -> int:
    """How often torchrun has started this job's workers again."""
    return torchrun_number("TORCHELASTIC_RESTART_COUNT", 0)


def _tell_torchrun(message: str) -> None:
    """Leave the message where torchrun looks for it; it repeats it as the root cause."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        facts = {"py_callstack": message, "timestamp": str(int(time.time()))}
        with open(file, "w") as f:
            json.dump({"message": {"message": message, "extraInfo": facts}}, f)
