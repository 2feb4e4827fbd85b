"""Checkpoints are those that serving engines load, and come back bit for bit."""

import json

import pytest
import torch
from draft_cases import HIDDEN, VOCAB, batch, dspark, head, manifest, msd
from oracle_parts import double_weights
from safetensors import safe_open
from safetensors.torch import save_file

from dspark.schemas.errors import InputError
from dspark.train_from_cache.batch import supervised_anchors
from dspark.train_from_cache.drafts.dspark import DSparkConfig, DSparkDraft
from dspark.train_from_cache.drafts.msd import MSDDraft
from dspark.train_from_cache.target_head import TargetHead

# Shapes of a published DSpark checkpoint, by its config: 4 query and 2 key heads of 4, 8 wide,
# MLP 12, vocabulary 13, 3 layers read, Markov rank 5, two layers.
LAYER = {
    "input_layernorm.weight": (8,),
    "post_attention_layernorm.weight": (8,),
    "self_attn.q_proj.weight": (16, 8),
    "self_attn.k_proj.weight": (8, 8),
    "self_attn.v_proj.weight": (8, 8),
    "self_attn.o_proj.weight": (8, 16),
    "self_attn.q_norm.weight": (4,),
    "self_attn.k_norm.weight": (4,),
    "mlp.gate_proj.weight": (12, 8),
    "mlp.up_proj.weight": (12, 8),
    "mlp.down_proj.weight": (8, 12),
}
DSPARK = {
    "fc.weight": (8, 24),
    "hidden_norm.weight": (8,),
    "norm.weight": (8,),
    **{f"layers.0.{name}": shape for name, shape in LAYER.items()},
    **{f"layers.1.{name}": shape for name, shape in LAYER.items()},
    "markov_head.markov_w1.weight": (13, 5),
    "markov_head.markov_w2.weight": (13, 5),
    "confidence_head.proj.weight": (1, 13),
    "confidence_head.proj.bias": (1,),
    "embed_tokens.weight": (13, 8),
    "lm_head.weight": (13, 8),
}
MARKOV = {
    "vanilla": {},
    "gated": {"markov_head.gate_proj.weight": (5, 13), "markov_head.gate_proj.bias": (5,)},
    "rnn": {"markov_head.joint_proj.weight": (15, 18), "markov_head.joint_proj.bias": (15,)},
}
MSD = {
    "embed_tokens.weight": (13, 8),
    "fc.weight": (8, 16),
    "fc.bias": (8,),
    "layers.0.self_attn.q_proj.weight": (16, 8),
    "layers.0.self_attn.k_proj.weight": (8, 8),
    "layers.0.self_attn.v_proj.weight": (8, 8),
    "layers.0.self_attn.o_proj.weight": (8, 16),
    "layers.0.post_attention_layernorm.weight": (8,),
    "layers.0.mlp.gate_proj.weight": (12, 8),
    "layers.0.mlp.up_proj.weight": (12, 8),
    "layers.0.mlp.down_proj.weight": (8, 12),
}
MSD_BIASES = {
    "layers.0.self_attn.q_proj.bias": (16,),
    "layers.0.self_attn.k_proj.bias": (8,),
    "layers.0.self_attn.v_proj.bias": (8,),
}


def saved_shapes(folder):
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


def assert_comes_back(draft, folder, frozen):
    cls = type(draft)
    loaded, info = cls.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values()), info
    assert loaded.dtype == torch.float32
    want = draft.state_dict()
    assert loaded.state_dict().keys() == want.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, want[name]), name
    assert torch.equal(loaded.rotary_emb.inv_freq, draft.rotary_emb.inv_freq)
    untrained = {name for name, p in loaded.named_parameters() if not p.requires_grad}
    assert untrained == frozen == {n for n, p in draft.named_parameters() if not p.requires_grad}
    return loaded


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_dspark_round_trip(kind, tmp_path):
    draft = dspark(markov_head_type=kind).float()
    draft.save_pretrained(tmp_path)
    assert saved_shapes(tmp_path) == {**DSPARK, **MARKOV[kind]}
    loaded = assert_comes_back(draft, tmp_path, {"embed_tokens.weight", "lm_head.weight"})
    anchors = supervised_anchors(batch()["loss_mask"])
    assert torch.equal(loaded.predict(batch(), anchors), draft.predict(batch(), anchors))

    config = json.loads((tmp_path / "config.json").read_text())
    want = {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "block_size": 3,
        "mask_token_id": 12,
        "target_layer_ids": [0, 2, 3],
        "num_target_layers": 6,
        "num_anchors": 64,
        "markov_rank": 5,
        "markov_head_type": kind,
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
        "rope_theta": 100.0,
        "vocab_size": 13,
        "tie_word_embeddings": False,
        "dtype": "float32",
    }
    assert {key: config.get(key) for key in want} == want
    mirrored = config["dflash_config"]
    assert {"block_size", "mask_token_id", "target_layer_ids"} <= set(mirrored)
    assert all(config[key] == value for key, value in mirrored.items())
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text()) == config


@pytest.mark.parametrize("bias", [True, False])
def test_msd_round_trip(bias, tmp_path):
    draft = msd(bias=bias).float()
    draft.save_pretrained(tmp_path)
    assert saved_shapes(tmp_path) == {**MSD, **(MSD_BIASES if bias else {})}
    loaded = assert_comes_back(draft, tmp_path, {"embed_tokens.weight"})
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["MSDModel"]
    assert config["rope_theta"] == 100.0 and config["num_hidden_layers"] == 1
    anchors = supervised_anchors(batch()["loss_mask"])
    loaded.attach_head(head(1, bias=True))
    draft.attach_head(head(1, bias=True))
    assert torch.equal(loaded.predict(batch(), anchors), draft.predict(batch(), anchors))


def test_a_checkpoint_published_elsewhere_loads(tmp_path):
    published = {
        "architectures": ["Qwen3DSparkModel"],
        "attention_bias": False,
        "block_size": 4,
        "confidence_head_with_markov": True,
        "enable_confidence_head": True,
        "head_dim": 4,
        "hidden_act": "silu",
        "hidden_size": 8,
        "intermediate_size": 12,
        "markov_head_type": "gated",
        "markov_rank": 5,
        "mask_token_id": 9,
        "max_position_embeddings": 64,
        "model_type": "qwen3",
        "num_anchors": 512,
        "num_attention_heads": 4,
        "num_hidden_layers": 2,
        "num_key_value_heads": 2,
        "num_target_layers": 36,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 1000000,
        "target_layer_ids": [1, 17, 33],
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "vocab_size": 13,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator).bfloat16()
        for name, shape in {**DSPARK, **MARKOV["gated"]}.items()
    }
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    draft, info = DSparkDraft.from_pretrained(
        tmp_path, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values()), info
    assert {k: v.shape for k, v in draft.state_dict().items()} == {
        k: v.shape for k, v in tensors.items()
    }
    for name, tensor in draft.state_dict().items():
        assert torch.equal(tensor, tensors[name].float()), name
    assert draft.depth == 4
    assert DSparkDraft.needed_fields(draft.config) == [
        *("input_ids", "attention_mask", "loss_mask"),
        *("hidden_states.1", "hidden_states.17", "hidden_states.33"),
    ]
    torch.testing.assert_close(draft.rotary_emb.inv_freq, torch.tensor([1.0, 1e-3]))
    assert draft.config.loss_gamma == 4.0


def test_a_checkpoint_of_the_other_slot_convention_is_refused():
    with pytest.raises(InputError, match="sample_from_anchor=false"):
        DSparkConfig(sample_from_anchor=False)


def test_the_head_of_the_target_is_copied_and_frozen():
    target = head(7)
    draft = DSparkDraft(DSparkDraft.config_from_cache(manifest(), {"num_hidden_layers": 1}))
    draft.attach_head(target)
    assert torch.equal(draft.embed_tokens.weight, target.embeddings)
    assert torch.equal(draft.lm_head.weight, target.weight)
    assert draft.lm_head.weight.data_ptr() != target.weight.data_ptr()
    assert not draft.lm_head.weight.requires_grad and not draft.embed_tokens.weight.requires_grad
    with pytest.raises(InputError, match="has a bias"):
        draft.attach_head(head(bias=True))
    other = TargetHead(torch.zeros(VOCAB, HIDDEN), torch.zeros(VOCAB + 1, HIDDEN))
    with pytest.raises(InputError, match="made for another target: its vocab_size is 13"):
        draft.attach_head(other)
    with pytest.raises(InputError, match="made for another target: its vocab_size is 13"):
        msd().attach_head(other)


@pytest.mark.parametrize("rows", [10, 16])
def test_an_embedding_table_of_another_height_is_cut_or_filled(rows):
    target = head()
    table = torch.randn(rows, HIDDEN)
    draft = MSDDraft(MSDDraft.config_from_cache(manifest(), {}))
    torch.nn.init.ones_(draft.embed_tokens.weight)
    draft.attach_head(TargetHead(table, target.weight))
    shared = min(rows, VOCAB)
    assert torch.equal(draft.embed_tokens.weight[:shared], table[:shared])
    assert not draft.embed_tokens.weight[shared:].any()


@pytest.mark.parametrize("cls", [DSparkDraft, MSDDraft])
def test_a_fresh_draft_starts_sane(cls):
    torch.manual_seed(0)
    draft = cls(cls.config_from_cache(manifest(), {}))
    for name, weight in double_weights(draft).items():
        if "norm" in name:
            assert (weight == 1).all(), name
        elif name.endswith("bias") or name == "markov_head.markov_w2.weight":
            assert not weight.any(), name
        elif "embed_tokens" not in name and "lm_head" not in name:
            gain = float(weight.detach().std()) * weight.shape[1] ** 0.5
            assert 0.6 < gain < 1.5, f"{name}: {gain}"
