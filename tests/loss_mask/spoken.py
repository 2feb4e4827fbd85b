"""Conversations, the texts that ``encode`` supervises of them, and what it should supervise."""

from collections.abc import Iterator
from typing import Any

from dspark.capture.rendering.encode import encode, encode_batch


def say(role: str, *parts: Any) -> dict[str, Any]:
    content = [
        {"type": "text", "text": p} if isinstance(p, str) else {"type": "image", "image": p}
        for p in parts
    ]
    return {"role": role, "content": content}


SYSTEM = say("system", "Be brief.")
ONE = [say("user", "Hi there."), say("assistant", "The best.")]
THREE = [
    *ONE,
    say("user", "Why?"),
    say("assistant", "Yes.\nNo, the 2nd: {'a': 1}"),
    say("user", "es"),
    say("assistant", "t"),
]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
CALL = {
    "id": "abcdefghi",
    "type": "function",
    "function": {"name": "add", "arguments": {"a": 1, "b": 2}},
}
CALLING = [
    say("user", "1+2?"),
    {**say("assistant"), "tool_calls": [CALL]},
    {**say("tool", "3"), "tool_call_id": "abcdefghi", "name": "add"},
    say("assistant", "It is 3."),
    say("user", "Sure?"),
    say("assistant", "Yes."),
]


def runs(ids: list[int], mask: list[int]) -> Iterator[list[int]]:
    """Runs of supervised tokens."""
    run: list[int] = []
    for token, one in zip([*ids, 0], [*mask, 0], strict=True):
        if one:
            run.append(token)
        elif run:
            yield run
            run = []


def masked(processor: Any, messages: list[dict[str, Any]], **options: Any) -> list[str]:
    """The texts of the runs of supervised tokens."""
    tensors = encode_batch([messages], processor, **options).tensors  # type: ignore[list-item]
    tokenizer = getattr(processor, "tokenizer", processor)
    found = runs(tensors["input_ids"][0].tolist(), tensors["loss_mask"][0].tolist())
    return [tokenizer.decode(r) for r in found]


def supervised(processor: Any, messages: list[dict[str, Any]]) -> list[str]:
    """The same, spaces at the ends left out."""
    return [text.strip() for text in masked(processor, messages)]


def mask_of(processor: Any, messages: list[dict[str, Any]]) -> list[int]:
    mask: list[int] = encode([messages], processor)["loss_mask"][0].tolist()  # type: ignore[list-item]
    return mask


def by_prefixes(processor: Any, messages: list[dict[str, Any]], end: str | None) -> list[int]:
    """The mask by rendering and tokenising each beginning of the conversation.

    From the end of the generation prompt to the last end token of the turn, or, where there is
    none, to the last token that is not space.
    """
    tokenizer = getattr(processor, "tokenizer", processor)

    def tokens(part: list[dict[str, Any]], opened: bool) -> list[int]:
        if processor is tokenizer:
            part = [{**m, "content": "".join(p["text"] for p in m["content"])} for m in part]
        out = processor.apply_chat_template(
            part, tokenize=True, return_dict=True, add_generation_prompt=opened
        )["input_ids"]
        return out[0] if isinstance(out[0], list) else out

    whole = tokens(messages, False)
    mask = [0] * len(whole)
    for i, message in enumerate(messages):
        if message["role"] == "assistant":
            before, through = tokens(messages[:i], True), tokens(messages[: i + 1], False)
            if end is None:
                while not tokenizer.decode(through[-1:]).strip():
                    through.pop()
            else:
                token = tokenizer.convert_tokens_to_ids(end)
                through = through[: len(through) - through[::-1].index(token)]
            assert whole[: len(before)] == before and whole[: len(through)] == through
            mask[len(before) : len(through)] = [1] * (len(through) - len(before))
    return mask
