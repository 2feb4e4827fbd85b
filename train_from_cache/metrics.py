"""How good a draft is, defined once for all drafts.

For an anchor ``a`` of a row of L tokens, p_k is the draft's distribution of ``x[a+1+k]`` after the
true tokens before it, q_k the target's, and

    e_k = prod_{j<=k} (a+1+j < L and loss_mask[a+1+j])     the supervised part of the round
    α_k = 1 - ½ ‖p_k - q_k‖₁                               acceptance under lossless speculative
                                                           sampling at temperature 1
    g_k = [argmax p_k = argmax q_k]                        acceptance under greedy decoding

- ``acceptance[k]``: mean of α_k over the anchors with e_k.
- ``tau``: mean over anchors of ``1 + Σ_k Π_{j<=k} α_j e_j``: tokens per target pass, the 1 being
  the token that the target itself adds (bonus).
- ``tau_greedy``: the same with g in place of α.
- ``agreement``: mean of g_0 over all anchors, i.e. teacher-forced top-1 agreement over supervised
  tokens.
- ``agreement_grounded``: the same over anchors whose next token is picture-grounded.
"""

from typing import Any

import torch
from torch import Tensor

from dspark.train_from_cache.batch import Anchors, Batch


def eval_mask(batch: Batch, anchors: Anchors, depth: int) -> Tensor:
    """The mask e.

    Args:
        batch: with ``loss_mask`` and ``length``.
        anchors: n of them.
        depth: K.

    Returns:
        bool ``[n, K]``, true on a prefix of each round.
    """
    offsets = torch.arange(1, depth + 1, device=anchors.position.device)
    position = anchors.position[:, None] + offsets
    row = anchors.row[:, None]
    mask = batch["loss_mask"]
    inside = position < batch["length"][row]
    supervised = mask[row, position.clamp(max=mask.shape[1] - 1)].bool() & inside
    return supervised.cumprod(dim=1).bool()


class Meter:
    """Sums of the metrics over any number of anchors, in double precision.

    Attributes:
        anchors: rounds measured so far.
        grounded: those whose next token is picture-grounded.
    """

    def __init__(self, depth: int) -> None:
        """Args: depth: K."""
        self.anchors = 0
        self.grounded = 0
        self._accepted = torch.zeros(depth, dtype=torch.float64)
        self._slots = torch.zeros(depth, dtype=torch.float64)
        self._tau = 0.0
        self._tau_greedy = 0.0
        self._agree = 0.0
        self._agree_grounded = 0.0

    def update(self, draft: Tensor, teacher: Tensor, mask: Tensor, grounded: Tensor) -> None:
        """Add n rounds.

        Args:
            draft: float ``[n, K, V]``, logits of p.
            teacher: float ``[n, K, V]``, logits of q; minus infinity is allowed.
            mask: bool ``[n, K]``, e.
            grounded: bool ``[n]``, whether ``x[a+1]`` is picture-grounded.
        """
        match = (draft.argmax(-1) == teacher.argmax(-1)).cpu().double()
        distance = (draft.float().softmax(-1) - teacher.float().softmax(-1)).abs_().sum(-1)
        alpha = 1 - 0.5 * distance.cpu().double()
        e, grounded = mask.cpu().double(), grounded.cpu().double()
        # Where e is 0 the logits are arbitrary, perhaps not even finite.
        alpha = torch.where(e > 0, alpha, 0.0)
        match = match * e
        self.anchors += len(e)
        self.grounded += int(grounded.sum())
        self._accepted += alpha.sum(0)
        self._slots += e.sum(0)
        self._tau += len(e) + float(alpha.cumprod(1).sum())
        self._tau_greedy += len(e) + float(match.cumprod(1).sum())
        self._agree += float(match[:, 0].sum())
        self._agree_grounded += float((match[:, 0] * grounded).sum())

    def result(self) -> dict[str, Any]:
        """The metrics as JSON values; None where nothing was measured."""
        return {
            "tau": _ratio(self._tau, self.anchors),
            "tau_greedy": _ratio(self._tau_greedy, self.anchors),
            "agreement": _ratio(self._agree, self.anchors),
            "agreement_grounded": _ratio(self._agree_grounded, self.grounded),
            "acceptance": [
                _ratio(a, n)
                for a, n in zip(self._accepted.tolist(), self._slots.tolist(), strict=True)
            ],
            "anchors": self.anchors,
            "grounded_anchors": self.grounded,
        }


def _ratio(total: float, count: float) -> float | None:
    return total / count if count else None
