"""The target's own predictions, from whatever form the cache stores them in."""

from functools import cached_property

import torch
from torch import Tensor

from dspark.train_from_cache.batch import Batch
from dspark.train_from_cache.target_head import TargetHead

# So many logits of a batch are kept for all who ask for them: 2 GiB in float32.
MAX_KEPT = 2**29


class Teacher:
    """The target on one batch, for any number of drafts.

    Attributes:
        hidden: float32 ``[B, L, H]``, post-norm last hidden states.
    """

    def __init__(self, batch: Batch, head: TargetHead) -> None:
        self._batch = batch
        self._head = head

    @cached_property
    def hidden(self) -> Tensor:
        return self._batch["last_hidden_state"].float()

    def logits(self, row: Tensor, position: Tensor) -> Tensor:
        """The target's logits at positions that are supervised or beside one that is. Those of the
        others are arbitrary.

        Args:
            row: int64 ``[…]``, rows of the batch.
            position: int64 ``[…]``, of the same shape.

        Returns:
            float32 ``[…, V]``; slot t predicts ``x[t+1]``. Read from ``logits`` if the cache has
            them; rebuilt from ``logits_topk`` with everything outside the top k at minus infinity,
            so that the softmax spreads that mass over the k kept ids; else recomputed from the last
            hidden state with the stored head.
        """
        if "logits" in self._batch:
            return self._batch["logits"][row, position].float()
        if "logits_topk.values" in self._batch:
            values = self._batch["logits_topk.values"][row, position].float()
            indices = self._batch["logits_topk.indices"][row, position].long()
            full = values.new_full((*values.shape[:-1], self._head.weight.shape[0]), -torch.inf)
            return full.scatter(-1, indices, values)
        if self._kept is None:
            return self._head(self.hidden[row, position]).float()
        logits, place = self._kept
        return logits[place[row, position]].float()

    @cached_property
    @torch.no_grad()
    def _kept(self) -> tuple[Tensor, Tensor] | None:
        """The head's logits ``[m, V]`` of the positions that may be asked for, and int64 ``[B, L]``
        where among them each is; None where there are too many. A draft asks for most of them, many
        more than once, and so does the next draft."""
        mask = self._batch["loss_mask"].bool()
        near = mask.clone()
        near[:, 1:] |= mask[:, :-1]
        near[:, :-1] |= mask[:, 1:]
        row, position = torch.nonzero(near, as_tuple=True)
        if len(row) * self._head.weight.shape[0] > MAX_KEPT:
            return None
        place = torch.zeros_like(near, dtype=torch.int64)
        place[row, position] = torch.arange(len(row), device=row.device)
        return self._head(self.hidden[row, position]), place


def teacher_fields(logits_mode: str) -> list[str]:
    """The stored fields that ``Teacher.logits`` reads under a manifest's logits mode.

    A draft that uses ``Teacher.hidden`` lists ``last_hidden_state`` among its own.
    """
    if logits_mode == "full":
        return ["logits"]
    if logits_mode.startswith("topk:"):
        return ["logits_topk.values", "logits_topk.indices"]
    return ["last_hidden_state"]
