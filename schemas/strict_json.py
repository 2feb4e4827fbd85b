"""JSON from files that may be damaged or hostile: every oddity is a ``ValueError``."""

import json
import math
import reprlib
import stat
from pathlib import Path
from typing import Any, NoReturn

_DEEPEST = 64


def read_json(path: Path, most_bytes: int) -> Any:
    """The JSON value in a regular file of at most ``most_bytes``.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be read.
        ValueError: it is too large, no regular file, or not the JSON that ``parse_json`` takes.
    """
    found = path.stat()
    if not stat.S_ISREG(found.st_mode):
        raise ValueError("it is not a file")
    if found.st_size > most_bytes:
        raise ValueError(f"{found.st_size:,} bytes, {most_bytes:,} at most are read")
    with open(path, "rb") as file:
        return parse_json(file.read(most_bytes))


def parse_json(text: bytes) -> Any:
    """The JSON value of UTF-8 ``text``.

    Raises:
        ValueError: not JSON, or JSON with a key twice in an object, a number that is not finite,
            or deep nesting.
    """
    try:
        value = json.loads(
            text.decode(),
            object_pairs_hook=_distinct,
            parse_float=_finite,
            parse_constant=_refuse,
        )
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    level = [value]
    for _ in range(_DEEPEST):
        level = [
            child
            for item in level
            if isinstance(item, dict | list)
            for child in (item.values() if isinstance(item, dict) else item)
        ]
    if level:
        raise ValueError("it is nested too deep")
    return value


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("an object has a key twice")
    return entries


def _finite(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{reprlib.repr(text)} is no finite number")
    return number


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number")
