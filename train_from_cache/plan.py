"""The options of a training, resolved."""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any

from dspark.schemas.errors import InputError

# With AdamW each update moves a number by about the learning rate: beyond this it is only noise.
MAX_LR = 1.0


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


def check_numbers(
    whole: Mapping[str, int | None],
    real: Mapping[str, float | None],
    shares: Mapping[str, float],
    seed: int,
) -> None:
    """Check the numeric options of a training, by name; None is one that was not given.

    Raises:
        InputError: one is no number, no whole one or out of range, or both ``steps`` and
            ``epochs`` are given.
    """
    kinds = (
        (Integral, "a whole number", {**whole, "seed": seed}),
        (Real, "a number", {**real, **shares}),
    )
    for kind, said, numbers in kinds:
        for name, value in numbers.items():
            optional = name in ("steps", "epochs")
            if not (isinstance(value, kind) or (value is None and optional)):
                raise InputError(f"{_option(name)} {value!r}: must be {said}")
    for name, value in {**whole, **real}.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise InputError(f"{_option(name)} {value}: must be greater than 0")
    lr = real["lr"]
    if lr is not None and lr > MAX_LR:
        raise InputError(f"--lr {lr}: must be at most {MAX_LR:g}")
    if not 0 <= shares["warmup"] < 1:
        raise InputError(
            f"--warmup {shares['warmup']}: choose a share of the steps, from 0 to below 1"
        )
    if whole["steps"] is not None and real["epochs"] is not None:
        raise InputError("--steps and --epochs both say how long to train; give one of them")


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")
