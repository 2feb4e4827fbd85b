"""The options of a training, resolved."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dspark.schemas.errors import InputError


@dataclass(frozen=True)
class Plan:
    """See the arguments of ``train_draft``."""

    arch: str
    steps: int
    batch_size: int
    lr: float
    warmup: float
    seed: int
    eval_fraction: float
    curriculum: bool
    zero_hidden_states: bool
    save_every: int
    log_every: int

    @property
    def warmup_steps(self) -> int:
        """Steps in which the learning rate rises."""
        return round(self.warmup * self.steps)

    def identity(self) -> dict[str, Any]:
        """The options that a resumed training must share."""
        options = asdict(self)
        del options["save_every"], options["log_every"]
        return options


def check_numbers(numbers: Mapping[str, float | None], warmup: float) -> None:
    """Check the numeric options of a training, by name; None is one that was not given.

    Raises:
        InputError: one is out of range, or both ``steps`` and ``epochs`` are given.
    """
    for name, value in numbers.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise InputError(f"--{name.replace('_', '-')} {value}: must be greater than 0")
    if not 0 <= warmup < 1:
        raise InputError(f"--warmup {warmup}: choose a share of the steps, from 0 to below 1")
    if numbers["steps"] is not None and numbers["epochs"] is not None:
        raise InputError("--steps and --epochs both say how long to train; give one of them")
