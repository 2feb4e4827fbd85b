"""EAGLE checkpoints are those that vLLM and SGLang load, and a draft trains from a cache alone."""

import pytest
import torch
from draft_cases import batch, head, manifest
from feature_cases import assert_config, eagle, fit, forget_field, losses
from safetensors.torch import load_file
from synthetic_cache import write_cache
from test_checkpoints import MSD, assert_comes_back, saved_shapes

from dspark.schemas.errors import IncompatibleCacheError, InputError
from dspark.train_from_cache.batch import supervised_anchors
from dspark.train_from_cache.drafts.eagle import EagleDraft


@pytest.mark.parametrize("bias", [True, False])
def test_round_trip(bias, tmp_path):
    draft = eagle(fc_bias=bias).float()
    draft.save_pretrained(tmp_path)
    want = dict(MSD)
    if not bias:
        del want["fc.bias"]
    assert saved_shapes(tmp_path) == want
    loaded = assert_comes_back(draft, tmp_path, {"embed_tokens.weight"})
    loaded.attach_head(head(1, bias=True))
    draft.attach_head(head(1, bias=True))
    anchors = supervised_anchors(batch()["loss_mask"])
    assert torch.equal(loaded.predict(batch(), anchors), draft.predict(batch(), anchors))
    entries = {
        "architectures": ["LlamaForCausalLMEagle", "EagleLlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "fc_bias": bias,
        "rms_norm_eps": 1e-6,
        "rope_theta": 100.0,
        "max_position_embeddings": 64,
        "vocab_size": 13,
        "tie_word_embeddings": False,
        "dtype": "float32",
        # To vLLM these would be biases of attention, which the checkpoint has not.
        "bias": "none",
        "qkv_bias": "none",
    }
    assert_config(tmp_path, entries, EagleDraft)


def test_config_of_a_fresh_draft():
    config = EagleDraft.config_from_cache(manifest(), {})
    assert (config.hidden_size, config.vocab_size, config.intermediate_size) == (8, 13, 12)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 4)
    assert config.rope_parameters["rope_theta"] == 5000.0 and config.rms_norm_eps == 1e-5
    assert (config.num_draft_tokens, config.feature_noise) == (5, 0.2)
    assert (config.fc_bias, config.attention_bias) == (True, False), "also for a Qwen2 target"
    assert (config.smooth_l1_weight, config.soft_ce_weight) == (1.0, 0.1)
    assert EagleDraft.needed_fields(config) == [
        *("inputs_embeds", "last_hidden_state", "attention_mask", "loss_mask")
    ]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"num_draft_tokens": "0"}, "-c num_draft_tokens=0: must be at least 1"),
        ({"soft_ce_weight": "-1"}, "-c soft_ce_weight=-1.0: must be at least 0"),
        ({"fc_bias": "1"}, "-c fc_bias=1: must be true or false"),
        ({"attention_bias": "true"}, "draft 'eagle' has no such config entry"),
    ],
)
def test_a_wrong_override_is_named(entry, message):
    with pytest.raises(InputError) as error:
        EagleDraft.config_from_cache(manifest(), entry)
    assert message in str(error.value)


@pytest.mark.parametrize("bias", ["true", "false"])
def test_it_learns_from_the_cache_alone(bias, tmp_path):
    out = tmp_path / "out"
    cache = write_cache(tmp_path / "cache")
    fit(cache, out, "eagle", draft_config={"fc_bias": bias})
    found = losses(out)
    assert sum(found[-5:]) < 0.9 * sum(found[:5])
    assert ("fc.bias" in load_file(out / "model.safetensors")) is (bias == "true")


def test_a_cache_without_its_fields_is_refused_at_once(tmp_path, monkeypatch):
    cache = write_cache(tmp_path / "cache")
    forget_field(monkeypatch, "inputs_embeds")
    with pytest.raises(IncompatibleCacheError, match="'eagle' needs inputs_embeds, .*capture"):
        fit(cache, tmp_path / "out", "eagle")
    assert not (tmp_path / "out").exists()
