"""Loading a target in parts, one on each worker of a replica, by means of transformers."""

from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor

from dspark.capture.targets.backbone import find_backbone
from dspark.capture.targets.fully_sharded import check_units, sharding_plan, without_own_plans
from dspark.capture.targets.head_weights import read_head_weights
from dspark.capture.targets.load_errors import why_not_loadable
from dspark.capture.targets.tensor_parallel import check_tensor_parallel
from dspark.capture.workers.replica import Replica, reaching_peers
from dspark.schemas.errors import InputError


def how_to_split(
    name: str, auto_model: Any, config: Any, replica: Replica, *, trust_remote_code: bool
) -> dict[str, Any]:
    """What ``from_pretrained`` needs to give each worker its part; no weight is read yet.

    Args:
        name: of the target.
        auto_model: the class of transformers that builds it.
        config: of the target.
        replica: the workers.
        trust_remote_code: run code that the repository brings along.

    Raises:
        InputError: it cannot be split this way.
    """
    option = "--fsdp" if replica.kind == "fsdp" else f"--tp {replica.size}"
    if getattr(config, "quantization_config", None) is not None:
        raise InputError(
            f"{option}: --target {name} is quantized, and dspark splits targets in bf16, fp16 or "
            "fp32 only; use --device-map auto"
        )
    skeleton = _skeleton(name, auto_model, config, trust_remote_code)
    if replica.kind == "tp":
        check_tensor_parallel(name, skeleton, replica.size)
        split = _distributed(option, tp_size=replica.size)
    else:
        config = without_own_plans(config)
        plan = sharding_plan(skeleton)
        split = _distributed(option, fsdp_size=replica.size, fsdp_plan=plan)
    # Where its slices do not fit, ``fill`` does not need them.
    return {"config": config, "distributed_config": split, "ignore_mismatched_sizes": True}


def _distributed(option: str, **sizes: Any) -> Any:
    import transformers
    from transformers.distributed import DistributedConfig

    try:
        return DistributedConfig(**sizes)
    except TypeError:
        raise InputError(
            f"{option}: transformers {transformers.__version__} is too old for it; 5.24 is not"
        ) from None


@reaching_peers()
@torch.no_grad()
def fill(model: Any, whole: Any | None) -> None:
    """Give each worker its part of the whole model's numbers; a collective of the replica.

    transformers 5.24 cuts weights before it merges, splits or permutes those of some checkpoints,
    so that what it loads in parts is wrong without a word. Tensors go to all workers one by one.

    Args:
        model: loaded in parts.
        whole: in the leader, the same model in host memory; None in the others.

    Raises:
        InputError: a worker is gone.
    """
    source = {} if whole is None else _tensors(whole)
    for key, held in _tensors(model).items():
        if whole is None:
            value = torch.empty(held.shape, dtype=held.dtype, device=held.device)
        else:
            value = source[key].to(held.device, copy=True).contiguous()
            assert (value.dtype, value.shape) == (held.dtype, held.shape), key
        dist.broadcast(value, src=0)
        if isinstance(held, DTensor):
            part = distribute_tensor(value, held.device_mesh, held.placements, src_data_rank=None)
            held.to_local().copy_(part.to_local())
        else:
            held.copy_(value)


def _tensors(model: Any) -> dict[str, Tensor]:
    both = (model.named_parameters(remove_duplicate=False), model.named_buffers())
    return dict(chain(*both))


@reaching_peers()
def split_head_tensors(
    name: str, model: Any, backbone: Any, device: torch.device
) -> dict[str, Tensor]:
    """The head tensors of a model that was loaded in parts, whole; a collective of the replica.

    Raises:
        InputError: the model has parts that not every forward pass enters, or a worker is gone.
    """
    check_units(name, model)
    return read_head_weights(model, backbone, device)


def _skeleton(name: str, auto_model: Any, config: Any, trust_remote_code: bool) -> Any:
    """The model on the meta device."""
    try:
        with torch.device("meta"):
            skeleton = auto_model.from_config(config, trust_remote_code=trust_remote_code)
    except Exception as error:  # what the code of models raises has no bound
        raise InputError(f"--target {name}: {why_not_loadable('model', error)}") from None
    try:
        find_backbone(skeleton)
    except InputError as error:
        raise InputError(f"--target {name}: {error}") from None
    return skeleton
