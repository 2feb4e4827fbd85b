"""Conversations to the tensors that the target takes."""

from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import ProcessorMixin


def encode(
    processor: ProcessorMixin,
    messages: Sequence[list[dict[str, Any]]],
    images: Sequence[Sequence[Image.Image]],
    *,
    prompt: bool = False,
) -> dict[str, Tensor]:
    """Encodes a batch, padded on the left.

    Gives `input_ids`, `attention_mask` and `mm_token_type_ids`, all int64 [B, T], and where there
    are pictures `pixel_values` float32 [patches, 384] and `image_grid_thw` int64 [pictures, 3].
    With `prompt` the assistant's turn is opened; without it `assistant_masks` int64 [B, T] is 1
    where the assistant wrote the token.
    """
    filled = [_fill(row, iter(shown)) for row, shown in zip(messages, images, strict=True)]
    batch: Any = processor.apply_chat_template(
        filled,
        tokenize=True,
        return_dict=True,
        add_generation_prompt=prompt,
        return_assistant_tokens_mask=not prompt,
        processor_kwargs={"padding": True, "return_tensors": "np"},
    )
    return {key: torch.as_tensor(value) for key, value in batch.items()}


def _fill(messages: list[dict[str, Any]], images: Any) -> list[dict[str, Any]]:
    """Puts the pictures where the messages only say that there is one."""
    return [
        {
            "role": message["role"],
            "content": [
                {"type": "image", "image": next(images)} if part["type"] == "image" else part
                for part in message["content"]
            ],
        }
        for message in messages
    ]
