"""Random small batches with everything that a cache may hold."""

import random

import torch
from draft_cases import HIDDEN, VOCAB
from torch import Tensor


def random_batch(seed: int) -> dict[str, Tensor]:
    """One to three rows of 1 to 11 tokens, the longest filling the batch.

    Runs of picture tokens, also at the row's start, at its end and one token apart; tokens that
    nobody may attend to, at the row's start too; supervised tokens in any pattern, but none of a
    picture; noise where a real batch has zeros, which must not matter.
    """
    chance = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    lengths = [chance.randint(1, 11) for _ in range(chance.randint(1, 3))]
    rows, length = len(lengths), max(lengths)
    masks = {
        name: torch.zeros(rows, length, dtype=torch.uint8)
        for name in ("attention_mask", "loss_mask", "image_mask")
    }
    for row, size in enumerate(lengths):
        density = chance.choice([0.0, 0.3, 0.7])
        for t in range(size):
            picture = chance.random() < density
            masks["image_mask"][row, t] = picture
            masks["attention_mask"][row, t] = picture or chance.random() < 0.9
            masks["loss_mask"][row, t] = not picture and chance.random() < 0.7

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "input_ids": torch.randint(0, VOCAB, (rows, length), generator=generator).int(),
        **masks,
        "inputs_embeds": normal(rows, length, HIDDEN),
        "last_hidden_state": normal(rows, length, HIDDEN),
        "logits": 2 * normal(rows, length, VOCAB),
        "length": torch.tensor(lengths),
        "sample": torch.arange(rows),
    }


def places(batch: dict[str, Tensor]) -> list[tuple[int, int]]:
    """All tokens of a batch that an answer could begin at: (row, position) of those no picture's,
    shuffled."""
    found = [
        (row, t)
        for row, size in enumerate(batch["length"].tolist())
        for t in range(size)
        if not batch["image_mask"][row, t]
    ]
    random.Random(0).shuffle(found)
    return found
