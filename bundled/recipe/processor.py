"""The tokenizer, trained on the conversations' own text, and the processor around it."""

import json
import random
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import PaddleOCRVLProcessor, Qwen2Tokenizer
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from .conversations import draw_mixed
from .pictures import TOKEN, scans
from .template import CHAT_TEMPLATE

VOCABULARY = 512
SPECIALS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


def make_processor(seed: int) -> PaddleOCRVLProcessor:
    """Trains a byte-level tokenizer of 512 tokens and wraps it with the image processor.

    The processor class is PaddleOCR-VL's, because it is the same as Qwen2.5-VL's for pictures but
    takes no video processor, which would need torchvision.
    """
    tokenizer = _tokenizer(_corpus(seed))
    images = Qwen2VLImageProcessorPil(
        patch_size=TOKEN // 2,
        merge_size=2,
        temporal_patch_size=2,
        size={"shortest_edge": 512, "longest_edge": 16384},
    )
    return PaddleOCRVLProcessor(images, tokenizer, chat_template=CHAT_TEMPLATE)


def _corpus(seed: int) -> list[str]:
    rng = random.Random(seed)
    texts = []
    for _ in range(3000):
        for turn in draw_mixed(rng, scans("train")).turns:
            texts += [turn.question.text, turn.question.answer]
    return [*texts, *["system\n", "user\n", "assistant\n"] * 1000]


def _tokenizer(corpus: list[str]) -> Qwen2Tokenizer:
    trained = Tokenizer(BPE())
    trained.normalizer = normalizers.NFC()
    trained.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trained.decoder = decoders.ByteLevel()
    trainer = BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    trained.train_from_iterator(corpus, trainer)
    model = json.loads(trained.to_str())["model"]
    vocabulary = dict(model["vocab"])
    for special in SPECIALS:
        vocabulary[special] = len(vocabulary)
    # No unknown token is needed where every byte is one; the annotations do not foresee that.
    model_parts: dict[str, Any] = {
        "vocab": vocabulary,
        "merges": [tuple(merge) for merge in model["merges"]],
        "unk_token": None,
    }
    return Qwen2Tokenizer(
        **model_parts,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        padding_side="left",
        model_max_length=512,
        extra_special_tokens={
            "im_start_token": "<|im_start|>",
            "vision_bos_token": "<|vision_start|>",
            "vision_eos_token": "<|vision_end|>",
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
        },
    )
