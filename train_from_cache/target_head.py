"""The target's embedding table and language-model head, as the cache holds them."""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dspark.schemas.disk_errors import is_unreadable
from dspark.schemas.errors import IncompatibleCacheError, UnreadableError
from dspark.schemas.paths import head_path


class TargetHead(nn.Module):
    """Frozen weights of the target that drafts share.

    Attributes:
        embeddings: ``[rows, H]``, what the target's embedding module returns for every id.
        weight: ``[V, H]`` of the language-model head.
        bias: ``[V]`` of the head, or None.
    """

    embeddings: Tensor
    weight: Tensor
    bias: Tensor | None

    def __init__(self, embeddings: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self.register_buffer("embeddings", embeddings)
        self.register_buffer("weight", weight)
        self.register_buffer("bias", bias)

    @classmethod
    def load(cls, root: Path, dtype: torch.dtype = torch.float32) -> "TargetHead":
        """Load from the cache directory ``root``, cast to ``dtype``.

        Raises:
            IncompatibleCacheError: the file is missing or damaged.
        """
        path = head_path(root)
        try:
            path.open(
                "rb"
            ).close()  # safetensors says of all that it cannot open that it is missing
            tensors = {k: v.to(dtype) for k, v in load_file(path).items()}
            embeddings, weight = tensors["embed_tokens.weight"], tensors["lm_head.weight"]
            bias = tensors.get("lm_head.bias")
            if embeddings.dim() != 2 or weight.shape[1:] != embeddings.shape[1:]:
                raise ValueError(f"shapes {tuple(embeddings.shape)} and {tuple(weight.shape)}")
            if bias is not None and bias.shape != weight.shape[:1]:
                raise ValueError(f"a bias of shape {tuple(bias.shape)}")
            return cls(embeddings, weight, bias)
        except (OSError, SafetensorError, KeyError, ValueError) as error:
            if isinstance(error, OSError) and is_unreadable(error):
                raise UnreadableError(path, error) from None
            raise IncompatibleCacheError(
                f"{path}: the target's head is missing or damaged ({error}); run the capture again"
            ) from None

    def forward(self, hidden: Tensor) -> Tensor:
        """Logits ``[…, V]`` of post-norm hidden states ``[…, H]``."""
        return F.linear(hidden, self.weight, self.bias)
