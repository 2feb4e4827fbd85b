"""How far the confidence that a draft states can be trusted, and temperatures that mend it.

At an anchor the draft states a logit c_k for each draft token k, and σ(c_k) is to be the rate α_k
at which it is accepted where those before it were (α, S and e as in ``metrics.py``). With

    ĉ_k = σ(c_k / T_k),   Ĉ_k = Π_{j<=k} ĉ_j

the expected calibration error is that of the position's own confidence and that of the whole
prefix, whose length a server chooses by Ĉ:

- ``ece[k]        = Σ_b |Σ_b (ĉ_k - α_k)| / n``
- ``ece_prefix[k] = Σ_b |Σ_b (Ĉ_k - S_k)| / n``

over the n anchors with e_k, bin b of 15 holding those whose prediction is in [b/15, (b+1)/15), the
last one 1 too. α being known, no token is drawn. Sequential temperature scaling (DSpark's paper,
section 3.2.1) takes the positions in order: T_k is the temperature that makes ``ece_prefix[k]``
smallest, those before it being fixed. The paper gives neither bins nor temperatures; here they are
2^(i/8) from 1/8 to 8, the one nearest to 1 where several are equally good. Temperatures are fitted
on every other held-out row and all errors measured on the rest.
"""

from typing import Any

import torch
from torch import Tensor

BINS = 15
TEMPERATURES = tuple(2.0 ** (i / 8) for i in sorted(range(-24, 25), key=abs))


def calibration_error(predicted: Tensor, observed: Tensor) -> float | None:
    """The expected calibration error of n predictions; None without any.

    Args:
        predicted: float64 ``[n]``, from 0 to 1.
        observed: float64 ``[n]``, rates or outcomes.
    """
    if not len(predicted):
        return None
    bins = (predicted * BINS).long().clamp(max=BINS - 1)
    gaps = torch.zeros(BINS, dtype=torch.float64).index_add_(0, bins, predicted - observed)
    return float(gaps.abs().sum()) / len(predicted)


def fit_temperatures(logits: Tensor, accept: Tensor, mask: Tensor) -> list[float]:
    """Sequential temperature scaling.

    Args:
        logits: float64 ``[n, K]``, c; anything outside the mask.
        accept: float64 ``[n, K]``, α.
        mask: bool ``[n, K]``, e.

    Returns:
        K temperatures; 1 for a position without an anchor.
    """
    chosen: list[float] = []
    through = accept.cumprod(1)
    before = torch.ones(len(logits), dtype=torch.float64)
    for k in range(logits.shape[1]):
        seen = mask[:, k]
        stated, earlier, observed = logits[seen, k], before[seen], through[seen, k]
        errors = [
            calibration_error(earlier * torch.sigmoid(stated / temperature), observed) or 0.0
            for temperature in TEMPERATURES
        ]
        chosen.append(TEMPERATURES[errors.index(min(errors))])
        before = before * torch.sigmoid(logits[:, k] / chosen[k])
    return chosen


class Confidences:
    """What a draft stated and what was accepted, anchor by anchor: 17 bytes for each token."""

    def __init__(self) -> None:
        self._parts: list[tuple[Tensor, ...]] = []

    def update(self, logits: Tensor, accept: Tensor, mask: Tensor, fit: Tensor) -> None:
        """Add n anchors.

        Args:
            logits: float ``[n, K]``, c; anything outside the mask.
            accept: float64 ``[n, K]``, α, 0 outside the mask.
            mask: bool ``[n, K]``, e.
            fit: bool ``[n]``, whether the temperatures are fitted on the anchor's row.
        """
        self._parts.append((logits.cpu().double(), accept, mask.cpu(), fit.cpu()))

    def result(self) -> dict[str, Any] | None:
        """The calibration as JSON values; None if there was no anchor."""
        if not self._parts:
            return None
        logits, accept, mask, fit = (torch.cat(parts) for parts in zip(*self._parts, strict=True))
        temperatures = fit_temperatures(logits[fit], accept[fit], mask[fit])
        rest = (logits[~fit], accept[~fit], mask[~fit])
        raw = _errors(*rest, torch.ones(len(temperatures), dtype=torch.float64))
        scaled = _errors(*rest, torch.tensor(temperatures, dtype=torch.float64))
        return {
            "bins": BINS,
            "fit_anchors": int(fit.sum()),
            "anchors": len(rest[0]),
            **raw,
            "temperatures": temperatures,
            **{f"{name}_scaled": errors for name, errors in scaled.items()},
        }


def _errors(
    logits: Tensor, accept: Tensor, mask: Tensor, temperatures: Tensor
) -> dict[str, list[float | None]]:
    own = torch.sigmoid(logits / temperatures)
    pairs = {"ece": (own, accept), "ece_prefix": (own.cumprod(1), accept.cumprod(1))}
    return {
        name: [
            calibration_error(predicted[mask[:, k], k], observed[mask[:, k], k])
            for k in range(mask.shape[1])
        ]
        for name, (predicted, observed) in pairs.items()
    }
