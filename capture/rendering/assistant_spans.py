"""Which characters of a rendered conversation the assistant wrote, with the end of each turn.

From the template's ``{% generation %}`` marks where it has them for every assistant turn. Else each
turn is found by rendering: it begins where the generation prompt ends, and it ends where the text
begins that follows a stand-in rendered in its place.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from dspark.capture.bad_row import BadRowError
from dspark.capture.rendering.render import (
    PROBE,
    THINK_CLOSE,
    THINK_OPEN,
    Renderer,
    Tools,
    texts_of,
)
from dspark.schemas.conversations import Conversation, Message

Span = tuple[int, int]


@dataclass(frozen=True)
class Written:
    """What the assistant wrote in a prompt.

    Attributes:
        spans: ``[start, end)`` in characters, rising, one or more for each assistant turn.
        reasoning: those parts of them that are reasoning.
    """

    spans: list[Span]
    reasoning: list[Span]


def find_written(renderer: Renderer, messages: Conversation, tools: Tools, prompt: str) -> Written:
    """Find what the assistant wrote in ``prompt``, which is ``renderer.text(messages, tools)``.

    Raises:
        BadRowError: it cannot be told with certainty.
    """
    turns = _marked(renderer, messages, tools, prompt)
    if turns is None:
        turns = {}
        last = 0
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                span = _turn(renderer, messages, tools, prompt, i)
                if span[0] < last:
                    raise _underivable(i, "its turn overlaps the one before")
                if not _holds(prompt[slice(*span)], _answers(message)):
                    raise _underivable(i, "the chat template does not render its text as it is")
                if not _holds(prompt[slice(*span)], _called(message)):
                    raise _underivable(i, "the chat template does not render its tool calls")
                turns[i] = [span]
                last = span[1]
    spans = [span for i in sorted(turns) for span in turns[i]]
    reasoning = [r for i in sorted(turns) for r in _reasoning(prompt, turns[i], messages[i])]
    return Written(spans, reasoning)


def _marked(
    renderer: Renderer, messages: Conversation, tools: Tools, prompt: str
) -> dict[int, list[Span]] | None:
    """The marks of each assistant's message, with the end of its turn; None if one has none."""
    marks = renderer.marks(messages, tools, prompt)
    turns: dict[int, list[Span]] = {}
    used = 0
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        last = used
        for text in (*_answers(message)[-1:], *_called(message)[-1:]):
            while last < len(marks) and text not in prompt[slice(*marks[last])]:
                last += 1
        if last >= len(marks):
            return None
        said = (texts_of(message) or [""])[-1]
        turns[i] = [_trimmed(renderer, prompt, mark, said) for mark in marks[used : last + 1]]
        used = last + 1
    return turns if used == len(marks) else None


def _trimmed(renderer: Renderer, prompt: str, mark: Span, said: str) -> Span:
    """A mark with the end token of its turn but without the space that the template adds behind.

    Space between the generation prompt and the mark is the model's to write.
    """
    start, end = mark
    opening, prompted = renderer.generation_prompt, len(prompt[:start].rstrip())
    if opening and prompt.endswith(opening, 0, prompted):
        start = prompted
    bare = start + len(prompt[start:end].rstrip())
    if (at := prompt.rfind(said, start, end)) >= 0:
        bare = max(bare, at + len(said))  # space at the end of the text is the assistant's
    if any(prompt.endswith(token.strip(), start, bare) for token in renderer.turn_ends):
        return start, bare
    ended = (renderer.turn_end_at(prompt, at) for at in range(bare, end + 1))
    return start, next((e for at, e in enumerate(ended, bare) if e > at), bare)


def _turn(renderer: Renderer, messages: Conversation, tools: Tools, prompt: str, i: int) -> Span:
    """The span of the assistant's message ``i``."""
    if PROBE in prompt:
        raise _underivable(i, f"a text holds {PROBE}")
    earlier = messages[:i]
    opened = _opened(renderer, earlier, tools)
    for stand_in in _stand_ins(messages[i]):
        try:
            marked = renderer.text([*earlier, stand_in, *messages[i + 1 :]], tools)
        except BadRowError:
            continue
        if marked.count(PROBE) != 1:
            continue
        before, after = marked.split(PROBE)
        start = _start(renderer, earlier, stand_in, tools, opened, before)
        if start is None or not (prompt.startswith(before[:start]) and prompt.endswith(after)):
            continue
        if opened.startswith(before[:start]) and prompt.startswith(opened):
            start = len(opened)  # a generation prompt that opens the reasoning, which stands here
        end = _end(renderer, prompt, len(prompt) - len(after), in_call="tool_calls" in stand_in)
        if end is not None and start <= end:
            return start, end
    return _by_prefixes(renderer, messages, tools, prompt, i, opened)


def _opened(renderer: Renderer, earlier: Conversation, tools: Tools) -> str:
    """The prompt that the assistant's turn answers; empty if the template renders none so short."""
    try:
        return renderer.text(earlier, tools, opened=True) if earlier else ""
    except BadRowError:
        return ""


def _bare() -> Message:
    return {"role": "assistant", "content": [{"type": "text", "text": PROBE}]}


def _stand_ins(message: Message) -> Iterator[Message]:
    """The message with one word for all of it or, so that replies to its tool calls are not left
    without them, for the name of the function that it calls last."""
    yield _bare()
    if calls := message.get("tool_calls"):
        *others, last = calls
        function = last.get("function", last)
        renamed = {**function, "name": PROBE}
        last = {**last, "function": renamed} if "function" in last else renamed
        yield {**message, "tool_calls": [*others, last]}


def _start(
    renderer: Renderer,
    earlier: Conversation,
    stand_in: Message,
    tools: Tools,
    opened: str,
    before: str,
) -> int | None:
    """Where generation would begin in a rendering that has ``before`` in front of the stand-in."""
    if not opened:
        return len(before)
    if before.startswith(opened):
        return len(opened) + len(_header(renderer, earlier, tools, opened, before[len(opened) :]))
    # Templates that render earlier messages differently once later ones follow them.
    closed = renderer.text(earlier, tools)
    prompted = renderer.pieces(opened)[_common_pieces(renderer, opened, closed) :]
    alone = renderer.text([*earlier, stand_in], tools)
    lead = alone[len(opened) : alone.find(PROBE)] if alone.startswith(opened) else ""
    for gap in (lead, "", before[len(before.rstrip()) :]):
        begin = len(before) - len(gap)
        tail = "".join(prompted) or renderer.pieces(opened)[-1]
        if before.endswith(gap) and before.endswith(tail, 0, begin):
            return begin + len(_header(renderer, earlier, tools, opened, gap))
    for n in range(len(prompted) - 1, 0, -1):  # a generation prompt that opens the reasoning
        if before.endswith("".join(prompted[:n])):
            return len(before)
    return None


def _header(renderer: Renderer, earlier: Conversation, tools: Tools, opened: str, lead: str) -> str:
    """What ``lead``, the text before an answer, begins with in a template that has no generation
    prompt but does put a header before each answer."""
    if not lead.strip() or renderer.text(earlier, tools) != opened:
        return ""
    alone = renderer.text([*earlier, _bare()], tools)
    header = alone[len(opened) : alone.find(PROBE)]
    return header if header.strip() and lead.startswith(header) else ""


def _end(renderer: Renderer, prompt: str, at: int, *, in_call: bool) -> int | None:
    """The end of a turn whose text ends at ``at``, or which has a tool call there."""
    if not in_call:
        return renderer.turn_end_at(prompt, at)
    tokens = (token.strip() for token in renderer.turn_ends)
    found = [(prompt.find(t, at), len(t)) for t in tokens if t in prompt[at:]]
    return sum(min(found)) if found else None


def _by_prefixes(
    renderer: Renderer, messages: Conversation, tools: Tools, prompt: str, i: int, opened: str
) -> Span:
    """Between the renderings of the messages before and through ``i``, if both are prefixes."""
    through = renderer.text(messages[: i + 1], tools).rstrip()
    special = next((t for t in reversed(renderer.pieces(through)) if t), "")
    closed = special in renderer.control_tokens
    known = opened and renderer.generation_prompt and closed
    if not (known and prompt.startswith(opened) and prompt.startswith(through)):
        raise _underivable(i, "the chat template renders it in its own way")
    return len(opened), len(through)


def _common_pieces(renderer: Renderer, a: str, b: str) -> int:
    pairs = list(zip(renderer.pieces(a), renderer.pieces(b), strict=False))
    return next((n for n, (x, y) in enumerate(pairs) if x != y), len(pairs))


def _answers(message: Message) -> list[str]:
    """The texts of an assistant's message that every template renders: reasoning may be dropped."""
    texts = (t.split(THINK_CLOSE)[-1].strip() for t in texts_of(message))
    return [t for t in texts if t]


def _called(message: Message) -> list[str]:
    """The names of the functions that an assistant's message calls."""
    return [str(call.get("function", call).get("name")) for call in message.get("tool_calls", [])]


def _holds(text: str, parts: Iterable[str]) -> bool:
    at = 0
    for part in parts:
        at = text.find(part, at)
        if at < 0:
            return False
        at += len(part)
    return True


def _reasoning(prompt: str, spans: list[Span], message: Message) -> list[Span]:
    """``<think>…</think>`` in a turn, tags included, and reasoning kept in a field of its own."""
    start, end = spans[0][0], spans[-1][1]
    found = []
    opening, closing = prompt.find(THINK_OPEN, start, end), prompt.find(THINK_CLOSE, start, end)
    if closing >= 0 and (opening < 0 or closing < opening):  # the generation prompt opened it
        found.append((start, closing + len(THINK_CLOSE)))
    while opening >= 0:
        closing = prompt.find(THINK_CLOSE, opening, end)
        stop = end if closing < 0 else closing + len(THINK_CLOSE)
        found.append((opening, stop))
        opening = prompt.find(THINK_OPEN, stop, end)
    field = message.get("reasoning_content", "").strip()
    at = prompt.find(field, start, end) if field else -1
    # Where the template drops the field, the same words may still stand in the answer.
    if at >= 0 and _holds(prompt[at + len(field) : end], [*_answers(message), *_called(message)]):
        found.append((at, at + len(field)))
    return sorted(found)


def _underivable(i: int, why: str) -> BadRowError:
    return BadRowError("loss mask cannot be derived", f"message {i}: {why}")
