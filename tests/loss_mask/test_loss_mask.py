"""The loss mask against hand-written answers and against prefix-by-prefix rendering."""

from typing import Any

import pytest
from conversation_data import noise_picture
from spoken import ONE, SYSTEM, THREE, by_prefixes, mask_of, say, supervised
from target_processors import picture_processor, text_tokenizer
from transformers import AutoProcessor

from dspark.bundled import TARGET

# The token that ends an assistant's turn, or None where the template ends it with plain text.
TEXT_FAMILIES: dict[str, str | None] = {
    "chatml": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "qwen3_thinking": "<|im_end|>",
    "llama2": "</s>",
    "llama3": "<|eot_id|>",
    "gemma3": "<end_of_turn>",
    "mistral": "</s>",
    "phi3": "<|end|>",
    "deepseek_v2": "<｜end▁of▁sentence｜>",
    "deepseek_r1": "<｜end▁of▁sentence｜>",
}
PICTURE_FAMILIES: dict[str, str | None] = {
    "qwen2_vl": "<|im_end|>",
    "llava_vicuna": None,
    "gemma3": "<end_of_turn>",
    "smolvlm": "<end_of_utterance>",
    "bundled": "<|im_end|>",
}


def processor_of(family: str) -> Any:
    if family == "bundled":
        return AutoProcessor.from_pretrained(TARGET)
    return picture_processor(family)


@pytest.mark.parametrize("system", [False, True], ids=["", "system"])
@pytest.mark.parametrize("family", TEXT_FAMILIES)
def test_text_families(family: str, system: bool) -> None:
    tokenizer = text_tokenizer(family)
    end = TEXT_FAMILIES[family] or ""
    messages = [*[SYSTEM] * system, *THREE]
    answers = ["The best.", "Yes.\nNo, the 2nd: {'a': 1}", "t"]
    found = supervised(tokenizer, messages)
    expected = [f"{a} {end}" if family == "llama2" else a + end for a in answers]
    if family.startswith("qwen3"):  # its template gives the last turn an empty reasoning
        rest = "\n\n</think>\n\n" if family == "qwen3_thinking" else "<think>\n\n</think>\n\n"
        expected[-1] = (rest + expected[-1]).strip()
    assert found == expected


# Templates whose beginnings stay the same when messages follow.
STABLE = sorted(TEXT_FAMILIES.keys() - {"qwen3", "qwen3_thinking", "deepseek_r1"})


@pytest.mark.parametrize("family", STABLE)
def test_text_families_equal_prefix_rendering(family: str) -> None:
    tokenizer = text_tokenizer(family)
    conversations = [ONE, THREE]
    if family != "mistral":  # puts the system prompt into the last user turn
        conversations += [[SYSTEM, *ONE], [SYSTEM, *THREE]]
    for messages in conversations:
        assert mask_of(tokenizer, messages) == by_prefixes(
            tokenizer, messages, TEXT_FAMILIES[family]
        )


def with_pictures(family: str) -> list[list[dict[str, Any]]]:
    a, b, c = (noise_picture(i, s) for i, s in enumerate([(32, 32), (64, 32), (48, 80)]))
    conversations = [
        [say("user", a, "Hi there."), say("assistant", "The best.")],
        [
            say("user", "See: ", a, b, " and?"),
            say("assistant", "Yes.\nNo."),
            say("user", c),
            say("assistant", "t"),
            say("user", "Why?", a),
            say("assistant", "So."),
        ],
    ]
    if family == "smolvlm":  # reads the first part to place a space, so it must be the picture
        conversations[1][0] = say("user", a, b, " and?")
    return [ONE, THREE, *conversations, *([SYSTEM, *c] for c in conversations)]


@pytest.mark.parametrize("family", PICTURE_FAMILIES)
def test_picture_families_equal_prefix_rendering(family: str) -> None:
    processor = processor_of(family)
    for messages in with_pictures(family):
        mask = mask_of(processor, messages)
        assert sum(mask) > 0
        assert mask == by_prefixes(processor, messages, PICTURE_FAMILIES[family])


@pytest.mark.parametrize("family", PICTURE_FAMILIES)
def test_picture_families_by_hand(family: str) -> None:
    end = PICTURE_FAMILIES[family] or ""
    messages = with_pictures(family)[-1]
    answers = ["Yes.\nNo.", "t", "So."]
    assert supervised(processor_of(family), messages) == [a + end for a in answers]


ODD = [
    "é 🙂 日本",
    " two  spaces",
    "USER: x ASSISTANT: y",
    "{{ x }} <b>",
    "im_end|>",
    "<|im_en",
    "a\n\nb\tc",
]


@pytest.mark.parametrize("family", [*STABLE, *PICTURE_FAMILIES])
def test_odd_texts(family: str) -> None:
    pictures = family in PICTURE_FAMILIES
    processor = processor_of(family) if pictures else text_tokenizer(family)
    end = PICTURE_FAMILIES[family] if pictures else TEXT_FAMILIES[family]
    messages = [say(("user", "assistant")[i % 2], text) for i, text in enumerate([*ODD, *ODD])]
    assert mask_of(processor, messages) == by_prefixes(processor, messages, end)
