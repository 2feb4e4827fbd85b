"""Vectors in 8 bits: against a list of all E4M3 numbers, and the bounds that are stated."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dspark.schemas.float8 import (
    FLOAT8,
    RELATIVE_ERROR,
    SMALLEST,
    from_float8,
    to_float8,
    without_float8,
)

# E4M3 as OCP's "8-bit Floating Point Specification" has it: 4 bits of exponent with bias 7, 3 of
# fraction, numbers without implicit 1 at exponent 0, and no infinity.
GRID = np.array(
    sorted(
        {
            sign * ((1 + m / 8) * 2.0 ** (e - 7) if e else m / 8 * 2.0**-6)
            for sign in (-1, 1)
            for e in range(16)
            for m in range(8)
            if (e, m) != (15, 7)
        }
    )
)


def vectors(seed: int, spread: float, size: float, dtype: torch.dtype) -> Tensor:
    """``[8, 64]`` numbers over ``spread`` binary orders of magnitude around ``2**size``."""
    generator = torch.Generator().manual_seed(seed)
    exponents = size + spread * (torch.rand(8, 64, generator=generator) - 0.5)
    return (torch.randn(8, 64, generator=generator) * torch.exp2(exponents)).to(dtype)


@given(
    seed=st.integers(0, 2**31),
    spread=st.floats(0, 40),
    size=st.floats(-80, 80),
    dtype=st.sampled_from([torch.bfloat16, torch.float32]),
)
def test_each_number_is_the_nearest_there_is(
    seed: int, spread: float, size: float, dtype: torch.dtype
) -> None:
    exact = vectors(seed, spread, size, dtype)
    stored, scale = to_float8(exact)
    assert (stored.dtype, scale.dtype, scale.shape) == (FLOAT8, torch.float32, (8,))
    x, s = exact.double().numpy(), scale.double().numpy()[:, None]
    assert (np.frexp(s)[0] == 0.5).all(), "a scale is no power of two"
    largest = np.abs(x).max(1, keepdims=True)
    assert (largest <= 448 * s).all() and (largest > 224 * s).all(), "another scale fits better"
    error = np.abs(from_float8(stored, scale, torch.float32).double().numpy() - x)
    nearest = np.abs((x / s)[..., None] - GRID).min(-1) * s
    assert (error == nearest).all()
    # The bounds that are stated.
    small = np.abs(x) < SMALLEST * largest
    assert (error <= RELATIVE_ERROR * np.where(small, SMALLEST * largest, np.abs(x))).all()


@given(seed=st.integers(0, 2**31), spread=st.floats(0, 300), size=st.floats(-140, 120))
def test_reading_has_no_error_of_its_own(seed: int, spread: float, size: float) -> None:
    exact = vectors(seed, spread, size, torch.float32).clamp(-1e38, 1e38)
    stored, scale = to_float8(exact)
    product = stored.double() * scale.double()[:, None]
    for dtype in (torch.bfloat16, torch.float32):
        assert torch.equal(from_float8(stored, scale, dtype).double(), product)
    again = from_float8(*to_float8(product.float()), torch.float32)
    assert torch.equal(again.double(), product)


def test_the_edges() -> None:
    rows = torch.tensor([[0.0, 0.0], [448.0, -448.0], [449.0, 1.0], [1e-45, 0.0], [1.7e38, 1.0]])
    stored, scale = to_float8(rows)
    assert scale.tolist()[1:4] == [1.0, 2.0, 2.0**-117] and scale[0] > 0
    decoded = from_float8(stored, scale)
    assert decoded.isfinite().all()
    assert decoded[:2].tolist() == rows[:2].tolist() and decoded[3].tolist() == [0, 0]


@pytest.mark.parametrize("bad", [torch.inf, -torch.inf, torch.nan, -3.3e38])
def test_a_vector_that_is_not_finite_has_no_scale(bad: float) -> None:
    _, scale = to_float8(torch.tensor([[1.0, bad], [1.0, 2.0]]))
    assert scale.isnan().tolist() == [True, False]


def test_fields_by_name() -> None:
    stored, scale = to_float8(torch.tensor([[1.0, 3.0]]))
    other = torch.tensor([7])
    found = without_float8({"x": stored, "x.scale": scale, "input_ids": other})
    assert found.keys() == {"x", "input_ids"}
    assert found["input_ids"] is other and found["x"].tolist() == [[1.0, 3.0]]
    assert found["x"].dtype == torch.bfloat16
