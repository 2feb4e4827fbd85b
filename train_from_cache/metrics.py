"""How good a draft is, defined once for all drafts.

For an anchor ``a`` of a row of L tokens and k from 0 to K-1, p_k is the draft's distribution of
``x[a+1+k]`` after the true tokens before it, q_k the target's, and

    e_k = prod_{j<=k} (a+1+j < L and loss_mask[a+1+j])     the supervised part of the round
    α_k = 1 - ½ ‖p_k - q_k‖₁                               acceptance under lossless speculative
                                                           sampling at temperature 1
    g_k = [argmax p_k = argmax q_k]                        acceptance under greedy decoding
    S_k = Π_{j<=k} α_j,  S_{-1} = 1                        tokens 0 to k are all accepted

With Σ over n anchors:

- ``acceptance[k]        = Σ e_k α_k / Σ e_k``
- ``conditional[k]       = Σ e_k S_k / Σ e_k S_{k-1}``: of token k where all before it are accepted.
- ``prefix[k]            = Σ e_k S_k / Σ e_k``: of tokens 0 to k together.
- ``tau_without_bonus    = Σ Σ_k e_k S_k / n``: draft tokens accepted per pass of the target.
- ``tau                  = 1 + tau_without_bonus``: tokens per pass, the 1 being the token that the
  target itself adds (bonus).
- ``acceptance_greedy``, ``conditional_greedy``, ``prefix_greedy``, ``tau_greedy`` and
  ``tau_greedy_without_bonus``: the same with g in place of α.
- ``agreement            = Σ e_0 g_0 / n``: teacher-forced top-1 agreement over supervised tokens.

Each is also given for the anchors of three groups: ``picture``, those of rows with a picture;
``grounded``, those of them whose next token is picture-grounded (``grounding.py``); ``text``, those
of rows without a picture. ``agreement_grounded`` is ``grounded``'s ``agreement``.
"""

from typing import Any

import torch
from torch import Tensor

from dspark.train_from_cache.batch import Anchors, Batch

GROUPS = ("picture", "grounded", "text")


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


def accepted(draft: Tensor, teacher: Tensor, mask: Tensor) -> Tensor:
    """α and g.

    Args:
        draft: float ``[n, K, V]``, logits of p.
        teacher: float ``[n, K, V]``, logits of q; minus infinity is allowed.
        mask: bool ``[n, K]``, e. Where it is false the logits may be anything, not even finite.

    Returns:
        float64 ``[n, 2, K]`` on the CPU, α before g; 0 outside the mask.
    """
    distance = (draft.float().softmax(-1) - teacher.float().softmax(-1)).abs_().sum(-1)
    match = draft.argmax(-1) == teacher.argmax(-1)
    both = torch.stack([1 - 0.5 * distance, match.float()], 1)
    return both.masked_fill(~mask[:, None], 0.0).cpu().double()


class Meter:
    """Sums of the metrics over any number of anchors, in double precision.

    Attributes:
        totals: float64 ``[1 + 3, 1 + 7K]`` on the CPU, for all anchors and for those of each group:
            n, then Σ e_k, then for α and for g Σ e_k α_k, Σ e_k S_{k-1} and Σ e_k S_k. The totals
            of all anchors are the sum of those of any parts.
    """

    def __init__(self, depth: int) -> None:
        """Args: depth: K."""
        self._depth = depth
        self.totals = torch.zeros(1 + len(GROUPS), 1 + 7 * depth, dtype=torch.float64)

    def update(self, accept: Tensor, mask: Tensor, picture: Tensor, grounded: Tensor) -> None:
        """Add n rounds.

        Args:
            accept: float64 ``[n, 2, K]``, see ``accepted``.
            mask: bool ``[n, K]``, e.
            picture: bool ``[n]``, whether the row has a picture.
            grounded: bool ``[n]``, whether ``x[a+1]`` is picture-grounded.
        """
        e = mask.cpu().double()
        picture, grounded = picture.cpu().double(), grounded.cpu().double()
        one = torch.ones_like(picture)
        through = accept.cumprod(-1)  # e_k S_k, for e is a prefix
        reached = e[:, None] * torch.cat([torch.ones_like(through[..., :1]), through], -1)[..., :-1]
        sums = torch.stack([accept, reached, through], 2)
        rounds = torch.cat([one[:, None], e, sums.flatten(1)], 1)
        self.totals += torch.stack([one, picture, grounded, 1 - picture]) @ rounds

    def result(self) -> dict[str, Any]:
        """The metrics as JSON values; None where nothing was measured."""
        everything, *groups = map(self._group, self.totals)
        named = dict(zip(GROUPS, groups, strict=True))
        return {
            **everything,
            "agreement_grounded": named["grounded"]["agreement"],
            "grounded_anchors": named["grounded"]["anchors"],
            **named,
        }

    def _group(self, totals: Tensor) -> dict[str, Any]:
        count = float(totals[0])
        slots, *sums = totals[1:].view(7, self._depth)
        result: dict[str, Any] = {}
        for kind, (accept, reached, through) in (("", sums[:3]), ("_greedy", sums[3:])):
            drafted = _ratio(float(through.sum()), count)
            result |= {
                f"tau{kind}": None if drafted is None else 1 + drafted,
                f"tau{kind}_without_bonus": drafted,
                f"acceptance{kind}": _ratios(accept, slots),
                f"conditional{kind}": _ratios(through, reached),
                f"prefix{kind}": _ratios(through, slots),
            }
        agree = float(sums[3][0])
        return {**result, "agreement": _ratio(agree, count), "anchors": round(count)}


def _ratios(totals: Tensor, counts: Tensor) -> list[float | None]:
    return [_ratio(t, n) for t, n in zip(totals.tolist(), counts.tolist(), strict=True)]


def _ratio(total: float, count: float) -> float | None:
    return total / count if count else None
