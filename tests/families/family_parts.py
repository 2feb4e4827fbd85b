"""Small configs and vision tensors that the families of this folder are put together from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tiny_targets import ENDOFTEXT, IM_END, IMAGE, VIDEO, VISION_END, VISION_START, VOCABULARY
from torch import Tensor

LAYERS = 4
SIDE = 32  # pixels; patches of 8, so 16 of them
PATCHES = (SIDE // 8) ** 2


def text(model_type: str, **extra: Any) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "bos_token_id": ENDOFTEXT,
        "eos_token_id": IM_END,
        "pad_token_id": ENDOFTEXT,
        **extra,
    }


def rotary(**extra: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, **extra}}


def vision(model_type: str | None, **extra: Any) -> dict[str, Any]:
    return {
        **({} if model_type is None else {"model_type": model_type}),
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "image_size": SIDE,
        "patch_size": 8,
        **extra,
    }


def qwen_vision(**extra: Any) -> dict[str, Any]:
    return {
        "depth": 3,
        "hidden_size": 32,
        "num_heads": 2,
        "intermediate_size": 48,
        "patch_size": 8,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": 32,
        **extra,
    }


CLIP, SIGLIP = vision("clip_vision_model"), vision("siglip_vision_model")
MROPE = rotary(mrope_section=[1, 1, 2], partial_rotary_factor=1.0)
LLAMA, QWEN2 = text("llama", **rotary()), text("qwen2", **rotary())
VISION_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "tie_word_embeddings": False,
}
GLM_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "image_start_token_id": VISION_START,
    "image_end_token_id": VISION_END,
    "video_start_token_id": 250,
    "video_end_token_id": 251,
    "tie_word_embeddings": False,
}
NAMED = {"image_token_id": IMAGE, "tie_word_embeddings": False}
INDEXED = {"image_token_index": IMAGE, "tie_word_embeddings": False}


def flat() -> dict[str, Tensor]:
    """Two pictures of one size."""
    return {"pixel_values": torch.randn(2, 3, SIDE, SIDE)}


def sized() -> dict[str, Tensor]:
    return {**flat(), "image_sizes": torch.tensor([[SIDE, SIDE]] * 2)}


def tiled() -> dict[str, Tensor]:
    """An overview and one tile each."""
    return {
        "pixel_values": torch.randn(2, 2, 3, SIDE, SIDE),
        "image_sizes": torch.tensor([[SIDE, SIDE]] * 2),
    }


def grouped() -> dict[str, Tensor]:
    """Rows of pictures, each with its pixel mask."""
    return {
        "pixel_values": torch.randn(2, 1, 3, SIDE, SIDE),
        "pixel_attention_mask": torch.ones(2, 1, SIDE, SIDE, dtype=torch.bool),
    }


def masked_tiles() -> dict[str, Tensor]:
    """Rows of tiles, with a mask of those that are real."""
    return {
        "pixel_values": torch.randn(2, 1, 3, SIDE, SIDE),
        "pixel_attention_mask": torch.ones(2, 1, dtype=torch.bool),
    }


def patches(width: int) -> Callable[[], dict[str, Tensor]]:
    """Patches in a row, with the grid that they come from."""

    def make() -> dict[str, Tensor]:
        return {
            "pixel_values": torch.randn(2 * PATCHES, width),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        }

    return make


@dataclass(frozen=True)
class Family:
    """A config and the vision tensors of two pictures, one for each row of a batch.

    Attributes:
        config: of the model, by keyword.
        pixels: makes the vision tensors.
        tokens: image tokens of one picture.
        types: name of the token-type tensor that the model takes, if it takes one.
    """

    config: dict[str, Any]
    pixels: Callable[[], dict[str, Tensor]]
    tokens: int
    types: str = ""


GRID = patches(3 * 2 * 8 * 8)
MM = "mm_token_type_ids"
QWEN_VISION = qwen_vision(num_position_embeddings=64)
DEEPSTACK_VISION = {**QWEN_VISION, "deepstack_visual_indexes": [0, 1]}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
LATENT = {  # attention and experts of DeepSeek-V3 and its kin
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "v_head_dim": 8,
    "qk_nope_head_dim": 8,
}
