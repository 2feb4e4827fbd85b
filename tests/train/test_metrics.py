"""The metrics against a plain loop in double precision."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_cache import VOCAB, write_cache
from torch import Tensor

from dspark.train_from_cache.batch import Anchors, Batch, supervised_anchors
from dspark.train_from_cache.metrics import Meter, accepted, eval_mask


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


def ratio(total: float, count: float) -> float | None:
    return total / count if count else None


def one_group(rounds: list[list[tuple[float, bool]]], depth: int) -> dict[str, Any]:
    """The metrics of rounds, each the (α, g) of its supervised tokens, by loops."""
    result: dict[str, Any] = {
        "anchors": len(rounds),
        "agreement": ratio(sum(tokens[0][1] for tokens in rounds), len(rounds)),
    }
    for which, kind in enumerate(("", "_greedy")):
        tau = 0.0
        for name in ("acceptance", "conditional", "prefix"):
            result[name + kind] = [None] * depth
        for k in range(depth):
            slots, accept, earlier, through = 0, 0.0, 0.0, 0.0
            for tokens in rounds:
                if k >= len(tokens):
                    continue
                product = 1.0
                for j in range(k):
                    product *= tokens[j][which]
                slots += 1
                accept += tokens[k][which]
                earlier += product
                through += product * tokens[k][which]
            tau += through
            result["acceptance" + kind][k] = ratio(accept, slots)
            result["conditional" + kind][k] = ratio(through, earlier)
            result["prefix" + kind][k] = ratio(through, slots)
        result[f"tau{kind}_without_bonus"] = ratio(tau, len(rounds))
        result["tau" + kind] = ratio(tau + len(rounds), len(rounds))
    return result


def assert_close(result: dict[str, Any], expected: dict[str, Any]) -> None:
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        many = isinstance(value, list)
        pairs = zip(result[name], value, strict=True) if many else [(result[name], value)]
        for got, want in pairs:
            assert got == (None if want is None else pytest.approx(want, abs=1e-6)), name


@settings(max_examples=40)
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
    same = torch.rand(n, depth, generator=generator) < 0.4
    p[same] = q[same] + 0.3 * p[same]  # so that some are accepted in a row
    has_picture = torch.rand(len(lengths), generator=generator) < 0.5
    picture = has_picture[anchors.row]
    grounded = (torch.rand(n, generator=generator) < 0.5) & picture

    whole, parts = Meter(depth), [Meter(depth), Meter(depth)]
    for i, start in enumerate(range(0, n, chunk)):
        part = slice(start, start + chunk)
        mask = eval_mask(batch, Anchors(anchors.row[part], anchors.position[part]), depth)
        accept = accepted(p[part], q[part], mask)
        for meter in (whole, parts[i % 2]):
            meter.update(accept, mask, picture[part], grounded[part])

    rounds: list[list[tuple[float, bool]]] = []
    rows: list[int] = []
    for row, length in enumerate(lengths):
        m = batch["loss_mask"][row].tolist()
        for a in range(length - 1):
            if not (m[a] and m[a + 1]):
                continue
            tokens = []
            for k in range(depth):
                if a + 1 + k >= length or not m[a + 1 + k]:
                    break
                draft, teacher = softmax(p[len(rounds), k]), softmax(q[len(rounds), k])
                distance = sum(abs(x - y) for x, y in zip(draft, teacher, strict=True))
                match = draft.index(max(draft)) == teacher.index(max(teacher))
                tokens.append((1 - 0.5 * distance, match))
            rounds.append(tokens)
            rows.append(row)
    assert len(rounds) == n
    groups = {
        "picture": [r for r, row in zip(rounds, rows, strict=True) if has_picture[row]],
        "grounded": [r for r, yes in zip(rounds, grounded.tolist(), strict=True) if yes],
        "text": [r for r, row in zip(rounds, rows, strict=True) if not has_picture[row]],
    }
    result = whole.result()
    for name, members in groups.items():
        assert_close(result.pop(name), one_group(members, depth))
    on_grounded = one_group(groups["grounded"], depth)
    expected = {
        **one_group(rounds, depth),
        "agreement_grounded": on_grounded["agreement"],
        "grounded_anchors": on_grounded["anchors"],
    }
    assert_close(result, expected)

    parts[0].totals += parts[1].totals
    torch.testing.assert_close(parts[0].totals, whole.totals)


def test_one_round_by_hand() -> None:
    """α = 0.5, 0.8 and 0.25, of which the third token is not supervised; g = 1 and 0."""
    meter, mask = Meter(3), torch.tensor([[True, True, False]])
    accept = torch.tensor([[[0.5, 0.8, 0.0], [1.0, 0.0, 0.0]]], dtype=torch.float64)
    meter.update(accept, mask, torch.tensor([True]), torch.tensor([False]))
    result = meter.result()
    assert result["acceptance"] == [0.5, 0.8, None]
    assert result["conditional"] == [0.5, 0.8, None]
    assert result["prefix"] == [0.5, 0.4, None]
    assert (result["tau"], result["tau_without_bonus"]) == pytest.approx((1.9, 0.9))
    assert result["conditional_greedy"] == result["prefix_greedy"] == [1, 0, None]
    assert (result["tau_greedy"], result["tau_greedy_without_bonus"]) == (2, 1)
    assert result["picture"]["tau"] == result["tau"]
    assert result["text"]["tau"] is result["grounded"]["tau"] is None
    assert result["text"]["acceptance"] == [None, None, None]


def nowhere(n: int) -> Tensor:
    return torch.zeros(n, dtype=torch.bool)


def test_a_draft_equal_to_its_target_has_the_longest_rounds() -> None:
    logits = torch.randn(3, 4, 9)
    meter = Meter(4)
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 0, 0]]).bool()
    first = torch.tensor([True, False, False])
    meter.update(accepted(logits, logits, mask), mask, first, first)
    result = meter.result()
    assert result["tau"] == pytest.approx((5 + 3 + 2) / 3)
    assert result["tau_greedy"] == pytest.approx((5 + 3 + 2) / 3)
    for name in ("acceptance", "conditional", "prefix"):
        assert result[name] == result[f"{name}_greedy"] == pytest.approx([1, 1, 1, 1])
    assert result["agreement"] == result["agreement_grounded"] == 1


def test_arbitrary_numbers_outside_the_mask_do_not_matter() -> None:
    p, q = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    mask = torch.tensor([[1, 1, 0], [1, 0, 0]]).bool()
    clean, dirty = Meter(3), Meter(3)
    clean.update(accepted(p, q, mask), mask, nowhere(2), nowhere(2))
    p, q = p.clone(), q.clone()
    p[~mask], q[~mask] = torch.nan, torch.inf
    dirty.update(accepted(p, q, mask), mask, nowhere(2), nowhere(2))
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
    rows = list(ok_rows(cache))
    one = module.evaluate(draft, cache, head, rows, batch_size=8)
    assert one == module.evaluate(draft, cache, head, rows, batch_size=8)
    monkeypatch.setattr(module, "_LOGITS", 5 * draft.depth * VOCAB)
    other = module.evaluate(draft, cache, head, rows, batch_size=3)
    assert one.keys() == other.keys()
    assert one["anchors"] == other["anchors"] > 100
    assert one["tau"] == pytest.approx(other["tau"], abs=1e-5)
    assert one["acceptance"] == pytest.approx(other["acceptance"], abs=1e-5)
