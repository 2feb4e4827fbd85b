"""Tokenizers and processors of the families whose chat templates are in ``loss_mask/templates/``.

The tokenizers are byte-level with the family's special tokens and a few merges; templates are as
published.
"""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import (
    Gemma3Processor,
    Idefics3Processor,
    LlavaProcessor,
    PaddleOCRVLProcessor,
    PreTrainedTokenizerFast,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

TEMPLATES = Path(__file__).parent / "loss_mask" / "templates"

# As in large vocabularies, line breaks and a full stop before one are single tokens.
_MERGES = [("Ċ", "Ċ"), ("ĊĊ", "Ċ"), (".", "Ċ"), ("Ġ", "t"), ("e", "s"), (">", "Ċ")]


def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text()


def byte_tokenizer(
    specials: list[str], *, eos: str, bos: str | None = None, plain: tuple[str, ...] = (), **kw: Any
) -> PreTrainedTokenizerFast:
    """One token per byte and a few merges; ``plain`` are added tokens that are not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *(a + b for a, b in _MERGES)]
    backend = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, _MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    special = [AddedToken(s, special=True, normalized=False) for s in specials]
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(s, special=False, normalized=False) for s in plain])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token=bos, eos_token=eos, pad_token=eos, **kw
    )


def llama_tokenizer() -> PreTrainedTokenizerFast:
    """Words begin with the space before them, as SentencePiece has it; a space is put in front."""
    letters = sorted({"▁", "\n", *(chr(c) for c in range(33, 127))})
    merges = [("▁", letter) for letter in letters if letter != "▁"]
    words = ["<unk>", "<s>", "</s>", "<image>", *letters, *(a + b for a, b in merges)]
    backend = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, merges, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    for name in ("<unk>", "<s>", "</s>", "<image>"):
        backend.add_special_tokens([AddedToken(name, special=True, normalized=False)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="</s>",
        extra_special_tokens={"image_token": "<image>"},
    )


_QWEN = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
_QWEN_PLAIN = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>")
_DEEPSEEK = ["<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"]
_MISTRAL = ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]"]
_MISTRAL += ["[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"]
_LLAMA3 = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def text_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a text-only family, with its published template."""
    match family:
        case "chatml":
            tokenizer = byte_tokenizer(_QWEN, eos="<|im_end|>")
        case "qwen3" | "qwen3_thinking":
            tokenizer = byte_tokenizer(_QWEN, eos="<|im_end|>", plain=_QWEN_PLAIN)
        case "llama3":
            tokenizer = byte_tokenizer(_LLAMA3, bos="<|begin_of_text|>", eos="<|eot_id|>")
        case "llama2":
            tokenizer = llama_tokenizer()
        case "mistral":
            tokenizer = byte_tokenizer(_MISTRAL, bos="<s>", eos="</s>")
        case "phi3":
            specials = [
                "<s>",
                "<|endoftext|>",
                "<|system|>",
                "<|user|>",
                "<|assistant|>",
                "<|end|>",
            ]
            tokenizer = byte_tokenizer(specials, bos="<s>", eos="<|endoftext|>")
        case "deepseek_v2" | "deepseek_r1":
            tokenizer = byte_tokenizer(_DEEPSEEK, bos=_DEEPSEEK[0], eos=_DEEPSEEK[1])
        case "gemma3":
            tokenizer = _gemma_tokenizer()
        case _:
            raise ValueError(family)
    tokenizer.chat_template = template(family)
    return tokenizer


def _gemma_tokenizer() -> PreTrainedTokenizerFast:
    specials = ["<pad>", "<bos>", "<start_of_turn>", "<end_of_turn>", "<image_soft_token>"]
    specials += ["<start_of_image>", "<end_of_image>"]
    return byte_tokenizer(
        specials,
        bos="<bos>",
        eos="<end_of_turn>",
        extra_special_tokens={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
    )


def picture_processor(family: str) -> Any:
    """The processor of a family that takes pictures, with its published template."""
    match family:
        case "qwen2_vl":
            pads = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
            tokens = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}
            return PaddleOCRVLProcessor(
                Qwen2VLImageProcessorPil(
                    patch_size=8,
                    merge_size=2,
                    temporal_patch_size=2,
                    size={"shortest_edge": 512, "longest_edge": 16384},
                ),
                byte_tokenizer([*_QWEN, *pads], eos="<|im_end|>", extra_special_tokens=tokens),
                chat_template=template(family),
            )
        case "llava_vicuna":
            return LlavaProcessor(
                CLIPImageProcessorPil(
                    size={"height": 32, "width": 32}, crop_size={"height": 32, "width": 32}
                ),
                llama_tokenizer(),
                patch_size=8,
                vision_feature_select_strategy="default",
                chat_template=template(family),
                num_additional_image_tokens=1,
            )
        case "gemma3":
            return Gemma3Processor(
                Gemma3ImageProcessorPil(size={"height": 32, "width": 32}),
                _gemma_tokenizer(),
                chat_template=template(family),
                image_seq_length=4,
            )
        case "smolvlm":
            grid = [f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7)]
            specials = ["<|im_start|>", "<end_of_utterance>", "<fake_token_around_image>"]
            specials += ["<image>", "<global-img>", *grid]
            return Idefics3Processor(
                Idefics3ImageProcessorPil(
                    size={"longest_edge": 64}, max_image_size={"longest_edge": 32}
                ),
                byte_tokenizer(specials, bos="<|im_start|>", eos="<end_of_utterance>"),
                image_seq_len=4,
                chat_template=template(family),
            )
        case _:
            raise ValueError(family)
