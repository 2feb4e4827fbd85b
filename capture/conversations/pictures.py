"""From the bytes of a picture to RGB pixels."""

import io
import warnings
from pathlib import Path

import numpy as np
from PIL import Image, ImageOps

from dspark.capture.bad_row import BadRowError

MAX_PIXELS = 89_478_485
"""More pixels than this are taken for a decompression bomb: Pillow's own bound, 256 MiB as RGB."""

# Formats of pixels only: PostScript and the like would start other programs.
_FORMATS = (
    "AVIF",
    "BMP",
    "GIF",
    "ICO",
    "JPEG",
    "JPEG2000",
    "MPO",
    "PNG",
    "PPM",
    "TIFF",
    "WEBP",
)


def decode_picture(data: bytes | Path, name: str) -> Image.Image:
    """The first frame of a picture, upright, in mode RGB.

    Args:
        data: an encoded picture, or the file that holds it.
        name: for messages, e.g. ``picture 0``.

    Raises:
        BadRowError: it has no bytes, too many pixels, or cannot be decoded.
    """
    empty = not data if isinstance(data, bytes) else data.stat().st_size == 0
    if empty:
        raise BadRowError("picture empty", f"{name} has zero bytes")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the bound below is stricter than Pillow's warning
            source = io.BytesIO(data) if isinstance(data, bytes) else data
            with Image.open(source, formats=_known_formats()) as picture:
                if picture.width * picture.height > MAX_PIXELS:
                    raise BadRowError("decompression bomb", f"{name} is {_dims(picture)}")
                picture.load()
                return to_rgb(picture, name)
    except BadRowError:
        raise
    except Image.DecompressionBombError as error:
        raise BadRowError("decompression bomb", f"{name}: {error}") from None
    except Exception as error:  # damaged bytes make Pillow's decoders raise nearly anything
        text = str(error) or type(error).__name__
        kind = "picture truncated" if "truncated" in text.lower() else "picture corrupt"
        raise BadRowError(kind, f"{name}: {_without_address(text)}") from None


def to_rgb(picture: Image.Image, name: str) -> Image.Image:
    """A picture upright in mode RGB: transparency on white, 16-bit grey by its high byte.

    Raises:
        BadRowError: its pixels are 32-bit numbers of an unknown range.
    """
    picture = ImageOps.exif_transpose(picture)
    if picture.mode.startswith(("I", "F")):
        picture = _from_16_bit(picture, name)
    if picture.has_transparency_data:
        rgba = picture.convert("RGBA")
        white = Image.new("RGBA", rgba.size, "white")
        return Image.alpha_composite(white, rgba).convert("RGB")
    return picture.convert("RGB")


def _from_16_bit(picture: Image.Image, name: str) -> Image.Image:
    values = np.asarray(picture)
    if values.dtype.kind == "f" or values.min() < 0 or values.max() > 0xFFFF:
        raise BadRowError("picture corrupt", f"{name} has pixels of mode {picture.mode}")
    return Image.fromarray((values >> 8).astype(np.uint8))


def _known_formats() -> list[str]:
    Image.init()
    return [name for name in _FORMATS if name in Image.OPEN]


def _dims(picture: Image.Image) -> str:
    return f"{picture.width} x {picture.height} pixels"


def _without_address(text: str) -> str:
    """Pillow names the object it read from, which differs from run to run."""
    return text.split(" <_io.")[0] if " <_io." in text else text
