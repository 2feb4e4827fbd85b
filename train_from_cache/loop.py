"""The training loop: batches in, updates out, all that is random a function of seed and step."""

import math
import signal
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor

from dspark.remote.store import UnreachableError
from dspark.schemas.errors import InputError, StoppedError
from dspark.schemas.signals import STOPPING
from dspark.train_from_cache.batch import Batch, LossTerm
from dspark.train_from_cache.draft_parts.row_random import RowRandom
from dspark.train_from_cache.evaluate import quick_tau, without_hidden_states
from dspark.train_from_cache.plan import Plan
from dspark.train_from_cache.progress import Progress
from dspark.train_from_cache.ranks import Ranks, gathered
from dspark.train_from_cache.target_head import TargetHead
from dspark.train_from_cache.teacher import Teacher
from dspark.train_from_cache.trainee import Trainee


def run(
    ranks: Ranks,
    trainees: Sequence[Trainee],
    head: TargetHead,
    batches: Iterable[Batch],
    plan: Plan,
    progress: Progress,
) -> None:
    """Do the updates of all drafts up to ``plan.steps``.

    Args:
        ranks: this process among the others.
        trainees: the drafts, whose plans differ in nothing that concerns the batches. One that is
            ahead of the others waits for its step.
        head: of the target, on the same device.
        batches: this process's rows of each step, from the first one that a draft needs.
        plan: of any draft.
        progress: told of each step.

    Raises:
        InputError: a loss or gradient is not finite; the states before that update were saved.
        StoppedError: SIGINT or SIGTERM, after the update under way was finished and saved.
    """
    first = min(trainee.start for trainee in trainees)
    speed = _Speed(first)
    coming = _saved_when_lost(ranks, trainees, batches, first)
    with _StopRequest() as stop:
        for step, batch in zip(range(first, plan.steps), coming, strict=True):
            due = [trainee for trainee in trainees if trainee.start <= step]
            if plan.batch_size <= ranks.rank:
                batch = unsupervised(batch)
            parts = split(batch, plan.accumulate)

            def given(part: Batch) -> tuple[Batch, Teacher]:
                inputs = without_hidden_states(part) if plan.zero_hidden_states else part
                return inputs, Teacher(part, head)

            if len(parts) > 1:
                for part in parts:
                    inputs, teacher = given(part)
                    for trainee in due:
                        trainee.count(inputs, teacher, step_random(plan.seed, step, part))
            for i, part in enumerate(parts, 1):
                inputs, teacher = given(part)
                for trainee in due:
                    random = step_random(plan.seed, step, part)
                    trainee.add(inputs, teacher, random, last=i == len(parts))
            numbers = {trainee.plan.arch: trainee.gradients() for trainee in due}
            for arch, found in numbers.items():
                if not (math.isfinite(found["loss"]) and math.isfinite(found["grad_norm"])):
                    for trainee in due:
                        trainee.save(step)
                    raise _not_finite(arch, step, found, batch)
            rates = [trainee.update(step) for trainee in due]

            done = step + 1
            if done % plan.log_every == 0 or done == plan.steps:
                samples_per_s = speed(done) * plan.batch_size
                for trainee, rate in zip(due, rates, strict=True):
                    arch = trainee.plan.arch
                    with ranks.accelerator.autocast(), gathered(trainee.draft):
                        tau = quick_tau(trainee.draft, inputs, teacher, ranks)
                    trainee.record(
                        {
                            "event": "step",
                            "step": done,
                            **numbers[arch],
                            "tau": tau,
                            "lr": rate,
                            "samples_per_s": samples_per_s,
                        }
                    )
                    if tau is not None:
                        progress.tau[arch] = tau
            losses = {arch: found["loss"] for arch, found in numbers.items()}
            progress.step(done, losses, plan.batch_size)
            stopped = ranks.highest(stop.requested or 0)
            if done % plan.save_every == 0 or done == plan.steps or stopped:
                for trainee in due:
                    trainee.save(done)
            if stopped:
                raise StoppedError(stopped, f"after step {done}")


def _saved_when_lost(
    ranks: Ranks, trainees: Sequence[Trainee], batches: Iterable[Batch], step: int
) -> Iterator[Batch]:
    """The batches, the first of them that of ``step``. Where one cannot be read because the cache
    is out of reach, the states before it are saved: by one process alone, since the others do not
    know."""
    coming = iter(batches)
    while True:
        try:
            batch = next(coming)
        except StopIteration:
            return
        except UnreachableError:
            if ranks.size == 1:
                for trainee in trainees:
                    if trainee.start < step:
                        trainee.save(step)
            raise
        yield batch
        step += 1


def step_random(seed: int, step: int, batch: Batch) -> RowRandom:
    """The source of a step's randomness."""
    return RowRandom(seed, step, batch["sample"])


def total_loss(terms: dict[str, LossTerm]) -> Tensor:
    """The loss that one process alone minimises, a scalar with gradient."""
    means = [t.weight * t.numerator / (t.denominator + 1e-6) for t in terms.values()]
    return torch.stack(means).sum()


def split(batch: Batch, count: int) -> list[Batch]:
    """A batch's rows in ``count`` parts; a part without a row has one that is not supervised."""
    columns = (x.tensor_split(count) for x in batch.values())
    parts = [dict(zip(batch, part, strict=True)) for part in zip(*columns, strict=True)]
    idle = unsupervised({name: x[:1] for name, x in batch.items()})
    return [part if len(part["sample"]) else idle for part in parts]


def unsupervised(batch: Batch) -> Batch:
    """The batch for a process without rows: its losses are zero."""
    return {**batch, "loss_mask": torch.zeros_like(batch["loss_mask"])}


def _not_finite(arch: str, step: int, found: dict[str, Any], batch: Batch) -> InputError:
    rows = ", ".join(map(str, batch["sample"].tolist()))
    return InputError(
        f"training of {arch} stopped at step {step + 1}: the loss is {found['loss']} and its "
        f"gradient norm {found['grad_norm']} on dataset rows {rows}; the state before this step is "
        "kept; start again with a lower --lr and another --out, or examine these rows"
    )


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
            for number in STOPPING:
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
