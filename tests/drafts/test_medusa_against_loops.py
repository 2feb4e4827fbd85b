"""A Medusa draft computes what the paper's formulas say, head by head and slot by slot."""

import math

import medusa_oracle as oracle
import pytest
import torch
from draft_cases import VOCAB, head, manifest
from draft_cases import batch as make_batch
from feature_cases import anchors, assert_gradients, medusa, run
from oracle_parts import double_weights
from random_batches import places, random_batch

from dspark.train_from_cache.draft_parts import slot_losses
from dspark.train_from_cache.drafts.medusa import MedusaDraft

VARIANTS = [
    {},
    {"distill": 1.0, "num_hidden_layers": 2},
    {"distill": 0.3, "medusa_fc_bias": False, "decay": 0.5},
    {"num_hidden_layers": 0, "num_heads": 1},
]


def assert_equal_to_loops(draft, batch):
    config, weights = draft.config, double_weights(draft)
    want = oracle.head_means(weights, batch, config.num_heads, config.distill)
    got = run(draft, batch)
    assert list(got) == [f"head_{i}" for i in range(config.num_heads)]
    for i, (term, (mean, count)) in enumerate(zip(got.values(), want, strict=True)):
        assert term.weight == pytest.approx(config.decay**i)
        assert float(term.denominator) == count
        if count:
            value = float(term.numerator.detach()) / count
            assert value == pytest.approx(float(mean.detach()), abs=1e-5)
    loss = sum(config.decay**i * mean for i, (mean, _) in enumerate(want))
    if loss.requires_grad:
        loss.backward()
    assert_gradients(draft, got, weights)


@pytest.mark.parametrize("config", VARIANTS)
def test_losses_and_gradients(config):
    assert_equal_to_loops(medusa(**config), make_batch())


@pytest.mark.parametrize("seed", range(12))
def test_losses_and_gradients_on_any_batch(seed):
    """Also on rows too short for the last head, and without a supervised token at all."""
    assert_equal_to_loops(medusa(seed, **VARIANTS[seed % 3]), random_batch(seed))


def test_a_batch_worked_by_hand():
    """Heads that give the hidden state as logits show what each reads and predicts."""
    draft = medusa(vocab_size=8, num_heads=2)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.zero_()
        for lm_head in draft.lm_heads:
            lm_head.weight.copy_(torch.eye(8))
    hidden = torch.zeros(1, 5, 8)
    hidden[0, 1, 6] = 3.0
    batch = {
        "input_ids": torch.tensor([[0, 0, 1, 6, 6]]).int(),
        "loss_mask": torch.tensor([[0, 0, 0, 1, 0]], dtype=torch.uint8),
        "last_hidden_state": hidden,
        "sample": torch.zeros(1, dtype=torch.int64),
    }
    got = run(draft, batch)
    # Token 3 is predicted by head 0 from g[1], which says 6, and by head 1 from g[0]: no idea.
    losses = [float(t.numerator.detach()) for t in got.values()]
    assert losses == pytest.approx([math.log(7 + math.e**3) - 3, math.log(8)])
    assert [float(t.denominator) for t in got.values()] == [1, 1]


@pytest.mark.parametrize("seed", range(4))
def test_proposals_come_from_the_last_known_hidden_state(seed):
    draft, batch = medusa(seed, **VARIANTS[seed]), random_batch(seed)
    weights = {name: w.detach() for name, w in double_weights(draft).items()}
    found = places(batch)
    got = draft.predict(batch, anchors(found))
    assert got.shape == (len(found), draft.depth, VOCAB)
    for logits, (row, a) in zip(got, found, strict=True):
        want = oracle.proposals(weights, batch, row, a, draft.depth)
        torch.testing.assert_close(logits, want, atol=1e-6, rtol=0)
    assert draft.predict(batch, anchors([])).shape == (0, draft.depth, VOCAB)


def test_only_features_before_the_anchor_count():
    draft, batch = medusa(), make_batch()
    for a in (1, 3, 6):
        chosen = anchors([(0, a), (1, a)])
        before = draft.predict(batch, chosen)
        later = {name: x.clone() for name, x in batch.items()}
        later["last_hidden_state"][:, a:] += 5.0
        assert torch.equal(draft.predict(later, chosen), before)
        later["last_hidden_state"][:, a - 1] += 5.0
        assert not torch.allclose(draft.predict(later, chosen), before)


def test_a_fresh_draft_is_the_targets_head_and_a_loaded_one_is_not(tmp_path):
    target, batch = head(), make_batch()
    draft = MedusaDraft(MedusaDraft.config_from_cache(manifest(), {"num_heads": "3"}))
    draft.attach_head(target)
    draft.start(None, [], target)
    hidden = batch["last_hidden_state"][0, 3]
    logits = draft.predict(batch, anchors([(0, 4)]))[0]
    torch.testing.assert_close(logits, target(hidden).expand(3, -1))
    assert all(p.requires_grad for p in draft.parameters())

    trained = medusa(5).float()
    trained.save_pretrained(tmp_path)
    loaded = type(draft).from_pretrained(tmp_path)
    loaded.attach_head(target)
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, trained.state_dict()[name]), name


def test_the_vocabulary_may_be_taken_in_parts(monkeypatch):
    draft, batch = medusa(distill=0.5), make_batch()
    want = {name: t.numerator.detach() for name, t in run(draft, batch).items()}
    monkeypatch.setattr(slot_losses, "MAX_LOGITS", 3 * VOCAB)
    for name, term in run(draft, batch).items():
        torch.testing.assert_close(term.numerator.detach(), want[name])
