"""The state of an unfinished training: one safetensors file, replaced as a whole.

Randomness, learning rate and data order are functions of the step, so the state is the step, the
trainable parameters and the optimizer's moments.
"""

import os
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from dspark.schemas.disk_errors import os_errors
from dspark.schemas.durable import publish, tmp_path
from dspark.schemas.errors import InputError

_PARAMETER = "parameter"
_OPTIMIZER = "optimizer"


def state_path(out: Path) -> Path:
    """Where a training in ``out`` keeps its state."""
    return out / "training_state" / "state.safetensors"


def save_state(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Publish the state after ``step`` updates; a crash leaves the previous one in place."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in _trainable(model).items():
        tensors[f"{_PARAMETER}.{name}"] = _stored(parameter)
        for key, value in optimizer.state.get(parameter, {}).items():
            tensors[f"{_OPTIMIZER}.{key}.{name}"] = _stored(value)
    path.parent.mkdir(parents=True, exist_ok=True)
    with os_errors(tmp_path(path)):
        save_file(tensors, tmp_path(path), metadata={"step": str(step)})
    make_durable(tmp_path(path))
    publish(path)


def load_state(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Put a saved state into ``model`` and ``optimizer``.

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
        with torch.no_grad():
            for name, parameter in trainable.items():
                parameter.copy_(stored.pop(f"{_PARAMETER}.{name}"))
        for key, value in stored.items():
            _, entry, name = key.split(".", 2)
            parameter = trainable[name]
            # AdamW keeps its scalar step on the CPU.
            device = parameter.device if value.dim() else torch.device("cpu")
            optimizer.state[parameter][entry] = value.to(device)
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


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def _stored(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().contiguous()
