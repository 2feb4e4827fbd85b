"""DFlash checkpoints are those that serving engines load, and a draft trains from a cache alone."""

import json

import pytest
import torch
from draft_cases import batch, dflash, head, manifest
from oracle_parts import double_weights
from safetensors.torch import load_file, save_file
from synthetic_cache import write_cache
from test_checkpoints import LAYER, assert_comes_back, saved_shapes

from dspark.schemas.errors import IncompatibleCacheError, InputError
from dspark.train_from_cache.batch import supervised_anchors
from dspark.train_from_cache.drafts.dflash import DFlashConfig, DFlashDraft
from dspark.train_from_cache.target_head import TargetHead
from dspark.train_from_cache.train import train_draft

# Shapes of a published checkpoint by its config: 4 query and 2 key heads of 4, 8 wide, MLP 12,
# 3 layers read, two layers.
DFLASH = {
    "fc.weight": (8, 24),
    "hidden_norm.weight": (8,),
    "norm.weight": (8,),
    **{f"layers.0.{name}": shape for name, shape in LAYER.items()},
    **{f"layers.1.{name}": shape for name, shape in LAYER.items()},
}
# z-lab's, cut down.
PUBLISHED = {
    "architectures": ["DFlashDraftModel"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 10,
    "bos_token_id": 5,
    "dflash_config": {"mask_token_id": 9, "target_layer_ids": [1, 17, 33]},
    "dtype": "bfloat16",
    "eos_token_id": 1,
    "head_dim": 4,
    "hidden_act": "silu",
    "hidden_size": 8,
    "initializer_range": 0.02,
    "intermediate_size": 12,
    "layer_types": ["full_attention", "full_attention"],
    "max_position_embeddings": 64,
    "max_window_layers": 2,
    "model_type": "qwen3",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "num_target_layers": 36,
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 13,
}


def publish(folder, **changes):
    """A checkpoint as found elsewhere: its tensors."""
    (folder / "config.json").write_text(json.dumps(PUBLISHED | changes))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in DFLASH.items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


def test_round_trip(tmp_path):
    draft = dflash().float()
    draft.save_pretrained(tmp_path)
    assert saved_shapes(tmp_path) == DFLASH
    loaded = assert_comes_back(draft, tmp_path, set())
    loaded.attach_head(head(1, bias=True))
    draft.attach_head(head(1, bias=True))
    anchors = supervised_anchors(batch()["loss_mask"])
    assert torch.equal(loaded.predict(batch(), anchors), draft.predict(batch(), anchors))

    config = json.loads((tmp_path / "config.json").read_text())
    want = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 4,
        "num_target_layers": 6,
        "dflash_config": {"mask_token_id": 12, "target_layer_ids": [0, 2, 3]},
        "layer_types": ["full_attention", "full_attention"],
        "sliding_window": None,
        "use_sliding_window": False,
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 4,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": 1e-6,
        "rope_theta": 100.0,
        "max_position_embeddings": 64,
        "vocab_size": 13,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    assert {key: config.get(key) for key in want} == want
    assert "target_layer_ids" not in config and "mask_token_id" not in config
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == config


def test_a_checkpoint_published_elsewhere_loads(tmp_path):
    tensors = publish(tmp_path)
    draft, info = DFlashDraft.from_pretrained(
        tmp_path, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values()), info
    for name, tensor in draft.state_dict().items():
        assert torch.equal(tensor, tensors[name].float()), name
    assert draft.depth == 9 and draft.config.gamma == 5
    assert draft.config.mask_token_id == 9
    assert DFlashDraft.needed_fields(draft.config) == [
        *("input_ids", "attention_mask", "loss_mask"),
        *("hidden_states.1", "hidden_states.17", "hidden_states.33"),
    ]
    torch.testing.assert_close(draft.rotary_emb.inv_freq, torch.tensor([1.0, 1e-3]))
    draft.save_pretrained(tmp_path / "again")
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["dflash_config"] == PUBLISHED["dflash_config"]


def test_the_block_size_may_be_nested_and_the_first_checkpoints_name_no_layers():
    nested = {"block_size": 8, "mask_token_id": 3, "target_layer_ids": [2]}
    config = DFlashConfig(dflash_config=nested)
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (8, 3, [2])
    first = DFlashConfig(num_target_layers=36, num_hidden_layers=5)
    assert first.target_layer_ids == [1, 9, 17, 25, 33]


@pytest.mark.parametrize(
    "entries",
    [
        {"dflash_config": {"causal": True}},
        {"dflash_config": {"use_swa": True, "swa_window_size": 512}},
        {"dflash_config": {"projector_type": "domino"}},
        {"is_causal": True},
    ],
)
def test_variants_that_would_be_computed_wrong_are_refused(entries):
    with pytest.raises(InputError, match="this variant of DFlash is not known"):
        DFlashConfig(**entries)
    harmless = {"causal": False, "use_swa": False, "swa_window_size": None}
    DFlashConfig(dflash_config=harmless, is_causal=False)


def test_sliding_windows_are_refused():
    sliding = DFlashConfig(num_hidden_layers=1, layer_types=["sliding_attention"])
    with pytest.raises(InputError, match="only full_attention is supported"):
        DFlashDraft(sliding)


def test_defaults_are_the_published_ones():
    config = DFlashDraft.config_from_cache(manifest(num_layers=36), {})
    assert (config.block_size, config.num_hidden_layers, config.num_anchors) == (16, 5, 512)
    assert config.target_layer_ids == [1, 9, 17, 25, 33] and config.gamma == 7
    assert (config.ce_weight, config.distill_weight) == (1.0, 0.0)
    assert config.mask_token_id == 12, "the spare row of the target's embedding table"
    assert config.num_target_layers == 36 and config.rope_parameters["rope_theta"] == 5000.0
    one = DFlashDraft.config_from_cache(manifest(), {"num_hidden_layers": "1", "block_size": "8"})
    assert one.target_layer_ids == [1, 2, 3, 4, 5] and one.gamma == 4


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"block_size": "1"}, "-c block_size=1: must be at least 2"),
        ({"loss_gamma": "-1"}, "-c loss_gamma=-1.0: must be at least 0"),
        ({"distill_weight": "-1"}, "-c distill_weight=-1.0: must be at least 0"),
        ({"target_layer_ids": "[7]"}, "8 decoder layers; name some of -1"),
        ({"mask_token_id": "13"}, "vocabulary, 0 to 12"),
        ({"markov_rank": "4"}, "draft 'dflash' has no such config entry"),
    ],
)
def test_a_wrong_override_is_named(entry, message):
    with pytest.raises(InputError) as error:
        DFlashDraft.config_from_cache(manifest(), entry)
    assert message in str(error.value)


def test_the_targets_weights_are_attached_and_never_trained():
    draft = DFlashDraft(DFlashDraft.config_from_cache(manifest(), {"num_hidden_layers": 1}))
    draft.attach_head(head(3, bias=True))
    assert all(parameter.requires_grad for parameter in draft.parameters())
    assert torch.equal(draft.embeddings, head(3).embeddings)
    for name, weight in double_weights(draft).items():
        if "norm" in name:
            assert (weight == 1).all(), name
        else:
            assert 0.6 < float(weight.detach().std()) * weight.shape[1] ** 0.5 < 1.5, name
    with pytest.raises(InputError, match="made for another target: its vocab_size is 13"):
        draft.attach_head(TargetHead(torch.zeros(13, 8), torch.zeros(14, 8)))


SMALL = {"num_hidden_layers": "1", "block_size": "4", "distill_weight": "0.5"}


def fit(cache, out, **options):
    settings = {"steps": 40, "batch_size": 4, "lr": 3e-3, "eval_fraction": 0.2, "log_every": 1}
    settings |= {"device": "cpu", "progress": False, "draft_config": SMALL}
    return train_draft(cache, "dflash", out, **(settings | options))


def test_it_learns_from_the_cache_alone(tmp_path):
    out = tmp_path / "out"
    result = fit(write_cache(tmp_path / "cache"), out)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    losses = [line["loss"] for line in lines if line["event"] == "step"]
    assert sum(losses[-5:]) < 0.9 * sum(losses[:5])
    assert len(result.after["acceptance"]) == 3
    weights = load_file(out / "model.safetensors")
    assert weights.keys() == DFlashDraft.from_pretrained(out).state_dict().keys()
    assert not {"embed_tokens.weight", "lm_head.weight"} & weights.keys()


def test_a_cache_without_its_layers_is_refused_before_anything_is_written(tmp_path):
    cache = write_cache(tmp_path / "cache", layers=(0, 1))
    with pytest.raises(
        IncompatibleCacheError, match=r"needs hidden_states\.2.*capture --extend --drafts dflash"
    ):
        fit(cache, tmp_path / "out")
    assert not (tmp_path / "out").exists()
