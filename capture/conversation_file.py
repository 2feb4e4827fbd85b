"""Conversations on disk, read by row: Parquet with the columns ``messages`` and ``images``."""

import io
from bisect import bisect_right
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash
from PIL import Image

from dspark.capture.bad_row import BadRowError
from dspark.schemas.conversations import Conversation, Message, Part
from dspark.schemas.errors import InputError

_ROLES = ("system", "user", "assistant")
_FINGERPRINT_BLOCKS = 64
_BLOCK = 1 << 16


class ConversationFile:
    """A Parquet file of conversations with random access by row.

    Columns: ``messages`` (list of ``{role, content}``, content being text or a list of parts
    ``{type: text|image, text}``), ``images`` (list of ``{bytes, path}`` or of bytes, in the order
    of the image parts; may be missing), ``id`` (optional).
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise InputError(f"--data {path}: no such file")
        try:
            self._file = pq.ParquetFile(path, memory_map=True)
        except (pa.ArrowException, OSError) as error:
            raise InputError(
                f"--data {path}: not a readable Parquet file ({error}); conversations are read "
                "from Parquet with the columns messages and images"
            ) from None
        columns = self._file.schema_arrow.names
        if "messages" not in columns:
            raise InputError(
                f"--data {path}: it has the columns {', '.join(columns)}; needed are messages "
                "(list of {role, content}) and, for pictures, images (list of {bytes, path})"
            )
        self.path = path
        self._columns = [c for c in ("id", "messages", "images") if c in columns]
        groups = self._file.metadata
        sizes = [groups.row_group(i).num_rows for i in range(groups.num_row_groups)]
        self._ends = np.cumsum(sizes).tolist()
        self._group = lru_cache(maxsize=2)(self._read_group)

    def __len__(self) -> int:
        return int(self._file.metadata.num_rows)

    def _read_group(self, group: int) -> pa.Table:
        return self._file.read_row_group(group, columns=self._columns)

    def _record(self, row: int) -> dict[str, Any]:
        group = bisect_right(self._ends, row)
        start = self._ends[group - 1] if group else 0
        record: dict[str, Any] = self._group(group).slice(row - start, 1).to_pylist()[0]
        return record

    def id(self, row: int) -> str:
        """The dataset's own id of a row, or an empty string."""
        if "id" not in self._columns:
            return ""
        value = self._record(row)["id"]
        return "" if value is None else str(value)

    def conversation(self, row: int) -> Conversation:
        """The conversation of a row, pictures decoded to RGB.

        Raises:
            BadRowError: the row is no conversation, or a picture cannot be decoded.
        """
        record = self._record(row)
        images = [_decode(i, image) for i, image in enumerate(record.get("images") or [])]
        pictures = iter(images)
        conversation = [_message(m, pictures) for m in record["messages"] or []]
        if left := len(list(pictures)):
            raise BadRowError(
                "pictures and placeholders do not match",
                f"{len(images)} pictures, {len(images) - left} image parts",
            )
        if not any(m["role"] == "assistant" for m in conversation):
            raise BadRowError("no assistant turn")
        return conversation

    def fingerprint(self) -> str:
        """xxh3-64 over the file's size and 64 blocks of 64 KiB spread evenly over it, in hex."""
        return sampled_digest(self.path)


def sampled_digest(path: Path) -> str:
    """xxh3-64 of a file's size and of up to 64 blocks of 64 KiB spread evenly over it, in hex."""
    size = path.stat().st_size
    state = xxhash.xxh3_64(str(size).encode())
    with open(path, "rb") as f:
        for offset in np.linspace(0, max(0, size - _BLOCK), _FINGERPRINT_BLOCKS, dtype=np.int64):
            f.seek(int(offset))
            state.update(f.read(_BLOCK))
    return state.hexdigest()


def _decode(number: int, image: Any) -> Image.Image:
    data = image.get("bytes") if isinstance(image, dict) else image
    if not isinstance(data, bytes):
        raise BadRowError("picture missing", f"picture {number} holds no bytes")
    try:
        return Image.open(io.BytesIO(data)).convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise BadRowError("picture cannot be decoded", f"picture {number}: {error}") from None


def _message(message: dict[str, Any] | None, pictures: Any) -> Message:
    role = (message or {}).get("role")
    if role not in _ROLES:
        raise BadRowError("unknown role", repr(role))
    assert message is not None
    content = message.get("content")
    if isinstance(content, str):
        content = [{"type": "text", "text": content}]
    parts = [_part(p, pictures) for p in content or []]
    if role == "assistant" and not any(p.get("text") for p in parts):
        raise BadRowError("empty assistant turn")
    return {"role": role, "content": parts}


def _part(part: dict[str, Any], pictures: Any) -> Part:
    kind = part.get("type")
    if kind == "text":
        return {"type": "text", "text": part.get("text") or ""}
    if kind == "image":
        picture = next(pictures, None)
        if picture is None:
            raise BadRowError("pictures and placeholders do not match", "an image part too many")
        return {"type": "image", "image": picture}
    raise BadRowError("unknown content part", repr(kind))
