"""Workers that hold one copy of the target together."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist

from dspark.capture.workers.job import TIMEOUT
from dspark.schemas.errors import InputError
from dspark.schemas.torchrun import torchrun_number, world_size

LOST_PEER = (
    "lost contact with another worker that holds a part of the same target; see its own message, "
    "or what torchrun reports of it"
)


@dataclass(frozen=True)
class Replica:
    """The workers that hold one copy of the target, seen from one of them.

    Attributes:
        kind: ``tp`` splits every matrix, and all workers compute each batch together; ``fsdp``
            splits the storage of the weights, and each worker computes its own batches.
        size: workers of the replica.
        first: rank in the job of its first worker.
        rank: of this worker in the replica.
    """

    kind: Literal["tp", "fsdp"]
    size: int
    first: int
    rank: int

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def connect(self, store: dist.Store, device: torch.device) -> None:
        """Make the replica the default process group: gloo on CPUs, NCCL on CUDA devices.

        transformers splits a model over all ranks of the default group, so several replicas side by
        side each need one of their own.

        Args:
            store: of the job, fresh for each start of its workers.
            device: of this worker.

        Raises:
            InputError: ``device`` is not of the kind that transformers would split the model over.
        """
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        if accelerator is not None and accelerator.type != device.type:
            raise InputError(
                f"--device {device.type}: transformers splits a target over the {accelerator.type} "
                "devices of a machine that has them; leave --device out, or hide them, e.g. with "
                "CUDA_VISIBLE_DEVICES="
            )
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore(f"replica/{self.first}", store),
            rank=self.rank,
            world_size=self.size,
            timeout=TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )


def find_replica(tp: int | None, fsdp: bool, device_map: str | None) -> Replica | None:
    """The replica of this worker, from its options and from what torchrun has set.

    With ``tp``, each ``tp`` consecutive ranks are a replica; with ``fsdp``, those of a node are.

    Returns:
        None where every worker holds a whole target.

    Raises:
        InputError: the options exclude each other, or do not fit the number of workers.
    """
    if tp is not None and fsdp:
        raise InputError("--tp and --fsdp split the target in two ways; give one of them")
    if not fsdp and tp in (None, 1):
        return None
    option = "--fsdp" if tp is None else f"--tp {tp}"
    if device_map is not None:
        raise InputError(
            f"--device-map spreads the target over the devices of one process, {option} over "
            "several processes; give one of them"
        )
    rank, world = torchrun_number("RANK", 0), world_size()
    local_world = torchrun_number("LOCAL_WORLD_SIZE", world)
    if world == 1:
        raise InputError(
            f"{option} splits the target over several workers, and there is one; start them with: "
            f"torchrun --nproc-per-node {tp or 2} $(which dspark) capture {option} …"
        )
    if tp is not None:
        if world % tp:
            raise InputError(
                f"--tp {tp}: {world} workers are no whole number of replicas; start a multiple of "
                f"{tp}, e.g. with torchrun --nproc-per-node {tp}"
            )
        return Replica("tp", tp, rank - rank % tp, rank % tp)
    if local_world == 1:
        raise InputError(
            "--fsdp splits the target over the workers of a node, and each node has one; start "
            "several with torchrun --nproc-per-node, or use --tp"
        )
    local_rank = torchrun_number("LOCAL_RANK", rank)
    return Replica("fsdp", local_world, rank - local_rank, local_rank)


def is_lost_peer(error: BaseException) -> bool:
    """Whether a collective failed because another worker is gone or does not answer.

    NCCL may instead end the process from its own watchdog; torchrun then names the first to fail.
    """
    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and "gloo" in str(error)


@contextmanager
def reaching_peers() -> Iterator[None]:
    """Around collectives: say that a worker is gone where they fail because of it.

    Raises:
        InputError: a worker of the replica is gone.
    """
    try:
        yield
    except Exception as error:
        if is_lost_peer(error):
            raise InputError(LOST_PEER) from None
        raise
