"""The tiny models of ``family_models`` saved as checkpoints with a processor of their family, for
families whose processor needs neither torchvision nor downloaded files."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from family_models import make_model
from family_parts import SIDE
from tiny_targets import IMAGE, chat_template, tokenizer
from transformers import (
    AyaVisionProcessor,
    ChameleonProcessor,
    Gemma3Processor,
    Granite4VisionProcessor,
    Idefics2Processor,
    Idefics3Processor,
    LlavaNextProcessor,
    Ovis2Processor,
)
from transformers.models.chameleon.image_processing_pil_chameleon import (
    ChameleonImageProcessorPil,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import (
    LlavaNextImageProcessorPil,
)
from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil

PAD = "<|image_pad|>"  # id IMAGE
SQUARE = {"height": SIDE, "width": SIDE}
SHORTEST = {"shortest_edge": SIDE}
TILES = [[SIDE, SIDE], [SIDE, 2 * SIDE], [2 * SIDE, SIDE]]


def tokens(**named: str) -> Any:
    """The byte-level tokenizer with more special tokens, by attribute; their ids follow."""
    made = tokenizer()
    made.add_special_tokens({"additional_special_tokens": list(named.values())})
    made._set_model_specific_special_tokens(special_tokens=named)
    return made


def llava_next() -> Any:
    return LlavaNextProcessor(
        LlavaNextImageProcessorPil(size=SHORTEST, crop_size=SQUARE, image_grid_pinpoints=TILES),
        tokens(),
        patch_size=8,
        vision_feature_select_strategy="default",
        image_token=PAD,
        num_additional_image_tokens=1,
        chat_template=chat_template(PAD),
    )


def granite4_vision() -> Any:
    return Granite4VisionProcessor(
        LlavaNextImageProcessorPil(size=SHORTEST, crop_size=SQUARE, image_grid_pinpoints=TILES),
        tokens(),
        patch_size=8,
        vision_feature_select_strategy="default",
        image_token=PAD,
        num_additional_image_tokens=1,
        downsample_rate="2/4",
        chat_template=chat_template(PAD),
    )


def gemma3() -> Any:
    return Gemma3Processor(
        Gemma3ImageProcessorPil(size=SQUARE, do_pan_and_scan=False),
        tokens(boi_token="<start_of_image>", eoi_token="<end_of_image>"),
        image_seq_length=4,
        chat_template=chat_template("<start_of_image>"),
    )


def idefics3() -> Any:
    return Idefics3Processor(
        Idefics3ImageProcessorPil(
            size={"longest_edge": 2 * SIDE}, max_image_size={"longest_edge": SIDE}
        ),
        tokens(row="<image>"),
        image_seq_len=4,
        chat_template=chat_template("<image>"),
    )


def idefics2() -> Any:
    return Idefics2Processor(
        Idefics2ImageProcessorPil(
            size={"longest_edge": SIDE, "shortest_edge": SIDE // 2}, do_image_splitting=False
        ),
        tokens(image_boundary_token="<fake>"),
        image_seq_len=4,
        chat_template=chat_template(PAD),
    )


def chameleon() -> Any:
    made = ChameleonProcessor(
        ChameleonImageProcessorPil(size=SHORTEST, crop_size=SQUARE),
        tokens(boi_token="<boi>", eoi_token="<eoi>"),
        image_seq_length=16,
    )
    made.chat_template = chat_template(PAD)
    return made


def aya_vision() -> Any:
    return AyaVisionProcessor(
        GotOcr2ImageProcessorPil(size=SQUARE, crop_to_patches=True, min_patches=1, max_patches=2),
        tokens(start="<|START_OF_IMG|>"),
        patch_size=8,
        img_size=SIDE,
        downsample_factor=2,
        image_token="<image>",
        img_patch_token=PAD,
        chat_template=chat_template("<image>"),
    )


def ovis2() -> Any:
    return Ovis2Processor(
        Ovis2ImageProcessorPil(size=SQUARE, crop_to_patches=False),
        tokens(
            prompt="<image>",
            atom="<IMG_ATOM>",
            start="<IMG_START>",
            end="<IMG_END>",
            grid="<IMG_GRID>",
        ),
        image_seq_length=4,
        chat_template=chat_template("<image>"),
    )


PROCESSORS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "llava_next": (llava_next, {"image_grid_pinpoints": TILES}),
    "granite4_vision": (granite4_vision, {"image_grid_pinpoints": TILES}),
    "gemma3": (gemma3, {}),
    "idefics3": (idefics3, {"image_token_id": 263}),
    "idefics2": (idefics2, {}),
    "chameleon": (chameleon, {}),
    "aya_vision": (aya_vision, {}),
    "ovis2": (
        ovis2,
        {"image_token_id": 264, "visual_indicator_token_ids": [265, 266, 267, 268, 269]},
    ),
}
assert IMAGE == 261


def save_checkpoint(family: str, folder: Path) -> Path:
    """Save the family's tiny model with its processor."""
    make_processor, config = PROCESSORS[family]
    make_model(family, **config).save_pretrained(folder)
    make_processor().save_pretrained(folder)
    return folder
