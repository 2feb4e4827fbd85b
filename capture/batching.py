"""Batches inside a shard: rows of like length together, under a budget of padded tokens."""

from collections.abc import Sequence


def plan_batches(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Cut the rows of a shard into batches. Depends on the shard alone.

    Args:
        lengths: tokens of each row.
        batch_tokens: most tokens of a batch, padding included; a longer row gets its own batch.

    Returns:
        Row numbers by batch, longest rows first, so that a batch that does not fit in memory shows
        at the start.
    """
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    batches: list[list[int]] = []
    for i in order:
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(i)
        else:
            batches.append([i])
    return batches
