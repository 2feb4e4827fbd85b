"""The target's configuration and how its weights start."""

import math

import torch
from torch import nn
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
)

LAYERS, VISION_LAYERS = 4, 2


def make_model(tokenizer: PreTrainedTokenizerBase, seed: int) -> Qwen2_5_VLForConditionalGeneration:
    """A fresh Qwen2.5-VL of about 1.3 million parameters, in float32."""
    torch.manual_seed(seed)
    ids = tokenizer.get_vocab()
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 512,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": False,
            "rope_parameters": {
                "rope_type": "default",
                # Columns take the slowest rotations. With the usual base of 1e4 two neighbouring
                # digits would differ by 0.01 radians, and their order would hardly be learned.
                "rope_theta": 100.0,
                "mrope_section": [2, 4, 10],
            },
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|endoftext|>"],
        },
        vision_config={
            "depth": VISION_LAYERS,
            "hidden_size": 96,
            "num_heads": 4,
            "intermediate_size": 192,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 128,
            "fullatt_block_indexes": list(range(VISION_LAYERS)),
            "window_size": 64,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
    )
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
    )
    _initialise(model)
    return model


@torch.no_grad()
def _initialise(model: nn.Module) -> None:
    """Gives every matrix unit gain, which a model this narrow needs to start learning."""
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            continue
        fan_in = parameter[0].numel()
        if "embed_tokens" in name:
            fan_in = parameter.shape[1]
        scale = 1 / math.sqrt(fan_in)
        if name.endswith(("o_proj.weight", "down_proj.weight", "attn.proj.weight")):
            depth = VISION_LAYERS if "visual" in name else LAYERS
            scale /= math.sqrt(2 * depth)
        if name == "lm_head.weight":
            scale *= 0.3
        nn.init.normal_(parameter, std=scale)
