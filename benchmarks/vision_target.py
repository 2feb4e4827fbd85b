"""A random vision-language model of any size, and conversations for it."""

import io
import random
import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from dspark.bundled import TARGET

_WORDS = ("the", "sum", "of", "both", "digits", "is", "seven", "and", "largest", "comes", "first")
_TOKENS_OF_A_WORD = 1.5
_PICTURE_TOKEN = 16
"""Pixels on a side."""


def save_vision_target(
    folder: Path, *, hidden_size: int, layers: int, max_length: int, dtype: torch.dtype
) -> int:
    """Save a Qwen2.5-VL with random weights and the bundled target's processor.

    Returns:
        Its parameters.
    """
    from transformers import AutoConfig, AutoProcessor, Qwen2_5_VLForConditionalGeneration

    config = AutoConfig.from_pretrained(TARGET)
    text = config.text_config
    text.hidden_size, text.num_hidden_layers = hidden_size, layers
    text.layer_types = ["full_attention"] * layers
    text.intermediate_size = 4 * hidden_size
    text.num_attention_heads = max(2, hidden_size // 64)
    text.num_key_value_heads = text.num_attention_heads // 2
    text.rope_parameters["mrope_section"] = [8, 12, 12]
    text.max_position_embeddings = max_length
    vision = config.vision_config
    vision.hidden_size, vision.intermediate_size = hidden_size // 2, 2 * hidden_size
    vision.num_heads, vision.depth = max(2, hidden_size // 128), 4
    vision.fullatt_block_indexes = [3]
    vision.out_hidden_size = hidden_size
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        model = Qwen2_5_VLForConditionalGeneration(config)
    finally:
        torch.set_default_dtype(before)
    model.save_pretrained(folder)
    processor = AutoProcessor.from_pretrained(TARGET)
    processor.image_processor.size = {"shortest_edge": 512, "longest_edge": 1 << 20}
    processor.save_pretrained(folder)
    shutil.copy(TARGET / "chat_template.jinja", folder)
    return sum(p.numel() for p in model.parameters())


def write_conversations(path: Path, rows: int, mean_length: int, max_length: int) -> None:
    """Conversations of which every second one has a picture, which is half of its tokens.

    Args:
        path: of the Parquet file.
        rows: conversations.
        mean_length: tokens of one, about; they vary by a half.
        max_length: no row is longer.
    """
    draw = random.Random(0)
    noise = np.random.default_rng(0)
    out = []
    for i in range(rows):
        length = min(int(mean_length * draw.uniform(0.5, 1.5)), max_length - 64)
        pictures = []
        words = int(length / _TOKENS_OF_A_WORD)
        if i % 2:
            side = max(2, round((length / 2) ** 0.5)) * _PICTURE_TOKEN
            pixels = noise.integers(0, 256, (side, side, 3), dtype=np.uint8)
            pictures = [_jpeg(Image.fromarray(pixels))]
            words //= 2
        said = " ".join(draw.choices(_WORDS, k=max(2, words)))
        question, answer = said[: len(said) // 3], said[len(said) // 3 :]
        asked = [{"type": "image", "text": None}] * len(pictures)
        out.append(
            {
                "messages": [
                    {"role": "user", "content": [*asked, {"type": "text", "text": question}]},
                    {"role": "assistant", "content": [{"type": "text", "text": answer}]},
                ],
                "images": [{"bytes": data} for data in pictures],
            }
        )
    schema = pa.Table.from_pylist(out[:2]).schema
    pq.write_table(pa.Table.from_pylist(out, schema=schema), path, row_group_size=16)


def _jpeg(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "JPEG", quality=90)
    return buffer.getvalue()
