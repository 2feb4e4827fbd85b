"""A DSpark draft computes what the paper's formulas say, slot by slot."""

import dspark_oracle as oracle
import pytest
import torch
from draft_cases import batch as make_batch
from draft_cases import dspark, head
from oracle_parts import double_weights

from dspark.train_from_cache.batch import Anchors, supervised_anchors
from dspark.train_from_cache.draft_parts import slot_losses
from dspark.train_from_cache.draft_parts.block_anchors import supervised_prefix
from dspark.train_from_cache.draft_parts.row_random import RowRandom
from dspark.train_from_cache.metrics import Meter, accepted, eval_mask
from dspark.train_from_cache.teacher import Teacher

HEADS = ("vanilla", "gated", "rnn")


def losses(draft, batch):
    return draft(batch, Teacher(batch, head()), RowRandom(0, 0, batch["sample"]))


@pytest.mark.parametrize("kind", HEADS)
def test_losses_and_gradients(kind):
    draft, batch = dspark(markov_head_type=kind), make_batch()
    weights = double_weights(draft)
    rounds = oracle.all_rounds(weights, batch, draft.config)
    assert any(r.anchor + draft.depth >= 12 for r in rounds), "no block runs over the row's end"
    want = oracle.loss_sums(batch, rounds, draft.config)

    got = losses(draft, batch)

    assert {name: term.weight for name, term in got.items()} == {
        "ce": 0.1,
        "l1": 0.9,
        "confidence": 1.0,
    }
    for name, term in got.items():
        mean = float(term.numerator.detach() / term.denominator)
        assert mean == pytest.approx(float((want[name] / want["weight"]).detach()), abs=1e-6), name
        assert float(term.denominator) == pytest.approx(float(want["weight"]), rel=1e-6)

    sum(t.weight * t.numerator / t.denominator for t in got.values()).backward()
    total = 0.1 * want["ce"] + 0.9 * want["l1"] + 1.0 * want["confidence"]
    (total / want["weight"]).backward()
    for name, parameter in draft.named_parameters():
        if name in ("embed_tokens.weight", "lm_head.weight"):
            assert parameter.grad is None, f"{name} is the target's"
        else:
            torch.testing.assert_close(
                parameter.grad,
                weights[name].grad,
                atol=1e-5,
                rtol=1e-5,
                msg=lambda m, n=name: n + m,
            )


@pytest.mark.parametrize("kind", HEADS)
def test_hidden_states_predictions_confidence_and_tau(kind):
    draft, batch = dspark(seed=3, markov_head_type=kind), make_batch(seed=3)
    anchors = supervised_anchors(batch["loss_mask"])
    weights = {name: w.detach() for name, w in double_weights(draft).items()}
    rounds = oracle.all_rounds(weights, batch, draft.config)
    assert [(r.row, r.anchor) for r in rounds] == list(
        zip(anchors.row.tolist(), anchors.position.tolist(), strict=True)
    )

    for block in rounds:
        at, keep = torch.full((2, 1), block.anchor), torch.tensor([[True], [True]])
        hidden = draft.encode(batch, at, keep)[block.row, 0]
        torch.testing.assert_close(hidden, torch.stack(block.hidden), atol=1e-6, rtol=0)

    logits = draft.predict(batch, anchors)
    confidence = torch.sigmoid(draft.confidence_logits(batch, anchors))
    teacher = Teacher(batch, head())
    position = anchors.position[:, None] + torch.arange(draft.depth)
    q = teacher.logits(anchors.row[:, None].expand(-1, draft.depth), position.clamp(max=11))
    mask = eval_mask(batch, anchors, draft.depth)
    for i, block in enumerate(rounds):
        assert mask[i].tolist() == block.supervised
        torch.testing.assert_close(logits[i], torch.stack(block.logits), atol=1e-6, rtol=0)
        want = torch.sigmoid(torch.stack(block.confidence))
        torch.testing.assert_close(confidence[i], want, atol=1e-6, rtol=0)
    meter = Meter(draft.depth)
    nowhere = torch.zeros(len(anchors), dtype=torch.bool)
    meter.update(accepted(logits, q, mask), mask, nowhere, nowhere)
    assert meter.result()["tau"] == pytest.approx(oracle.tau(batch, rounds), abs=1e-6)


def test_a_confidence_head_may_read_the_hidden_state_alone_or_be_absent():
    batch = make_batch()
    draft = dspark(confidence_head_with_markov=False)
    weights = double_weights(draft)
    want = oracle.loss_sums(batch, oracle.all_rounds(weights, batch, draft.config), draft.config)
    got = losses(draft, batch)["confidence"]
    assert float(got.numerator.detach()) == pytest.approx(
        float(want["confidence"].detach()), abs=1e-5
    )
    assert set(losses(dspark(enable_confidence_head=False), batch)) == {"ce", "l1"}


def test_the_supervised_part_of_a_block_is_the_prefix_before_the_first_gap():
    batch = make_batch()
    mask = batch["loss_mask"].bool()
    anchor = torch.arange(12).expand(2, -1)
    keep = torch.ones(2, 12, dtype=torch.bool)
    keep[0, 4] = False
    got = supervised_prefix(mask, anchor, keep, 3)
    for row in range(2):
        for a in range(12):
            alive = bool(keep[row, a])
            for k in range(3):
                alive = alive and a + 1 + k < 12 and bool(mask[row, a + 1 + k])
                assert bool(got[row, a, k]) == alive, (row, a, k)


def test_only_features_before_the_anchor_count():
    draft, batch = dspark(), make_batch()
    for position in (3, 5, 8):
        anchors = Anchors(torch.tensor([0, 1]), torch.tensor([position, position]))
        before = draft.predict(batch, anchors)
        later = {k: v.clone() for k, v in batch.items()}
        for name in later:
            if name.startswith("hidden_states."):
                later[name][:, position:] += 5.0
        assert torch.equal(draft.predict(later, anchors), before)
        for name in later:
            if name.startswith("hidden_states."):
                later[name][:, position - 1] += 5.0
        assert not torch.allclose(draft.predict(later, anchors), before)


def test_predictions_keep_the_order_of_the_anchors_and_there_may_be_none():
    draft, batch = dspark(), make_batch()
    row, position = torch.tensor([1, 0, 1, 0, 0]), torch.tensor([7, 10, 0, 4, 5])
    together = draft.predict(batch, Anchors(row, position))
    for i in range(5):
        alone = draft.predict(batch, Anchors(row[i : i + 1], position[i : i + 1]))
        torch.testing.assert_close(together[i], alone[0], atol=1e-12, rtol=0)
    none = Anchors(row[:0], position[:0])
    assert draft.predict(batch, none).shape == (0, 3, 13)


def test_a_batch_without_candidates_gives_zero_losses_that_reach_every_parameter():
    draft, batch = dspark(), make_batch()
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    got = losses(draft, batch)
    assert all(t.numerator.item() == 0 and t.denominator.item() == 0 for t in got.values())
    sum(t.numerator for t in got.values()).backward()
    for name, parameter in draft.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and not parameter.grad.any(), name


def test_anchors_are_not_spent_on_tokens_whose_next_is_not_supervised():
    draft, batch = dspark(num_anchors=1), make_batch()
    batch["loss_mask"].zero_()
    batch["loss_mask"][0, [0, 2, 4, 6, 9, 10]] = 1  # 9 is the only anchor
    for seed in range(8):
        got = draft(batch, Teacher(batch, head()), RowRandom(seed, 0, batch["sample"]))
        assert got["ce"].denominator.item() == 1.0


def test_losses_in_parts_are_the_losses_at_once(monkeypatch):
    draft, batch = dspark(), make_batch()

    def run():
        draft.zero_grad()
        got = losses(draft, batch)
        sum(t.weight * t.numerator for t in got.values()).backward()
        gradients = [p.grad.clone() for p in draft.parameters() if p.requires_grad]
        return [t.numerator.detach() for t in got.values()], gradients

    at_once = run()
    monkeypatch.setattr(slot_losses, "MAX_LOGITS", 4 * 13)
    torch.testing.assert_close(run(), at_once, atol=1e-9, rtol=1e-9)
