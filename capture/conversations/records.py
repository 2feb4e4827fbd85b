"""What every kind of file offers: the records of a dataset, each read by its number."""

from typing import Any, Protocol

Record = dict[str, Any]

COLUMNS = (
    "id",
    "messages",
    "conversation",
    "conversations",
    "texts",
    "prompt",
    "completion",
    "images",
    "image",
    "system",
    "tools",
    "video",
    "videos",
    "audio",
    "audios",
)
"""The columns that layouts read; column-wise files read no others."""

PICTURE_COLUMNS = ("images", "image")
"""Those that say nothing of the layout, and are most of a file."""


class Records(Protocol):
    """Random access to the records of one file or dataset, in bounded memory."""

    def __len__(self) -> int: ...

    def columns(self) -> list[str]:
        """Names of all columns; of JSON, the keys of its first records."""
        ...

    def read(self, row: int) -> Record:
        """One record; struct fields that are null in a column-wise file are absent.

        Raises:
            BadRowError: the file has no record there, e.g. because the line is broken.
        """
        ...

    def head(self, count: int) -> list[Record]:
        """The readable ones of the first ``count`` records, without reading much more.

        Column-wise files leave out ``PICTURE_COLUMNS``.
        """
        ...

    def fingerprint(self) -> str:
        """A digest of the contents, in hex."""
        ...


def without_nulls(value: Any) -> Any:
    """A value of a column-wise file without the struct fields that are null.

    Such a file gives every struct of a column the same fields: ``{"type": "text", "image": null}``.
    """
    if isinstance(value, dict):
        return {k: without_nulls(v) for k, v in value.items() if v is not None}
    if isinstance(value, list):
        return [without_nulls(v) for v in value]
    return value
