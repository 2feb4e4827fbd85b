"""Randomness that belongs to rows: equal for a row in any batch, on any rank and any device."""

import torch
from torch import Tensor


class RowRandom:
    """Uniform numbers for the rows of a batch, a function of seed, step and dataset row.

    Row b has a SplitMix64 stream of its own, whose i-th number is a function of i, so that neither
    padding nor the other rows matter.
    """

    def __init__(self, seed: int, step: int, sample: Tensor) -> None:
        """Key the rows.

        Args:
            seed: of the training.
            step: updates done before this one.
            sample: int64 ``[B]``, dataset row of each row of the batch.
        """
        key = torch.full_like(sample, _signed(seed))
        for part in (step, sample):
            key = _mix(key) + part
        self._key = key

    # Compiled C++ need not wrap around.
    @torch.compiler.disable
    def uniform(self, length: int, *shape: int) -> Tensor:
        """The next numbers of each row, other ones at every call.

        Args:
            length: L, positions.
            shape: of what each position gets.

        Returns:
            float32 ``[B, L, *shape]`` in [0, 1), where ``sample`` lies; a position's numbers do not
            depend on L.
        """
        self._key = _mix(self._key)
        each = torch.Size(shape).numel()
        index = torch.arange(length * each, device=self._key.device) * _GAMMA
        out = torch.empty(len(self._key), length, *shape, device=self._key.device)
        for row, key in zip(out.view(len(out), length * each), self._key, strict=True):
            # The upper 24 bits: as many as a float32 holds exactly.
            row.copy_(_shift_right(_mix(key + index), 40)).mul_(2.0**-24)
        return out


def _signed(value: int) -> int:
    """The int64 with the lowest 64 bits of ``value``."""
    return (value + 2**63) % 2**64 - 2**63


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Of int64 taken as unsigned."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def _mix(x: Tensor) -> Tensor:
    """SplitMix64: from its state to its next number. int64 arithmetic wraps around."""
    x = x + _GAMMA
    x = (x ^ _shift_right(x, 30)) * _signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


_GAMMA = _signed(0x9E3779B97F4A7C15)
