"""Small EAGLE-3 drafts with random weights, and random batches."""

import torch
from draft_cases import DIMS, HIDDEN, LAYERS, VOCAB, head, randomise
from torch import Tensor

from dspark.train_from_cache.drafts.eagle3 import Eagle3Config, Eagle3Draft

USED = [0, 2, 3, 5, 8, 9, 12]
"""The target's ids that the drafts know, of 13."""
IMAGE_ID = 11
CHUNKED = {"mrope_section": [1, 1, 2]}
INTERLEAVED = {"mrope_section": [2, 1, 1], "mrope_interleaved": True}


def eagle3(seed: int = 0, *, mrope: dict | None = None, **config: object) -> Eagle3Draft:
    """A float64 draft of three steps over 7 of the target's 13 ids, heads of 8."""
    entries = {
        **DIMS,
        "head_dim": 8,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "target_layer_ids": list(LAYERS),
        "draft_vocab_size": len(USED),
        "image_token_id": IMAGE_ID,
        "ttt_steps": 3,
        **config,
    }
    theta = entries.pop("rope_theta")
    rope = {"rope_type": "default", "rope_theta": theta, **(mrope or {})}
    draft = Eagle3Draft(Eagle3Config(**entries, rope_parameters=rope)).double()
    draft.attach_head(head())
    randomise(draft, seed)
    know(draft, USED if draft.config.draft_vocab_size == len(USED) else list(range(VOCAB)))
    return draft


def know(draft: Eagle3Draft, used: list[int]) -> None:
    """Set the draft's vocabulary."""
    for j, v in enumerate(used):
        draft.d2t[j] = v - j
    for v in range(len(draft.t2d)):
        draft.t2d[v] = v in used


def random_batch(seed: int) -> dict[str, Tensor]:
    """1 to 3 rows of 2 to 9 tokens, masks with holes, and noise where a real batch has zeros."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    rows = int(torch.randint(1, 4, (), generator=generator))
    lengths = torch.randint(2, 10, (rows,), generator=generator)
    size = int(lengths.max())
    real = torch.arange(size) < lengths[:, None]

    def coin(chance: float) -> Tensor:
        return (torch.rand(rows, size, generator=generator) < chance) & real

    attention = coin(0.9)
    steps = torch.randint(0, 3, (rows, 3, size), generator=generator)
    return {
        "input_ids": torch.randint(0, VOCAB, (rows, size), generator=generator).int(),
        "attention_mask": attention.byte(),
        "loss_mask": (coin(0.6) & attention).byte(),
        "image_mask": coin(0.3).byte(),
        "position_ids": steps.cumsum(-1).int(),
        "inputs_embeds": normal(rows, size, HIDDEN),
        "last_hidden_state": normal(rows, size, HIDDEN),
        "logits": 2 * normal(rows, size, VOCAB),
        **{f"hidden_states.{k}": normal(rows, size, HIDDEN) for k in LAYERS},
        "length": lengths,
        "sample": torch.arange(rows),
    }
