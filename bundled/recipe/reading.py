"""How well the target reads held-out digits: exact match for each kind of question.

    python -m dspark.bundled.recipe.reading

The second column of percentages is the control: the same questions about blank pictures.
"""

import argparse
import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from transformers import AutoModelForImageTextToText, AutoProcessor

from .. import TARGET
from .answer import answer_all
from .conversations import SHIPPED_TEXT_KINDS, Conversation, draw_mixed, draw_single
from .pictures import blank, scans
from .questions import PAIR_KINDS, PICTURE_KINDS

LATER = "later turns"
QUOTAS = {
    **dict.fromkeys(PICTURE_KINDS, 100),
    **dict.fromkeys(PAIR_KINDS, 100),
    **dict.fromkeys(SHIPPED_TEXT_KINDS, 50),
    "read": 300,
}
SEED = 20_000


def prompts() -> list[Conversation]:
    """One-turn conversations with held-out digits, `QUOTAS` of each kind."""
    rng = random.Random(SEED)
    missing = dict(QUOTAS)
    chosen = []
    while any(missing.values()):
        conversation = draw_single(rng, scans("heldout"))
        kind = conversation.turns[0].question.kind
        if missing.get(kind):
            missing[kind] -= 1
            chosen.append(conversation)
    return chosen


def longer() -> list[Conversation]:
    """300 conversations with held-out digits and two or three turns about pictures."""
    rng = random.Random(SEED + 1)
    drawn: list[Conversation] = []
    while len(drawn) < 300:
        conversation = draw_mixed(rng, scans("heldout"), SHIPPED_TEXT_KINDS)
        if conversation.pictures and len(conversation.turns) > 1:
            drawn.append(conversation)
    return drawn


def blanked(conversation: Conversation) -> Conversation:
    """The same conversation about blank pictures of the same sizes."""
    turns = [replace(t, pictures=tuple(map(blank, t.pictures))) for t in conversation.turns]
    return replace(conversation, turns=tuple(turns))


def scores(
    conversations: list[Conversation], answers: list[list[str] | None]
) -> Iterator[tuple[str, bool]]:
    """For each scored turn its kind and whether the answer is the right one, to the letter.

    Turns after the first count under `LATER`, the target's own answers coming before them.
    """
    for conversation, given in zip(conversations, answers, strict=True):
        for k, turn in enumerate(conversation.turns):
            right = given is not None and given[k] == turn.question.answer
            if len(conversation.turns) == 1:
                yield turn.question.kind, right
            elif k:
                yield LATER, right


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, default=TARGET)
    target = parser.parse_args().target
    model = AutoModelForImageTextToText.from_pretrained(target).eval()
    processor = AutoProcessor.from_pretrained(target)
    conversations = prompts() + longer()
    seen: dict[str, list[bool]] = defaultdict(list)
    unseen: dict[str, list[bool]] = defaultdict(list)
    for kind, right in scores(conversations, answer_all(model, processor, conversations)):
        seen[kind].append(right)
    control = [blanked(conversation) for conversation in conversations if conversation.pictures]
    for kind, right in scores(control, answer_all(model, processor, control)):
        unseen[kind].append(right)

    print("| question | prompts | exact match | on blank pictures |\n|---|---|---|---|")
    for kind in (*PICTURE_KINDS, *PAIR_KINDS, LATER, *SHIPPED_TEXT_KINDS):
        print(_line(kind, seen[kind], unseen[kind]))
    kinds = (*PICTURE_KINDS, *PAIR_KINDS, LATER)
    everything = [[right for kind in kinds for right in table[kind]] for table in (seen, unseen)]
    print(_line("all about pictures", *everything))


def _line(name: str, seen: list[bool], unseen: list[bool]) -> str:
    control = f"{100 * sum(unseen) / len(unseen):.1f} %" if unseen else ""
    return f"| {name} | {len(seen)} | {100 * sum(seen) / len(seen):.1f} % | {control} |"


if __name__ == "__main__":
    main()
