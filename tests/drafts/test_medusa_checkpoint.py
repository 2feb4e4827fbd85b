"""Medusa checkpoints are those that vLLM loads, and a draft trains from a cache alone."""

import pytest
import torch
from draft_cases import batch, head, manifest
from feature_cases import assert_config, fit, forget_field, losses, medusa
from safetensors.torch import load_file
from synthetic_cache import write_cache
from test_checkpoints import saved_shapes

from dspark.schemas.errors import IncompatibleCacheError, InputError
from dspark.train_from_cache.batch import supervised_anchors
from dspark.train_from_cache.cache import open_cache
from dspark.train_from_cache.drafts.medusa import MedusaConfig, MedusaDraft
from dspark.train_from_cache.evaluate import evaluate
from dspark.train_from_cache.target_head import TargetHead


@pytest.mark.parametrize("bias", [True, False])
def test_round_trip(bias, tmp_path):
    draft = medusa(num_heads=2, num_hidden_layers=2, medusa_fc_bias=bias, distill=0.5).float()
    draft.save_pretrained(tmp_path)
    want = {f"blocks.{i}.layers.{j}.weight": (8, 8) for i in range(2) for j in range(2)}
    if bias:
        want |= {f"blocks.{i}.layers.{j}.bias": (8,) for i in range(2) for j in range(2)}
    want |= {f"lm_heads.{i}.weight": (13, 8) for i in range(2)}
    assert saved_shapes(tmp_path) == want

    loaded, info = MedusaDraft.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    anchors = supervised_anchors(batch()["loss_mask"])
    assert torch.equal(loaded.predict(batch(), anchors), draft.predict(batch(), anchors))
    entries = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": 8,
        "vocab_size": 13,
        "truncated_vocab_size": 13,
        "original_lm_head": False,
        "num_heads": 2,
        "num_hidden_layers": 2,
        "medusa_fc_bias": bias,
        "decay": 0.8,
        "distill": 0.5,
        "dtype": "float32",
    }
    assert_config(tmp_path, entries, MedusaDraft)


def test_vllm_finds_no_other_number_of_heads_or_layers(tmp_path):
    """It takes every entry with ``num`` and ``heads``, or ``num`` and ``layers``, for one."""
    names = MedusaDraft.config_from_cache(manifest(), {}).to_dict()
    assert [n for n in names if "num" in n] == ["num_heads", "num_hidden_layers"]


@pytest.mark.parametrize("entries", [{"original_lm_head": True}, {"truncated_vocab_size": 5}])
def test_forms_of_the_checkpoint_that_are_not_read_are_refused(entries):
    with pytest.raises(InputError, match="must have its own weights"):
        MedusaConfig(vocab_size=13, **entries)
    MedusaConfig(vocab_size=13, truncated_vocab_size=None, original_lm_head=False)


def test_config_of_a_fresh_draft():
    config = MedusaDraft.config_from_cache(manifest(), {})
    assert (config.num_heads, config.num_hidden_layers, config.medusa_fc_bias) == (4, 1, True)
    assert (config.decay, config.distill) == (0.8, 0.0)
    assert (config.hidden_size, config.vocab_size, config.eos_token_id) == (8, 13, [1])
    assert MedusaDraft.needed_fields(config) == ["input_ids", "last_hidden_state", "loss_mask"]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"num_heads": "0"}, "-c num_heads=0: must be at least 1"),
        ({"distill": "1.5"}, "-c distill=1.5: must be at most 1"),
        ({"distill": "-1"}, "-c distill=-1.0: must be at least 0"),
        ({"head_dim": "4"}, "draft 'medusa' has no such config entry"),
    ],
)
def test_a_wrong_override_is_named(entry, message):
    with pytest.raises(InputError) as error:
        MedusaDraft.config_from_cache(manifest(), entry)
    assert message in str(error.value)


def test_a_head_that_cannot_be_the_heads_start_is_refused():
    with pytest.raises(InputError, match="has a bias.*use --arch msd"):
        medusa().attach_head(head(bias=True))
    with pytest.raises(InputError, match="made for another target: its vocab_size is 13"):
        medusa().attach_head(TargetHead(torch.zeros(13, 8), torch.zeros(14, 8)))


@pytest.mark.parametrize("logits", ["head", "full", "topk:12"])
def test_it_learns_from_the_cache_alone(logits, tmp_path):
    cache, out = write_cache(tmp_path / "cache", logits=logits), tmp_path / "out"
    heads = {"distill": "0.5", "num_heads": "2"}
    result = fit(cache, out, "medusa", lr=1e-2, draft_config=heads)
    found = losses(out)
    assert sum(found[-5:]) < 0.9 * sum(found[:5])
    assert len(result.after["acceptance"]) == 2
    weights = load_file(out / "model.safetensors")
    target = TargetHead.load(cache)
    assert not torch.equal(weights["lm_heads.0.weight"], target.weight), "the heads are trained"

    loaded = MedusaDraft.from_pretrained(out)
    loaded.attach_head(target)
    rows = [row for row in range(40) if open_cache(cache).lengths[row]][:6]
    again = evaluate(loaded, open_cache(cache), target, rows)
    loaded.attach_head(target)
    assert evaluate(loaded, open_cache(cache), target, rows) == again


def test_it_starts_as_the_targets_head(tmp_path):
    cache = write_cache(tmp_path / "cache")
    fit(cache, tmp_path / "out", "medusa", steps=1, lr=1e-30)
    weights = load_file(tmp_path / "out" / "model.safetensors")
    for i in range(4):
        assert torch.equal(weights[f"lm_heads.{i}.weight"], TargetHead.load(cache).weight)
        assert weights[f"blocks.{i}.layers.0.weight"].abs().max() < 1e-20


def test_a_training_starts_from_a_trained_draft(tmp_path):
    cache = write_cache(tmp_path / "cache")
    first = fit(cache, tmp_path / "first", "medusa", steps=10)
    second = fit(cache, tmp_path / "second", "medusa", steps=1, init_from=tmp_path / "first")
    assert second.before == first.after


def test_a_cache_without_its_fields_is_refused_at_once(tmp_path, monkeypatch):
    cache = write_cache(tmp_path / "cache")
    forget_field(monkeypatch, "last_hidden_state")
    with pytest.raises(IncompatibleCacheError, match="'medusa' needs last_hidden_state, .*capture"):
        fit(cache, tmp_path / "out", "medusa")
    assert not (tmp_path / "out").exists()
