"""Reasoning, tool calls, templates that rewrite earlier turns, marks of ``{% generation %}``."""

from typing import Any

import pytest
from conversation_data import noise_picture
from spoken import CALL, CALLING, ONE, SYSTEM, THREE, TOOLS, mask_of, masked, say, supervised
from target_processors import picture_processor, text_tokenizer

from dspark.capture.bad_row import BadRowError
from dspark.capture.rendering.encode import encode

THOUGHT = [
    say("user", "One?"),
    say("assistant", "<think>\nFirst.\n</think>\n\nA."),
    say("user", "Two?"),
    say("assistant", "<think>\nSecond.\n</think>\n\nB."),
]


def test_earlier_reasoning_is_dropped_by_the_template() -> None:
    assert supervised(text_tokenizer("qwen3"), THOUGHT) == [
        "A.<|im_end|>",
        "<think>\nSecond.\n</think>\n\nB.<|im_end|>",
    ]


def test_a_generation_prompt_that_opens_the_reasoning() -> None:
    """The tag is the prompt's where the prompt ends with it, and there only."""
    found = masked(text_tokenizer("qwen3_thinking"), THOUGHT)
    assert found == ["A.<|im_end|>", "Second.\n</think>\n\nB.<|im_end|>"]
    found = masked(text_tokenizer("deepseek_r1"), THOUGHT)
    assert found == ["\n\nA.<｜end▁of▁sentence｜>", "\n\nB.<｜end▁of▁sentence｜>"]


@pytest.mark.parametrize("family", ["qwen3", "qwen3_thinking"])
def test_mask_reasoning(family: str) -> None:
    tokenizer = text_tokenizer(family)
    found = masked(tokenizer, THOUGHT, mask_reasoning=True)
    assert found == ["A.<|im_end|>", "\n\nB.<|im_end|>"]


def test_mask_reasoning_of_a_field_of_its_own() -> None:
    answer = {**say("assistant", "B."), "reasoning_content": "Second."}
    messages = [say("user", "Two?"), answer]
    tokenizer = text_tokenizer("qwen3")
    assert masked(tokenizer, messages) == ["<think>\nSecond.\n</think>\n\nB.<|im_end|>"]
    assert masked(tokenizer, messages, mask_reasoning=True) == ["\n\nB.<|im_end|>"]


def test_reasoning_that_the_template_drops_is_not_looked_for_in_answers() -> None:
    messages = [say("user", "?"), {**say("assistant", "Yes, B."), "reasoning_content": "Yes"}]
    messages += [say("user", "?"), say("assistant", "Yes.")]
    found = masked(text_tokenizer("chatml"), messages, mask_reasoning=True)
    assert found == ["Yes, B.<|im_end|>", "Yes.<|im_end|>"]


def test_reasoning_under_other_tags() -> None:
    tokenizer = text_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['reasoning_content'] %}{{ '[' + m['reasoning_content'] + ']' }}{% endif %}"
        "{{ m['content'] + '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    messages = [say("user", "?"), {**say("assistant", "Yes."), "reasoning_content": "Yes, why"}]
    assert masked(tokenizer, messages) == ["[Yes, why]Yes.<|im_end|>"]
    assert masked(tokenizer, messages, mask_reasoning=True) == ["[", "]Yes.<|im_end|>"]


def test_mask_reasoning_that_a_plain_template_leaves_in_the_text() -> None:
    """``<think>`` is no token here; one over the border of the reasoning goes with it."""
    tokenizer = text_tokenizer("chatml")
    assert masked(tokenizer, THOUGHT, mask_reasoning=True) == [
        "\n\nA.<|im_end|>",
        "\n\nB.<|im_end|>",
    ]
    messages = [say("user", "?"), say("assistant", "<think>x</think>\nB.")]
    assert masked(tokenizer, messages, mask_reasoning=True) == ["B.<|im_end|>"]
    unclosed = [say("user", "?"), say("assistant", "So: <think>and on")]
    assert masked(tokenizer, unclosed, mask_reasoning=True) == ["So: "]


def test_tool_calls_are_supervised_and_tool_messages_are_not() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    assert masked(text_tokenizer("qwen3"), CALLING, tools=[TOOLS]) == [
        f"{call}<|im_end|>",
        "It is 3.<|im_end|>",
        "<think>\n\n</think>\n\nYes.<|im_end|>",
    ]
    call = '[TOOL_CALLS] [{"name": "add", "arguments": {"a": 1, "b": 2}, "id": "abcdefghi"}]'
    assert masked(text_tokenizer("mistral"), CALLING, tools=[TOOLS]) == [
        f"{call}</s>",
        " It is 3.</s>",
        " Yes.</s>",
    ]


def test_text_beside_a_tool_call() -> None:
    messages = [*CALLING[:1], {**say("assistant", "Wait."), "tool_calls": [CALL]}, *CALLING[2:]]
    call = 'Wait.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    found = masked(text_tokenizer("qwen3"), messages, tools=[TOOLS])
    assert found[0] == f"{call}<|im_end|>"


def test_arguments_are_given_as_the_template_reads_them() -> None:
    """This one joins the arguments to text, which only text allows."""
    tokenizer = text_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
        "{% for c in m['tool_calls'] or [] %}"
        "{{ c['function']['name'] + ' ' + c['function']['arguments'] }}{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    assert masked(tokenizer, CALLING)[0] == 'add {"a": 1, "b": 2}<|im_end|>'


def test_tool_calls_that_the_template_drops() -> None:
    with pytest.raises(BadRowError, match="cannot be derived: message 1: .* its tool calls"):
        encode([CALLING], text_tokenizer("chatml"))  # type: ignore[list-item]


def test_marks_that_leave_out_the_end_token_or_take_the_line_break() -> None:
    for body in (
        "{% generation %}{{ m['content'] }}{% endgeneration %}{{ '<|im_end|>\n' }}",
        "{% generation %}{{ m['content'] + '<|im_end|>\n' }}{% endgeneration %}",
    ):
        tokenizer = text_tokenizer("chatml")
        unmarked = mask_of(tokenizer, THREE)
        tokenizer.chat_template = (
            "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
            "{% if m['role'] == 'assistant' %}" + body + "{% else %}"
            "{{ m['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
        )
        assert mask_of(tokenizer, THREE) == unmarked


def test_marks_in_some_turns_only_are_not_believed() -> None:
    tokenizer = text_tokenizer("chatml")
    unmarked = mask_of(tokenizer, THREE)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['role'] == 'assistant' and loop.last %}"
        "{% generation %}{{ m['content'] + '<|im_end|>' }}{% endgeneration %}"
        "{% else %}{{ m['content'] + '<|im_end|>' }}{% endif %}{{ '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    assert mask_of(tokenizer, THREE) == unmarked


def test_marks_without_the_tool_calls_are_not_believed() -> None:
    tokenizer = text_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
        "{% if m['role'] == 'assistant' %}"
        "{% generation %}{{ m['content'] }}{% endgeneration %}"
        "{% else %}{{ m['content'] }}{% endif %}"
        "{% for c in m['tool_calls'] or [] %}{{ '[' + c['function']['name'] + ']' }}{% endfor %}"
        "{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    messages = [say("user", "?"), {**say("assistant", "Wait."), "tool_calls": [CALL]}]
    assert masked(tokenizer, messages) == ["Wait.[add]<|im_end|>"]


def test_with_and_without_marks_llava_is_the_same() -> None:
    processor = picture_processor("llava_vicuna")
    messages = [say("user", noise_picture(0, (32, 32)), "Hi."), *THREE[1:]]
    marked = mask_of(processor, messages)
    for mark in ("{% generation %}", "{% endgeneration %}"):
        processor.chat_template = processor.chat_template.replace(mark, "")
    assert mask_of(processor, messages) == marked


def test_a_template_without_generation_prompt_but_with_a_header() -> None:
    tokenizer = text_tokenizer("phi3")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}"
        "{% endfor %}"
    )
    assert masked(tokenizer, ONE) == ["The best.<|end|>"]


def test_the_last_turn_may_end_by_another_token() -> None:
    """And what is written may begin before the text: here with the channel that it goes to."""
    tokenizer = text_tokenizer("chatml")
    tokenizer.add_special_tokens({"extra_special_tokens": ["<|return|>", "<|channel|>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] }}"
        "{% if m['role'] == 'assistant' %}{{ '<|channel|>final' }}{% endif %}"
        "{{ ': ' + m['content'] }}"
        "{% if m['role'] == 'assistant' and loop.last %}{{ '<|return|>' }}"
        "{% else %}{{ '<|im_end|>' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"
    )
    assert masked(tokenizer, [*ONE, *ONE]) == [
        "<|channel|>final: The best.<|im_end|>",
        "<|channel|>final: The best.<|return|>",
    ]


def test_the_next_turn_does_not_end_this_one() -> None:
    tokenizer = text_tokenizer("phi3")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
    )
    assert masked(tokenizer, [*ONE, *ONE]) == ["\nThe best.", "\nThe best."]


def test_no_end_token_at_the_very_end() -> None:
    tokenizer = text_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
        "{% if not loop.last %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_end|>\n<|im_start|>assistant\n' }}{% endif %}"
    )
    assert masked(tokenizer, [*ONE, *ONE]) == ["The best.<|im_end|>", "The best."]


def test_a_token_over_the_border_goes_with_the_letter_in_it() -> None:
    """Without an end token, ``.`` and the template's line break are one token here."""
    tokenizer = text_tokenizer("chatml")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
    )
    messages = [say("user", "a"), say("assistant", "Yes."), say("user", "b"), say("assistant", "t")]
    assert masked(tokenizer, messages) == ["Yes.\n", " t"]
    only_space = [say("user", "a"), say("assistant", "Yes\n"), *messages[2:]]
    assert masked(tokenizer, only_space)[0] == "Yes"


def test_a_template_that_changes_the_text_is_refused() -> None:
    tokenizer = text_tokenizer("chatml")
    tokenizer.chat_template = tokenizer.chat_template.replace(
        "message['content']", "message['content'] | replace('e', 'E')"
    )
    with pytest.raises(BadRowError, match="cannot be derived: message 1: .* text as it is"):
        encode([ONE], tokenizer)  # type: ignore[list-item]


def test_a_template_that_refuses_a_conversation() -> None:
    with pytest.raises(BadRowError, match="the chat template refuses it: .*must alternate"):
        encode([[*ONE, say("assistant", "More.")]], text_tokenizer("gemma3"))  # type: ignore[list-item]


def test_offsets_that_a_processor_does_not_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mask is the same when it is aligned token by token."""
    for family in ("qwen2_vl", "smolvlm", "llava_vicuna"):
        processor = picture_processor(family)
        picture = noise_picture(0, (64, 32))
        messages = [say("user", picture, picture, "Hi."), *THREE[1:], say("user", picture, "?")]
        messages += [say("assistant", "So.")]
        expected = mask_of(processor, messages)
        original = type(processor).__call__

        def refuse(self: Any, *args: Any, original: Any = original, **options: Any) -> Any:
            if options.get("return_text_replacement_offsets"):
                raise TypeError("unexpected keyword")
            return original(self, *args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(type(processor), "__call__", refuse)
            assert mask_of(picture_processor(family), messages) == expected


def test_a_slow_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    messages = [SYSTEM, say("user", "Grüße 🙂"), say("assistant", "Äh, 🙂.\n"), *THREE]
    for family in ("chatml", "llama2"):
        tokenizer = text_tokenizer(family)
        if family == "llama2":
            messages[1:3] = ONE
        expected = mask_of(tokenizer, messages)
        assert sum(expected) > 10
        with monkeypatch.context() as patch:
            patch.setattr(type(tokenizer), "is_fast", False)
            assert mask_of(tokenizer, messages) == expected
