"""The options of a training, resolved."""

import math
from dataclasses import asdict, dataclass
from numbers import Integral, Real
from typing import Any

from dspark.schemas.errors import InputError
from dspark.schemas.options import option_name
from dspark.train_from_cache.options import TrainTask

DEFAULT_EPOCHS = 10.0

# With AdamW each update moves a number by about the learning rate: beyond this it is only noise.
MAX_LR = 1.0


@dataclass(frozen=True)
class Plan:
    """See ``TrainOptions``."""

    arch: str
    steps: int
    batch_size: int
    accumulate: int
    lr: float
    warmup: float
    ema: float | None
    seed: int
    eval_fraction: float
    curriculum: bool
    bucket: bool
    zero_hidden_states: bool
    save_every: int
    log_every: int
    trim: bool
    compile: bool
    init_from: str | None

    @classmethod
    def of(cls, task: TrainTask, rows: int) -> "Plan":
        """The plan for a task that was checked, with ``rows`` to train on."""
        batch_size = int(task.batch_size)
        epochs = float(task.epochs or DEFAULT_EPOCHS)
        # Numbers of numpy become Python's own, which JSON knows.
        return cls(
            arch=task.arch,
            steps=int(task.steps or math.ceil(epochs * rows / batch_size)),
            batch_size=batch_size,
            accumulate=int(task.accumulate),
            lr=float(task.lr),
            warmup=float(task.warmup),
            ema=None if task.ema is None else float(task.ema),
            seed=int(task.seed),
            eval_fraction=float(task.eval_fraction),
            curriculum=task.curriculum,
            bucket=task.bucket,
            zero_hidden_states=task.zero_hidden_states,
            save_every=int(task.save_every),
            log_every=int(task.log_every),
            trim=task.trim,
            compile=task.compile,
            init_from=None if task.init_from is None else str(task.init_from),
        )

    @property
    def warmup_steps(self) -> int:
        """Steps in which the learning rate rises."""
        return round(self.warmup * self.steps)

    def identity(self) -> dict[str, Any]:
        """The options that a resumed training must share."""
        options = asdict(self)
        for habit in ("save_every", "log_every", "accumulate", "trim", "compile"):
            del options[habit]
        return options


def check_numbers(task: TrainTask) -> None:
    """Check the numeric options of a training.

    Raises:
        InputError: one is no number, no whole one or out of range, or both ``steps`` and
            ``epochs`` are given.
    """
    whole = ("steps", "batch_size", "accumulate", "save_every", "log_every", "seed")
    real = ("epochs", "lr", "warmup", "eval_fraction", "ema")
    optional = ("steps", "epochs", "ema")
    for kind, said, names in ((Integral, "a whole number", whole), (Real, "a number", real)):
        for name in names:
            value = getattr(task, name)
            if not (isinstance(value, kind) or (value is None and name in optional)):
                raise InputError(f"{option_name(name)} {value!r}: must be {said}")
    for name in (*whole[:-1], "epochs", "lr"):
        value = getattr(task, name)
        if value is not None and not (value > 0 and math.isfinite(value)):
            raise InputError(f"{option_name(name)} {value}: must be greater than 0")
    if task.lr > MAX_LR:
        raise InputError(f"--lr {task.lr}: must be at most {MAX_LR:g}")
    if not 0 <= task.warmup < 1:
        raise InputError(f"--warmup {task.warmup}: choose a share of the steps, from 0 to below 1")
    if task.ema is not None and not 0 <= task.ema < 1:
        raise InputError(f"--ema {task.ema}: choose a decay from 0 to below 1")
    if task.accumulate > task.batch_size:
        raise InputError(
            f"--accumulate {task.accumulate}: an update of --batch-size {task.batch_size} rows "
            "has not as many parts"
        )
    if task.steps is not None and task.epochs is not None:
        raise InputError("--steps and --epochs both say how long to train; give one of them")
