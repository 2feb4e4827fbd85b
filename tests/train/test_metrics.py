"""The metrics against a plain loop in double precision."""

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_cache import VOCAB, write_cache
from torch import Tensor

from dspark.train_from_cache.batch import Anchors, Batch, supervised_anchors
from dspark.train_from_cache.metrics import Meter, eval_mask


def softmax(logits: Tensor) -> list[float]:
    values = [float(x) for x in logits]
    top = max(values)
    weights = [math.exp(v - top) for v in values]
    return [w / sum(weights) for w in weights]


def batch_of(lengths: list[int], density: float, generator: torch.Generator) -> Batch:
    mask = torch.rand(len(lengths), max(lengths), generator=generator) < density
    length = torch.tensor(lengths)
    mask &= torch.arange(max(lengths)) < length[:, None]
    return {"loss_mask": mask.to(torch.uint8), "length": length}


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(2, 14), min_size=1, max_size=4),
    st.integers(1, 5),
    st.floats(0.3, 1.0),
    st.integers(0, 2**31),
    st.integers(1, 7),
)
def test_sums_equal_a_plain_loop(
    lengths: list[int], depth: int, density: float, seed: int, chunk: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch = batch_of(lengths, density, generator)
    anchors = supervised_anchors(batch["loss_mask"])
    n, vocab = len(anchors), 6
    p = torch.randn(n, depth, vocab, generator=generator)
    q = torch.randn(n, depth, vocab, generator=generator)
    q[..., 1] = -torch.inf  # as a top-k teacher has it
    grounded = torch.rand(n, generator=generator) < 0.5

    meter = Meter(depth)
    for start in range(0, n, chunk):
        part = slice(start, start + chunk)
        mask = eval_mask(batch, Anchors(anchors.row[part], anchors.position[part]), depth)
        meter.update(p[part], q[part], mask, grounded[part])
    result = meter.result()

    accepted, slots = [0.0] * depth, [0] * depth
    tau = greedy = agree = agree_grounded = 0.0
    count = 0
    for row, length in enumerate(lengths):
        m = batch["loss_mask"][row].tolist()
        for a in range(length - 1):
            if not (m[a] and m[a + 1]):
                continue
            product, matches = 1.0, 1.0
            tau, greedy = tau + 1, greedy + 1
            for k in range(depth):
                if a + 1 + k >= length or not m[a + 1 + k]:
                    break
                draft, teacher = softmax(p[count, k]), softmax(q[count, k])
                distance = sum(abs(x - y) for x, y in zip(draft, teacher, strict=True))
                match = draft.index(max(draft)) == teacher.index(max(teacher))
                accepted[k] += 1 - 0.5 * distance
                slots[k] += 1
                product *= 1 - 0.5 * distance
                matches *= match
                tau, greedy = tau + product, greedy + matches
                if k == 0:
                    agree += match
                    agree_grounded += match and bool(grounded[count])
            count += 1
    assert count == n == result["anchors"]
    assert result["grounded_anchors"] == int(grounded.sum())
    expected = {
        "tau": tau / n if n else None,
        "tau_greedy": greedy / n if n else None,
        "agreement": agree / n if n else None,
        "agreement_grounded": agree_grounded / int(grounded.sum()) if grounded.any() else None,
    }
    for name, value in expected.items():
        assert result[name] == (None if value is None else pytest.approx(value, abs=1e-6)), name
    for k in range(depth):
        mean = accepted[k] / slots[k] if slots[k] else None
        assert result["acceptance"][k] == (None if mean is None else pytest.approx(mean, abs=1e-6))


def test_a_draft_equal_to_its_target_has_the_longest_rounds() -> None:
    logits = torch.randn(3, 4, 9)
    meter = Meter(4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    meter.update(logits, logits, mask, torch.tensor([True, False, False]))
    result = meter.result()
    assert result["tau"] == pytest.approx((5 + 3 + 2) / 3)
    assert result["tau_greedy"] == pytest.approx((5 + 3 + 2) / 3)
    assert result["acceptance"] == pytest.approx([1, 1, 1, 1])
    assert result["agreement"] == result["agreement_grounded"] == 1


def test_arbitrary_numbers_outside_the_mask_do_not_matter() -> None:
    p, q = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    clean, dirty = Meter(3), Meter(3)
    clean.update(p, q, mask, torch.zeros(2))
    p, q = p.clone(), q.clone()
    p[~mask], q[~mask] = torch.nan, torch.inf
    dirty.update(p, q, mask, torch.zeros(2))
    assert clean.result() == dirty.result()


def test_nothing_measured_is_none() -> None:
    result = Meter(2).result()
    assert result["tau"] is result["agreement"] is result["agreement_grounded"] is None
    assert result["acceptance"] == [None, None]


def test_evaluation_does_not_depend_on_batches_or_chunks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dspark.train_from_cache import evaluate as module
    from dspark.train_from_cache.cache import ok_rows, open_cache
    from dspark.train_from_cache.drafts import draft_class
    from dspark.train_from_cache.target_head import TargetHead

    cache = open_cache(write_cache(tmp_path / "cache"))
    cls = draft_class("dspark")
    draft = cls(cls.config_from_cache(cache.manifest, {"num_hidden_layers": 1}))
    head = TargetHead.load(cache.root)
    draft.attach_head(head)
    rows = ok_rows(cache).tolist()
    one = module.evaluate(draft, cache, head, rows, batch_size=8)
    assert one == module.evaluate(draft, cache, head, rows, batch_size=8)
    monkeypatch.setattr(module, "_LOGITS", 5 * draft.depth * VOCAB)
    other = module.evaluate(draft, cache, head, rows, batch_size=3)
    assert one.keys() == other.keys()
    assert one["anchors"] == other["anchors"] > 100
    assert one["tau"] == pytest.approx(other["tau"], abs=1e-5)
    assert one["acceptance"] == pytest.approx(other["acceptance"], abs=1e-5)
