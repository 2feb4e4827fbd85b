"""Every kind of picture, against pixels worked out by hand or by numpy."""

import base64
import io
import json
import os
import struct
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conversation_data import noise_picture, png
from PIL import Image

from dspark.capture.bad_row import BadRowError
from dspark.capture.conversations import pictures
from dspark.capture.conversations.picture_sources import PictureSource
from dspark.capture.conversations.pictures import decode_picture

NOISE = noise_picture(0, (8, 6))


def encoded(picture: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, kind, **options)
    return buffer.getvalue()


def pixels(data: bytes) -> np.ndarray:
    picture = decode_picture(data, "picture 0")
    assert picture.mode == "RGB"
    return np.asarray(picture)


@pytest.mark.parametrize("kind", ["PNG", "BMP", "TIFF", "PPM", "WEBP"])
def test_lossless_rgb(kind: str) -> None:
    options = {"lossless": True} if kind == "WEBP" else {}
    assert (pixels(encoded(NOISE, kind, **options)) == np.asarray(NOISE)).all()


@pytest.mark.parametrize(
    ("orientation", "turned"),
    [
        (1, lambda p: p),
        (2, lambda p: p[:, ::-1]),
        (3, lambda p: p[::-1, ::-1]),
        (4, lambda p: p[::-1]),
        (5, lambda p: p.transpose(1, 0, 2)),
        (6, lambda p: np.rot90(p, -1)),
        (7, lambda p: p.transpose(1, 0, 2)[::-1, ::-1]),
        (8, lambda p: np.rot90(p)),
    ],
)
def test_exif_orientation(orientation: int, turned: Any) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    assert (pixels(encoded(NOISE, "PNG", exif=exif)) == turned(np.asarray(NOISE))).all()


def test_transparency_lies_on_white() -> None:
    colour = np.array([200, 100, 0], np.uint8)
    rgba = np.zeros((1, 3, 4), np.uint8)
    rgba[0, :, :3] = colour
    rgba[0, :, 3] = 255, 0, 51
    expected = [colour, [255, 255, 255], np.round(0.2 * colour + 0.8 * 255)]
    assert np.abs(pixels(encoded(Image.fromarray(rgba), "PNG"))[0] - np.array(expected)).max() <= 1
    grey = np.array([[[100, 255], [100, 0]]], np.uint8)
    assert pixels(encoded(Image.fromarray(grey, "LA"), "PNG"))[0].tolist() == [
        [100] * 3,
        [255] * 3,
    ]


def test_palette_with_and_without_transparency() -> None:
    picture = Image.new("P", (3, 1))
    picture.putpalette([255, 0, 0, 0, 255, 0, 0, 0, 255])
    picture.putdata([0, 1, 2])
    assert pixels(encoded(picture, "PNG"))[0].tolist() == [[255, 0, 0], [0, 255, 0], [0, 0, 255]]
    clear = pixels(encoded(picture, "PNG", transparency=1))
    assert clear[0].tolist() == [[255, 0, 0], [255, 255, 255], [0, 0, 255]]


def test_grey_black_and_white_and_16_bit() -> None:
    grey = np.array([[0, 100, 255]], np.uint8)
    assert pixels(encoded(Image.fromarray(grey), "PNG"))[0, :, 1].tolist() == [0, 100, 255]
    two = Image.fromarray(grey).convert("1", dither=Image.Dither.NONE)
    assert pixels(encoded(two, "PNG"))[0, :, 2].tolist() == [0, 0, 255]
    deep = np.array([[0, 256, 32768 + 5, 65535]], np.uint16)
    for kind in ("PNG", "TIFF"):
        assert pixels(encoded(Image.fromarray(deep), kind))[0].tolist() == [
            [v] * 3 for v in (0, 1, 128, 255)
        ]
    for wild in (np.array([[-1]], np.int32), np.array([[70000]], np.int32), np.ones((1, 1), "f4")):
        with pytest.raises(BadRowError, match="picture corrupt: picture 0 has pixels of mode"):
            pixels(encoded(Image.fromarray(wild), "TIFF"))


def test_16_bit_rgb() -> None:
    """Pillow writes none: a PNG made by hand."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + data))
        return struct.pack(">I", len(data)) + kind + data + check

    data = (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", struct.pack(">IIBBBBB", 1, 1, 16, 2, 0, 0, 0))
        + chunk(b"IDAT", zlib.compress(b"\0" + struct.pack(">HHH", 65535, 32768, 255)))
        + chunk(b"IEND", b"")
    )
    assert pixels(data)[0, 0].tolist() == [255, 128, 0]


def test_cmyk() -> None:
    cmyk = np.array([[[0, 0, 0, 0], [255, 0, 0, 0], [0, 51, 102, 51], [0, 0, 0, 255]]], np.uint8)
    expected = [
        [255 - round(min(255, c + k - c * k / 255)) for c in (*pixel[:3],)]
        for pixel in cmyk[0].astype(int)
        for k in [pixel[3]]
    ]
    found = pixels(encoded(Image.fromarray(cmyk, "CMYK"), "TIFF"))
    assert np.abs(found[0].astype(int) - np.array(expected)).max() <= 1


@pytest.mark.parametrize("kind", ["GIF", "PNG", "WEBP", "TIFF"])
def test_first_frame_of_an_animation(kind: str) -> None:
    frames = [Image.new("RGB", (2, 2), colour) for colour in ((255, 0, 0), (0, 0, 255))]
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(frames[0], kind, save_all=True, append_images=frames[1:], **options)
    assert pixels(data)[0, 0].tolist() == [255, 0, 0]


def test_bad_bytes() -> None:
    whole = png(noise_picture(1, (64, 64)))
    bomb = whole[:16] + struct.pack(">II", 50_000, 50_000) + whole[24:29]
    bomb += struct.pack(">I", zlib.crc32(bomb[12:29])) + whole[33:]
    jpeg = encoded(noise_picture(1, (64, 64)), "JPEG")
    for data, kind in [
        (b"", "picture empty: picture 3 has zero bytes"),
        (whole[: len(whole) // 2], "picture truncated: picture 3: "),
        (jpeg[: len(jpeg) // 2], "picture truncated: picture 3: "),
        (b"no picture", "picture corrupt: picture 3: cannot identify image file$"),
        (
            b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n",
            "picture corrupt: picture 3: cannot",
        ),
        (whole[:50] + b"\xff" * 40 + whole[90:], "picture (corrupt|truncated): picture 3: "),
        (bomb, "decompression bomb: picture 3: .*2500000000"),
    ]:
        with pytest.raises(BadRowError, match=kind):
            decode_picture(data, "picture 3")


def test_any_damage_is_a_bad_row_or_a_picture() -> None:
    """One flipped byte anywhere makes no other error."""
    rng = np.random.RandomState(0)
    for kind in ("PNG", "JPEG", "GIF", "TIFF", "WEBP", "BMP", "ICO", "JPEG2000"):
        whole = encoded(noise_picture(2, (16, 16)), kind)
        for _ in range(60):
            damaged = bytearray(whole)
            for place in rng.randint(0, min(len(whole), 300), 3):
                damaged[place] = rng.randint(0, 256)
            try:
                decode_picture(bytes(damaged), "picture 0")
            except BadRowError:
                continue


def test_pillows_warned_size_is_a_bomb(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MAX_PIXELS", 47)
    with pytest.raises(BadRowError, match="decompression bomb: picture 0 is 8 x 6 pixels"):
        decode_picture(png(NOISE), "picture 0")
    monkeypatch.setattr(pictures, "MAX_PIXELS", 48)
    decode_picture(png(NOISE), "picture 0")


def test_sources(tmp_path: Path) -> None:
    data = png(NOISE)
    (tmp_path / "a").mkdir()
    path = tmp_path / "a" / "ä b.png"
    path.write_bytes(data)
    text = base64.b64encode(data).decode()
    source = PictureSource(tmp_path, None)
    for value in [
        data,
        bytearray(data),
        {"bytes": data, "path": None},
        {"bytes": data, "path": "elsewhere.png"},
        {"bytes": None, "path": "a/ä b.png"},
        {"path": str(path)},
        {"base64": text},
        {"bytes": text, "path": None},
        {"url": "a/ä b.png"},
        "a/ä b.png",
        str(path),
        path.as_uri(),
        f"data:image/png;base64,{text}",
        f"data:image/png;base64,{text[:9]}\n{text[9:]}",
        NOISE,
        NOISE.convert("RGBA"),
    ]:
        assert (np.asarray(source.open(value, "p")) == np.asarray(NOISE)).all(), value


def test_sources_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "empty.png").write_bytes(b"")
    os.mkfifo(tmp_path / "pipe")
    source = PictureSource(tmp_path, None)
    for value, reason in [
        ("nowhere.png", "picture missing: p: 'nowhere.png': No such file or directory"),
        ("", "picture missing: p is empty"),
        (None, "picture missing: p is null"),
        ({"bytes": None, "path": None}, "picture missing: p is null"),
        (7, "picture missing: p is a int"),
        ("\0", "picture missing: p: "),
        ("x" * 5000, "picture missing: p: "),
        (".", "picture missing: p: '.' is no file"),
        ("pipe", "picture missing: p: 'pipe' is no file"),
        ("/dev/zero", "picture missing: p: '/dev/zero' is no file"),
        ("empty.png", "picture empty: p has zero bytes"),
        ("file://[", "picture missing: p: 'file://[': "),
        ("a\ud800", "picture missing: p: "),
        ({"base64": b"abc"}, "picture corrupt: p: not base64"),
        ("data:image/png,abc", "picture corrupt: p: a data URI without base64"),
        ("data:image/png;base64,a?", "picture corrupt: p: not base64"),
        ({"base64": 7}, "picture corrupt: p: not base64"),
        ("https://example.com/a.png", "picture is a web address: p is fetched only with --allow"),
    ]:
        with pytest.raises(BadRowError) as error:
            source.open(value, "p")
        assert str(error.value).startswith(reason)


def test_paths_start_from_the_file_or_from_image_root(tmp_path: Path) -> None:
    from dspark.capture.conversations import open_conversations
    from dspark.capture.settings import RowOptions
    from dspark.schemas.errors import InputError

    row = {
        "messages": [
            {"role": "user", "content": [{"type": "image", "image": "p.png"}]},
            {"role": "assistant", "content": "x"},
        ]
    }
    for name, colour in (("data", "red"), ("root", "blue")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "p.png").write_bytes(png(Image.new("RGB", (1, 1), colour)))
    path = tmp_path / "data" / "d.jsonl"
    path.write_text(json.dumps(row))

    def first_pixel(root: Path | None) -> Any:
        conversations = open_conversations(path, RowOptions(image_root=root))
        return conversations.read(0).messages[0]["content"][0]["image"].getpixel((0, 0))

    assert first_pixel(None) == (255, 0, 0)
    assert first_pixel(tmp_path / "root") == (0, 0, 255)
    with pytest.raises(InputError, match="--image-root .*none: no such folder"):
        first_pixel(tmp_path / "none")
