"""An EAGLE-3 draft trained from a cache, and its vocabulary."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from synthetic_cache import IMAGE_ID, VOCAB, write_cache

from dspark.schemas.errors import IncompatibleCacheError
from dspark.schemas.manifest import Manifest, read_manifest, write_manifest
from dspark.train_from_cache import loop
from dspark.train_from_cache.batch import Batch
from dspark.train_from_cache.cache import ok_rows, open_cache
from dspark.train_from_cache.draft_parts.draft_vocab import (
    choose_ids,
    count_supervised,
    special_ids,
)
from dspark.train_from_cache.draft_parts.row_random import RowRandom
from dspark.train_from_cache.drafts.eagle3 import Eagle3Draft
from dspark.train_from_cache.split import split_rows
from dspark.train_from_cache.target_head import TargetHead
from dspark.train_from_cache.train import TrainResult, train_draft

SMALL = {"ttt_steps": "3", "draft_vocab_size": "30"}


def fit(cache: Path, out: Path, **options: Any) -> TrainResult:
    merged = {
        "steps": 12, "batch_size": 4, "save_every": 5, "log_every": 1, "device": "cpu",
        "progress": False, "eval_fraction": 0.2, "draft_config": SMALL,
    } | options  # fmt: skip
    return train_draft(cache, "eagle3", out, **merged)


def records(out: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cache(tmp_path_factory.mktemp("eagle3") / "cache")


def supervised(root: Path, rows: list[int]) -> Counter[int]:
    """By loops over tokens."""
    counts: Counter[int] = Counter()
    with open_cache(root) as opened:
        for row in rows:
            sample = opened[row]
            for token, counted in zip(sample["input_ids"], sample["loss_mask"], strict=True):
                if counted:
                    counts[int(token)] += 1
    return counts


def training_rows(root: Path) -> list[int]:
    return list(split_rows(ok_rows(open_cache(root)), 0.2)[0])


def test_it_learns_and_says_how_much_its_vocabulary_covers(cache: Path, tmp_path: Path) -> None:
    result = fit(cache, tmp_path / "out", steps=60, lr=3e-3)
    steps = [r for r in records(tmp_path / "out") if r["event"] == "step"]
    losses = [r["loss"] for r in steps]
    assert sum(losses[-5:]) < 0.95 * sum(losses[:5])
    assert list(steps[0]["terms"]) == ["step_0", "step_1", "step_2"]
    assert result.before is not None and len(result.before["acceptance"]) == 3

    counts = supervised(cache, training_rows(cache))
    weights = load_file(tmp_path / "out" / "model.safetensors")
    used = [j + int(d) for j, d in enumerate(weights["d2t"])]
    assert used == sorted(set(used)) and len(used) == 30
    assert weights["t2d"].nonzero().flatten().tolist() == used
    assert {0, IMAGE_ID} <= set(used)
    chosen = [v for v in used if v not in (0, IMAGE_ID)]
    left = [v for v in range(VOCAB) if v not in used]
    assert min(counts[v] for v in chosen) >= max(counts[v] for v in left) > 0
    covered = sum(counts[v] for v in used) / sum(counts.values())
    for metrics in (result.before, result.after):
        assert metrics["draft_vocab_coverage"] == pytest.approx(covered) != 1


def test_a_resumed_training_has_the_same_vocabulary(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fit(cache, tmp_path / "whole")
    real = loop.step_random

    def stopping(seed: int, step: int, batch: Batch) -> RowRandom:
        if step == 7:
            raise KeyboardInterrupt
        return real(seed, step, batch)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(loop, "step_random", stopping)
        fit(cache, tmp_path / "out")
    fit(cache, tmp_path / "out", resume=True)
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "out"))
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    assert records(tmp_path / "whole")[-1] == records(tmp_path / "out")[-1]


def test_the_head_starts_as_the_targets_rows(cache: Path) -> None:
    opened, head = open_cache(cache), TargetHead.load(cache)
    draft = Eagle3Draft(Eagle3Draft.config_from_cache(opened.manifest, SMALL))
    draft.attach_head(head)
    draft.start(opened, training_rows(cache), head)
    for j, offset in enumerate(draft.d2t.tolist()):
        assert torch.equal(draft.lm_head.weight[j], head.weight[j + offset])
    trained = draft.lm_head.weight.detach().clone() + 1
    with torch.no_grad():
        draft.lm_head.weight.copy_(trained)
    draft.attach_head(head)
    assert torch.equal(draft.lm_head.weight, trained), "attaching to a trained draft keeps it"


def test_ids_are_counted_in_the_training_rows_alone(cache: Path) -> None:
    opened = open_cache(cache)
    train, held_out = split_rows(ok_rows(opened), 0.2)
    assert len(held_out) and opened.lengths.min() == 0  # some rows were skipped
    for rows in (train, held_out, []):
        counts = count_supervised(opened, rows)
        assert counts.tolist() == [supervised(cache, list(rows))[v] for v in range(VOCAB)]


@given(st.lists(st.integers(0, 5), min_size=4, max_size=12), st.data())
def test_the_most_frequent_ids_are_chosen(counts: list[int], data: st.DataObject) -> None:
    ids = range(len(counts))
    always = data.draw(st.lists(st.sampled_from(ids), unique=True, max_size=4))
    size = data.draw(st.integers(max(1, len(always)), len(counts)))
    used = choose_ids(torch.tensor(counts), size, always).tolist()
    rest = sorted((v for v in ids if v not in always), key=lambda v: (-counts[v], v))
    assert used == sorted([*always, *rest[: size - len(always)]])


def test_special_ids_lie_in_the_vocabulary(cache: Path) -> None:
    target = open_cache(cache).manifest.target
    assert special_ids(target) == [0, IMAGE_ID]
    other = replace(target, eos_token_ids=[3, 5], pad_token_id=None, image_token_id=VOCAB)
    assert special_ids(other) == [3, 5]


def with_mrope(root: Path) -> Manifest:
    """Let the target of a synthetic cache turn its positions on three axes."""
    facts = read_manifest(root)
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    target = replace(facts.target, text={**facts.target.text, "rope_parameters": rope})
    write_manifest(root, replace(facts, target=target))
    return read_manifest(root)


@pytest.mark.parametrize("image_embeds", ["merged", "token"])
@pytest.mark.parametrize("logits", ["head", "topk:4"])
def test_targets_with_three_axes(tmp_path: Path, image_embeds: str, logits: str) -> None:
    root = write_cache(tmp_path / "cache", position_rows=3, logits=logits, dtype="bf16")
    with_mrope(root)
    entries = {**SMALL, "image_embeds": image_embeds}
    result = fit(root, tmp_path / "out", steps=3, draft_config=entries)
    assert result.after["tau"] >= 1
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["rope_scaling"]["mrope_section"] == [1, 1, 2]
    assert config["image_embeds"] == image_embeds


def test_a_cache_without_its_layers_is_refused_with_the_command(tmp_path: Path) -> None:
    root = write_cache(tmp_path / "cache", layers=(0, 1))
    with pytest.raises(IncompatibleCacheError, match=r"'eagle3' needs hidden_states\.2.*--"):
        fit(root, tmp_path / "out")
    assert not (tmp_path / "out").exists()
