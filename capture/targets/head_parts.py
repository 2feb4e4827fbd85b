"""Logits of some real rows at a time, as the target itself makes them of its last hidden states."""

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class LogitParts:
    """The logits of a batch's later rows. Each part runs the model once more, with what its base
    model returned before in that one's place: only the head, and what the model does around it.

    Attributes:
        model: the target's.
        inputs: of the batch.
        returned: what its base model returned, with ``last_hidden_state`` ``[B, L, H]``.
        hidden: ``[R, H]``, the rows of it that are real and have no logits yet.
        at_once: rows of a part.
    """

    model: Any
    inputs: Mapping[str, Any]
    returned: Any
    hidden: Tensor
    at_once: int

    def __iter__(self) -> Iterator[Tensor]:
        """``[at_once, V]`` each, the last one what is left."""
        return map(self._logits, self.hidden.split(self.at_once))

    @torch.no_grad()
    def _logits(self, hidden: Tensor) -> Tensor:
        returned = copy.copy(self.returned)
        returned["last_hidden_state"] = hidden[None]
        with _returning(self.model.base_model, returned):
            logits: Tensor = self.model(**self.inputs, use_cache=False).logits
        return logits[0]


def can_part(model: Any, returned: Any, tokens: torch.Size) -> bool:
    """Whether logits can come in parts.

    Args:
        model: the target's.
        returned: by its base model.
        tokens: ``[B, L]``.
    """
    hidden = getattr(returned, "last_hidden_state", None)
    return (
        model.base_model is not model
        and isinstance(hidden, Tensor)
        and hidden.ndim == 3
        and hidden.shape[:2] == tokens
    )


@contextmanager
def _returning(module: nn.Module, value: Any) -> Iterator[None]:
    """Let a module return ``value``, whatever it is called with."""
    own = vars(module).get("forward")  # of accelerate, where it has hooks
    module.forward = lambda *_, **__: value
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own
