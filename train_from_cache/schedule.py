"""The learning rate as a pure function of the step, so that a resumed run needs no state for it."""

import math

FLOOR = 0.1


def lr_factor(step: int, steps: int, warmup: int) -> float:
    """What the peak learning rate is multiplied with: a linear rise, then a cosine to ``FLOOR``.

    Args:
        step: from 0 to ``steps - 1``.
        steps: of the whole training.
        warmup: steps of the rise, of which the last one reaches 1.
    """
    if step < warmup:
        return (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return FLOOR + (1 - FLOOR) * 0.5 * (1 + math.cos(math.pi * progress))
