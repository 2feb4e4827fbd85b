"""Small random vision-language models of several families, saved as ordinary checkpoints."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import pre_tokenizers
from transformers import (
    CLIPVisionConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PaddleOCRVLProcessor,
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
BYTES = 256
ENDOFTEXT, IM_START, IM_END, VISION_START, VISION_END, IMAGE, VIDEO = range(BYTES, BYTES + 7)
VOCABULARY = BYTES + len(SPECIALS) + 9  # nine spare rows, as published checkpoints have

_QWEN_PICTURE = "<|vision_start|><|image_pad|><|vision_end|>"


def chat_template(picture: str) -> str:
    """ChatML with the assistant's part marked; a picture part renders as ``picture``."""
    return (
        "{%- for m in messages -%}{{- '<|im_start|>' + m['role'] + '\\n' -}}"
        "{%- set ns = namespace(text='') -%}"
        "{%- if m['content'] is string -%}{%- set ns.text = m['content'] -%}{%- else -%}"
        "{%- for p in m['content'] -%}"
        "{%- set ns.text = ns.text + ('" + picture + "' if p['type'] == 'image' else p['text']) -%}"
        "{%- endfor -%}{%- endif -%}"
        "{%- if m['role'] == 'assistant' -%}"
        "{%- generation -%}{{- ns.text + '<|im_end|>' -}}{%- endgeneration -%}"
        "{%- else -%}{{- ns.text + '<|im_end|>' -}}{%- endif -%}{{- '\\n' -}}{%- endfor -%}"
        "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}"
    )


def tokenizer() -> Qwen2Tokenizer:
    """One token per byte, then the special tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*alphabet, *SPECIALS])}
    return Qwen2Tokenizer(
        vocab=vocabulary,
        merges=[],
        unk_token=None,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        extra_special_tokens={
            "im_start_token": "<|im_start|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
        },
    )


def qwen_processor() -> PaddleOCRVLProcessor:
    """What Qwen2-VL and its successors do with pictures, without a video processor."""
    images = Qwen2VLImageProcessorPil(
        patch_size=8,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 512, "longest_edge": 16384},
    )
    return PaddleOCRVLProcessor(images, tokenizer(), chat_template=chat_template(_QWEN_PICTURE))


def llava_processor() -> LlavaProcessor:
    images = CLIPImageProcessorPil(
        size={"height": 32, "width": 32}, crop_size={"height": 32, "width": 32}
    )
    return LlavaProcessor(
        images,
        tokenizer(),
        patch_size=8,
        vision_feature_select_strategy="default",
        chat_template=chat_template("<|image_pad|>"),
        num_additional_image_tokens=1,
    )


def _text(**extra: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
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


_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_QWEN_IDS = {
    "image_token_id": IMAGE,
    "video_token_id": VIDEO,
    "vision_start_token_id": VISION_START,
    "vision_end_token_id": VISION_END,
    "tie_word_embeddings": False,
}


def qwen2_vl() -> PreTrainedModel:
    config = Qwen2VLConfig(
        text_config=_text(rope_parameters=_MROPE),
        vision_config={
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 32,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        **_QWEN_IDS,
    )
    return Qwen2VLForConditionalGeneration(config)


def qwen2_5_vl() -> PreTrainedModel:
    config = Qwen2_5_VLConfig(
        text_config=_text(rope_parameters=_MROPE),
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 48,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 32,
            "fullatt_block_indexes": [0, 1],
            "window_size": 64,
        },
        **_QWEN_IDS,
    )
    return Qwen2_5_VLForConditionalGeneration(config)


def qwen3_vl() -> PreTrainedModel:
    """With DeepStack: picture features enter after layers 0 and 1 as well."""
    config = Qwen3VLConfig(
        text_config=_text(rope_parameters={**_MROPE, "mrope_interleaved": True}),
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "num_heads": 2,
            "intermediate_size": 48,
            "patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": 32,
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [0, 1],
        },
        **_QWEN_IDS,
    )
    return Qwen3VLForConditionalGeneration(config)


def llava() -> PreTrainedModel:
    config = LlavaConfig(
        vision_config=CLIPVisionConfig(
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=3,
            num_attention_heads=2,
            image_size=32,
            patch_size=8,
        ),
        text_config=Qwen2Config(
            **_text(rope_parameters={"rope_type": "default", "rope_theta": 1e4})
        ),
        image_token_index=IMAGE,
        image_seq_length=16,
    )
    return LlavaForConditionalGeneration(config)


FAMILIES: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[], Any]]] = {
    "qwen2_vl": (qwen2_vl, qwen_processor),
    "qwen2_5_vl": (qwen2_5_vl, qwen_processor),
    "qwen3_vl": (qwen3_vl, qwen_processor),
    "llava": (llava, llava_processor),
}


def save_tiny_target(family: str, folder: Path) -> Path:
    """Save a random model of the family with its processor; all weights perturbed, so that norms,
    biases and attention are not trivial."""
    make_model, make_processor = FAMILIES[family]
    torch.manual_seed(0)
    model = make_model()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * (0.12 if p.ndim > 1 else 0.05))
    model.save_pretrained(folder)
    make_processor().save_pretrained(folder)
    return folder
