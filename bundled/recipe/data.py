"""The shipped conversations: questions from the generator, answers from the trained target."""

import random
from itertools import count
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import ProcessorMixin, Qwen2_5_VLForConditionalGeneration

from .answer import answer_all
from .conversations import SHIPPED_TEXT_KINDS, Conversation, draw_mixed
from .pictures import png, scans

PART = pa.struct([("type", pa.string()), ("text", pa.string())])
MESSAGE = pa.struct([("role", pa.string()), ("content", pa.list_(PART))])
IMAGE = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("messages", pa.list_(MESSAGE)),
        ("images", pa.list_(IMAGE)),
        ("kinds", pa.list_(pa.string())),
    ]
)


def write_conversations(
    model: Qwen2_5_VLForConditionalGeneration,
    processor: ProcessorMixin,
    split: str,
    n_rows: int,
    seed: int,
    path: Path,
) -> None:
    """Writes `n_rows` conversations about the digits of one split as a Parquet file."""
    rng = random.Random(seed)
    names = (f"{split}-{k:05d}" for k in count())
    rows: list[dict[str, Any]] = []
    while missing := n_rows - len(rows):
        drawn = [draw_mixed(rng, scans(split), SHIPPED_TEXT_KINDS) for _ in range(missing)]
        answered = answer_all(model, processor, drawn)
        # An answer that does not end is drawn again rather than cut.
        rows += [
            _row(next(names), conversation, answers)
            for conversation, answers in zip(drawn, answered, strict=True)
            if answers is not None
        ]
    pq.write_table(pa.Table.from_pylist(rows, SCHEMA), path, compression="zstd")


def _row(name: str, conversation: Conversation, answers: list[str]) -> dict[str, Any]:
    return {
        "id": name,
        "messages": conversation.messages(answers),
        "images": [{"bytes": png(p.image), "path": None} for p in conversation.pictures],
        "kinds": [turn.question.kind for turn in conversation.turns],
    }
