"""Small conversation files for tests."""

import io
import random
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        (
            "messages",
            pa.list_(
                pa.struct(
                    [
                        ("role", pa.string()),
                        (
                            "content",
                            pa.list_(pa.struct([("type", pa.string()), ("text", pa.string())])),
                        ),
                    ]
                )
            ),
        ),
        ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))),
    ]
)


def png(picture: Image.Image) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, "PNG")
    return buffer.getvalue()


def noise_picture(seed: int, size: tuple[int, int]) -> Image.Image:
    pixels = np.random.RandomState(seed).randint(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def text(value: str) -> dict[str, Any]:
    return {"type": "text", "text": value}


IMAGE: dict[str, Any] = {"type": "image", "text": None}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


def assistant(value: str) -> dict[str, Any]:
    return {"role": "assistant", "content": [text(value)]}


def row(
    number: int, messages: list[dict[str, Any]], pictures: list[Image.Image] | None = None
) -> dict[str, Any]:
    return {
        "id": f"row-{number}",
        "messages": messages,
        "images": [{"bytes": png(p), "path": None} for p in pictures or []],
    }


def mixed_rows(count: int, seed: int = 0) -> list[dict[str, Any]]:
    """Text-only, one-picture and two-picture conversations, in one to three turns."""
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        words = " ".join(rng.choices(["red", "two", "cat", "is", "7", "sum"], k=rng.randint(1, 8)))
        sizes = [rng.choice([(32, 32), (64, 32), (96, 64), (48, 80)]) for _ in range(i % 3)]
        pictures = [noise_picture(100 * i + j, s) for j, s in enumerate(sizes)]
        messages = [user(*[IMAGE] * (i % 3), text(words)), assistant(f"It is {words}.")]
        for turn in range(rng.randint(0, 2)):
            messages += [user(text(f"And {turn}?")), assistant(rng.choice(["Yes.", "No, never."]))]
        rows.append(row(i, messages, pictures))
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows, schema=SCHEMA), path, row_group_size=7)
    return path
