"""More families: chosen for what is odd about them, or because they are cheap to have."""

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
    masked_tiles,
    patches,
    qwen_vision,
    rotary,
    sized,
    text,
    tiled,
    vision,
)
from tiny_targets import IMAGE, VIDEO

OTHERS: dict[str, Family] = {
    "vipllava": Family(
        {
            "vision_config": CLIP,
            "text_config": LLAMA,
            "vision_feature_layers": [-2, -1],
            **INDEXED,
        },
        flat,
        16,
    ),
    "paligemma2": Family(
        {
            "model_type": "paligemma",
            "text_config": text(
                "gemma2",
                sliding_window=16,
                query_pre_attn_scalar=8,
                final_logit_softcapping=0.3,
                **rotary(),
            ),
            "vision_config": vision("siglip_vision_model", projection_dim=32),
            "projection_dim": 32,
            **INDEXED,
        },
        flat,
        16,
        "token_type_ids",
    ),
    "chameleon": Family(
        {
            **text("chameleon", **rotary()),
            "vq_config": {
                "embed_dim": 8,
                "num_embeddings": 12,
                "latent_channels": 8,
                "resolution": SIDE,
                "base_channels": 32,
                "channel_multiplier": [1, 1, 1, 2],
                "num_res_blocks": 1,
            },
            "vocabulary_map": {"<image>": IMAGE}
            | {f"IMGIMG{chr(65 + i // 10)}{chr(65 + i % 10)}Z": 240 + i for i in range(12)},
        },
        flat,
        16,
    ),
    "glm5_next": Family(
        {
            "text_config": text(
                "glm5_next_text",
                **LATENT,
                index_topk=8,
                index_head_dim=8,
                index_n_heads=2,
                index_kpool=4,
                linear_head_dim=8,
                linear_num_heads=4,
                hc_mult=3,
                head_dim=0,
                mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
            ),
            "vision_config": qwen_vision(image_size=SIDE, projection_intermediate_size=48),
            **GLM_IDS,
        },
        GRID,
        4,
        MM,
    ),
    "qwen4_exp": Family(
        {
            "text_config": text(
                "qwen4_exp_text",
                layer_types=["linear_attention", "indexed_attention"] * 2,
                **LINEAR,
                **MOE,
                shared_expert_intermediate_size=16,
                hc_count=3,
                hc_lowrank=8,
                indexer_n_heads=2,
                indexer_kv_heads=1,
                indexer_head_dim=8,
                indexer_budget=8,
                indexer_compress_ratio=4,
                **MROPE,
            ),
            "vision_config": QWEN_VISION,
            **VISION_IDS,
        },
        GRID,
        4,
        MM,
    ),
    "hunyuan_vl": Family(
        {
            "text_config": text(
                "hunyuan_vl_text",
                rope_parameters={
                    "rope_type": "xdrope",
                    "rope_theta": 1e4,
                    "xdrope_section": [1, 1, 1, 1],
                    "alpha": 1000.0,
                    "factor": 1.0,
                },
            ),
            "vision_config": vision(
                None, out_hidden_size=32, text_hidden_size=32, max_image_size=64, min_image_size=32
            ),
            **NAMED,
        },
        patches(3 * 8 * 8),
        4 + 2 + 2,  # with a line end for each of two rows, a start and an end
        MM,
    ),
    "granite_docling": Family(
        {
            "text_config": text("granite_docling_text", logits_scaling=2.0, **rotary()),
            "vision_config": vision(
                None,
                num_hidden_layers=4,
                out_hidden_size=32,
                scale_factor=2,
                deepstack_visual_indexes=[0, 1],
            ),
            **NAMED,
        },
        masked_tiles,
        4,
    ),
    "idefics2": Family(
        {
            "text_config": text("mistral", **rotary()),
            "vision_config": vision(None),
            "perceiver_config": {
                "hidden_size": 32,
                "resampler_n_latents": 4,
                "resampler_depth": 1,
                "resampler_n_heads": 4,
                "resampler_head_dim": 8,
                "num_key_value_heads": 2,
            },
            **NAMED,
        },
        grouped,
        4,
    ),
    "aya_vision": Family(
        {
            "text_config": text("cohere2", sliding_window=16, logit_scale=0.0625, **rotary()),
            "vision_config": SIGLIP,
            **INDEXED,
        },
        flat,
        4,
    ),
    "cohere2_vision": Family(
        {
            "text_config": text("cohere2", sliding_window=16, logit_scale=0.0625, **rotary()),
            "vision_config": SIGLIP,
            "alignment_intermediate_size": 48,
            **NAMED,
        },
        flat,
        4,
    ),
    "qwen3_5_moe": Family(
        {
            "text_config": text(
                "qwen3_5_moe_text",
                layer_types=["linear_attention", "full_attention"] * 2,
                **LINEAR,
                **MOE,
                shared_expert_intermediate_size=16,
                **MROPE,
            ),
            "vision_config": QWEN_VISION,
            **VISION_IDS,
        },
        GRID,
        4,
        MM,
    ),
    "glm4v_moe": Family(
        {
            "text_config": text(
                "glm4v_moe_text",
                moe_intermediate_size=16,
                n_routed_experts=4,
                num_experts_per_tok=2,
                **MROPE,
            ),
            "vision_config": qwen_vision(image_size=SIDE),
            **GLM_IDS,
        },
        GRID,
        4,
        MM,
    ),
    "glm46v": Family(
        {
            "text_config": text("glm4v_text", **MROPE),
            "vision_config": {"model_type": "glm4v_vision", **qwen_vision(image_size=SIDE)},
            **GLM_IDS,
        },
        GRID,
        4,
        MM,
    ),
    "glm_ocr": Family(
        {
            "text_config": text("glm_ocr_text", **MROPE),
            "vision_config": qwen_vision(image_size=SIDE),
            **GLM_IDS,
        },
        GRID,
        4,
        MM,
    ),
    "llava_next_video": Family(
        {
            "vision_config": CLIP,
            "text_config": LLAMA,
            "image_grid_pinpoints": [[SIDE, SIDE]],
            "video_token_index": VIDEO,
            **INDEXED,
        },
        tiled,
        16 + 4 * 5,
    ),
    "lighton_ocr": Family(
        {
            "text_config": text("qwen3", **rotary()),
            "vision_config": vision("pixtral", head_dim=16, **rotary()),
            **NAMED,
        },
        sized,
        4,
    ),
    "exaone4_5": Family(
        {
            "text_config": text(
                "exaone4",
                sliding_window=16,
                layer_types=["sliding_attention", "full_attention"] * 2,
                **rotary(),
            ),
            "vision_config": qwen_vision(
                num_key_value_heads=2, fullatt_block_indexes=[0, 1], window_size=64
            ),
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "tie_word_embeddings": False,
        },
        GRID,
        4,
    ),
    "video_llama_3": Family(
        {
            "text_config": QWEN2,
            "vision_config": {k: v for k, v in vision(None).items() if k != "image_size"},
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "tie_word_embeddings": False,
        },
        lambda: {
            **patches(3 * 8 * 8)(),
            "image_merge_sizes": torch.tensor([2, 2]),
        },
        4,
    ),
    "deepseek_vl": Family({"text_config": LLAMA, "vision_config": SIGLIP, **NAMED}, flat, 16),
    "qianfan_ocr": Family(
        {
            "text_config": text("qwen3", **rotary()),
            "vision_config": vision(None, image_size=[SIDE, SIDE], patch_size=[8, 8]),
            "image_seq_length": 4,
            **NAMED,
        },
        flat,
        4,
    ),
    "aria": Family(
        {
            "text_config": text(
                "aria_text", moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1, **rotary()
            ),
            "vision_config": {**vision(None), "model_type": "idefics3_vision"},
            "projector_patch_to_query_dict": {"16": 4},
            **INDEXED,
        },
        lambda: {**flat(), "pixel_mask": torch.ones(2, SIDE, SIDE, dtype=torch.bool)},
        4,
    ),
    "hy_v4_vl": Family(
        {
            "text_config": text(
                "hy_v4_vl_text",
                **LATENT,
                qk_rope_head_dim=8,
                index_topk=8,
                index_head_dim=16,
                index_n_heads=2,
                hc_mult=3,
                mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
                **MROPE,
            ),
            "vision_config": {
                **{k: v for k, v in vision(None).items() if k != "image_size"},
                "out_hidden_size": 32,
                "max_image_size": 64,
            },
            "image_token_id": IMAGE,
            "video_token_id": VIDEO,
            "tie_word_embeddings": False,
        },
        patches(3 * 8 * 8),
        4 + 2,
        MM,
    ),
    "mistral_large4": Family(
        {
            "text_config": text(
                "mistral_large4_text",
                **{k: v for k, v in LATENT.items() if k != "q_lora_rank"},
                qk_rope_head_dim=8,
                index_topk=8,
                index_head_dim=16,
                index_n_heads=2,
                final_logit_softcapping=0.3,
                **rotary(),
            ),
            "vision_config": vision("pixtral", head_dim=16, **rotary()),
            **INDEXED,
        },
        sized,
        4,
    ),
    "cohere_compass": Family(
        {
            "text_config": text(
                "cohere_compass_text",
                logit_scale=0.25,
                sliding_window=16,
                layer_types=["sliding_attention", "full_attention"] * 2,
                rope_parameters={
                    kind: MROPE["rope_parameters"]
                    for kind in ("sliding_attention", "full_attention")
                },
            ),
            "vision_config": DEEPSTACK_VISION,
            **VISION_IDS,
        },
        GRID,
        4,
        MM,
    ),
    "paddleocr_vl": Family(
        {
            "text_config": text("paddleocr_vl_text", **MROPE),
            "vision_config": vision(None),
            **VISION_IDS,
        },
        lambda: {
            "pixel_values": torch.randn(2 * PATCHES, 3, 8, 8),
            "image_grid_thw": torch.tensor([[1, 4, 4]] * 2),
        },
        4,
        MM,
    ),
    "ernie4_5_vl_moe": Family(
        {
            "text_config": text(
                "ernie4_5_vl_moe_text",
                moe_intermediate_size=[16, 16],
                moe_k=2,
                moe_num_experts=4,
                mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
                **MROPE,
            ),
            "vision_config": {**qwen_vision(), "temporal_merge_size": 2},
            **GLM_IDS,
        },
        patches(3 * 8 * 8),
        4,
        MM,
    ),
    "cosmos3_edge": Family(
        {
            "text_config": text("cosmos3_edge_text", **MROPE),
            "vision_config": {
                **{k: v for k, v in vision(None).items() if k != "image_size"},
                "num_patches": PATCHES,
            },
            "projector_hidden_size": 32,
            **VISION_IDS,
        },
        patches(3 * 8 * 8),
        4,
        MM,
    ),
}
