"""Small EAGLE, ViSpec and Medusa drafts, and what their tests compare."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_cases import DIMS, HIDDEN, VOCAB, head, randomise
from torch import Tensor

from dspark.schemas.manifest import Manifest
from dspark.train_from_cache.batch import Anchors, Batch, LossTerm
from dspark.train_from_cache.draft_parts.feature_draft import FeatureDraft
from dspark.train_from_cache.draft_parts.row_random import RowRandom
from dspark.train_from_cache.drafts.base import Draft
from dspark.train_from_cache.drafts.eagle import EagleConfig, EagleDraft
from dspark.train_from_cache.drafts.medusa import MedusaConfig, MedusaDraft
from dspark.train_from_cache.drafts.vispec import ViSpecConfig, ViSpecDraft
from dspark.train_from_cache.loop import total_loss
from dspark.train_from_cache.teacher import Teacher
from dspark.train_from_cache.train import TrainResult, train_draft


def ready(draft: FeatureDraft, seed: int) -> Any:
    """The draft in float64, with random weights that leave the softmax far from saturation."""
    draft.double().attach_head(head(seed + 1, bias=True))
    draft.head_weight *= 0.1
    randomise(draft, seed)
    return draft


def eagle(seed: int = 0, **config: Any) -> EagleDraft:
    """A float64 EAGLE draft with a head that has a bias."""
    entries = {**DIMS, "num_draft_tokens": 4, "feature_noise": 0.0, **config}
    return ready(EagleDraft(EagleConfig(**entries)), seed)


def vispec(seed: int = 0, **config: Any) -> ViSpecDraft:
    """A float64 ViSpec draft of stage 2 with three queries and a head that has a bias."""
    entries = {
        **DIMS,
        "num_key_value_heads": 4,
        "num_draft_tokens": 4,
        "feature_noise": 0.0,
        "num_query_tokens": 3,
        **config,
    }
    return ready(ViSpecDraft(ViSpecConfig(**entries)), seed)


def medusa(seed: int = 0, **config: Any) -> MedusaDraft:
    """A float64 Medusa draft of three heads."""
    entries = {"hidden_size": HIDDEN, "vocab_size": VOCAB, "num_heads": 3, **config}
    draft = MedusaDraft(MedusaConfig(**entries)).double()
    randomise(draft, seed)
    return draft


def run(draft: Draft, batch: Batch, seed: int = 0) -> dict[str, LossTerm]:
    return draft(batch, Teacher(batch, head()), RowRandom(seed, 0, batch["sample"]))


def assert_gradients(draft: Draft, terms: dict[str, LossTerm], want: dict[str, Tensor]) -> None:
    """The gradients of the trainer's loss are those of the oracle's weights, name by name."""
    draft.zero_grad()
    total_loss(terms).backward()
    for name, parameter in draft.named_parameters():
        if not parameter.requires_grad:
            assert parameter.grad is None, name
            continue
        assert parameter.grad is not None, name
        expected = want[name].grad
        expected = torch.zeros_like(want[name]) if expected is None else expected
        torch.testing.assert_close(
            parameter.grad, expected, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def anchors(places: list[tuple[int, int]]) -> Anchors:
    row, position = torch.tensor(places, dtype=torch.long).reshape(-1, 2).T
    return Anchors(row, position)


def fit(cache: Path, out: Path, arch: str, **options: Any) -> TrainResult:
    """A short training on a CPU."""
    settings: dict[str, Any] = {
        "steps": 40, "batch_size": 4, "lr": 3e-3, "eval_fraction": 0.2, "log_every": 1,
        "device": "cpu", "progress": False,
    }  # fmt: skip
    return train_draft(cache, arch, out, **(settings | options))


def losses(out: Path) -> list[float]:
    """The loss of each step of a training."""
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if line["event"] == "step"]


def forget_field(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Make all caches say that they hold no such field."""
    field = Manifest.field
    monkeypatch.setattr(Manifest, "field", lambda m, n: None if n == name else field(m, n))


def assert_config(folder: Path, want: dict[str, Any], draft: type[Draft]) -> None:
    """``config.json`` has these entries, and comes back as it is."""
    config = json.loads((folder / "config.json").read_text())
    assert {key: config.get(key, "none") for key in want} == want
    draft.from_pretrained(folder).save_pretrained(folder / "again")
    assert json.loads((folder / "again" / "config.json").read_text()) == config
