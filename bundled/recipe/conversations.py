"""Conversations of one to three turns, about no picture, one picture or two."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from .phrases import LEADS, SYSTEMS
from .pictures import Picture, Scans, draw_picture
from .questions import (
    PAIR_KINDS,
    PICTURE_KINDS,
    PLACED_KINDS,
    TEXT_KINDS,
    Question,
    ask_pair,
    ask_picture,
    ask_text,
    parts,
)

ONE, NEW = "the picture", "the new picture"
FIRST, SECOND = "the first picture", "the second picture"

WHOLE_KINDS = ("read", "read", "sum", "sum", "sum", "sorted", "sorted", "largest", "smallest")
"""Kinds that need every digit of a picture, as often as they are reviewed."""
SHIPPED_TEXT_KINDS = tuple(kind for kind in TEXT_KINDS if kind != "text_compare")
"""Without the kind that stays at chance: which of two numbers is larger."""


@dataclass(frozen=True)
class Turn:
    """A question, and the pictures that are shown with it."""

    question: Question
    pictures: tuple[Picture, ...] = ()


@dataclass(frozen=True)
class Conversation:
    """What a user asks, turn by turn, with the right answers."""

    turns: tuple[Turn, ...]
    system: str | None = None

    @property
    def pictures(self) -> list[Picture]:
        """All pictures in the order in which they are shown."""
        return [picture for turn in self.turns for picture in turn.pictures]

    @property
    def answers(self) -> list[str]:
        """The right answers."""
        return [turn.question.answer for turn in self.turns]

    def messages(self, answers: Sequence[str]) -> list[dict[str, Any]]:
        """Messages up to the question after the last of `answers`, or to the last answer.

        Content is a list of `{"type": "image" | "text", "text": str | None}`.
        """
        messages = [] if self.system is None else [_message("system", self.system)]
        for k, turn in enumerate(self.turns[: len(answers) + 1]):
            asked = _message("user", turn.question.text)
            images = [{"type": "image", "text": None} for _ in turn.pictures]
            messages.append({"role": "user", "content": images + asked["content"]})
            if k < len(answers):
                messages.append(_message("assistant", answers[k]))
        return messages


def draw_text(rng: random.Random, n_turns: int, kinds: Sequence[str] = TEXT_KINDS) -> Conversation:
    """A conversation without pictures, with questions of different `kinds`."""
    chosen = rng.sample(kinds, n_turns)
    return Conversation(tuple(Turn(ask_text(rng, kind)) for kind in chosen), _system(rng))


def draw_one(rng: random.Random, source: Scans, n_turns: int) -> Conversation:
    """A conversation about one picture.

    Earlier turns ask about one digit each, so that the digits of later answers must be read
    from the picture and not from the text before.
    """
    n_digits = rng.choice((1, 2, 2, 3, 3)) if n_turns == 1 else rng.choice((2, 3, 3))
    picture = draw_picture(rng, source, max(n_digits, n_turns))
    indices = rng.sample(range(len(picture.digits)), n_turns)
    questions = [
        ask_picture(rng, rng.choice(PLACED_KINDS), picture.digits, ONE, index)
        for index in indices[:-1]
    ]
    questions.append(_any(rng, picture, ONE, indices[-1]))
    turns = [_show(rng, "one", questions[0], picture), *map(Turn, questions[1:])]
    return Conversation(tuple(turns), _system(rng))


def draw_pair(rng: random.Random, source: Scans, n_turns: int) -> Conversation:
    """A conversation about two pictures that are shown together."""
    pictures = tuple(draw_picture(rng, source, rng.choice((1, 2, 2, 3))) for _ in range(2))
    named = list(zip((FIRST, SECOND), pictures, strict=True))
    rng.shuffle(named)
    questions = [
        ask_picture(rng, rng.choice(PLACED_KINDS), picture.digits, where)
        for where, picture in named[: n_turns - 1]
    ]
    questions.append(ask_pair(rng, rng.choice(PAIR_KINDS), *(p.digits for p in pictures)))
    turns = [_show(rng, "pair", questions[0], *pictures), *map(Turn, questions[1:])]
    return Conversation(tuple(turns), _system(rng))


def draw_sequel(rng: random.Random, source: Scans, n_turns: int) -> Conversation:
    """A conversation of two or three turns with a second picture in the second turn."""
    before, after = (draw_picture(rng, source, rng.choice((1, 2, 3, 3))) for _ in range(2))
    turns = [_show(rng, "one", _any(rng, before, ONE), before)]
    if n_turns == 2:
        turns.append(_show(rng, "sequel", _any(rng, after, NEW), after))
    else:
        index = rng.randrange(len(after.digits))
        others = [k for k in range(len(after.digits)) if k != index]
        question = ask_picture(rng, rng.choice(PLACED_KINDS), after.digits, NEW, index)
        turns.append(_show(rng, "sequel", question, after))
        turns.append(Turn(_any(rng, after, SECOND, rng.choice(others or [index]))))
    return Conversation(tuple(turns), _system(rng))


def draw_single(rng: random.Random, source: Scans) -> Conversation:
    """One turn: what the target learns first."""
    draw = rng.choices(("text", "one", "pair"), (0.2, 0.65, 0.15))[0]
    if draw == "text":
        return draw_text(rng, 1)
    return draw_one(rng, source, 1) if draw == "one" else draw_pair(rng, source, 1)


def draw_mixed(
    rng: random.Random, source: Scans, text_kinds: Sequence[str] = TEXT_KINDS
) -> Conversation:
    """One to three turns, a third of them about no picture: what the shipped data looks like."""
    if rng.random() < 1 / 3:
        return draw_text(rng, rng.choice((2, 3, 3, 3)), text_kinds)
    n_turns = rng.choice((1, 2, 3, 3))
    draws = (draw_one, draw_pair) if n_turns == 1 else (draw_one, draw_pair, draw_sequel)
    return rng.choice(draws)(rng, source, n_turns)


def draw_review(rng: random.Random, source: Scans) -> Conversation:
    """What the target learns last: the shipped mix, and single questions about whole pictures, of
    which the hard ones come up more often."""
    draw = rng.choices(("mixed", "whole", "pair"), (0.35, 0.45, 0.2))[0]
    if draw == "mixed":
        return draw_mixed(rng, source, SHIPPED_TEXT_KINDS)
    if draw == "pair":
        return draw_pair(rng, source, 1)
    picture = draw_picture(rng, source, rng.choice((2, 3, 3)))
    question = ask_picture(rng, rng.choice(WHOLE_KINDS), picture.digits, ONE)
    return Conversation((_show(rng, "one", question, picture),), _system(rng))


def _any(rng: random.Random, picture: Picture, where: str, index: int | None = None) -> Question:
    kinds = [kind for kind in PICTURE_KINDS if parts(kind, len(picture.digits))]
    return ask_picture(rng, rng.choice(kinds), picture.digits, where, index)


def _show(rng: random.Random, lead: str, question: Question, *pictures: Picture) -> Turn:
    """A turn with pictures; two in three say something before they ask."""
    if rng.random() < 1 / 3:
        return Turn(question, pictures)
    return Turn(replace(question, text=f"{rng.choice(LEADS[lead])} {question.text}"), pictures)


def _system(rng: random.Random) -> str | None:
    return rng.choice(SYSTEMS) if rng.random() < 0.5 else None


def _message(role: str, text: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text}]}
