"""The processes that torchrun started together for a training, or this one alone.

They read the same cache and take the same steps. Of a step's rows each takes its share, so that the
order is that of one process; sums and denominators are those of all.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from dspark.schemas.errors import InputError
from dspark.schemas.torchrun import world_size
from dspark.train_from_cache.batch import LossTerm
from dspark.train_from_cache.drafts.base import Draft


class Ranks:
    """This process among those of the training.

    Attributes:
        rank: its number, from 0. The first one alone writes.
        size: how many there are.
        device: where this one computes.
        accelerator: that set the processes up; has the precision.
    """

    def __init__(self, device: str, fsdp: bool) -> None:
        """Join the other processes, if the environment names any (as torchrun does).

        Args:
            device: ``auto``, ``cpu`` or ``cuda``.
            fsdp: ``spread`` shards drafts instead of copying them.

        Raises:
            InputError: there is no such device, or no other process to shard for.
        """
        if device not in ("auto", "cpu", "cuda"):
            raise InputError(f"--device {device}: choose from auto, cpu, cuda")
        if device == "cuda" and not torch.cuda.is_available():
            raise InputError("--device cuda: torch finds no CUDA device; use --device cpu or auto")
        cuda = device != "cpu" and torch.cuda.is_available()
        self.accelerator = _join(cuda)
        self.rank: int = self.accelerator.process_index
        self.size: int = self.accelerator.num_processes
        self.device: torch.device = self.accelerator.device
        self._fsdp = fsdp
        if fsdp and self.size == 1:
            raise InputError(
                "--fsdp shards the draft over several processes, and this is one; start dspark "
                "with torchrun, or leave it out"
            )

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def share(self, rows: Sequence[int]) -> list[int]:
        """The rows of this process: together, all of them once."""
        return list(rows[self.rank :: self.size])

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all processes' ``x``; a collective."""
        return self._reduced(x, dist.ReduceOp.SUM)

    def highest(self, value: int) -> int:
        """The highest of all processes' values; a collective."""
        return int(self._reduced(torch.tensor(value), dist.ReduceOp.MAX))

    def _reduced(self, x: Tensor, how: Any) -> Tensor:
        if self.size == 1:
            return x
        moved = x.detach().to(self.device, copy=True)
        dist.all_reduce(moved, how)
        return moved.to(x.device)

    def wait_for_first(self) -> None:
        """Go on when all processes, the first one among them, are here."""
        self.highest(0)

    def spread(self, draft: Draft) -> nn.Module:
        """The module to train ``draft`` by, whose gradients, times ``loss_scale``, are the sum of
        all processes'.

        FSDP2 is applied by torch's own function: accelerate would prepare one model and its
        optimizer only. The draft is one unit, since it is little deeper than a target's layer; what
        is frozen is not sharded, so that no step has to gather it.
        """
        if self.size == 1:
            return draft
        if not self._fsdp:
            cuda = self.device.type == "cuda"
            return DistributedDataParallel(
                draft, device_ids=[self.device] if cuda else None, broadcast_buffers=False
            )
        _show_loss_terms()
        frozen = {p for p in draft.parameters() if not p.requires_grad}
        mesh = init_device_mesh(self.device.type, (self.size,))
        unit = fully_shard(draft, mesh=mesh, ignored_params=frozen)
        # A sum; not every backend averages.
        unit.set_gradient_divide_factor(1.0)
        unit.set_force_sum_reduction_for_comms(True)
        return draft

    @property
    def loss_scale(self) -> int:
        """What a loss is multiplied with before the backward pass: DDP averages."""
        return 1 if self._fsdp else self.size


def _join(cuda: bool) -> Accelerator:
    expected = world_size()
    try:
        joined = Accelerator(cpu=not cuda, mixed_precision="bf16" if cuda else "no")
        if joined.num_processes != expected:
            raise ValueError(f"there are {joined.num_processes}")
    except (ValueError, RuntimeError) as error:
        if expected == 1:
            raise
        raise InputError(
            f"WORLD_SIZE is {expected}, but so many processes are not together ({error}); start "
            "them with torchrun"
        ) from None
    return joined


@cache
def _show_loss_terms() -> None:
    """Let FSDP2 find the tensors that a draft returns; not every version looks into dataclasses."""
    torch.export.register_dataclass(LossTerm)


def unsynchronised(model: nn.Module) -> AbstractContextManager[Any]:
    """Where the gradients of a backward pass are added up, and not yet exchanged.

    FSDP2 goes on exchanging: whole gradients are what it must not keep.
    """
    return model.no_sync() if isinstance(model, DistributedDataParallel) else nullcontext()


@contextmanager
def gathered(draft: Draft) -> Iterator[None]:
    """All weights of a draft in full, for whatever is not its forward pass; a collective."""
    if isinstance(draft, FSDPModule):
        draft.unshard()
        yield
        draft.reshard()
    else:
        yield


def whole(tensor: Tensor) -> Tensor:
    """A tensor that may be sharded, in full; a collective."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def placed_like(tensor: Tensor, other: Tensor) -> Tensor:
    """A whole tensor, sharded and placed as ``other``, of the same shape."""
    if isinstance(other, DTensor):
        mesh = other.device_mesh
        moved = tensor.to(mesh.device_type)
        return distribute_tensor(moved, mesh, other.placements, src_data_rank=None)
    return tensor.to(other.device)
