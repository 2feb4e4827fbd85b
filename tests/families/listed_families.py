"""The families that must be captured, and two that must be refused."""

import torch
from family_parts import (
    CLIP,
    DEEPSTACK_VISION,
    GLM_IDS,
    GRID,
    INDEXED,
    LATENT,
    LINEAR,
    LLAMA,
    MM,
    MOE,
    MROPE,
    NAMED,
    PATCHES,
    QWEN2,
    QWEN_VISION,
    SIDE,
    SIGLIP,
    VISION_IDS,
    Family,
    flat,
    grouped,
    qwen_vision,
    rotary,
    sized,
    text,
    tiled,
    vision,
)
from tiny_targets import IMAGE, VIDEO, VOCABULARY

LISTED: dict[str, Family] = {
    "llava": Family({"vision_config": CLIP, "text_config": LLAMA, **INDEXED}, flat, 16),
    "llava_next": Family(
        {
            "vision_config": CLIP,
            "text_config": text("mistral", **rotary()),
            "image_grid_pinpoints": [[SIDE, SIDE]],
            **INDEXED,
        },
        tiled,
        16 + 4 * 5,
    ),
    "llava_onevision": Family(
        {
            "vision_config": SIGLIP,
            "text_config": QWEN2,
            "image_grid_pinpoints": [[SIDE, SIDE]],
            **INDEXED,
        },
        tiled,
        16 + 4 * 5,
    ),
    "qwen2_vl": Family(
        {
            "text_config": text("qwen2_vl_text", **MROPE),
            "vision_config": {**qwen_vision(), "embed_dim": 32, "mlp_ratio": 2},
            **VISION_IDS,
        },
        GRID,
        4,
        MM,
    ),
    "qwen2_5_vl": Family(
        {
            "text_config": text("qwen2_5_vl_text", **MROPE),
            "vision_config": qwen_vision(fullatt_block_indexes=[0, 1], window_size=64),
            **VISION_IDS,
        },
        GRID,
        4,
        MM,
    ),
    "qwen3_vl": Family(
        {
            "text_config": text("qwen3_vl_text", **MROPE),
            "vision_config": DEEPSTACK_VISION,
            **VISION_IDS,
        },
        GRID,
        4,
        MM,
    ),
    "qwen3_vl_moe": Family(
        {
            "text_config": text(
                "qwen3_vl_moe_text",
                **MOE,
                **MROPE,
            ),
            "vision_config": DEEPSTACK_VISION,
            **VISION_IDS,
        },
        GRID,
        4,
        MM,
    ),
    "qwen3_5": Family(
        {
            "text_config": text(
                "qwen3_5_text",
                layer_types=["linear_attention", "full_attention"] * 2,
                **LINEAR,
                **MROPE,
            ),
            "vision_config": QWEN_VISION,
            **VISION_IDS,
        },
        GRID,
        4,
        MM,
    ),
    "gemma3": Family(
        {
            "text_config": text("gemma3_text", sliding_window=16, query_pre_attn_scalar=8),
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 4,
            **INDEXED,
        },
        flat,
        4,
        "token_type_ids",
    ),
    "gemma4": Family(
        {
            "text_config": text(
                "gemma4_text",
                sliding_window=16,
                global_head_dim=8,
                vocab_size_per_layer_input=VOCABULARY,
                hidden_size_per_layer_input=8,
                final_logit_softcapping=0.3,
            ),
            "vision_config": vision(
                None, num_key_value_heads=2, head_dim=16, pooling_kernel_size=2
            ),
            "audio_config": None,
            **NAMED,
            "video_token_id": VIDEO,
            "boi_token_id": 250,
            "eoi_token_id": 251,
            "audio_token_id": 252,
            "boa_token_id": 253,
            "eoa_token_index": 254,
        },
        lambda: {
            "pixel_values": torch.rand(2, PATCHES, 3 * 8 * 8),
            "image_position_ids": torch.cartesian_prod(torch.arange(4), torch.arange(4))
            .flip(-1)
            .expand(2, -1, -1),
        },
        4,
        MM,
    ),
    "gemma3n": Family(
        {
            "text_config": text(
                "gemma3n_text",
                sliding_window=16,
                vocab_size_per_layer_input=VOCABULARY,
                hidden_size_per_layer_input=8,
                num_kv_shared_layers=0,
                laurel_rank=4,
                altup_num_inputs=3,
                final_logit_softcapping=0.3,
            ),
            "vision_config": {"hidden_size": 16, "vocab_size": 8, "vocab_offset": 256},
            "audio_config": {"hidden_size": 16, "vocab_size": 8, "vocab_offset": 264},
            **NAMED,
            "vision_soft_tokens_per_image": 4,
            "boi_token_id": 250,
            "eoi_token_id": 256,
            "audio_token_id": 264,
            "boa_token_id": 251,
            "eoa_token_id": 265,
        },
        flat,
        4,
    ),
    "smolvlm": Family(
        {"text_config": LLAMA, "vision_config": vision(None), **NAMED, "scale_factor": 2},
        grouped,
        4,
    ),
    "idefics3": Family(
        {"text_config": LLAMA, "vision_config": vision(None), **NAMED, "scale_factor": 2},
        grouped,
        4,
    ),
    "internvl": Family(
        {
            "text_config": QWEN2,
            "vision_config": vision(None, image_size=[SIDE, SIDE], patch_size=[8, 8]),
            "image_seq_length": 4,
            **NAMED,
        },
        flat,
        4,
    ),
    "mistral3": Family(
        {
            "text_config": text("mistral", **rotary()),
            "vision_config": vision("pixtral", head_dim=16, **rotary()),
            **INDEXED,
        },
        sized,
        4,
    ),
    "paligemma": Family(
        {
            "text_config": text("gemma", **rotary()),
            "vision_config": vision("siglip_vision_model", projection_dim=32),
            "projection_dim": 32,
            **INDEXED,
        },
        flat,
        16,
        "token_type_ids",
    ),
    "glm4v": Family(
        {
            "text_config": text("glm4v_text", **MROPE),
            "vision_config": qwen_vision(image_size=SIDE),
            **GLM_IDS,
        },
        GRID,
        4,
        MM,
    ),
    "kimi_k25": Family(
        {
            "text_config": text(
                "deepseek_v3",
                **LATENT,
                n_group=2,
                topk_group=1,
                qk_rope_head_dim=8,
                first_k_dense_replace=1,
                **rotary(),
            ),
            "vision_config": {
                **vision(None),
                "pos_emb_height": 8,
                "pos_emb_width": 8,
                "pos_emb_time": 2,
            },
            "projection_hidden_size": 32,
            **VISION_IDS,
        },
        lambda: {
            "pixel_values": torch.randn(2 * PATCHES, 3, 8, 8),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        },
        4,
    ),
    "minimax_m3_vl": Family(
        {
            "text_config": text(
                "minimax_m3_vl_text",
                dense_intermediate_size=48,
                shared_intermediate_size=16,
                num_local_experts=4,
                num_experts_per_tok=2,
                rotary_dim=8,
                mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
                layer_types=["full_attention", "minimax_m3_sparse"] * 2,
                index_n_heads=2,
                index_head_dim=8,
                index_block_size=4,
                index_topk_blocks=2,
            ),
            "vision_config": vision(None, spatial_merge_size=2, temporal_patch_size=2),
            "projector_hidden_size": 32,
            "video_token_index": VIDEO,
            **INDEXED,
        },
        GRID,
        4,
    ),
    "lfm2_vl": Family(
        {
            "text_config": text("lfm2", layer_types=["conv", "full_attention"] * 2, **rotary()),
            "vision_config": vision("siglip2_vision_model", num_patches=PATCHES),
            "projector_hidden_size": 32,
            **NAMED,
        },
        lambda: {
            "pixel_values": torch.randn(2, PATCHES, 3 * 8 * 8),
            "spatial_shapes": torch.tensor([[4, 4]] * 2),
            "pixel_attention_mask": torch.ones(2, PATCHES, dtype=torch.long),
        },
        4,
    ),
    "granite4_vision": Family(
        {
            "text_config": text(
                "granite4_vision_text",
                embedding_multiplier=3.0,
                logits_scaling=2.0,
                **rotary(),
            ),
            "vision_config": vision("clip_vision_model", hidden_size=64),
            "image_grid_pinpoints": [[SIDE, SIDE]],
            "downsample_rate": "2/4",
            "deepstack_layer_map": [[-2, 0], [-3, 2]],
            "spatial_target_layers": [1, 3, 1, 3],
            "qformer_config": {
                "model_type": "blip_2_qformer",
                "num_hidden_layers": 1,
                "intermediate_size": 48,
                "cross_attention_frequency": 1,
                "use_qformer_text_input": False,
            },
            **INDEXED,
        },
        tiled,
        4 + 2 * 3,
    ),
    "ovis2": Family(
        {
            "text_config": QWEN2,
            "vision_config": vision(
                None, vocab_size=24, num_visual_indicator_tokens=5, hidden_stride=2
            ),
            "visual_indicator_token_ids": [250, 251, 252, 253, 254],
            "vocab_size": VOCABULARY,
            "hidden_size": 32,
            **NAMED,
        },
        flat,
        4,
    ),
}

# Whose pictures do not enter as embeddings of tokens: to be refused.
REFUSED: dict[str, Family] = {
    "mllama": Family(
        {
            "text_config": text(
                "mllama_text_model",
                cross_attention_layers=[1, 3],
                **rotary(),
            ),
            "vision_config": {
                **vision(None),
                "attention_heads": 2,
                "num_global_layers": 1,
                "intermediate_layers_indices": [0, 1],
                "vision_output_dim": 96,
                "max_num_tiles": 1,
                "supported_aspect_ratios": [[1, 1]],
            },
            **INDEXED,
        },
        lambda: {
            "pixel_values": torch.randn(2, 1, 1, 3, SIDE, SIDE),
            "aspect_ratio_ids": torch.ones(2, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(2, 1, 1, dtype=torch.long),
        },
        1,
    ),
    "florence2": Family(
        {
            "text_config": {
                "model_type": "bart",
                "vocab_size": VOCABULARY,
                "d_model": 32,
                "encoder_layers": 2,
                "decoder_layers": 2,
                "encoder_attention_heads": 2,
                "decoder_attention_heads": 2,
                "encoder_ffn_dim": 48,
                "decoder_ffn_dim": 48,
            },
            "vision_config": {
                "depths": [1, 1, 1, 1],
                "embed_dim": [8, 8, 16, 32],
                "num_heads": [1, 1, 2, 2],
                "num_groups": [1, 1, 2, 2],
                "window_size": 4,
                "projection_dim": 32,
            },
            "image_token_id": IMAGE,
        },
        flat,
        2,
    ),
}
