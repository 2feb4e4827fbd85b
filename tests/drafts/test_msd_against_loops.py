"""An MSD draft computes what the paper's formulas say, slot by slot."""

import msd_oracle as oracle
import pytest
import torch
from draft_cases import batch as make_batch
from draft_cases import head, msd
from oracle_parts import double_weights
from torch import nn

from dspark.train_from_cache.batch import Anchors
from dspark.train_from_cache.draft_parts.row_random import RowRandom
from dspark.train_from_cache.teacher import Teacher


def head_weights(draft):
    return draft.head_weight.double(), draft.head_bias.double()


def run(draft, batch, teacher_batch=None, seed=0):
    random = RowRandom(seed, 0, batch["sample"])
    return draft(batch, Teacher(teacher_batch or batch, head()), random)


@pytest.mark.parametrize("bias", [True, False])
def test_losses_and_gradients(bias):
    draft, batch = msd(bias=bias), make_batch()
    hidden = batch["last_hidden_state"]
    weights = double_weights(draft)
    want = oracle.loss_means(weights, head_weights(draft), batch, hidden, hidden)

    got = run(draft, batch)

    assert {name: term.weight for name, term in got.items()} == {"smooth_l1": 1.0, "soft_ce": 0.1}
    for name, term in got.items():
        assert float(term.denominator) == want["count"] == 13
        mean = float(term.numerator.detach() / term.denominator)
        assert mean == pytest.approx(float(want[name].detach()), abs=1e-6), name
    sum(t.weight * t.numerator / t.denominator for t in got.values()).backward()
    (want["smooth_l1"] + 0.1 * want["soft_ce"]).backward()
    for name, parameter in draft.named_parameters():
        if name == "embed_tokens.weight":
            assert parameter.grad is None, "the embeddings are the target's"
        else:
            torch.testing.assert_close(
                parameter.grad,
                weights[name].grad,
                atol=1e-6,
                rtol=1e-6,
                msg=lambda m, n=name: n + m,
            )


def test_a_batch_worked_by_hand():
    """The layer is made to pass its input through, so that each slot's numbers can be read off."""
    draft = msd()
    size, length = 8, 5
    with torch.no_grad():
        for name in ("o_proj", "down_proj"):
            owner = draft.layers[0].self_attn if name == "o_proj" else draft.layers[0].mlp
            getattr(owner, name).weight.zero_()
        # fc adds the embedding to ten times the hidden state.
        draft.fc.weight.copy_(torch.cat([torch.eye(size), 10 * torch.eye(size)], 1))
        draft.fc.bias.zero_()
    ramp = torch.arange(1.0, length + 1)[None, :, None].expand(1, length, size)
    batch = {
        "input_ids": torch.zeros(1, length, dtype=torch.int32),
        "attention_mask": torch.ones(1, length, dtype=torch.uint8),
        # The last token's own slot, 4, would predict a token beyond the row: slots 2 and 3 train.
        "loss_mask": torch.tensor([[1, 0, 0, 1, 1]], dtype=torch.uint8),
        "image_mask": torch.tensor([[0, 1, 0, 1, 0]], dtype=torch.uint8),
        "inputs_embeds": ramp,
        "last_hidden_state": ramp / 10,
        "logits": torch.zeros(1, length, 13),
        "sample": torch.zeros(1, dtype=torch.int64),
    }
    # Slot 2: token 3 is a picture's, so its input is E[3] = 4; it should be g[3] = 0.4: 3.6 - 0.5.
    # Slot 3: token 4 is text: E[4] + 10 g[3] = 5 + 4 = 9; it should be g[4] = 0.5: 8.5 - 0.5.
    got = run(draft, batch)["smooth_l1"]
    assert float(got.denominator) == 2
    assert float(got.numerator.detach()) == pytest.approx(3.1 + 8.0, abs=1e-5)

    zero_tail = draft._slots(batch, torch.zeros(1, length, size, dtype=torch.float64)).inputs
    assert zero_tail[0, :, 0].tolist() == [2, 3, 4, 5, 0]


def test_the_input_may_be_zeroed_while_the_teacher_is_not():
    draft, batch = msd(), make_batch()
    blind = {**batch, "last_hidden_state": torch.zeros_like(batch["last_hidden_state"])}
    want = oracle.loss_means(
        double_weights(draft),
        head_weights(draft),
        batch,
        blind["last_hidden_state"],
        batch["last_hidden_state"],
    )
    for name, term in run(draft, blind, batch).items():
        mean = float(term.numerator.detach() / term.denominator)
        assert mean == pytest.approx(float(want[name].detach()), abs=1e-6), name


def test_noise_moves_the_input_features_in_training_alone():
    batch = make_batch()
    quiet, noisy = msd(), msd(feature_noise=0.2)
    assert noisy.eval() is noisy
    clean = run(quiet, batch)["smooth_l1"].numerator
    assert run(noisy, batch)["smooth_l1"].numerator == clean
    noisy.train()
    uniform = RowRandom(5, 0, batch["sample"]).uniform(12, 8)
    scale = torch.tensor([12, 9])[:, None, None]
    shifted = batch["last_hidden_state"] + (uniform - 0.5) * 0.2 * 512 / scale
    want = oracle.loss_means(
        double_weights(noisy), head_weights(noisy), batch, shifted, batch["last_hidden_state"]
    )
    term = run(noisy, batch, seed=5)["smooth_l1"]
    mean = float(term.numerator.detach() / term.denominator)
    assert mean == pytest.approx(float(want["smooth_l1"].detach()), abs=1e-6)
    assert term.numerator != clean


def test_predictions_are_a_literal_rollout():
    draft, batch = msd(seed=4), make_batch(seed=4)
    weights = {name: w.detach() for name, w in double_weights(draft).items()}
    # Includes the row's start, an anchor at a masked token, pictures ahead, and the row's end.
    places = [(1, 7), (0, 4), (0, 5), (0, 0), (1, 0), (0, 2), (0, 10), (1, 1), (0, 11)]
    row, position = (torch.tensor(x) for x in zip(*places, strict=True))
    got = draft.predict(batch, Anchors(row, position))
    assert got.shape == (9, 4, 13) and got.isfinite().all()
    for i, (b, a) in enumerate(places):
        want = oracle.rollout(weights, head_weights(draft), batch, b, a, draft.depth)
        assert len(want) == min(4, 12 - a)
        torch.testing.assert_close(got[i, : len(want)], torch.stack(want), atol=1e-6, rtol=0)
    assert draft.predict(batch, Anchors(row[:0], position[:0])).shape == (0, 4, 13)


def test_only_features_before_the_anchor_count():
    draft, batch = msd(), make_batch()
    for a in (1, 3, 6):
        anchors = Anchors(torch.tensor([0, 1]), torch.tensor([a, a]))
        before = draft.predict(batch, anchors)
        later = {name: x.clone() for name, x in batch.items()}
        later["last_hidden_state"][:, a:] += 5.0
        later["inputs_embeds"][:, a + draft.depth :] += 5.0
        assert torch.equal(draft.predict(later, anchors), before)
        later["last_hidden_state"][:, a - 1] += 5.0
        assert not torch.allclose(draft.predict(later, anchors), before)


def test_padding_and_masked_tokens_do_not_count():
    draft, batch = msd(), make_batch()
    want = {name: t.numerator.detach() for name, t in run(draft, batch).items()}
    # Row 1 ends at 9. Token 2 of row 0 is masked: its slot holds g[2] and the embedding of token 3.
    batch["last_hidden_state"][1, 9:] = 50.0
    batch["inputs_embeds"][1, 9:] = 50.0
    batch["last_hidden_state"][0, 2] = 50.0
    got = {name: t.numerator.detach() for name, t in run(draft, batch).items()}
    assert got == want


def test_a_batch_without_supervised_slots_gives_zero_losses_that_reach_every_parameter():
    draft, batch = msd(), make_batch()
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    got = run(draft, batch)
    assert all(t.numerator.item() == 0 and t.denominator.item() == 0 for t in got.values())
    sum(t.numerator for t in got.values()).backward()
    for name, parameter in draft.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and not parameter.grad.any(), name


def test_a_masked_first_token_gives_no_nan():
    draft, batch = msd(), make_batch()
    batch["attention_mask"][:, :2] = 0
    terms = run(draft, batch)
    assert all(t.numerator.isfinite() for t in terms.values())
    assert isinstance(draft.fc, nn.Linear)
