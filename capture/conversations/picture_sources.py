"""Where a picture comes from: bytes, a path, PIL, a data URI or a web address."""

import base64
import stat
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlparse

from PIL import Image

from dspark.capture.bad_row import BadRowError
from dspark.capture.conversations.download import Downloads
from dspark.capture.conversations.pictures import decode_picture, to_rgb


class PictureSource:
    """Opens the pictures that rows name.

    Args:
        root: folder that paths are relative to.
        downloads: fetches web addresses; None refuses them.
    """

    def __init__(self, root: Path, downloads: Downloads | None) -> None:
        self._root = root
        self._downloads = downloads

    def open(self, value: Any, name: str) -> Image.Image:
        """A picture in mode RGB.

        Args:
            value: bytes, ``{bytes, path}``, ``{base64}``, a PIL picture, a path, a base64 data URI
                or an http(s) address. Bytes inside of an object may be base64, as JSON needs it.
            name: for messages, e.g. ``picture 0``.

        Raises:
            BadRowError: there is no such picture, or it cannot be decoded.
        """
        if isinstance(value, Image.Image):
            return to_rgb(value, name)
        if isinstance(value, dict):
            keys = ("bytes", "base64", "path", "url")
            key = next((k for k in keys if value.get(k) is not None), None)
            if key == "base64" or (key == "bytes" and isinstance(value[key], str)):
                return decode_picture(_from_base64(value[key], name), name)
            value = None if key is None else value[key]
        if isinstance(value, (bytes, bytearray, memoryview)):
            return decode_picture(bytes(value), name)
        if not isinstance(value, str) or not value:
            raise BadRowError("picture missing", f"{name} is {_what(value)}")
        if value.startswith("data:"):
            head, comma, data = value.partition(",")
            if not (comma and head.endswith(";base64")):
                raise BadRowError("picture corrupt", f"{name}: a data URI without base64")
            return decode_picture(_from_base64(data, name), name)
        if value.startswith(("http://", "https://")):
            if self._downloads is None:
                raise BadRowError(
                    "picture is a web address", f"{name} is fetched only with --allow-download"
                )
            return decode_picture(self._downloads.fetch(value, name), name)
        return decode_picture(self._file(value, name), name)

    def _file(self, value: str, name: str) -> Path:
        path = value
        try:
            if value.startswith("file://"):
                path = unquote(urlparse(value).path)
            full = self._root / path
            regular = stat.S_ISREG(full.stat().st_mode)
        except (OSError, ValueError) as error:
            problem = getattr(error, "strerror", None) or str(error)
            raise BadRowError("picture missing", f"{name}: {path!r}: {problem}") from None
        if not regular:
            raise BadRowError("picture missing", f"{name}: {path!r} is no file")
        return full


def _from_base64(data: Any, name: str) -> bytes:
    try:
        return base64.b64decode("".join(data.split()), validate=True)
    except (ValueError, AttributeError, TypeError) as error:
        raise BadRowError("picture corrupt", f"{name}: not base64 ({error})") from None


def _what(value: Any) -> str:
    return "null" if value is None else "empty" if value == "" else f"a {type(value).__name__}"
