"""A fresh EAGLE-3 draft takes after its target; checkpoints are those that servers load."""

import json
from dataclasses import replace

import pytest
import torch
from draft_cases import batch, head, manifest
from eagle3_cases import CHUNKED, INTERLEAVED, USED, eagle3
from safetensors import safe_open
from safetensors.torch import save_file

from dspark.schemas.errors import InputError
from dspark.schemas.fields import Field
from dspark.train_from_cache.batch import supervised_anchors
from dspark.train_from_cache.draft_parts.mrope import frequency_axes
from dspark.train_from_cache.drafts.eagle3 import Eagle3Config, Eagle3Draft

# Shapes of a published checkpoint, by its config: 2 query heads and a key head of 8, hidden size 8,
# MLP 12, three layers read, 7 of 13 ids.
TENSORS = {
    "fc.weight": (8, 24),
    "midlayer.input_layernorm.weight": (8,),
    "midlayer.hidden_norm.weight": (8,),
    "midlayer.self_attn.q_proj.weight": (16, 16),
    "midlayer.self_attn.k_proj.weight": (8, 16),
    "midlayer.self_attn.v_proj.weight": (8, 16),
    "midlayer.self_attn.o_proj.weight": (8, 16),
    "midlayer.post_attention_layernorm.weight": (8,),
    "midlayer.mlp.gate_proj.weight": (12, 8),
    "midlayer.mlp.up_proj.weight": (12, 8),
    "midlayer.mlp.down_proj.weight": (8, 12),
    "norm.weight": (8,),
    "lm_head.weight": (7, 8),
    "d2t": (7,),
    "t2d": (13,),
}
BIASES = {
    "midlayer.self_attn.q_proj.bias": (16,),
    "midlayer.self_attn.k_proj.bias": (8,),
    "midlayer.self_attn.v_proj.bias": (8,),
    "midlayer.self_attn.o_proj.bias": (8,),
}
FC_NORMS = {f"fc_norm.{j}.weight": (8,) for j in range(3)}
MROPE = {"rope_type": "default", "rope_theta": 5000.0, "mrope_section": [1, 0, 1]}


def vlm(rows: int = 3, **rope):
    """A target with mRoPE whose positions have so many rows, heads of 4."""
    facts = manifest()
    text = {**facts.target.text, "rope_parameters": {**MROPE, **rope}}
    return replace(
        facts,
        target=replace(facts.target, text=text),
        fields=(Field("position_ids", "I32", (rows, 16), token_axis=1),),
    )


@pytest.mark.parametrize(
    ("entries", "extra"),
    [
        ({}, {}),
        ({"attention_bias": True}, BIASES),
        ({"fc_norm": True, "norm_output": True}, FC_NORMS),
        ({"norm_before_fc": True, "mrope": CHUNKED}, {"input_norm.weight": (24,)}),
        ({"mrope": INTERLEAVED, "image_embeds": "token", "norm_before_residual": True}, {}),
    ],
)
def test_round_trip(entries, extra, tmp_path):
    draft = eagle3(**entries).float()
    draft.save_pretrained(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    assert {name: tuple(x.shape) for name, x in tensors.items()} == {**TENSORS, **extra}
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert [j + int(d) for j, d in enumerate(tensors["d2t"])] == USED
    assert [v for v, known in enumerate(tensors["t2d"]) if known] == USED

    loaded, info = Eagle3Draft.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values()), info
    want = draft.state_dict()
    assert loaded.state_dict().keys() == want.keys()
    for name, tensor in loaded.state_dict().items():
        assert torch.equal(tensor, want[name]), name
    assert all(p.requires_grad for p in loaded.parameters())
    assert torch.equal(loaded.rotary_emb.inv_freq, draft.rotary_emb.inv_freq)
    assert loaded.rotary_emb.axes == draft.rotary_emb.axes
    features = batch() | {"position_ids": torch.arange(12).repeat(2, 3, 1).int()}
    anchors = supervised_anchors(features["loss_mask"])
    loaded.attach_head(head())
    assert torch.equal(loaded.predict(features, anchors), draft.predict(features, anchors))
    loaded.save_pretrained(tmp_path / "again")
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / name).read_bytes()


@pytest.mark.parametrize("mrope", [None, CHUNKED, INTERLEAVED])
def test_the_config_holds_what_servers_read(mrope, tmp_path):
    eagle3(mrope=mrope, fc_norm=True, image_embeds="token").float().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    want = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 8,
        "target_hidden_size": 8,
        "intermediate_size": 12,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 100.0,
        "rope_scaling": mrope and {"type": "mrope", "rope_type": "default", **mrope},
        "vocab_size": 13,
        "draft_vocab_size": 7,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "norm_before_residual": False,
        "fc_norm": True,
        "norm_before_fc": False,
        "norm_output": False,
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],  # inputs of layers, as vLLM counts
        "eagle_config": {
            "use_aux_hidden_state": True,
            "eagle_aux_hidden_state_layer_ids": [0, 2, 3],  # outputs, as SGLang counts
        },
        "image_embeds": "token",
        "ttt_steps": 3,
        "dtype": "float32",
    }
    missing = object()
    assert {key: config.get(key, missing) for key in want} == want


@pytest.mark.parametrize(
    ("named", "layers"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 18, 33]}, [1, 17, 32]),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]}}, [1, 17, 32]),
        (
            {
                "eagle_aux_hidden_state_layer_ids": [2, 18, 33],
                "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]},
            },
            [1, 17, 32],
        ),
        ({}, None),
    ],
)
def test_a_checkpoint_published_elsewhere_loads(named, layers, tmp_path):
    published = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "attention_bias": False,
        "bos_token_id": 1,
        "draft_vocab_size": 7,
        "eos_token_id": 2,
        "head_dim": 8,
        "hidden_act": "silu",
        "hidden_size": 8,
        "intermediate_size": 12,
        "max_position_embeddings": 64,
        "model_type": "llama",
        "num_attention_heads": 2,
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-6,
        "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]},
        "rope_theta": 1000000,
        "target_model_type": "qwen2_5_vl",
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": 13,
        **named,
    }
    (tmp_path / "config.json").write_text(json.dumps(published))
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(shape, generator=generator).bfloat16() for name, shape in TENSORS.items()
    }
    tensors["d2t"] = torch.tensor([v - j for j, v in enumerate(USED)])
    tensors["t2d"] = torch.tensor([v in USED for v in range(13)])
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    draft, info = Eagle3Draft.from_pretrained(
        tmp_path, output_loading_info=True, dtype=torch.float32
    )
    assert not any(info.values()), info
    for name, tensor in draft.state_dict().items():
        stored = tensors[name]
        assert torch.equal(tensor, stored.float() if stored.is_floating_point() else stored), name
    assert draft.config.rope_parameters == {
        "rope_type": "default",
        "rope_theta": 1000000,
        "mrope_section": [1, 1, 2],
    }
    assert draft.rotary_emb.axes == [0, 1, 2, 2]
    assert draft.depth == 7 and draft.config.target_layer_ids == layers
    if layers is None:
        with pytest.raises(InputError, match="does not say which layers"):
            Eagle3Draft.needed_fields(draft.config)


def test_defaults_are_the_published_ones():
    config = Eagle3Draft.config_from_cache(manifest(num_layers=36), {})
    assert config.target_layer_ids == [1, 17, 32]
    assert (config.num_hidden_layers, config.ttt_steps, config.ttt_decay) == (1, 7, 0.8)
    assert (config.loss_mask, config.image_embeds) == ("shifted", "merged")
    assert not (config.norm_before_residual or config.fc_norm)
    assert not (config.norm_before_fc or config.norm_output or config.attention_bias)
    assert config.draft_vocab_size == 13
    large = manifest(vocab_size=152064)
    assert Eagle3Draft.config_from_cache(large, {}).draft_vocab_size == 32000


def test_dimensions_follow_the_target():
    config = Eagle3Draft.config_from_cache(manifest(), {})
    assert (config.hidden_size, config.vocab_size, config.intermediate_size) == (8, 13, 12)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 4)
    assert (config.target_hidden_size, config.image_token_id) == (8, 11)
    assert config.rms_norm_eps == 1e-5
    assert config.rope_parameters == {"rope_type": "default", "rope_theta": 5000.0}
    assert config.max_position_embeddings == 64
    assert config.eos_token_id == [1]


def test_positions_are_the_targets_where_it_has_several_axes():
    config = Eagle3Draft.config_from_cache(vlm(), {})
    assert config.rope_parameters == MROPE
    assert "position_ids" in Eagle3Draft.needed_fields(config)
    config = Eagle3Draft.config_from_cache(vlm(mrope_interleaved=True), {})
    assert config.rope_parameters == {**MROPE, "mrope_interleaved": True}
    # By the user's wish, or where the target's sections turn a part of a head only, or one axis
    # was stored.
    for facts, entries in (
        (vlm(), {"mrope_section": "[]"}),
        (vlm(mrope_section=[1, 0, 0]), {}),
        (vlm(rows=1), {}),
        (manifest(), {}),
    ):
        config = Eagle3Draft.config_from_cache(facts, entries)
        assert "mrope_section" not in config.rope_parameters
        assert "position_ids" not in Eagle3Draft.needed_fields(config)
    chosen = {"mrope_section": "[2,2,0]", "head_dim": "8"}
    config = Eagle3Draft.config_from_cache(vlm(), chosen)
    assert config.rope_parameters == {**MROPE, "mrope_section": [2, 2, 0]}


def test_frequencies_lie_one_axis_after_the_other_or_in_turn():
    assert frequency_axes({}, 3) == [0, 0, 0]
    assert frequency_axes({"mrope_section": [2, 1, 3]}, 6) == [0, 0, 1, 2, 2, 2]
    rope = {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    assert frequency_axes(rope, 8) == [0, 1, 2, 0, 1, 2, 0, 0]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"block_size": "5"}, "draft 'eagle3' has no such config entry; it has attention_bias"),
        ({"ttt_steps": "0"}, "-c ttt_steps=0: must be at least 1"),
        ({"ttt_decay": "-1"}, "-c ttt_decay=-1.0: must be at least 0"),
        ({"draft_vocab_size": "2"}, "draft_vocab_size=2: choose from 3 (the special ids) to 13"),
        ({"draft_vocab_size": "14"}, "-c draft_vocab_size=14: choose from 3"),
        ({"target_layer_ids": "[1,2]"}, "8 decoder layers; name 3 of -1"),
        ({"target_layer_ids": "[1,1,2]"}, "8 decoder layers; name 3 of -1"),
        ({"target_layer_ids": "[1,1,2,3]"}, "8 decoder layers; name 3 of -1"),
        ({"target_layer_ids": "[1,2,7]"}, "8 decoder layers; name 3 of -1"),
        ({"loss_mask": "twice"}, "-c loss_mask=twice: choose from shifted, unshifted"),
        ({"image_embeds": "pixels"}, "-c image_embeds=pixels: choose from merged, token"),
        ({"mrope_section": "[1,0,1]"}, "the target's positions have one axis"),
        ({"head_dim": "7"}, "-c head_dim=7: must be even"),
    ],
)
def test_a_wrong_override_is_named(entry, message):
    with pytest.raises(InputError) as error:
        Eagle3Draft.config_from_cache(manifest(), entry)
    assert message in str(error.value)


@pytest.mark.parametrize("section", ["[1,1]", "[1,1,1]", "[3,-1,0]"])
def test_sections_must_fill_the_head(section):
    with pytest.raises(InputError, match="how many of the 2 frequencies each of the 3 axes turns"):
        Eagle3Draft.config_from_cache(vlm(), {"mrope_section": section})


def test_it_reads_only_what_it_needs():
    config = Eagle3Draft.config_from_cache(manifest(), {"target_layer_ids": "[-1,3,5]"})
    fields = ["inputs_embeds", "attention_mask", "loss_mask"]
    fields += ["hidden_states.-1", "hidden_states.3", "hidden_states.5"]
    assert Eagle3Draft.needed_fields(config) == fields
    config = Eagle3Draft.config_from_cache(manifest(), {"image_embeds": "token"})
    assert "image_mask" in Eagle3Draft.needed_fields(config)


def test_a_fresh_draft_starts_sane():
    torch.manual_seed(0)
    draft = Eagle3Draft(
        Eagle3Draft.config_from_cache(manifest(), {"fc_norm": True, "attention_bias": True})
    )
    for name, weight in draft.named_parameters():
        if "norm" in name:
            assert (weight == 1).all(), name
        elif name.endswith("bias"):
            assert not weight.any(), name
        else:
            gain = float(weight.detach().std()) * weight.shape[1] ** 0.5
            assert 0.6 < gain < 1.5, f"{name}: {gain}"
    assert not draft.d2t.any() and draft.t2d.all()


def test_a_draft_of_another_width_is_refused():
    with pytest.raises(InputError, match="hidden_size 8, target_hidden_size 16: .* not supported"):
        eagle3(target_hidden_size=16)


def test_a_shallow_target_gives_fewer_layers():
    config = Eagle3Draft.config_from_cache(manifest(num_layers=3), {})
    assert config.target_layer_ids == [0, 1]
    assert Eagle3Draft(config).fc.weight.shape == (8, 16)
    assert Eagle3Config().to_dict()["architectures"] == ["LlamaForCausalLMEagle3"]
