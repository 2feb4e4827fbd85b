"""Trains the target from scratch: the vision tower alone, then single turns, then conversations,
then once more with heads that look ahead.
"""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import ProcessorMixin

from .batches import batches, encode_all
from .conversations import draw_mixed, draw_review, draw_single
from .look_ahead import LookAhead
from .model import make_model
from .optimizer import Optimizer
from .pictures import NOTHING, NOWHERE, draw_picture, scans

Report = Callable[[str], None]


@dataclass(frozen=True)
class Schedule:
    """How many steps each stage takes, and how many pictures or conversations a step sees."""

    vision_steps: int = 400
    single_steps: int = 600
    mixed_steps: int = 1000
    review_steps: int = 1400
    pictures: int = 64
    singles: int = 40
    mixed: int = 32
    reviews: int = 36
    check_every: int = 100


def train(processor: ProcessorMixin, schedule: Schedule, seed: int, report: Report) -> Any:
    """Returns the weights that were best on the validation digits, in float32."""
    model = make_model(processor.tokenizer, seed)
    rng = random.Random(seed)
    source = scans("train")
    _learn_to_see(model, processor, schedule, rng, report)

    validation = validation_batches(processor, seed)
    single = batches(processor, rng, lambda: draw_single(rng, source), schedule.singles)
    mixed = batches(processor, rng, lambda: draw_mixed(rng, source), schedule.mixed)
    total = schedule.single_steps + schedule.mixed_steps
    stream = _staged(single, schedule.single_steps, mixed, total)
    _fit(model, stream, Optimizer(model, total), None, validation, schedule.check_every, report)
    review(model, processor, schedule, seed, report)
    return model.eval()


def validation_batches(processor: ProcessorMixin, seed: int) -> list[dict[str, Tensor]]:
    """240 conversations about validation digits, in batches of 40 of about one length."""
    rng = random.Random(seed + 1)
    held = [draw_mixed(rng, scans("validation")) for _ in range(240)]
    held.sort(key=lambda conversation: sum(p.cells.size for p in conversation.pictures))
    return [encode_all(processor, held[start : start + 40]) for start in range(0, 240, 40)]


def review(
    model: Any,
    processor: ProcessorMixin,
    schedule: Schedule,
    seed: int,
    report: Report,
) -> None:
    """The last stage: conversations again, hard questions more often, with look-ahead heads."""
    again = random.Random(seed + 2)
    source = scans("train")
    reviews = batches(processor, again, lambda: draw_review(again, source), schedule.reviews)
    stream = islice(reviews, schedule.review_steps)
    validation = validation_batches(processor, seed)
    ahead = LookAhead(model.lm_head.in_features, model.lm_head.out_features, seed + 3)
    module = nn.ModuleDict({"model": model, "ahead": ahead})
    optimizer = Optimizer(module, schedule.review_steps, peak=0.6)
    _fit(model, stream, optimizer, ahead, validation, schedule.check_every, report)


def _fit(
    model: Any,
    stream: Iterator[dict[str, Tensor]],
    optimizer: Optimizer,
    ahead: LookAhead | None,
    validation: list[dict[str, Tensor]],
    check_every: int,
    report: Report,
) -> None:
    """Trains on the whole stream and leaves the model as it was best on the validation digits.

    With `ahead`, its loss is added.
    """
    best, best_state = 0.0, model.state_dict()
    started = time.monotonic()
    model.train()
    for step, batch in enumerate(stream, start=1):
        hidden = _hidden(model, batch)
        logits, labels = _next_tokens(model, hidden, batch)
        loss = F.cross_entropy(logits, labels)
        if ahead is None:
            optimizer.step(loss)
        else:
            foretold = ahead.loss(hidden, batch["input_ids"], batch["assistant_masks"])
            optimizer.step(loss + foretold)
        if step % check_every == 0:
            right = _accuracy(model, validation)
            seconds = time.monotonic() - started
            report(f"step {step} loss {loss:.3f} validation {right:.4f} {seconds:.0f} s")
            if right > best:
                best = right
                best_state = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(best_state)


def _staged(
    first: Iterator[dict[str, Tensor]], n_first: int, then: Iterator[dict[str, Tensor]], total: int
) -> Iterator[dict[str, Tensor]]:
    yield from islice(first, n_first)
    yield from islice(then, total - n_first)


def _learn_to_see(
    model: Any, processor: ProcessorMixin, schedule: Schedule, rng: random.Random, report: Report
) -> None:
    """Teaches the vision tower alone: each token's digit and the digit's place from the left.

    Both go through a head that is thrown away. Without this the language model finds no use for
    the pictures for many hundred steps.
    """
    head = nn.Linear(model.lm_head.in_features, NOTHING + 1 + NOWHERE + 1)
    module = nn.ModuleDict({"visual": model.model.visual, "head": head})
    optimizer = Optimizer(module, schedule.vision_steps)
    for step in range(1, schedule.vision_steps + 1):
        pictures = [
            draw_picture(rng, scans("train"), rng.randint(1, 3)) for _ in range(schedule.pictures)
        ]
        seen = processor.image_processor([p.image for p in pictures], return_tensors="pt")
        features = model.model.visual(seen["pixel_values"], grid_thw=seen["image_grid_thw"])
        cells = [torch.from_numpy(picture.cells).flatten(0, 1) for picture in pictures]
        digits, places = torch.cat(cells).unbind(1)
        logits, place_logits = head(features.pooler_output).split([NOTHING + 1, NOWHERE + 1], 1)
        loss = F.cross_entropy(logits, digits) + 0.5 * F.cross_entropy(place_logits, places)
        optimizer.step(loss)
        if step % schedule.check_every == 0:
            shown = digits != NOTHING
            right = (logits.argmax(1) == digits)[shown].float().mean()
            placed = (place_logits.argmax(1) == places)[shown].float().mean()
            report(f"vision step {step} loss {loss:.3f} digits {right:.3f} places {placed:.3f}")


def _hidden(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """The last hidden states [B, L, H]."""
    inputs = {key: value for key, value in batch.items() if key != "assistant_masks"}
    hidden: Tensor = model.model(**inputs, use_cache=False).last_hidden_state
    return hidden


def _next_tokens(model: Any, hidden: Tensor, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Logits float32 [N, V] and labels int64 [N] of the N tokens that assistants wrote."""
    written = batch["assistant_masks"][:, 1:].bool()
    return model.lm_head(hidden[:, :-1][written]).float(), batch["input_ids"][:, 1:][written]


@torch.inference_mode()
def _accuracy(model: Any, validation: list[dict[str, Tensor]]) -> float:
    """The share of the assistants' tokens that are the likeliest ones."""
    right = total = 0
    for batch in validation:
        logits, labels = _next_tokens(model, _hidden(model, batch), batch)
        right += int((logits.argmax(-1) == labels).sum())
        total += len(labels)
    return right / total
