"""Texts that hold a control token are refused; those that only look like one are text."""

from typing import Any

import pytest
from conversation_data import noise_picture
from spoken import CALL, CALLING, ONE, TOOLS, mask_of, say, supervised
from target_processors import picture_processor, text_tokenizer

from dspark.capture.bad_row import BadRowError, kind_of
from dspark.capture.rendering.encode import encode

PICTURE = noise_picture(0, (32, 32))


def calling(**function: Any) -> list[dict[str, Any]]:
    call = {**CALL, "function": {**CALL["function"], **function}}
    return [CALLING[0], {**CALLING[1], "tool_calls": [call]}, *CALLING[2:]]


@pytest.mark.parametrize(
    ("messages", "tools"),
    [
        ([say("user", "a <|im_end|> b"), *ONE[1:]], None),
        ([ONE[0], say("assistant", "<|im_start|>")], None),
        ([say("user", "in two <|im_", "end|> parts"), *ONE[1:]], None),
        ([ONE[0], {**ONE[1], "reasoning_content": "<|im_end|>"}], None),
        (calling(arguments={"a": ["<|im_end|>"]}), TOOLS),
        (calling(arguments='{"<|im_end|>": 1}'), TOOLS),
        ([*CALLING[:2], {**CALLING[2], "name": "<|im_end|>"}, *CALLING[3:]], TOOLS),
        (CALLING, [{"type": "function", "function": {"name": "f", "description": "<|im_end|>"}}]),
    ],
)
def test_wherever_it_is(messages: list[dict[str, Any]], tools: Any) -> None:
    with pytest.raises(BadRowError, match=r"^control token in a text: <\|im_(end|start)\|>$"):
        encode([messages], text_tokenizer("qwen3"), [tools])  # type: ignore[list-item]


def test_placeholders_of_pictures() -> None:
    """``<image>`` is the placeholder of one family and text to another."""
    literal = [say("user", PICTURE, "Why <image>?"), say("assistant", "An <image> tag.")]
    with pytest.raises(BadRowError) as raised:
        encode([literal], picture_processor("llava_vicuna"))  # type: ignore[list-item]
    assert kind_of(str(raised.value)) == "control token in a text"
    assert supervised(picture_processor("qwen2_vl"), literal) == ["An <image> tag.<|im_end|>"]
    for token in ("<|image_pad|>", "<|video_pad|>", "<|vision_end|>"):
        with pytest.raises(BadRowError, match="control token in a text"):
            encode([[say("user", PICTURE, token), *ONE[1:]]], picture_processor("qwen2_vl"))  # type: ignore[list-item]


def test_tags_that_are_not_special_are_text() -> None:
    messages = [say("user", "What is <think>, or <tool_call>?"), say("assistant", "A <tag>.")]
    assert supervised(text_tokenizer("qwen3"), messages)[0].endswith("A <tag>.<|im_end|>")


def test_reasoning_tags_that_are_special_are_the_assistants() -> None:
    tokenizer = text_tokenizer("chatml")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<think>", "</think>"]})
    thought = [say("user", "?"), say("assistant", "<think>x</think>B.")]
    assert supervised(tokenizer, thought) == ["<think>x</think>B.<|im_end|>"]
    with pytest.raises(BadRowError, match="control token in a text: <think>"):
        encode([[say("user", "<think>"), *ONE[1:]]], tokenizer)  # type: ignore[list-item]


def test_pictures_for_a_text_only_target() -> None:
    with pytest.raises(BadRowError, match="^pictures for a text-only target$"):
        encode([[say("user", PICTURE, "?"), *ONE[1:]]], text_tokenizer("qwen3"))  # type: ignore[list-item]


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "mistral"])
def test_a_text_only_target_gets_what_its_tokenizer_renders(family: str) -> None:
    """Whether the template reads contents as text or as lists of parts."""
    tokenizer = text_tokenizer(family)
    tensors = encode([ONE, ONE[:1] + ONE[1:]], tokenizer)  # type: ignore[list-item]
    plain = [{"role": m["role"], "content": m["content"][0]["text"]} for m in ONE]
    expected = tokenizer.apply_chat_template(plain, tokenize=True, return_dict=True)
    assert tensors.keys() == {*expected.keys(), "loss_mask"}
    assert tensors["input_ids"].tolist() == [expected["input_ids"]] * 2


def test_contents_given_as_text() -> None:
    """As examples of the collate function may have them, also where a template reads lists."""
    plain: list[dict[str, Any]] = [
        {"role": m["role"], "content": m["content"][0]["text"]} for m in ONE
    ]
    for family in ("llava_vicuna", "qwen2_vl"):
        processor = picture_processor(family)
        assert mask_of(processor, plain) == mask_of(processor, ONE)
