"""The part of the target that a cache carries, so that a trainer never needs the target itself."""

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import align_module_device
from safetensors.torch import save_file
from torch import Tensor

from dspark.capture.targets.target import Target
from dspark.schemas.durable import fsync_dir, tmp_path
from dspark.schemas.paths import head_path, target_dir

_FINAL_NORM_NAMES = ("norm", "final_layernorm", "final_layer_norm", "embedding_norm", "ln_f")
_EMBED_CHUNK = 8192


def write_target_files(root: Path, target: Target) -> None:
    """Write ``target/`` of a cache: config, tokenizer, processor, chat template and head weights.

    ``head.safetensors`` holds ``embed_tokens.weight`` ``[rows, H]`` as the embedding module returns
    it (scaling included), ``lm_head.weight`` ``[V, H]``, ``lm_head.bias`` where there is one, and
    ``norm.weight`` (and ``norm.bias``) ``[H]`` where the backbone has a final norm of that kind; in
    the target's own number type.
    """
    final = target_dir(root)
    tmp = tmp_path(final)
    shutil.rmtree(tmp, ignore_errors=True)
    tmp.mkdir(parents=True)
    target.model.config.save_pretrained(tmp)
    target.processor.save_pretrained(tmp)
    save_file(head_tensors(target), tmp / head_path(root).name)
    for path in tmp.iterdir():
        os.chmod(path, 0o644)
        with open(path, "rb") as f:
            os.fsync(f.fileno())
    shutil.rmtree(final, ignore_errors=True)
    os.replace(tmp, final)
    fsync_dir(root)


@torch.inference_mode()
def head_tensors(target: Target) -> dict[str, Tensor]:
    embedding: Any = target.embedding
    ids = torch.arange(embedding.weight.shape[0], device=target.device)
    tensors = {
        "embed_tokens.weight": torch.cat([embedding(i).cpu() for i in ids.split(_EMBED_CHUNK)])
    }
    norms = (getattr(target.backbone, name, None) for name in _FINAL_NORM_NAMES)
    norm = next((n for n in norms if isinstance(getattr(n, "weight", None), Tensor)), None)
    for name, module in (("lm_head", target.head), ("norm", norm)):
        if module is None:
            continue
        with align_module_device(module):  # accelerate may keep weights elsewhere between calls
            for key in ("weight", "bias"):
                value = getattr(module, key, None)
                if isinstance(value, Tensor):
                    tensors[f"{name}.{key}"] = value.detach().to("cpu", copy=True)
    return {k: v.contiguous() for k, v in tensors.items()}
