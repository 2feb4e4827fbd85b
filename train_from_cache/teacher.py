"""The target's own predictions, from whatever form the cache stores them in."""

from functools import cached_property

import torch
from torch import Tensor

from dspark.train_from_cache.batch import Batch
from dspark.train_from_cache.target_head import TargetHead


class Teacher:
    """The target on one batch.

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
        """The target's logits at some positions.

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
        return self._head(self.hidden[row, position]).float()


def teacher_fields(logits_mode: str) -> list[str]:
    """The stored fields that ``Teacher.logits`` reads under a manifest's logits mode.

    A draft that uses ``Teacher.hidden`` lists ``last_hidden_state`` among its own.
    """
    if logits_mode == "full":
        return ["logits"]
    if logits_mode.startswith("topk:"):
        return ["logits_topk.values", "logits_topk.indices"]
    return ["last_hidden_state"]
