"""Which characters of a prompt each token of a row stands for, across expanded pictures.

A token over the border of a span carries it if it holds a character of it other than space: the
target reads the answer's first or last letter in that token and in no other.
"""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dspark.capture.bad_row import BadRowError
from dspark.capture.rendering.assistant_spans import Span

_NOWHERE = (0, 0)
_PICTURE = (-1, -1)


@dataclass(frozen=True)
class TokenOrigins:
    """Which characters of the prompt, placeholders not expanded, each of L tokens stands for.

    Attributes:
        start: int64 ``[L]``, its first character.
        end: int64 ``[L]``, one beyond its last; both 0 for tokens without characters, such as a
            space that a tokenizer puts before a word, and -1 for those of pictures.
    """

    start: Tensor
    end: Tensor

    @classmethod
    def of(cls, spans: Sequence[Span]) -> "TokenOrigins":
        """From ``(start, end)`` of each token."""
        both = torch.tensor(spans, dtype=torch.int64).reshape(-1, 2)
        return cls(both[:, 0], both[:, 1])

    def within(self, prompt: str, span: Span) -> Tensor:
        """The tokens that carry the characters of ``span``: bool ``[L]``."""
        first, stop = span
        text = prompt[first:stop]
        bare_first = stop - len(text.lstrip())
        bare_stop = first + len(text.rstrip())
        inside = (self.start >= first) & (self.end <= stop)
        over = (self.start < bare_stop) & (self.end > bare_first)
        held = (self.start < self.end) & (inside | over)
        # From the first to the last of them, tokens without characters go along.
        between = held.cummax(0).values & held.flip(0).cummax(0).values.flip(0)
        return held | (between & (self.end == 0))

    def touching(self, span: Span) -> Tensor:
        """The tokens with any character of ``span`` and those between them: bool ``[L]``."""
        held = (self.start < span[1]) & (self.end > span[0])
        return held.cummax(0).values & held.flip(0).cummax(0).values.flip(0)


def from_offsets(offsets: Sequence[Span], replacements: Sequence[dict[str, Any]]) -> TokenOrigins:
    """From a fast tokenizer's offsets in the expanded text and the processor's own record of what
    it expanded (``text_replacement_offsets``)."""
    starts = [r["new_span"][0] for r in replacements]
    spans: list[Span] = []
    for a, b in offsets:
        n = bisect_right(starts, a)
        last = replacements[n - 1] if n else None
        if b <= a:
            spans.append(_NOWHERE)
        elif last is None:
            spans.append((a, b))
        elif a < last["new_span"][1]:
            spans.append(_PICTURE)
        else:
            gained = last["new_span"][1] - last["span"][1]
            spans.append((a - gained, b - gained))
    return TokenOrigins.of(spans)


def align(
    ids: Sequence[int], plain_ids: Sequence[int], plain: Sequence[Span], placeholders: set[int]
) -> TokenOrigins:
    """From the tokens of the prompt itself: between placeholders they are those of the row.

    Args:
        ids: of the row, placeholders expanded.
        plain_ids: of the prompt, placeholders not expanded.
        plain: the characters of each of them.
        placeholders: ids that the processor expands.

    Raises:
        BadRowError: the row is not the prompt with its placeholders expanded.
    """
    spans: list[Span] = [_PICTURE] * len(ids)
    runs: list[list[int]] = [[]]
    for i, token in enumerate(plain_ids):
        if token in placeholders:
            runs.append([])
        else:
            runs[-1].append(i)
    at = 0
    for number, run in enumerate(runs):
        wanted = [plain_ids[i] for i in run]
        last = number > 0 and number == len(runs) - 1
        # A picture has at least one position. Some processors add tokens around the whole text.
        begin = _find(ids, wanted, at + 1 if number else 0, from_the_end=last)
        if begin is None:
            raise BadRowError(
                "loss mask cannot be derived",
                "the processor changes more of the text than the picture placeholders",
            )
        for offset, i in enumerate(run):
            spans[begin + offset] = plain[i]
        at = begin + len(wanted)
    return TokenOrigins.of(spans)


def _find(
    ids: Sequence[int], wanted: Sequence[int], start: int, *, from_the_end: bool
) -> int | None:
    n = len(wanted)
    places: Iterable[int] = range(start, len(ids) - n + 1)
    if from_the_end:
        places = reversed(range(start, len(ids) - n + 1))
    ids, wanted = list(ids), list(wanted)
    return next((i for i in places if ids[i : i + n] == wanted), None)


def read_along(tokenizer: Any, text: str, ids: Sequence[int]) -> list[Span]:
    """What a fast tokenizer's offsets are, for one without: by decoding and reading along.

    Raises:
        BadRowError: the tokens do not decode to the text.
    """
    spans: list[Span] = []
    at = 0
    first = 0  # the first token of a letter that is spread over several
    for n in range(1, len(ids) + 1):
        piece = decode(tokenizer, ids[first:n])
        if piece.endswith("\ufffd") and n < len(ids):
            continue
        begin = at
        while begin < len(text) and text[begin].isspace() and not text.startswith(piece, begin):
            begin += 1
        if not piece:
            spans += [_NOWHERE] * (n - first)  # a space that decoding strips
        elif text.startswith(piece, begin):
            spans += [(at, begin + len(piece))] * (n - first)
            at = begin + len(piece)
        elif n - first == 1 and ids[first] in tokenizer.all_special_ids:
            spans.append(_NOWHERE)  # added by the tokenizer at the beginning or the end
        else:
            raise BadRowError(
                "loss mask cannot be derived", f"token {first} decodes to another text"
            )
        first = n
    return spans


def decode(tokenizer: Any, ids: Sequence[int]) -> str:
    """The text of tokens, special ones included, nothing tidied up."""
    text = tokenizer.decode(list(ids), clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text
