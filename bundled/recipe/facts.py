"""Sizes of what is shipped: the target's parameters and the tokens of the conversations.

python -m dspark.bundled.recipe.facts
"""

from io import BytesIO
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor, ProcessorMixin

from .. import HELDOUT_DATA, TARGET, TRAIN_DATA
from .encode import encode


def main() -> None:
    """Prints one table for the target and one for the data."""
    model = AutoModelForImageTextToText.from_pretrained(TARGET)
    processor = AutoProcessor.from_pretrained(TARGET)
    weights = TARGET / "model.safetensors"
    print(f"parameters: {model.num_parameters():,}; weights: {weights.stat().st_size:,} bytes\n")
    columns = [_column(processor, path) for path in (TRAIN_DATA, HELDOUT_DATA)]
    print(f"| | {TRAIN_DATA.stem} | {HELDOUT_DATA.stem} |\n|---|---|---|")
    for name in columns[0]:
        print(f"| {name} | {columns[0][name]} | {columns[1][name]} |")


def _column(processor: ProcessorMixin, path: Path) -> dict[str, str]:
    rows = pq.read_table(path).to_pylist()
    lengths: list[int] = []
    written: list[int] = []
    for row in rows:
        images = [Image.open(BytesIO(image["bytes"])).convert("RGB") for image in row["images"]]
        batch = encode(processor, [row["messages"]], [images])
        lengths.append(batch["input_ids"].shape[1])
        written.append(int(batch["assistant_masks"].sum()))
    with_picture = [row for row in rows if row["images"]]
    digits = [new for row in with_picture for new in _digits(row["messages"])]
    return {
        "conversations": str(len(rows)),
        "with no / one / two pictures": _counts([len(row["images"]) for row in rows], (0, 1, 2)),
        "of one / two / three turns": _counts([len(row["kinds"]) for row in rows], (1, 2, 3)),
        "tokens, mean": f"{sum(lengths) / len(rows):.1f}",
        "tokens, least and most": f"{min(lengths)}, {max(lengths)}",
        "tokens of the assistant, mean": f"{sum(written) / len(rows):.1f}",
        "digits in answers about pictures": str(len(digits)),
        "of these not in the text before": f"{100 * sum(digits) / len(digits):.0f} %",
        "bytes": f"{path.stat().st_size:,}",
    }


def _counts(values: list[int], wanted: tuple[int, ...]) -> str:
    return " / ".join(str(values.count(value)) for value in wanted)


def _digits(messages: list[dict[str, Any]]) -> list[bool]:
    """For each digit that the assistant says, whether the text before it lacks that digit."""
    before, new = "", []
    for message in messages:
        for character in "".join(part["text"] or "" for part in message["content"]):
            if message["role"] == "assistant" and character.isdigit():
                new.append(character not in before)
            before += character
    return new


if __name__ == "__main__":
    main()
