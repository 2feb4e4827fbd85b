"""Calibration errors and temperatures against plain loops in double precision."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.train_from_cache.calibration import (
    TEMPERATURES,
    Confidences,
    calibration_error,
    fit_temperatures,
)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def loop_error(pairs: list[tuple[float, float]]) -> float | None:
    """Weighted mean, over 15 bins, of the gap between mean prediction and mean outcome."""
    if not pairs:
        return None
    error = 0.0
    for b in range(15):
        members = [(p, o) for p, o in pairs if min(math.floor(p * 15), 14) == b]
        if members:
            predicted = sum(p for p, _ in members) / len(members)
            observed = sum(o for _, o in members) / len(members)
            error += len(members) / len(pairs) * abs(predicted - observed)
    return error


def loop_errors(
    anchors: list[list[tuple[float, float]]], temperatures: list[float], prefix: bool
) -> list[float | None]:
    """Of each position; an anchor is the (c, α) of its supervised tokens."""
    errors = []
    for k in range(len(temperatures)):
        pairs = []
        for tokens in anchors:
            if k >= len(tokens):
                continue
            predicted = observed = 1.0
            for j in range(0 if prefix else k, k + 1):
                predicted *= sigmoid(tokens[j][0] / temperatures[j])
                observed *= tokens[j][1]
            pairs.append((predicted, observed))
        errors.append(loop_error(pairs))
    return errors


def loop_fit(anchors: list[list[tuple[float, float]]], depth: int) -> list[float]:
    chosen: list[float] = []
    for k in range(depth):
        best, best_error = 1.0, math.inf
        for t in sorted((2 ** (i / 8) for i in range(-24, 25)), key=lambda t: abs(math.log(t))):
            error = loop_errors(anchors, [*chosen, t], prefix=True)[k]
            if error is not None and error < best_error - 1e-12:
                best, best_error = t, error
        chosen.append(best)
    return chosen


def tensors(anchors: list[list[tuple[float, float]]], depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """c with something else than a number outside the mask, α, e."""
    logits = torch.full((len(anchors), depth), torch.nan, dtype=torch.float64)
    accept = torch.zeros(len(anchors), depth, dtype=torch.float64)
    mask = torch.zeros(len(anchors), depth, dtype=torch.bool)
    for i, tokens in enumerate(anchors):
        for k, (c, alpha) in enumerate(tokens):
            logits[i, k], accept[i, k], mask[i, k] = c, alpha, True
    return logits, accept, mask


TOKEN = st.tuples(st.floats(-9, 9), st.floats(0, 1))
ANCHORS = st.integers(1, 4).flatmap(
    lambda depth: st.tuples(
        st.just(depth),
        st.lists(
            st.tuples(st.lists(TOKEN, min_size=1, max_size=depth), st.booleans()), max_size=12
        ),
    )
)


def close(got: list[float | None], want: list[float | None]) -> bool:
    return got == [None if w is None else pytest.approx(w, abs=1e-9) for w in want]


@settings(max_examples=30)
@given(ANCHORS)
def test_errors_and_temperatures_equal_plain_loops(
    given: tuple[int, list[tuple[list[tuple[float, float]], bool]]],
) -> None:
    depth, anchors = given
    confidences = Confidences()
    for start in range(0, len(anchors), 5):
        part = anchors[start : start + 5]
        fit = torch.tensor([yes for _, yes in part])
        confidences.update(*tensors([a for a, _ in part], depth), fit)
    result = confidences.result()
    if not anchors:
        assert result is None
        return
    assert result is not None
    fitted, rest = ([a for a, yes in anchors if yes is side] for side in (True, False))
    temperatures = result["temperatures"]
    for k in range(depth):  # equally good ones may be told apart by the last bit
        want = loop_fit(fitted, depth)[k]
        if temperatures[k] != want:
            one, other = (
                loop_errors(fitted, [*temperatures[:k], t], prefix=True)[k]
                for t in (temperatures[k], want)
            )
            assert one == pytest.approx(other, abs=1e-9)
            break
    assert (result["fit_anchors"], result["anchors"]) == (len(fitted), len(rest))
    for name, scale in (("", [1.0] * depth), ("_scaled", temperatures)):
        assert close(result["ece" + name], loop_errors(rest, scale, prefix=False))
        assert close(result["ece_prefix" + name], loop_errors(rest, scale, prefix=True))


def test_confidence_that_is_true_has_no_error() -> None:
    predicted = torch.rand(1000, dtype=torch.float64)
    assert calibration_error(predicted, predicted) == 0
    assert calibration_error(torch.ones(4).double(), torch.zeros(4).double()) == 1
    one_bin = torch.tensor([0.41, 0.45]).double()
    assert calibration_error(one_bin, one_bin.flip(0)) == pytest.approx(0)


@pytest.mark.parametrize("temperature", [0.25, 1.0, 4.0])
def test_known_temperatures_are_found_position_by_position(temperature: float) -> None:
    """A head whose logits at position k are too large by a known factor."""
    generator = torch.Generator().manual_seed(0)
    true = 2 * torch.randn(4000, 3, generator=generator, dtype=torch.float64)
    scale = torch.tensor([temperature, 1.0, 2 * temperature], dtype=torch.float64)
    mask = torch.rand(4000, 3, generator=generator).cumsum(1) < 2.5
    found = fit_temperatures(true * scale, torch.sigmoid(true), mask)
    assert found == scale.tolist()


def test_temperatures_lie_around_one() -> None:
    assert TEMPERATURES[0] == 1 and (min(TEMPERATURES), max(TEMPERATURES)) == (1 / 8, 8)
