"""The training loop: batches in, updates out, all that is random a function of seed and step."""

import math
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterable
from types import FrameType, TracebackType
from typing import Any

import torch
import xxhash
from accelerate import Accelerator
from torch import Tensor, nn

from dspark.schemas.errors import InputError, StoppedError
from dspark.train_from_cache.batch import Batch, LossTerm
from dspark.train_from_cache.drafts.base import Draft
from dspark.train_from_cache.evaluate import quick_tau, without_hidden_states
from dspark.train_from_cache.plan import Plan
from dspark.train_from_cache.progress import Progress
from dspark.train_from_cache.schedule import lr_factor
from dspark.train_from_cache.target_head import TargetHead
from dspark.train_from_cache.teacher import Teacher

MAX_GRAD_NORM = 1.0
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.01


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """AdamW over the trainable parameters, with weight decay on matrices alone."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trainable if p.dim() >= 2]
    vectors = [p for p in trainable if p.dim() < 2]
    return torch.optim.AdamW(
        [
            {"params": matrices, "weight_decay": WEIGHT_DECAY},
            {"params": vectors, "weight_decay": 0.0},
        ],
        betas=BETAS,
    )


def run(
    accelerator: Accelerator,
    draft: Draft,
    optimizer: torch.optim.Optimizer,
    head: TargetHead,
    batches: Iterable[Batch],
    start: int,
    plan: Plan,
    *,
    save: Callable[[int], None],
    record: Callable[[dict[str, Any]], None],
    progress: Progress,
) -> None:
    """Do the updates from ``start`` to ``plan.steps`` in place.

    Args:
        accelerator: that prepared ``draft`` and ``optimizer``.
        draft: the model.
        optimizer: of its trainable parameters.
        head: of the target, on the same device.
        batches: one for each step.
        start: updates already done.
        plan: the numbers.
        save: keeps the state after so many updates.
        record: takes a log record.
        progress: told of each step.

    Raises:
        InputError: loss or gradient is not finite; the state before that update was saved.
        StoppedError: SIGINT or SIGTERM, after the update under way was finished and saved.
    """
    trainable = [p for p in draft.parameters() if p.requires_grad]
    draft.train()
    speed = _Speed(start)
    with _StopRequest() as stop:
        for step, batch in zip(range(start, plan.steps), batches, strict=True):
            teacher = Teacher(batch, head)
            inputs = without_hidden_states(batch) if plan.zero_hidden_states else batch
            rate = plan.lr * lr_factor(step, plan.steps, plan.warmup_steps)
            for group in optimizer.param_groups:
                group["lr"] = rate
            terms = draft(inputs, teacher, step_generator(plan.seed, step))
            loss = total_loss(terms)
            optimizer.zero_grad()
            accelerator.backward(loss)
            norm = accelerator.clip_grad_norm_(trainable, MAX_GRAD_NORM)
            loss_value, norm_value = torch.stack([loss.detach(), norm]).tolist()
            if not (math.isfinite(loss_value) and math.isfinite(norm_value)):
                save(step)
                rows = ", ".join(map(str, batch["sample"].tolist()))
                raise InputError(
                    f"training stopped at step {step + 1}: the loss is {loss_value} and its "
                    f"gradient norm {norm_value} on dataset rows {rows}; the state before this "
                    "step is kept; start again with a lower --lr and another --out, or examine "
                    "these rows"
                )
            optimizer.step()

            done = step + 1
            tau = None
            if done % plan.log_every == 0 or done == plan.steps:
                with accelerator.autocast():
                    tau = quick_tau(draft, inputs, teacher)
                record(
                    {
                        "event": "step",
                        "step": done,
                        "loss": loss_value,
                        "terms": {name: _mean(term).item() for name, term in terms.items()},
                        "tau": tau,
                        "lr": rate,
                        "grad_norm": norm_value,
                        "samples_per_s": speed(done) * plan.batch_size,
                    }
                )
            progress.step(done, loss_value, tau, plan.batch_size)
            if done % plan.save_every == 0 or done == plan.steps or stop.requested:
                save(done)
            if stop.requested:
                raise StoppedError(stop.requested, f"after step {done}")


def total_loss(terms: dict[str, LossTerm]) -> Tensor:
    """The loss that is minimised, a scalar with gradient."""
    return torch.stack([term.weight * _mean(term) for term in terms.values()]).sum()


def step_generator(seed: int, step: int) -> torch.Generator:
    """The source of a step's randomness, on the CPU."""
    key = struct.pack("<Qq", seed % 2**64, step)
    return torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(key))


def _mean(term: LossTerm) -> Tensor:
    return term.numerator / (term.denominator + 1e-6)


class _Speed:
    """Steps per second since it was last asked."""

    def __init__(self, start: int) -> None:
        self._step, self._time = start, time.monotonic()

    def __call__(self, step: int) -> float:
        now = time.monotonic()
        speed = (step - self._step) / max(now - self._time, 1e-9)
        self._step, self._time = step, now
        return speed


class _StopRequest:
    """Turns the first SIGINT or SIGTERM into a wish, so that it never splits an update; a second
    one stops at once.

    Attributes:
        requested: the signal that came, or None.
    """

    def __init__(self) -> None:
        self.requested: int | None = None

    def __enter__(self) -> "_StopRequest":
        # Only the main thread may set handlers, and only it is interrupted.
        self._before: dict[int, Any] = {}
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested = number
        signal.signal(number, self._before[number])
