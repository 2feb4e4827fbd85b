"""An EAGLE draft computes what the paper's formulas say, slot by slot."""

import eagle_oracle as oracle
import pytest
import torch
from draft_cases import batch as make_batch
from draft_cases import msd
from feature_cases import anchors, assert_gradients, eagle, run
from oracle_parts import double_weights
from random_batches import places, random_batch

from dspark.train_from_cache.draft_parts import slot_losses
from dspark.train_from_cache.draft_parts.row_random import RowRandom


def head_weights(draft):
    return draft.head_weight.double(), draft.head_bias.double()


def read_fields(draft, batch):
    """The batch without the fields that the draft does not ask for."""
    names = {*type(draft).needed_fields(draft.config), "length", "sample", "logits"}
    return {name: x for name, x in batch.items() if name in names}


def assert_equal_to_loops(draft, batch):
    weights = double_weights(draft)
    count = int((batch["loss_mask"][:, 1:] > 0).sum())
    got = run(draft, read_fields(draft, batch))
    assert {name: term.weight for name, term in got.items()} == {"smooth_l1": 1.0, "soft_ce": 0.1}
    assert all(float(term.denominator) == count for term in got.values())
    if count:
        hidden = batch["last_hidden_state"]
        want = oracle.loss_means(weights, head_weights(draft), batch, hidden)
        for name, term in got.items():
            mean = float(term.numerator.detach() / term.denominator)
            assert mean == pytest.approx(float(want[name].detach()), abs=1e-5), name
        (want["smooth_l1"] + 0.1 * want["soft_ce"]).backward()
    assert_gradients(draft, got, weights)


@pytest.mark.parametrize("bias", [True, False])
def test_losses_and_gradients(bias):
    assert_equal_to_loops(eagle(fc_bias=bias), make_batch())


@pytest.mark.parametrize("seed", range(8))
def test_losses_and_gradients_on_any_batch(seed):
    assert_equal_to_loops(eagle(seed), random_batch(seed))


@pytest.mark.parametrize("seed", range(4))
def test_predictions_are_a_literal_rollout(seed):
    draft, batch = eagle(seed), random_batch(seed)
    weights = {name: w.detach() for name, w in double_weights(draft).items()}
    found = places(batch)
    got = draft.predict(read_fields(draft, batch), anchors(found))
    assert got.isfinite().all()
    for logits, (row, a) in zip(got, found, strict=True):
        want = oracle.rollout(weights, head_weights(draft), batch, row, a, draft.depth)
        inside = min(draft.depth, int(batch["length"][row]) - a)
        torch.testing.assert_close(logits[:inside], torch.stack(want[:inside]), atol=1e-6, rtol=0)


def test_only_features_before_the_anchor_count():
    draft, batch = eagle(), make_batch()
    for a in (1, 3, 6):
        chosen = anchors([(0, a), (1, a)])
        before = draft.predict(batch, chosen)
        later = {name: x.clone() for name, x in batch.items()}
        later["last_hidden_state"][:, a:] += 5.0
        later["inputs_embeds"][:, a + draft.depth :] += 5.0
        assert torch.equal(draft.predict(later, chosen), before)
        later["last_hidden_state"][:, a - 1] += 5.0
        assert not torch.allclose(draft.predict(later, chosen), before)


def test_without_pictures_it_is_msd():
    a, b, batch = eagle(3), msd(3, bias=False), oracle.without_pictures(make_batch())
    b.load_state_dict(a.state_dict())
    b.head_weight, b.head_bias = a.head_weight, a.head_bias
    for name, term in run(a, batch).items():
        assert torch.equal(term.numerator, run(b, batch)[name].numerator)
    chosen = anchors([(0, 4), (1, 7)])
    assert torch.equal(a.predict(batch, chosen), b.predict(batch, chosen))


def test_noise_moves_the_input_features_in_training_alone():
    batch = make_batch()
    noisy = eagle(feature_noise=0.2)
    assert run(noisy.eval(), batch)["soft_ce"].numerator == run(eagle(), batch)["soft_ce"].numerator
    hidden = batch["last_hidden_state"]
    uniform = RowRandom(5, 0, batch["sample"]).uniform(12, 8)
    shifted = hidden + (uniform - 0.5) * 0.2 * 512 / torch.tensor([12, 9])[:, None, None]
    want = oracle.loss_means(double_weights(noisy), head_weights(noisy), batch, shifted)
    term = run(noisy.train(), batch, seed=5)["soft_ce"]
    mean = float(term.numerator.detach() / term.denominator)
    assert mean == pytest.approx(float(want["soft_ce"].detach()), abs=1e-5)


def test_the_vocabulary_may_be_taken_in_parts(monkeypatch):
    draft, batch = eagle(), make_batch()
    want = {name: t.numerator.detach() for name, t in run(draft, batch).items()}
    monkeypatch.setattr(slot_losses, "MAX_LOGITS", 3 * 13)
    for name, term in run(draft, batch).items():
        torch.testing.assert_close(term.numerator.detach(), want[name])
