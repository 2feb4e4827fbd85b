"""A JSON file that is one array of objects: one pass notes where each starts and ends."""

import json
from pathlib import Path

import numpy as np

from dspark.capture.conversations.json_records import JsonRecords
from dspark.schemas.errors import InputError

_CHUNK = 1 << 22
_WHITESPACE = " \t\r\n"
_TAIL = 16
"""An error this near to the end of what was read may come from the cut."""


def open_json_array(path: Path) -> JsonRecords:
    """The elements of a JSON array.

    Raises:
        InputError: the file is not one JSON array.
    """
    return JsonRecords(path, *_elements(path))


def _elements(path: Path) -> tuple[np.ndarray, np.ndarray]:
    """Byte offsets of the start and end of every element.

    What is read is decoded as Latin-1: JSON's structure is ASCII, and one character is one byte.

    Raises:
        InputError: the file is not one JSON array.
    """
    starts: list[int] = []
    ends: list[int] = []
    decode = json.JSONDecoder().raw_decode
    with open(path, "rb") as f:
        text, base, eof = f.read(_CHUNK).decode("latin-1"), 0, False
        at = text.index("[") + 1
        expected = "value or end"
        while True:
            while at < len(text) and text[at] in _WHITESPACE:
                at += 1
            if at < len(text):
                if expected != "value" and text[at] == "]":
                    if text[at + 1 :].strip(_WHITESPACE) or f.read(_CHUNK).strip():
                        raise _broken(path, base + at + 1, "extra data after the array")
                    return np.array(starts, np.int64), np.array(ends, np.int64)
                if expected == "comma":
                    if text[at] != ",":
                        raise _broken(path, base + at, "a comma is missing")
                    at, expected = at + 1, "value"
                    continue
                try:
                    end = decode(text, at)[1]
                except (ValueError, RecursionError) as error:
                    where = getattr(error, "pos", at)
                    cut = where >= len(text) - _TAIL or "Unterminated string" in str(error)
                    if eof or not cut:
                        raise _broken(path, base + where, str(error).split(":")[0]) from None
                else:
                    if end < len(text) or eof:
                        starts.append(base + at)
                        ends.append(base + end)
                        at, expected = end, "comma"
                        continue
            if eof:
                raise _broken(path, base + at, "the array does not end")
            # As much again as is left over, so that a large element is not parsed over and over.
            more = f.read(max(_CHUNK, len(text) - at))
            eof = not more
            text, base, at = text[at:] + more.decode("latin-1"), base + at, 0


def _broken(path: Path, offset: int, problem: str) -> InputError:
    return InputError(
        f"--data {path}: not a readable JSON array (byte {offset}: {problem}); mend it, or use "
        "JSON Lines, where a broken line costs one row only"
    )
