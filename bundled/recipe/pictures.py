"""Pictures of one to three handwritten digits, drawn from scikit-learn's 8x8 scans."""

import random
from dataclasses import dataclass
from functools import cache
from io import BytesIO

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from sklearn.datasets import load_digits

CELL = 32
"""Side of one digit's cell, in pixels."""
TOKEN = 16
"""Side of the square that becomes one token of the language model, in pixels."""
NOTHING, NOWHERE = 10, 3
"""Digit and place of a token that lies outside every digit's cell."""
SPLIT_SIZES = {"train": 1347, "validation": 150, "heldout": 300}


@dataclass(frozen=True)
class Scans:
    """Handwritten digits: `images` uint8 [N, 8, 8], `labels` int [N]."""

    images: NDArray[np.uint8]
    labels: NDArray[np.int64]


@dataclass(frozen=True)
class Picture:
    """A picture, the digits in it from left to right, and what each of its tokens shows.

    `cells` is int [height / 16, width / 16, 2]: the digit that a token shows a part of, and that
    digit's place from the left, 0 to 2; `NOTHING` and `NOWHERE` in the margins.
    """

    image: Image.Image
    digits: tuple[int, ...]
    cells: NDArray[np.int64]


@cache
def scans(split: str) -> Scans:
    """The scans of one split; no scan is in two splits."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(labels))
    start = 0
    for name, size in SPLIT_SIZES.items():
        if name == split:
            chosen = order[start : start + size]
            grey = np.round(images[chosen].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
            return Scans(grey, labels[chosen].astype(np.int64))
        start += size
    raise ValueError(f"no split {split!r}; there are {', '.join(SPLIT_SIZES)}")


def draw_picture(rng: random.Random, source: Scans, n_digits: int) -> Picture:
    """Draws `n_digits` random scans side by side; margins and scales vary."""
    left, right = rng.choice((0, 0, TOKEN)), rng.choice((0, 0, TOKEN))
    above, below = rng.choice(((0, 0), (0, 0), (0, TOKEN), (TOKEN, 0)))
    height, width = above + CELL + below, left + n_digits * CELL + right
    canvas = np.zeros((height, width), np.uint8)
    cells = np.tile(np.array([NOTHING, NOWHERE]), (height // TOKEN, width // TOKEN, 1))
    digits = []
    for k in range(n_digits):
        chosen = rng.randrange(len(source.labels))
        glyph = _glyph(rng, source.images[chosen])
        x, y = left + k * CELL, above
        dx = rng.randint(0, CELL - glyph.shape[1])
        dy = rng.randint(0, CELL - glyph.shape[0])
        canvas[y + dy : y + dy + glyph.shape[0], x + dx : x + dx + glyph.shape[1]] = glyph
        digit = int(source.labels[chosen])
        digits.append(digit)
        row, column = y // TOKEN, x // TOKEN
        cells[row : row + CELL // TOKEN, column : column + CELL // TOKEN] = digit, k
    image = Image.fromarray(canvas).convert("RGB")
    return Picture(image, tuple(digits), cells)


def blank(picture: Picture) -> Picture:
    """The same picture with nothing in it: what a target that cannot see would be given."""
    return Picture(Image.new("RGB", picture.image.size), picture.digits, picture.cells)


def png(image: Image.Image) -> bytes:
    """The picture as the bytes of a PNG file."""
    buffer = BytesIO()
    image.convert("L").save(buffer, format="PNG", optimize=True)
    return buffer.getvalue()


def _glyph(rng: random.Random, scan: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """One scan enlarged to 23-30 pixels, as uint8 [height, width]."""
    height = rng.randint(23, 30)
    width = min(30, max(20, round(height * rng.uniform(0.85, 1.1))))
    glyph = Image.fromarray(scan).resize((width, height), Image.Resampling.BICUBIC)
    if rng.random() < 0.5:
        glyph = glyph.rotate(rng.uniform(-10, 10), Image.Resampling.BICUBIC)
    brightness = rng.uniform(0.7, 1.0)
    return np.round(np.asarray(glyph) * brightness).astype(np.uint8)
