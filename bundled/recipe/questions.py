"""One question and its right answer: about a picture, about two pictures, or about no picture."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from .phrases import FACTS, OPPOSITES, PAIR_FORMS, PICTURE_FORMS, TEXT_FORMS, WORDS

PICTURE_KINDS = tuple(PICTURE_FORMS)
PAIR_KINDS = tuple(PAIR_FORMS)
TEXT_KINDS = (*TEXT_FORMS, "text_fact")
PLACED_KINDS = ("position", "parity", "next")
"""Kinds that ask about a single digit, and so say nothing about the others."""

_NUMBERS = {1: "one digit", 2: "two digits", 3: "three digits"}
_ORDINALS = ("first", "second", "third")
_WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")


@dataclass(frozen=True)
class Question:
    """A question, the answer that is right, and the kind that both belong to."""

    kind: str
    text: str
    answer: str


def ask_picture(
    rng: random.Random, kind: str, digits: Sequence[int], where: str, index: int | None = None
) -> Question:
    """Asks about one picture; `index` picks the digit for the kinds that need one."""
    chosen = rng.randrange(len(digits)) if index is None else index
    place = rng.choice(_places(chosen, len(digits)))
    fields = {**_facts(digits), **_digit_facts(digits[chosen])}
    fields |= {"place": place, "where": where, "Where": where[0].upper() + where[1:]}
    return _fill(rng, kind, PICTURE_FORMS[kind], fields)


def ask_pair(
    rng: random.Random, kind: str, first: Sequence[int], second: Sequence[int]
) -> Question:
    """Asks about two pictures at once."""
    index, place = rng.choice(((0, "first"), (-1, "last")))
    a, b = first[index], second[index]
    verdict = "they are equal" if a == b else f"the {'first' if a > b else 'second'} picture has it"
    fields = {**_facts(first), **{f"{key}2": value for key, value in _facts(second).items()}}
    fields |= {"place": place, "digit": str(a), "digit2": str(b), "verdict": verdict}
    return _fill(rng, kind, PAIR_FORMS[kind], fields)


def ask_text(rng: random.Random, kind: str) -> Question:
    """Asks about no picture at all."""
    if kind == "text_fact":
        question, answer = rng.choice(FACTS)
        return Question(kind, question, answer)
    return _fill(rng, kind, TEXT_FORMS[kind], _text_fields(rng, kind))


def parts(kind: str, n_digits: int) -> bool:
    """Whether a kind makes sense for a picture of `n_digits`."""
    return n_digits > 1 or kind not in ("sum", "largest", "smallest", "sorted")


def _fill(
    rng: random.Random, kind: str, forms: Sequence[tuple[str, str]], fields: dict[str, str]
) -> Question:
    question, answer = rng.choice(forms)
    return Question(kind, question.format(**fields), answer.format(**fields))


def _text_fields(rng: random.Random, kind: str) -> dict[str, str]:
    if kind in ("text_add", "text_subtract"):
        a, b = rng.randint(0, 9), rng.randint(0, 9)
        return {"a": str(a), "b": str(b), "sum": str(a + b)}
    if kind == "text_next":
        n = rng.randint(1, 97)
        return {"n": str(n), "n_next": str(n + 1), "n_next2": str(n + 2)}
    if kind == "text_compare":
        n, m = rng.sample(range(10, 100), 2)
        return {"n": str(n), "m": str(m), "max": str(max(n, m)), "min": str(min(n, m))}
    if kind == "text_letters":
        word = rng.choice(WORDS)
        return {"word": word, "length": str(len(word)), "spelled": ", ".join(word)}
    left, right = rng.choice(OPPOSITES)
    return {"left": left, "right": right, "Left": left.capitalize()}


def _places(index: int, n_digits: int) -> tuple[str, ...]:
    """The names of one place: the last of two digits is also the second."""
    last = index == n_digits - 1 and n_digits > 1
    return (_ORDINALS[index], "last") if last else (_ORDINALS[index],)


def _facts(digits: Sequence[int]) -> dict[str, str]:
    number = _NUMBERS[len(digits)]
    return {
        "all": _listed(digits),
        "first": str(digits[0]),
        "commas": ", ".join(map(str, digits)),
        "number": number,
        "is_number": f"{'is' if len(digits) == 1 else 'are'} {number}",
        "plus": " plus ".join(map(str, digits)),
        "sum": str(sum(digits)),
        "sum_parity": _parity(sum(digits)),
        "max": str(max(digits)),
        "min": str(min(digits)),
        "rising": _listed(sorted(digits)),
        "falling": _listed(sorted(digits, reverse=True)),
    }


def _digit_facts(digit: int) -> dict[str, str]:
    return {
        "digit": str(digit),
        "digit_word": _WORDS[digit],
        "digit_next": str(digit + 1),
        "parity": _parity(digit),
    }


def _parity(number: int) -> str:
    return "odd" if number % 2 else "even"


def _listed(digits: Sequence[int]) -> str:
    *head, last = map(str, digits)
    return f"{', '.join(head)} and {last}" if head else last
