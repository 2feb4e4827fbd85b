"""A ViSpec draft computes what the paper's formulas say, slot by slot and picture by picture."""

import pytest
import torch
import vispec_oracle as oracle
from draft_cases import batch as make_batch
from draft_cases import head
from feature_cases import anchors, assert_gradients, eagle, run, vispec
from oracle_parts import double_weights
from random_batches import places, random_batch

from dspark.train_from_cache.batch import supervised_anchors
from dspark.train_from_cache.draft_parts import slot_losses
from dspark.train_from_cache.draft_parts.picture_spans import picture_spans
from dspark.train_from_cache.draft_parts.ranking import list_mle
from dspark.train_from_cache.draft_parts.row_random import RowRandom

WEIGHTS = {
    1: {"smooth_l1": 1.0, "soft_ce": 0.1, "list_mle": 0.01},
    2: {"l1": 10.0, "list_mle": 0.1},
}


def head_weights(draft):
    return draft.head_weight.double(), draft.head_bias.double()


def read_fields(draft, batch):
    """The batch without the fields that the draft does not ask for."""
    names = {*type(draft).needed_fields(draft.config), "length", "sample", "logits"}
    return {name: x for name, x in batch.items() if name in names}


def assert_equal_to_loops(draft, batch):
    config, weights = draft.config, double_weights(draft)
    want, count = oracle.loss_means(
        weights,
        head_weights(draft),
        batch,
        batch["last_hidden_state"],
        config.stage,
        config.mtp_steps,
    )
    got = run(draft, read_fields(draft, batch))
    assert {name: term.weight for name, term in got.items()} == WEIGHTS[config.stage]
    for name, term in got.items():
        assert float(term.denominator) == count
        if count:
            mean = float(term.numerator.detach()) / count
            assert mean == pytest.approx(float(want[name].detach()), abs=1e-5), name
    loss = sum(WEIGHTS[config.stage][name] * value for name, value in want.items())
    if loss.requires_grad:
        loss.backward()
    assert_gradients(draft, got, weights)


@pytest.mark.parametrize(
    "config",
    [
        {"stage": 1},
        {"num_query_tokens": 2},
        {"num_query_tokens": 4, "mtp_steps": 0},
        {"mtp_steps": 2, "num_key_value_heads": 2},
        {"attention_bias": False},
    ],
)
def test_losses_and_gradients(config):
    assert_equal_to_loops(vispec(**config), make_batch())


@pytest.mark.parametrize("seed", range(14))
def test_losses_and_gradients_of_stage_2_on_any_batch(seed):
    """Several pictures in a row, some shorter than what they are compressed to, or none."""
    assert_equal_to_loops(vispec(seed, num_query_tokens=2 + seed % 3), random_batch(seed))


@pytest.mark.parametrize("seed", range(4))
def test_losses_and_gradients_of_stage_1_on_any_batch(seed):
    assert_equal_to_loops(vispec(seed, stage=1), random_batch(seed))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("seed", range(5))
def test_predictions_are_a_literal_rollout(seed, stage):
    draft, batch = vispec(seed, stage=stage, num_query_tokens=2 + seed % 3), random_batch(seed)
    weights = {name: w.detach() for name, w in double_weights(draft).items()}
    found = places(batch)
    got = draft.predict(read_fields(draft, batch), anchors(found))
    assert got.isfinite().all()
    for logits, (row, a) in zip(got, found, strict=True):
        want = oracle.rollout(weights, head_weights(draft), batch, row, a, draft.depth, stage)
        torch.testing.assert_close(
            logits[: len(want)], torch.stack(want), atol=1e-6, rtol=0, msg=lambda m, a=a: f"{a}{m}"
        )
    assert draft.predict(batch, anchors([])).shape == (0, 4, 13)


@pytest.mark.parametrize("stage", [1, 2])
def test_only_features_before_the_anchor_count(stage):
    draft, batch = vispec(stage=stage), make_batch()
    for a in (2, 3, 8):
        chosen = anchors([(0, a), (1, a)])
        before = draft.predict(batch, chosen)
        later = {name: x.clone() for name, x in batch.items()}
        later["last_hidden_state"][:, a:] += 5.0
        later["inputs_embeds"][:, a + draft.depth :] += 5.0
        torch.testing.assert_close(draft.predict(later, chosen), before, atol=1e-12, rtol=0)
        later["last_hidden_state"][:, a - 1] += 5.0
        assert not torch.allclose(draft.predict(later, chosen), before)


def test_a_picture_is_seen_by_what_comes_after_it_and_by_nothing_else():
    draft, batch = vispec(), make_batch()
    chosen = anchors([(0, 3), (0, 6), (0, 8), (0, 10)])
    before = draft.predict(batch, chosen)
    batch["inputs_embeds"][0, 7] += 5.0  # the second picture, one token long
    after = draft.predict(batch, chosen)
    changed = (after - before).abs().amax((1, 2)) > 1e-9
    assert changed.tolist()[0] is False and changed.tolist()[2:] == [True, True]


def test_stage_2_begins_where_stage_1_ended():
    """Without a picture, and with fresh vision modules, both stages compute the same."""
    first, second, batch = vispec(stage=1), vispec(), make_batch()
    second.load_state_dict(first.state_dict(), strict=False)
    second._init_weights(second.img_fc)
    batch["image_mask"].zero_()
    chosen = supervised_anchors(batch["loss_mask"])
    torch.testing.assert_close(first.predict(batch, chosen), second.predict(batch, chosen))


def test_stage_1_is_eagle():
    first, plain, batch = vispec(stage=1, attention_bias=False), eagle(), make_batch()
    plain = eagle(num_key_value_heads=4)
    plain.load_state_dict(first.state_dict())
    plain.head_weight, plain.head_bias = first.head_weight, first.head_bias
    a, b = run(first, batch), run(plain, batch)
    assert all(torch.equal(a[name].numerator, b[name].numerator) for name in b)


def test_pictures_left_out_give_zeros_and_are_not_seen():
    draft, batch = vispec(num_query_tokens=2), make_batch()
    batch["image_mask"][0, 1:4] = 1  # slots 0, 1, 2: the last one stays
    hidden = batch["last_hidden_state"].double()
    vision = draft._vision(batch)
    out = draft._predicted(batch, hidden, vision)
    assert not out[0, :2].any() and out[0, 2].any() and out[0, 3].any()
    assert not out[1, 9:].any(), "padding"
    noisy = hidden.clone()
    noisy[0, :3] += 7.0
    assert torch.equal(draft._predicted(batch, noisy, vision), out)


def test_a_batch_without_supervised_slots_or_pictures_reaches_every_parameter():
    draft, batch = vispec(), make_batch()
    batch["image_mask"].zero_()
    for name, term in run(draft, batch).items():
        assert term.numerator > 0, name
    batch["loss_mask"].zero_()
    got = run(draft, batch)
    assert all(t.numerator.item() == 0 and t.denominator.item() == 0 for t in got.values())
    sum(t.numerator for t in got.values()).backward()
    for name, parameter in draft.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and not parameter.grad.any(), name


def test_padding_does_not_count():
    draft, batch = vispec(), make_batch()
    want = {name: t.numerator.detach() for name, t in run(draft, batch).items()}
    batch["last_hidden_state"][1, 9:] = 50.0
    batch["inputs_embeds"][1, 9:] = 50.0
    for name, term in run(draft, batch).items():
        assert torch.equal(term.numerator.detach(), want[name])


@pytest.mark.parametrize("stage", [1, 2])
def test_noise_moves_the_input_features_in_training_alone(stage):
    batch = make_batch()
    noisy = vispec(stage=stage, feature_noise=0.2)
    quiet = run(vispec(stage=stage), batch)["list_mle"].numerator
    assert run(noisy.eval(), batch)["list_mle"].numerator == quiet
    hidden = batch["last_hidden_state"]
    uniform = RowRandom(5, 0, batch["sample"]).uniform(12, 8)
    scale = torch.tensor([12, 9])[:, None, None]
    shifted = hidden.double() + ((uniform - 0.5) * 0.2 * 512 / scale).double()
    want, count = oracle.loss_means(
        double_weights(noisy), head_weights(noisy), batch, shifted, stage
    )
    term = run(noisy.train(), batch, seed=5)["list_mle"]
    mean = float(term.numerator.detach()) / count
    assert mean == pytest.approx(float(want["list_mle"].detach()), abs=1e-5)


def test_it_runs_in_mixed_precision():
    draft, batch = vispec().float(), make_batch()
    with torch.autocast("cpu", torch.bfloat16):
        loss = sum(t.numerator for t in run(draft, batch).values())
        logits = draft.predict(batch, anchors([(0, 4)]))
    loss.backward()
    assert loss.isfinite() and logits.isfinite().all()
    assert all(p.grad is None or p.grad.isfinite().all() for p in draft.parameters())


def test_the_vocabulary_may_be_taken_in_parts(monkeypatch):
    draft, batch = vispec(), make_batch()
    want = {name: t.numerator.detach() for name, t in run(draft, batch).items()}
    monkeypatch.setattr(slot_losses, "MAX_LOGITS", 3 * 13)
    for name, term in run(draft, batch).items():
        torch.testing.assert_close(term.numerator.detach(), want[name])


def test_list_mle_worked_by_hand():
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    target = torch.tensor([[0.6, 0.1, 0.3]])
    # The order is 0, 2, 1: -log of e^0 / (e^0 + e^1 + e^2) and of e^1 / (e^1 + e^2).
    e = torch.e
    want = torch.tensor((1 + e + e**2) * (e + e**2) / e).log()
    torch.testing.assert_close(list_mle(logits, target), want[None], atol=1e-6, rtol=0)


def test_list_mle_has_no_order_for_what_the_target_never_says():
    logits = torch.randn(1, 20, dtype=torch.float64, requires_grad=True)
    target = torch.zeros(1, 20, dtype=torch.float64)
    target[0, [4, 7, 9]] = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    got = list_mle(logits, target)
    want = oracle.list_mle(logits[0], target[0], 3)
    torch.testing.assert_close(got[0], want)
    (mine,) = torch.autograd.grad(got.sum(), logits, retain_graph=True)
    (theirs,) = torch.autograd.grad(want, logits)
    torch.testing.assert_close(mine, theirs)


def test_a_teacher_of_few_stored_logits_gives_a_finite_loss():
    draft, batch = vispec(), make_batch()
    values, indices = batch.pop("logits").topk(3)
    batch |= {"logits_topk.values": values, "logits_topk.indices": indices}
    terms = run(draft, batch)
    sum(t.numerator for t in terms.values()).backward()
    assert all(t.numerator.isfinite() for t in terms.values())
    assert all(p.grad.isfinite().all() for p in draft.parameters() if p.requires_grad)


@pytest.mark.parametrize("seed", range(6))
def test_picture_spans_are_the_runs_of_the_mask(seed):
    mask = torch.rand(3, 9, generator=torch.Generator().manual_seed(seed)) < 0.15 * (1 + seed)
    got = picture_spans(mask)
    runs = []
    for row in range(3):
        last_ended = 0
        for t in range(9):
            assert got.before[row, t] == last_ended
            if mask[row, t] and not (t and mask[row, t - 1]):
                runs.append([row, t, t])
            if mask[row, t]:
                runs[-1][2] = t
                if t == 8 or not mask[row, t + 1]:
                    last_ended = len(runs)
    found = torch.stack([got.row, got.first, got.last], 1).tolist()
    assert found == runs


def test_the_head_of_another_target_is_refused():
    with pytest.raises(Exception, match="made for another target"):
        vispec().attach_head(type(head())(torch.zeros(13, 8), torch.zeros(14, 8)))
