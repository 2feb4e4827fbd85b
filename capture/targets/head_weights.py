"""What trainers need of the target itself: its input embedding, its head and its final norm."""

from typing import Any

import torch
from accelerate.utils import align_module_device
from torch import Tensor
from torch.distributed.tensor import DTensor

from dspark.capture.targets.backbone import decoder_layers, find_head
from dspark.capture.targets.fully_sharded import gathered

_FINAL_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "embedding_norm", "ln_f")
_EMBED_CHUNK = 8192


@torch.no_grad()
def read_head_weights(model: Any, backbone: Any, device: torch.device) -> dict[str, Tensor]:
    """Copies on the CPU, in the target's own number type.

    A collective if the model is split over several workers.

    Args:
        model: the target.
        backbone: its language backbone.
        device: where its input embedding runs.

    Returns:
        ``embed_tokens.weight`` ``[rows, H]`` as the embedding module returns it (scaling included),
        ``lm_head.weight`` ``[V, H]``, ``lm_head.bias`` where there is one, and ``norm.weight`` (and
        ``norm.bias``) ``[H]`` where the backbone has a final norm of that kind.
    """
    with gathered(model, decoder_layers(backbone)):
        embedding = model.get_input_embeddings()
        ids = torch.arange(embedding.weight.shape[0], device=device)
        tensors = {
            "embed_tokens.weight": torch.cat([embedding(i).cpu() for i in ids.split(_EMBED_CHUNK)])
        }
        norms = (getattr(backbone, name, None) for name in _FINAL_NORM_NAMES)
        norm = next((n for n in norms if isinstance(getattr(n, "weight", None), Tensor)), None)
        for name, module in (("lm_head", find_head(model)), ("norm", norm)):
            if module is None:
                continue
            with align_module_device(module):  # accelerate may keep weights elsewhere
                for key in ("weight", "bias"):
                    value = getattr(module, key, None)
                    if isinstance(value, Tensor):
                        tensors[f"{name}.{key}"] = _whole(value).to("cpu", copy=True)
    return {k: v.contiguous() for k, v in tensors.items()}


def _whole(value: Tensor) -> Tensor:
    whole = value.full_tensor() if isinstance(value, DTensor) else value
    return whole.detach()
