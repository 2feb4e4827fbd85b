"""An EAGLE-3 draft computes what the paper's formulas say, step by step and slot by slot."""

import pytest
import torch
from draft_cases import VOCAB, head
from draft_cases import batch as make_batch
from eagle3_cases import CHUNKED, IMAGE_ID, INTERLEAVED, USED, eagle3, know, random_batch
from eagle3_oracle import Oracle, total
from oracle_parts import double_weights
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLTextConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from dspark.schemas.errors import InputError
from dspark.train_from_cache.batch import Anchors
from dspark.train_from_cache.draft_parts import slot_losses
from dspark.train_from_cache.draft_parts.row_random import RowRandom
from dspark.train_from_cache.loop import total_loss
from dspark.train_from_cache.target_head import TargetHead
from dspark.train_from_cache.teacher import Teacher

VARIANTS = [
    {},
    {"ttt_steps": 7},
    {"ttt_steps": 1, "loss_mask": "unshifted"},
    {"loss_mask": "unshifted", "attention_bias": True},
    {"draft_vocab_size": VOCAB, "norm_before_residual": True},
    {"fc_norm": True, "norm_output": True, "image_embeds": "token"},
    {"norm_before_fc": True, "mrope": CHUNKED},
    {"mrope": INTERLEAVED, "image_embeds": "token", "ttt_decay": 0.5},
]


def oracle(draft):
    weights = double_weights(draft)
    used = USED if draft.config.draft_vocab_size == len(USED) else list(range(VOCAB))
    return Oracle(weights, draft.config, used, head().embeddings[IMAGE_ID])


def run(draft, batch):
    return draft(batch, Teacher(batch, head()), RowRandom(0, 0, batch["sample"]))


def assert_equal_to_loops(draft, batch):
    reference = oracle(draft)
    want = reference.losses(batch)
    got = run(draft, batch)
    steps, decay = draft.config.ttt_steps, draft.config.ttt_decay
    assert list(got) == [f"step_{i}" for i in range(steps)]
    for i, (term, (value, count)) in enumerate(zip(got.values(), want, strict=True)):
        assert term.weight == pytest.approx(decay**i)
        assert float(term.denominator) == count
        assert not term.denominator.requires_grad
        assert float(term.numerator.detach()) == pytest.approx(float(value.detach()), abs=1e-5)
    terms = [t.weight * t.numerator / t.denominator for t in got.values() if t.denominator]
    loss = sum(terms, 0 * got["step_0"].numerator)
    expected = total(want, decay)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-5)
    loss.backward()
    if expected.requires_grad:
        expected.backward()
    for name, parameter in draft.named_parameters():
        gradient = reference.w[name].grad
        gradient = torch.zeros_like(parameter) if gradient is None else gradient
        torch.testing.assert_close(
            parameter.grad, gradient, atol=1e-5, rtol=1e-5, msg=lambda m, n=name: n + m
        )
    return want


@pytest.mark.parametrize("variant", VARIANTS)
def test_losses_and_gradients(variant):
    batch = make_batch() | {"position_ids": torch.arange(12).repeat(2, 3, 1).cumsum(1).int()}
    counts = [count for _, count in assert_equal_to_loops(eagle3(**variant), batch)]
    assert all(counts)


@pytest.mark.parametrize("seed", range(24))
def test_losses_and_gradients_of_random_batches(seed):
    draft = eagle3(seed, **VARIANTS[seed % len(VARIANTS)])
    assert_equal_to_loops(draft, random_batch(seed))


def test_the_slots_that_count():
    """Row 1 of the batch, worked by hand: 9 tokens, those at 1-5, 7 and 8 supervised."""
    batch = {name: x[1:] for name, x in make_batch().items()}
    supervised = [1, 2, 3, 4, 5, 7, 8]
    every = {"draft_vocab_size": VOCAB}
    # Slot t takes steps 0, 1, 2 towards tokens 1, 2 and 3 after it: one slot less with each step.
    got = run(eagle3(**every), batch)
    wanted = [sum(p - i >= 1 for p in supervised) for i in range(3)]
    assert batch["attention_mask"][:, :9].all()
    assert [float(t.denominator) for t in got.values()] == wanted == [7, 6, 5]
    # Unshifted, slot 8 counts no more, for it is fed no token.
    got = run(eagle3(**every, loss_mask="unshifted"), batch)
    wanted = [sum(t - i >= 0 for t in supervised if t < 8) for i in range(3)]
    assert [float(t.denominator) for t in got.values()] == wanted == [6, 6, 5]
    # Where the target's own choice is unknown to the draft, it is not held to it.
    batch["logits"][0, 5, 1] = 50.0
    got = run(eagle3(), batch)
    before = [count for _, count in oracle(eagle3()).losses(batch)]
    assert [float(t.denominator) for t in got.values()] == before
    draft = eagle3(**every)
    know(draft, [v for v in range(VOCAB) if v != 1])
    draft.d2t[-1] = 0
    chosen = batch["logits"][0].argmax(-1)
    lost = sum(int(chosen[p]) == 1 for p in supervised)
    assert float(run(draft, batch)["step_0"].denominator) == 7 - lost < 7


def test_losses_do_not_depend_on_how_slots_are_parted(monkeypatch):
    batch = make_batch()
    whole, parts = eagle3(), eagle3()
    total_loss(run(whole, batch)).backward()
    monkeypatch.setattr(slot_losses, "MAX_LOGITS", 80)
    total_loss(run(parts, batch)).backward()
    for (name, a), b in zip(whole.named_parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, msg=lambda m, n=name: n + m)


@pytest.mark.parametrize("variant", VARIANTS)
def test_predictions_are_a_literal_rollout(variant):
    draft = eagle3(seed=4, **variant)
    batch = make_batch(seed=4) | {"position_ids": torch.arange(12).repeat(2, 3, 1).cumsum(1).int()}
    reference = oracle(draft)
    # Includes the row's start, an anchor at a masked token, pictures ahead, and the row's end.
    places = [(1, 7), (0, 4), (0, 5), (0, 0), (1, 0), (0, 2), (0, 10), (1, 1), (0, 11)]
    row, position = (torch.tensor(x) for x in zip(*places, strict=True))
    got = draft.predict(batch, Anchors(row, position))
    assert got.shape == (9, draft.depth, VOCAB) and got.isfinite().all()
    for i, (b, a) in enumerate(places):
        want = torch.stack(reference.predictions(batch, b, a)).detach()
        assert len(want) == min(draft.depth, 12 - a)
        p = got[i, : len(want)].softmax(-1)
        torch.testing.assert_close(p, want, atol=1e-6, rtol=0)
        unknown = [v for v in range(VOCAB) if v not in reference.used]
        assert (p[:, unknown] == 0).all()
    assert draft.predict(batch, Anchors(row[:0], position[:0])).shape == (0, draft.depth, VOCAB)


@pytest.mark.parametrize("variant", VARIANTS)
def test_only_features_before_the_anchor_count(variant):
    draft, batch = eagle3(**variant), make_batch()
    batch["position_ids"] = torch.arange(12).repeat(2, 3, 1).int()
    for a in (1, 3, 6):
        anchors = Anchors(torch.tensor([0, 1]), torch.tensor([a, a]))
        before = draft.predict(batch, anchors)
        later = {name: x.clone() for name, x in batch.items()}
        for name in later:
            if name.startswith("hidden_states."):
                later[name][:, a:] += 5.0
        later["last_hidden_state"] += 5.0
        later["position_ids"][..., a:] += 5
        later["inputs_embeds"][:, a + draft.depth :] += 5.0
        assert torch.equal(draft.predict(later, anchors), before)
        later["hidden_states.0"][:, a - 1] += 5.0
        assert not torch.allclose(draft.predict(later, anchors), before)


def test_a_training_step_is_what_a_server_runs():
    """The loss of step i is that of ``predict`` at the anchor after the slot."""
    draft, batch = eagle3(draft_vocab_size=VOCAB), make_batch()
    got = run(draft, batch)
    sums = [0.0] * draft.depth
    for row, length in enumerate(batch["length"].tolist()):
        for a in range(1, length):
            anchors = Anchors(torch.tensor([row]), torch.tensor([a]))
            log_p = draft.predict(batch, anchors)[0].log_softmax(-1)
            for i in range(draft.depth):
                whole = batch["attention_mask"][row, a - 1 : a + i + 1].all()
                if a + i < length and batch["loss_mask"][row, a + i] and whole:
                    q = batch["logits"][row, a + i].double().softmax(-1)
                    sums[i] -= float(q @ log_p[i])
    assert [float(t.numerator.detach()) for t in got.values()] == pytest.approx(sums, abs=1e-5)


def test_padding_and_masked_tokens_do_not_count():
    draft, batch = eagle3(), make_batch()
    want = {name: t.numerator.detach() for name, t in run(draft, batch).items()}
    # Row 1 ends at 9. Token 2 of row 0 is masked: its slot holds its features and token 3, and
    # the slot before is fed its embedding, but is a key that others see.
    for name in batch:
        if name.startswith("hidden_states."):
            batch[name][1, 9:] = batch[name][0, 2] = 50.0
    batch["inputs_embeds"][1, 9:] = 50.0
    got = {name: t.numerator.detach() for name, t in run(draft, batch).items()}
    assert got == want


def test_a_picture_is_fed_as_the_server_will_feed_it():
    batch = make_batch()
    blind = {**batch, "inputs_embeds": batch["inputs_embeds"].clone()}
    blind["inputs_embeds"][batch["image_mask"].bool()] = 7.0
    for kind, moved in (("merged", True), ("token", False)):
        a, b = (total_loss(run(eagle3(image_embeds=kind), x)) for x in (batch, blind))
        assert (a != b) == moved


def test_a_batch_without_supervised_slots_gives_zero_losses_that_reach_every_parameter():
    draft, batch = eagle3(fc_norm=True, norm_before_fc=True), make_batch()
    batch["loss_mask"] = torch.zeros_like(batch["loss_mask"])
    got = run(draft, batch)
    assert all(t.numerator.item() == 0 and t.denominator.item() == 0 for t in got.values())
    sum(t.numerator for t in got.values()).backward()
    for name, parameter in draft.named_parameters():
        assert parameter.grad is not None and not parameter.grad.any(), name


def test_a_masked_first_token_gives_no_nan():
    draft, batch = eagle3(), make_batch()
    batch["attention_mask"][:, :2] = 0
    assert all(t.numerator.isfinite() for t in run(draft, batch).values())


def test_top_k_logits_that_are_all_unknown_to_the_draft_give_no_nan():
    draft, batch = eagle3(), make_batch()
    logits = batch.pop("logits")
    logits[:, ::2, USED] -= 100.0
    batch["logits_topk.values"], indices = logits.topk(2)
    batch["logits_topk.indices"] = indices.int()
    full = torch.full_like(logits, -torch.inf).scatter(-1, indices, batch["logits_topk.values"])
    want = oracle(draft).losses({**batch, "logits": full})
    got = run(draft, batch)
    for term, (value, count) in zip(got.values(), want, strict=True):
        assert float(term.denominator) == count
        assert float(term.numerator.detach()) == pytest.approx(float(value.detach()), abs=1e-5)
    total_loss(got).backward()
    assert all(p.grad.isfinite().all() for p in draft.parameters())


@pytest.mark.parametrize(
    ("config", "rotary", "rope"),
    [
        (Qwen2_5_VLTextConfig, Qwen2_5_VLRotaryEmbedding, CHUNKED),
        (Qwen3VLTextConfig, Qwen3VLTextRotaryEmbedding, INTERLEAVED),
    ],
)
def test_positions_turn_as_in_the_targets_own_model(config, rotary, rope):
    draft = eagle3(mrope=rope)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "head_dim": 8}
    theirs = rotary(config(**sizes, rope_parameters=draft.config.rope_parameters))
    position = random_batch(3)["position_ids"].long()
    x = torch.zeros(1)
    for a, b in zip(draft.rotary_emb(x, position), theirs(x, position.movedim(1, 0)), strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)


def test_the_placeholder_must_be_in_the_targets_table():
    small = TargetHead(head().embeddings[:IMAGE_ID], head().weight)
    with pytest.raises(InputError, match="has 11 rows, none for its placeholder 11; use merged"):
        eagle3(image_embeds="token").attach_head(small)
    eagle3().attach_head(small)
