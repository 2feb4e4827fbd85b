"""ViSpec checkpoints come back as they are, stage 2 starts from stage 1, and both train from a
cache alone."""

import pytest
import torch
from draft_cases import batch, head, manifest
from feature_cases import assert_config, fit, forget_field, losses, vispec
from safetensors.torch import load_file
from synthetic_cache import write_cache
from test_checkpoints import MSD, MSD_BIASES, assert_comes_back, saved_shapes

from dspark.schemas.errors import IncompatibleCacheError, InputError
from dspark.train_from_cache.batch import supervised_anchors
from dspark.train_from_cache.drafts.vispec import ViSpecDraft

# MSD's names, as many key heads as query heads.
TEXT = {
    **MSD,
    **MSD_BIASES,
    "layers.0.self_attn.k_proj.weight": (16, 8),
    "layers.0.self_attn.v_proj.weight": (16, 8),
    "layers.0.self_attn.k_proj.bias": (16,),
    "layers.0.self_attn.v_proj.bias": (16,),
}
VISION = {
    "imadpt.q": (3, 4, 4),
    "imadpt.k_proj.weight": (16, 8),
    "imadpt.k_proj.bias": (16,),
    "imadpt.v_proj.weight": (16, 8),
    "imadpt.v_proj.bias": (16,),
    "imadpt.o_proj.weight": (8, 16),
    "img_fc.weight": (8, 16),
    "img_fc.bias": (8,),
}


@pytest.mark.parametrize("stage", [1, 2])
def test_round_trip(stage, tmp_path):
    draft = vispec(stage=stage).float()
    draft.save_pretrained(tmp_path)
    assert saved_shapes(tmp_path) == {**TEXT, **(VISION if stage == 2 else {})}
    loaded = assert_comes_back(draft, tmp_path, {"embed_tokens.weight"})
    loaded.attach_head(head(1, bias=True))
    draft.attach_head(head(1, bias=True))
    anchors = supervised_anchors(batch()["loss_mask"])
    assert torch.equal(loaded.predict(batch(), anchors), draft.predict(batch(), anchors))
    entries = {
        "architectures": ["ViSpecModel"],
        "model_type": "llama",
        "stage": stage,
        "num_query_tokens": 3,
        "mtp_steps": 1,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "attention_bias": True,
        "rope_theta": 100.0,
        "l1_weight": 10.0,
        "list_mle_weight": 0.1,
        "text_list_mle_weight": 0.01,
        "smooth_l1_weight": 1.0,
        "soft_ce_weight": 0.1,
        "dtype": "float32",
    }
    assert_config(tmp_path, entries, ViSpecDraft)


def test_config_of_a_fresh_draft():
    config = ViSpecDraft.config_from_cache(manifest(text_model_type="llama"), {})
    assert (config.stage, config.num_query_tokens, config.mtp_steps) == (2, 2, 1)
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 4)
    assert config.attention_bias is True, "whatever the target has"
    fields = ["inputs_embeds", "last_hidden_state", "attention_mask", "loss_mask"]
    assert ViSpecDraft.needed_fields(config) == [*fields, "image_mask"]
    first = ViSpecDraft.config_from_cache(manifest(), {"stage": "1", "num_key_value_heads": "2"})
    assert (first.stage, first.num_key_value_heads) == (1, 2)
    assert ViSpecDraft.needed_fields(first) == fields


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"stage": "0"}, "-c stage=0: must be at least 1"),
        ({"stage": "3"}, "-c stage=3: must be 1 or 2"),
        ({"num_query_tokens": "1"}, "-c num_query_tokens=1: must be at least 2"),
        ({"mtp_steps": "-1"}, "-c mtp_steps=-1: must be at least 0"),
        ({"l1_weight": "-1"}, "-c l1_weight=-1.0: must be at least 0"),
        ({"num_q": "2"}, "draft 'vispec' has no such config entry"),
    ],
)
def test_a_wrong_override_is_named(entry, message):
    with pytest.raises(InputError) as error:
        ViSpecDraft.config_from_cache(manifest(), entry)
    assert message in str(error.value)


def test_a_fresh_draft_starts_sane():
    torch.manual_seed(0)
    draft = ViSpecDraft(ViSpecDraft.config_from_cache(manifest(), {"num_query_tokens": "64"}))
    assert torch.equal(draft.img_fc.weight, torch.eye(8, 16)), "[I | 0]"
    assert not draft.img_fc.bias.any() and not draft.imadpt.k_proj.bias.any()
    assert float(draft.imadpt.q.detach().std()) == pytest.approx(0.5, rel=0.1)
    for name in ("k_proj", "v_proj", "o_proj"):
        weight = getattr(draft.imadpt, name).weight.detach()
        assert 0.6 < float(weight.std()) * weight.shape[1] ** 0.5 < 1.5, name


def test_stage_2_goes_on_from_stage_1(tmp_path):
    """Its vision modules are fresh: on rows without pictures it begins as the same draft."""
    cache = write_cache(tmp_path / "cache", text_every=1)
    one, two = tmp_path / "one", tmp_path / "two"
    first = fit(cache, one, "vispec", draft_config={"stage": "1"})
    stage = {"stage": "2"}
    second = fit(cache, two, "vispec", steps=1, lr=1e-30, init_from=one, draft_config=stage)
    assert second.before["acceptance"] == pytest.approx(first.after["acceptance"])
    before, after = load_file(one / "model.safetensors"), load_file(two / "model.safetensors")
    added = after.keys() - before.keys()
    assert {name.split(".")[0] for name in added} == {"imadpt", "img_fc"}
    for name, tensor in before.items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-6, atol=1e-9)
    with pytest.raises(InputError, match=r"-c num_query_tokens=4: .*imadpt\.q"):
        fit(cache, tmp_path / "x", "vispec", init_from=two, draft_config={"num_query_tokens": "4"})
    with pytest.raises(InputError, match=r"-c stage=1: .*imadpt\.q"):
        fit(cache, tmp_path / "x", "vispec", init_from=two, draft_config={"stage": "1"})


@pytest.mark.parametrize("stage", [1, 2])
def test_it_learns_from_the_cache_alone(stage, tmp_path):
    cache, out = write_cache(tmp_path / "cache"), tmp_path / "out"
    fit(cache, out, "vispec", draft_config={"stage": stage, "num_query_tokens": 3})
    found = losses(out)
    assert sum(found[-5:]) < 0.95 * sum(found[:5])
    if stage == 2:
        weights = load_file(out / "model.safetensors")
        assert weights["img_fc.weight"][:, 16:].abs().max() > 1e-3, "it heeds the pictures"


def test_a_cache_without_its_fields_is_refused_at_once(tmp_path, monkeypatch):
    cache = write_cache(tmp_path / "cache")
    forget_field(monkeypatch, "image_mask")
    with pytest.raises(IncompatibleCacheError, match="'vispec' needs image_mask, .*capture"):
        fit(cache, tmp_path / "out", "vispec")
    assert not (tmp_path / "out").exists()
