"""A DFlash draft computes what the paper's formulas say, slot by slot."""

import dflash_oracle as oracle
import pytest
import torch
from draft_cases import HIDDEN, LAYERS, VOCAB, dflash, dspark, head
from draft_cases import batch as make_batch
from oracle_parts import double_weights

from dspark.train_from_cache.batch import Anchors, supervised_anchors
from dspark.train_from_cache.draft_parts import slot_losses
from dspark.train_from_cache.draft_parts.row_random import RowRandom
from dspark.train_from_cache.drafts.dflash import DFlashConfig
from dspark.train_from_cache.teacher import Teacher


def random_batch(seed):
    """One to three rows of 4 to 12 tokens, padded; holes in every mask."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low, high):
        return int(torch.randint(low, high, (), generator=generator))

    rows = integer(1, 4)
    lengths = torch.tensor([integer(4, 13) for _ in range(rows)])
    length = int(lengths.max())
    real = torch.arange(length) < lengths[:, None]

    def mask(share):
        drawn = torch.rand(rows, length, generator=generator) < share
        return (drawn & real).to(torch.uint8)

    def normal(width):
        return torch.randn(rows, length, width, generator=generator) * real[..., None]

    loss_mask = mask(0.7)
    loss_mask[0, lengths[0] - 3 : lengths[0]] = 1
    ids = torch.randint(0, VOCAB, (rows, length), generator=generator).int()
    return {
        "input_ids": ids * real,
        "attention_mask": mask(0.9),
        "loss_mask": loss_mask,
        "last_hidden_state": normal(HIDDEN),
        "logits": 2 * normal(VOCAB),
        **{f"hidden_states.{k}": normal(HIDDEN) for k in LAYERS},
        "length": lengths,
        "sample": torch.arange(rows),
    }


BATCHES = [make_batch, *(lambda s=s: random_batch(s) for s in range(5))]


def oracle_weights(draft, seed=0, bias=True):
    return {**double_weights(draft), **oracle.target_weights(head(seed + 1, bias=bias))}


def losses(draft, batch):
    return draft(batch, Teacher(batch, head()), RowRandom(0, 0, batch["sample"]))


@pytest.mark.parametrize("case", range(len(BATCHES)))
def test_losses_and_gradients(case):
    batch = BATCHES[case]()
    draft = dflash(case, distill_weight=0.5, block_size=2 + case % 4)
    weights = oracle_weights(draft, case)
    blocks = oracle.all_blocks(weights, batch, draft.config)
    want = oracle.loss_sums(batch, blocks, draft.config.gamma)

    got = losses(draft, batch)

    assert {name: term.weight for name, term in got.items()} == {"ce": 1.0, "distill": 0.5}
    for name, term in got.items():
        mean = float(term.numerator.detach() / term.denominator)
        assert mean == pytest.approx(float((want[name] / want["weight"]).detach()), abs=1e-5), name
        assert float(term.denominator) == pytest.approx(float(want["weight"]), rel=1e-6)

    sum(t.weight * t.numerator / t.denominator for t in got.values()).backward()
    ((want["ce"] + 0.5 * want["distill"]) / want["weight"]).backward()
    for name, parameter in draft.named_parameters():
        torch.testing.assert_close(
            parameter.grad, weights[name].grad, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: n + m
        )


@pytest.mark.parametrize("case", range(len(BATCHES)))
def test_predictions(case):
    batch = BATCHES[case]()
    draft = dflash(case, bias=bool(case % 2), block_size=2 + case % 4)
    anchors = supervised_anchors(batch["loss_mask"])
    weights = oracle_weights(draft, case, bool(case % 2))
    blocks = oracle.all_blocks({k: w.detach() for k, w in weights.items()}, batch, draft.config)

    logits = draft.predict(batch, anchors)

    assert logits.shape == (len(blocks), draft.depth, VOCAB)
    for got, block in zip(logits, blocks, strict=True):
        torch.testing.assert_close(got, torch.stack(block.logits), atol=1e-6, rtol=0)


def test_distillation_is_off_unless_asked_for_and_needs_no_teacher():
    draft, batch = dflash(), make_batch()
    got = draft(batch, None, RowRandom(0, 0, batch["sample"]))
    assert set(got) == {"ce"} and got["ce"].weight == 1.0


@pytest.mark.parametrize(("size", "gamma"), [(16, 7), (10, 5), (8, 4), (4, 2), (24, 9)])
def test_slots_weigh_as_published_for_their_block_size(size, gamma):
    assert DFlashConfig(block_size=size).gamma == gamma
    assert DFlashConfig(block_size=size, loss_gamma=3.5).gamma == 3.5


def test_only_features_before_the_anchor_count():
    draft, batch = dflash(), make_batch()
    features = [name for name in batch if name.startswith("hidden_states.")]
    for position in (3, 5, 8):
        anchors = Anchors(torch.tensor([0, 1]), torch.tensor([position, position]))
        before = draft.predict(batch, anchors)
        later = {k: v.clone() for k, v in batch.items()}
        for name in [*features, "last_hidden_state"]:
            later[name][:, position:] += 5.0
        later["input_ids"][:, position + 1 :] += 1
        assert torch.equal(draft.predict(later, anchors), before)
        for name in features:
            later[name][:, position - 1] += 5.0
        assert not torch.allclose(draft.predict(later, anchors), before)


def test_predictions_keep_the_order_of_the_anchors_and_there_may_be_none():
    draft, batch = dflash(), make_batch()
    row, position = torch.tensor([1, 0, 1, 0, 0]), torch.tensor([7, 10, 0, 4, 5])
    together = draft.predict(batch, Anchors(row, position))
    for i in range(5):
        alone = draft.predict(batch, Anchors(row[i : i + 1], position[i : i + 1]))
        torch.testing.assert_close(together[i], alone[0], atol=1e-12, rtol=0)
    assert draft.predict(batch, Anchors(row[:0], position[:0])).shape == (0, 3, VOCAB)


def test_a_batch_without_anchors_gives_zero_losses_that_reach_every_parameter():
    draft, batch = dflash(distill_weight=1.0), make_batch()
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    got = losses(draft, batch)
    assert all(t.numerator.item() == 0 and t.denominator.item() == 0 for t in got.values())
    sum(t.numerator for t in got.values()).backward()
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_losses_in_parts_are_the_losses_at_once(monkeypatch):
    draft, batch = dflash(distill_weight=0.5), make_batch()

    def run():
        draft.zero_grad()
        got = losses(draft, batch)
        sum(t.weight * t.numerator for t in got.values()).backward()
        return [t.numerator.detach() for t in got.values()], [p.grad for p in draft.parameters()]

    at_once = run()
    monkeypatch.setattr(slot_losses, "MAX_LOGITS", 4 * VOCAB)
    torch.testing.assert_close(run(), at_once, atol=1e-9, rtol=1e-9)


def test_the_backbone_is_that_of_dspark():
    """Equal weights give equal hidden states: one module, not two."""
    batch = make_batch()
    one, other = dflash(bias=False), dspark(block_size=4)
    missing, unknown = other.load_state_dict(one.state_dict(), strict=False)
    assert not unknown and all(n.split(".")[0] in _NOT_SHARED for n in missing)
    other.embed_tokens.weight.data.copy_(one.embeddings)
    anchor, keep = torch.tensor([[4, 7], [3, 5]]), torch.ones(2, 2, dtype=torch.bool)
    hidden = one.encode(batch, anchor, keep)
    assert torch.equal(hidden, other.encode(batch, anchor, keep))


_NOT_SHARED = {"embed_tokens", "lm_head", "markov_head", "confidence_head"}
