"""The state of an unfinished training: one safetensors file, replaced as a whole.

Randomness, learning rate and data order are functions of the step, so the state is the step, the
trainable parameters, the optimizer's moments and the moving average. It does not depend on the
number of processes.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dspark.schemas.disk_errors import os_errors
from dspark.schemas.durable import publish, tmp_path
from dspark.schemas.errors import InputError
from dspark.train_from_cache.ema import Ema
from dspark.train_from_cache.ranks import placed_like, whole

_PARAMETER = "parameter"
_OPTIMIZER = "optimizer"
_AVERAGE = "average"


def state_path(out: Path) -> Path:
    """Where a training in ``out`` keeps its state."""
    return out / "training_state" / "state.safetensors"


def save_state(
    path: Path,
    step: int,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    ema: Ema | None = None,
    *,
    write: bool = True,
) -> None:
    """Publish the state after ``step`` updates; a crash leaves the previous one in place.

    All processes call it, one of them with ``write``.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in _state(model, optimizer, ema):
        full = whole(tensor)
        if write:
            tensors[name] = full.detach().cpu().contiguous()
    if not write:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with os_errors(tmp_path(path)):
        save_file(tensors, tmp_path(path), metadata={"step": str(step)})
    make_durable(tmp_path(path))
    publish(path)


def load_state(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, ema: Ema | None = None
) -> int:
    """Put a saved state into a model, its optimizer and its average.

    Returns:
        The number of updates done.

    Raises:
        InputError: the file is damaged, or is not of this model.
    """
    trainable = _trainable(model)
    try:
        with safe_open(path, framework="pt") as file:
            step = int(file.metadata()["step"])
            stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        for kind, places in ((_PARAMETER, trainable), (_AVERAGE, ema.averages if ema else {})):
            with torch.no_grad():
                for name, place in places.items():
                    place.copy_(placed_like(stored.pop(f"{kind}.{name}"), place))
        for key, value in stored.items():
            _, entry, name = key.split(".", 2)
            parameter = trainable[name]
            # AdamW keeps its scalar step on the CPU.
            optimizer.state[parameter][entry] = (
                placed_like(value, parameter) if value.dim() else value
            )
    except (OSError, SafetensorError, KeyError, ValueError, TypeError, RuntimeError) as error:
        raise InputError(
            f"{path}: not a usable training state of this draft ({error}); start again with "
            "another --out"
        ) from None
    return step


def make_durable(path: Path) -> None:
    """Bring a written file to disk, readable as files commonly are (safetensors makes it 0600)."""
    path.chmod(0o644)
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def _state(
    model: nn.Module, optimizer: torch.optim.Optimizer, ema: Ema | None
) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in _trainable(model).items():
        yield f"{_PARAMETER}.{name}", parameter
        for key, value in optimizer.state.get(parameter, {}).items():
            yield f"{_OPTIMIZER}.{key}.{name}", value
        if ema:
            yield f"{_AVERAGE}.{name}", ema.averages[name]


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}
