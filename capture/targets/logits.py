"""What a cache keeps of the target's logits, and the proof that the stored head gives them back."""

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from accelerate.utils import align_module_device
from torch import Tensor

from dspark.capture.targets.features import Features
from dspark.capture.targets.target import Target
from dspark.schemas.errors import InputError

# The head is applied to the same rows in the same type both times, so an honest head differs by
# summation order at most; a soft-cap or a scale differs by far more.
_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}
_TOLERANCE_16_BIT = 2e-2


LOGITS_AT_ONCE = 1 << 26
"""Numbers, of a batch; more are computed and cast, or searched for the largest, in parts."""


def stored_logits(parts: Iterable[Tensor], mode: str, dtype: torch.dtype) -> dict[str, Tensor]:
    """The logit fields of a batch.

    Args:
        parts: ``[R, V]`` each, the target's own, of some rows after the others.
        mode: ``full`` or ``topk:k``.
        dtype: of the stored floats.
    """
    fields = [_stored_logits(part, mode, dtype) for part in parts]
    if len(fields) == 1:
        return fields[0]
    return {name: torch.cat([of[name] for of in fields]) for name in fields[0]}


def _stored_logits(logits: Tensor, mode: str, dtype: torch.dtype) -> dict[str, Tensor]:
    if mode == "full":
        return {"logits": logits.to(dtype)}
    values, indices = logits.topk(int(mode.removeprefix("topk:")), dim=-1)
    return {
        "logits_topk.values": values.to(dtype),
        "logits_topk.indices": indices.int(),
        "logits_topk.logsumexp": logits.float().logsumexp(-1),
    }


@torch.no_grad()
def prove_head(target: Target, features: Features) -> float:
    """Prove on real rows that the stored head reproduces the target's own logits.

    Args:
        target: the frozen model.
        features: of a batch, with logits, at least of its first rows.

    Returns:
        The largest absolute difference between the target's logits and those that a trainer
        recomputes from ``last_hidden_state`` in the stored type.

    Raises:
        InputError: the target does more to its logits than its head (a soft-cap, a scale).
    """
    assert features.logits is not None
    own = features.logits.float().to(features.last_hidden.device)
    hidden = features.last_hidden[: len(own)]
    stored = features.stored["last_hidden_state"][: len(own)].to(hidden.dtype)
    exact, recomputed = _apply_head(target, hidden, stored)
    tolerance = _TOLERANCE.get(features.last_hidden.dtype, _TOLERANCE_16_BIT)
    error = (exact - own).abs().max().item()
    if not error <= tolerance * max(1.0, own.abs().max().item()):
        raise InputError(
            "--logits head (which auto takes where full logits are large): the target's logits "
            f"differ by up to {error:.3g} from its head applied to last_hidden_state, so it caps "
            "or scales them; use --logits full or --logits topk:64"
        )
    return (recomputed - own).abs().max().item()


def _apply_head(target: Target, *hidden: Tensor) -> list[Tensor]:
    head = target.head
    if head is None:
        raise InputError(
            f"--logits head (which auto takes where full logits are large): {target.id} names no "
            "head; use --logits full or --logits topk:64"
        )
    if target.gathered is not None:
        weight = target.gathered["lm_head.weight"].to(target.device)
        bias = target.gathered.get("lm_head.bias")
        return _linear(weight, None if bias is None else bias.to(target.device), hidden)
    with align_module_device(head):  # accelerate may keep its weights elsewhere between calls
        assert isinstance(head.weight, Tensor)
        return _linear(head.weight, getattr(head, "bias", None), hidden)


def _linear(weight: Tensor, bias: Tensor | None, hidden: Sequence[Tensor]) -> list[Tensor]:
    rows = (F.linear(h.to(weight.device), weight, bias) for h in hidden)
    return [r.float().to(h.device) for r, h in zip(rows, hidden, strict=True)]
