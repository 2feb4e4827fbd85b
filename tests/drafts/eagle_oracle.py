"""EAGLE in float64: MSD's loops on a batch that says of no token that it is a picture's."""

import msd_oracle
import torch
from oracle_parts import Weights
from torch import Tensor

Batch = dict[str, Tensor]


def without_pictures(batch: Batch) -> Batch:
    return {**batch, "image_mask": torch.zeros_like(batch["loss_mask"])}


def loss_means(
    w: Weights, head: tuple[Tensor, Tensor], batch: Batch, hidden: Tensor
) -> dict[str, Tensor]:
    return msd_oracle.loss_means(
        w, head, without_pictures(batch), hidden, batch["last_hidden_state"]
    )


def rollout(
    w: Weights, head: tuple[Tensor, Tensor], batch: Batch, row: int, anchor: int, depth: int
) -> list[Tensor]:
    return msd_oracle.rollout(w, head, without_pictures(batch), row, anchor, depth)
