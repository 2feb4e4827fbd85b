"""A fresh draft takes after its target; what the user sets is checked."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from draft_cases import manifest

from dspark.schemas.errors import InputError
from dspark.train_from_cache.drafts import ARCHITECTURES, draft_class
from dspark.train_from_cache.drafts.dspark import DSparkDraft
from dspark.train_from_cache.drafts.msd import MSDDraft


def test_drafts_are_found_by_name_without_loading_torch():
    assert {"dflash", "dspark", "msd"} <= set(ARCHITECTURES)
    assert [draft_class(arch).arch for arch in ARCHITECTURES] == list(ARCHITECTURES)
    with pytest.raises(InputError, match="--arch eagle9: no such draft; choose from .*dspark"):
        draft_class("eagle9")
    code = "import dspark.train_from_cache.drafts, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("cls", [DSparkDraft, MSDDraft])
def test_dimensions_follow_the_target(cls):
    config = cls.config_from_cache(manifest(), {})
    assert (config.hidden_size, config.vocab_size, config.intermediate_size) == (8, 13, 12)
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (4, 2, 4)
    assert config.rms_norm_eps == 1e-5
    assert config.rope_parameters["rope_theta"] == 5000.0
    assert config.max_position_embeddings == 64
    assert config.eos_token_id == [1]


@pytest.mark.parametrize(
    "text",
    [
        {"rope_theta": 7.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}},
        {
            "rope_parameters": {
                "sliding_attention": {"rope_theta": 1.0},
                "full_attention": {"rope_theta": 7.0},
            }
        },
    ],
)
def test_the_rotary_base_is_found_wherever_the_target_keeps_it(text):
    config = DSparkDraft.config_from_cache(manifest(text=text), {})
    assert config.rope_parameters["rope_theta"] == 7.0


def test_dspark_defaults_are_the_published_ones():
    config = DSparkDraft.config_from_cache(manifest(), {})
    assert (config.block_size, config.num_hidden_layers, config.num_anchors) == (7, 5, 512)
    assert (config.markov_rank, config.markov_head_type) == (256, "vanilla")
    assert (config.ce_weight, config.l1_weight, config.confidence_weight) == (0.1, 0.9, 1.0)
    assert config.loss_gamma == 4.0
    assert config.target_layer_ids == [1, 2, 3, 4, 5]
    assert DSparkDraft.config_from_cache(manifest(num_layers=36), {}).target_layer_ids == [
        *(1, 9, 17, 25, 33)
    ]


@pytest.mark.parametrize(
    ("text", "target", "want"),
    [
        ({"tokenizer_size": 9}, {}, 9),
        ({"tokenizer_size": 11}, {}, 12),  # 11 is the picture placeholder
        ({"tokenizer_size": 9}, {"embedding_rows": 9}, 0),
        ({"tokenizer_size": 13}, {"pad_token_id": 4}, 4),
        ({}, {"pad_token_id": 4}, 4),
    ],
)
def test_the_mask_token_is_one_that_answers_never_contain(text, target, want):
    facts = manifest(**target)
    facts = replace(facts, target=replace(facts.target, text=text))
    assert DSparkDraft.config_from_cache(facts, {}).mask_token_id == want


@pytest.mark.parametrize("pad", [None, 1, 13])
def test_without_a_spare_id_the_user_is_asked(pad):
    facts = manifest(pad_token_id=pad, text={"tokenizer_size": 13})
    with pytest.raises(InputError, match="-c mask_token_id=ID"):
        DSparkDraft.config_from_cache(facts, {})
    assert DSparkDraft.config_from_cache(facts, {"mask_token_id": "7"}).mask_token_id == 7


@pytest.mark.parametrize(("family", "bias"), [("qwen2_5_vl_text", True), ("llama", False)])
def test_msd_has_the_biases_of_its_target(family, bias):
    assert MSDDraft.config_from_cache(manifest(text_model_type=family), {}).attention_bias is bias
    stated = manifest(text_model_type=family, text={"attention_bias": not bias})
    assert MSDDraft.config_from_cache(stated, {}).attention_bias is not bias


def test_overrides_come_as_strings_or_values():
    config = DSparkDraft.config_from_cache(
        manifest(),
        {
            "block_size": "5",
            "markov_head_type": "rnn",
            "enable_confidence_head": "false",
            "target_layer_ids": "[-1,2]",
            "loss_gamma": "3",
            "num_anchors": np.int64(9),
            "ce_weight": np.float32(0.5),
        },
    )
    assert config.block_size == 5 and config.markov_head_type == "rnn"
    assert config.enable_confidence_head is False and config.target_layer_ids == [-1, 2]
    assert config.loss_gamma == 3.0 and config.num_anchors == 9
    assert type(config.num_anchors) is int and config.ce_weight == 0.5
    layers = DSparkDraft.config_from_cache(manifest(), {"target_layer_ids": (-1, 2)})
    assert layers.target_layer_ids == [-1, 2]
    assert MSDDraft.config_from_cache(manifest(), {"feature_noise": "0"}).feature_noise == 0.0


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"blocksize": "5"}, "-c blocksize: draft 'dspark' has no such config entry; it has block"),
        ({"hidden_size": "5"}, "-c hidden_size: draft 'dspark' has no such config entry"),
        ({"block_size": "5.5"}, "-c block_size=5.5: must be a whole number"),
        ({"block_size": "true"}, "-c block_size=true: must be a whole number"),
        ({"block_size": "five"}, "-c block_size=five: must be a whole number"),
        ({"block_size": "0"}, "-c block_size=0: must be at least 1"),
        ({"loss_gamma": "x"}, "-c loss_gamma=x: must be a finite number"),
        ({"enable_confidence_head": "1"}, "-c enable_confidence_head=1: must be true or false"),
        ({"target_layer_ids": "[1,2.5]"}, "must be a list of whole numbers"),
        ({"target_layer_ids": "[7]"}, "8 decoder layers; name some of -1"),
        ({"target_layer_ids": "[]"}, "8 decoder layers; name some of -1"),
        ({"markov_head_type": "lstm"}, "lstm: choose from vanilla, gated, rnn"),
        ({"mask_token_id": "13"}, "vocabulary, 0 to 12"),
        ({"num_key_value_heads": "3"}, "must divide num_attention_heads=4"),
        ({"num_key_value_heads": "0"}, "-c num_key_value_heads=0: must be at least 1"),
        ({"num_attention_heads": "-2"}, "-c num_attention_heads=-2: must be at least 1"),
        ({"intermediate_size": "0"}, "-c intermediate_size=0: must be at least 1"),
        ({"max_position_embeddings": "0"}, "-c max_position_embeddings=0: must be at least 1"),
        ({"head_dim": "0"}, "-c head_dim=0: must be at least 2"),
        ({"head_dim": "7"}, "-c head_dim=7: must be even"),
        ({"hidden_act": "foo"}, "-c hidden_act=foo: choose from"),
        ({"rms_norm_eps": "0"}, "-c rms_norm_eps=0.0: must be at least"),
        ({"rope_theta": "-1"}, "-c rope_theta=-1.0: must be at least 1"),
        ({"loss_gamma": "NaN"}, "-c loss_gamma=NaN: must be a finite number"),
        ({"loss_gamma": "Infinity"}, "-c loss_gamma=Infinity: must be a finite number"),
        ({"ce_weight": "-1"}, "-c ce_weight=-1.0: must be at least 0"),
    ],
)
def test_a_wrong_override_is_named(entry, message):
    with pytest.raises(InputError) as error:
        DSparkDraft.config_from_cache(manifest(), entry)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_each_draft_lists_its_own_entries():
    with pytest.raises(InputError, match="draft 'msd' has no such.*feature_noise.*soft_ce_weight"):
        MSDDraft.config_from_cache(manifest(), {"block_size": "5"})
    with pytest.raises(InputError, match="-c num_draft_tokens=0: must be at least 1"):
        MSDDraft.config_from_cache(manifest(), {"num_draft_tokens": "0"})


def test_each_draft_reads_only_what_it_needs():
    config = MSDDraft.config_from_cache(manifest(), {})
    assert MSDDraft.needed_fields(config) == [
        *("inputs_embeds", "last_hidden_state", "attention_mask", "loss_mask", "image_mask")
    ]
    config = DSparkDraft.config_from_cache(manifest(), {"target_layer_ids": "[-1,3]"})
    assert DSparkDraft.needed_fields(config) == [
        *("input_ids", "attention_mask", "loss_mask", "hidden_states.-1", "hidden_states.3")
    ]
