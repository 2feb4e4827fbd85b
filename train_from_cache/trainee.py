"""One draft of a training: its optimizer, schedule, clipping, average, checkpoint and records."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dspark.train_from_cache.batch import Batch, LossTerm
from dspark.train_from_cache.checkpoint import load_state, save_state, state_path
from dspark.train_from_cache.draft_parts.row_random import RowRandom
from dspark.train_from_cache.drafts.base import Draft
from dspark.train_from_cache.ema import Ema
from dspark.train_from_cache.outputs import Journal
from dspark.train_from_cache.plan import Plan
from dspark.train_from_cache.ranks import Ranks, unsynchronised, whole
from dspark.train_from_cache.schedule import lr_factor
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


class Trainee:
    """A draft and all that its updates change.

    Of a step, ``add`` is called for each part of the rows, then ``gradients``, then ``update``;
    before them, ``count`` for each part if there are several.

    Attributes:
        plan: its options.
        draft: its weights.
        ema: their average, if one is wanted.
        start: updates done when it was opened.
        journal: takes its records; None on all processes but the first.
    """

    def __init__(
        self, ranks: Ranks, draft: Draft, plan: Plan, out: Path, track: str | None
    ) -> None:
        """Open the training of ``draft``, on its device, in ``out``, at the state saved there."""
        self.plan = plan
        self.draft = draft
        self._ranks = ranks
        self._state = state_path(out)
        if plan.compile:
            # Also where batches have one shape: how many tokens are supervised differs, and without
            # it each step would be compiled again.
            draft.compile(dynamic=True)
        self._model = ranks.spread(draft)
        self._optimizer = make_optimizer(draft)
        self.ema = None if plan.ema is None else Ema(draft, plan.ema)
        self.start = 0
        if self._state.exists():
            self.start = load_state(self._state, draft, self._optimizer, self.ema)
        self._trainable = [p for p in draft.parameters() if p.requires_grad]
        # Of the parts of a step so far, with an entry for each term of the loss.
        self._denominators: list[Tensor] = []
        self._numerators: list[Tensor] = []
        self._terms: dict[str, float] = {}
        self._divisors: Tensor | None = None
        self.journal = Journal(out, self.start, track) if ranks.is_first else None

    @torch.no_grad()
    def count(self, batch: Batch, teacher: Teacher, random: RowRandom) -> None:
        """Take the denominators of a part, so that they are known before its backward pass."""
        self.draft.train()
        with self._ranks.accelerator.autocast():
            terms = self.draft(batch, teacher, random)
        self._denominators.append(_denominators(terms))

    def add(self, batch: Batch, teacher: Teacher, random: RowRandom, *, last: bool) -> None:
        """Add the gradients of a part.

        Args:
            batch: its rows, as the draft is to see them.
            teacher: the target on them.
            random: of them.
            last: whether it is the step's last part.
        """
        self.draft.train()
        with nullcontext() if last else unsynchronised(self._model):
            with self._ranks.accelerator.autocast():
                terms: dict[str, LossTerm] = self._model(batch, teacher, random)
            if self._divisors is None:
                counted = torch.stack(self._denominators or [_denominators(terms)]).sum(0)
                self._divisors = self._ranks.sum(counted) + 1e-6
            self._terms = {name: term.weight for name, term in terms.items()}
            numerators = torch.stack([term.numerator for term in terms.values()])
            (self._loss(numerators / self._divisors) * self._ranks.loss_scale).backward()
        self._numerators.append(numerators.detach())

    def gradients(self) -> dict[str, Any]:
        """Clip the gradients that were added.

        Returns:
            Of the step: ``loss``, its ``terms``, and ``grad_norm`` before clipping; a collective.
        """
        assert self._divisors is not None
        means = self._ranks.sum(torch.stack(self._numerators).sum(0)) / self._divisors
        norm = whole(nn.utils.clip_grad_norm_(self._trainable, MAX_GRAD_NORM))
        numbers = torch.stack([self._loss(means), norm, *means]).tolist()
        terms = dict(zip(self._terms, numbers[2:], strict=True))
        self._denominators, self._numerators, self._divisors = [], [], None
        return {"loss": numbers[0], "terms": terms, "grad_norm": numbers[1]}

    def update(self, step: int) -> float:
        """Do the update of ``step``, from 0, with the gradients as they are.

        Returns:
            The learning rate.
        """
        rate = self.plan.lr * lr_factor(step, self.plan.steps, self.plan.warmup_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.step()
        self._optimizer.zero_grad()
        if self.ema:
            self.ema.update(step)
        return rate

    def record(self, entry: dict[str, Any]) -> None:
        """Note an entry of ``MetricsLog``."""
        if self.journal:
            self.journal.record(entry)

    def sync(self) -> None:
        """Make all records so far durable."""
        if self.journal:
            self.journal.sync()

    def save(self, step: int) -> None:
        """Keep the state after so many updates, and all records before it; a collective."""
        self.sync()
        save_state(
            self._state, step, self.draft, self._optimizer, self.ema, write=self._ranks.is_first
        )

    def close(self) -> None:
        """Close the records."""
        if self.journal:
            self.journal.close()

    def _loss(self, means: Tensor) -> Tensor:
        return (means * means.new_tensor([*self._terms.values()])).sum()


def _denominators(terms: dict[str, LossTerm]) -> Tensor:
    return torch.stack([term.denominator for term in terms.values()])
