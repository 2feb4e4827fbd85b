"""The learning rate over a training."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.train_from_cache.schedule import FLOOR, lr_factor


@given(st.integers(2, 500), st.floats(0, 0.9))
def test_rises_to_the_peak_then_falls_to_the_floor(steps: int, share: float) -> None:
    warmup = round(share * steps)
    factors = [lr_factor(step, steps, warmup) for step in range(steps)]
    peak = max(0, warmup - 1)
    assert factors[peak] == pytest.approx(1.0)
    assert factors[: peak + 1] == sorted(factors[: peak + 1])
    assert factors[peak:] == sorted(factors[peak:], reverse=True)
    assert all(0 < f <= 1 for f in factors)
    if steps - warmup > 1:
        assert factors[-1] == pytest.approx(FLOOR)
