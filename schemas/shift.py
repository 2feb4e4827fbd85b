"""The one shift of this project. Everything is stored unshifted; each draft shifts for itself."""

import torch
from torch import Tensor


def shift_left(x: Tensor, dim: int = 1) -> Tensor:
    """``y[t] = x[t+1]`` along ``dim``, with a zero tail."""
    y = torch.zeros_like(x)
    n = x.shape[dim] - 1
    y.narrow(dim, 0, n).copy_(x.narrow(dim, 1, n))
    return y
