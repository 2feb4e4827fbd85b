"""A draft's reduced vocabulary: the target's ids that answers use most.

Draft id j stands for the target's id ``j + d2t[j]``; ``t2d[v]`` says whether the target's id v is
in. The ids are in ascending order.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from dspark.schemas.manifest import TargetFacts
from dspark.train_from_cache.cache import Cache


def count_supervised(cache: Cache, rows: Sequence[int]) -> Tensor:
    """How often each id is supervised in some dataset rows.

    Always counted from the rows themselves, so that a resumed training comes to the same numbers.

    Returns:
        int64 ``[ids]``, as many as the target embeds or predicts.
    """
    target = cache.manifest.target
    counts = torch.zeros(max(target.vocab_size, target.embedding_rows), dtype=torch.int64)
    ids_field, mask_field = cache.field("input_ids"), cache.field("loss_mask")
    with cache.ahead(([row] for row in rows), [ids_field, mask_field]) as batches:
        for (row,) in batches:
            length = int(cache.lengths[row])
            ids = torch.empty(length, dtype=torch.int32)
            mask = torch.empty(length, dtype=torch.uint8)
            cache.read_row(row, ids_field, ids)
            cache.read_row(row, mask_field, mask)
            supervised = ids[mask.bool()].long()
            counts.index_add_(0, supervised, torch.ones_like(supervised))
    return counts


def special_ids(target: TargetFacts) -> list[int]:
    """Ids of the target's vocabulary with a meaning of their own, ascending."""
    ids = {
        *target.eos_token_ids,
        target.pad_token_id,
        target.image_token_id,
        target.video_token_id,
    }
    return sorted(i for i in ids if i is not None and 0 <= i < target.vocab_size)


def choose_ids(counts: Tensor, size: int, always: Sequence[int]) -> Tensor:
    """The ``size`` most frequent ids, those of ``always`` in any case; of equally frequent ones the
    lower.

    Args:
        counts: int64 ``[V]``.
        size: at most V, and at least as many as ``always``.
        always: distinct ids.

    Returns:
        int64 ``[size]``, ascending.
    """
    rank = counts.clone()
    rank[list(always)] = counts.max() + 1
    return rank.argsort(descending=True, stable=True)[:size].sort().values
