"""Copying the target's embeddings and head into a draft."""

import torch
from torch import Tensor, nn

from dspark.schemas.errors import InputError


@torch.no_grad()
def copy_embeddings(module: nn.Embedding, table: Tensor) -> None:
    """Copy the target's embedding table.

    The draft's table has one row per id of the target's logits. Some targets embed more ids than
    they can produce (picture placeholders), some fewer (a padded head): rows beyond either table
    are dropped or zero.

    Args:
        module: ``[V, H]``.
        table: ``[rows, H]``.

    Raises:
        InputError: another H.
    """
    _check(module.embedding_dim, table.shape[1], "hidden_size")
    rows = min(len(table), len(module.weight))
    module.weight.zero_()
    module.weight[:rows] = table[:rows].to(module.weight)


@torch.no_grad()
def copy_head(module: nn.Linear, weight: Tensor) -> None:
    """Copy the target's language-model head, ``[V, H]``.

    Raises:
        InputError: another V or H.
    """
    check_head(module.out_features, module.in_features, weight)
    module.weight.copy_(weight)


def check_head(vocab_size: int, hidden_size: int, weight: Tensor) -> None:
    """Check that a head ``[V, H]`` is the one that the draft's config was made for.

    Raises:
        InputError: another V or H.
    """
    _check(vocab_size, weight.shape[0], "vocab_size")
    _check(hidden_size, weight.shape[1], "hidden_size")


def _check(draft: int, target: int, name: str) -> None:
    if draft != target:
        raise InputError(
            f"the draft was made for another target: its {name} is {draft}, the cache's {target}; "
            "train a fresh draft, or use the cache that it was trained on"
        )
