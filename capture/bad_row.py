"""A row of the dataset that cannot be captured."""

from typing import TYPE_CHECKING

from dspark.schemas.errors import InputError, one_line

if TYPE_CHECKING:
    from dspark.capture.conversations import Conversations

_DETAIL = 300


class BadRowError(Exception):
    """Why a row is skipped. The index stores ``kind: detail``; the summary counts by kind.

    The detail may quote the row: it is made one line, cut to 300 characters, and storable as UTF-8.
    """

    def __init__(self, kind: str, detail: str = "") -> None:
        detail = one_line(detail)[:_DETAIL].encode(errors="replace").decode()
        super().__init__(f"{kind}: {detail}" if detail else kind)


def stop_if_asked(
    on_bad_row: str, conversations: "Conversations", sample: int, reason: str
) -> None:
    """End a capture at a bad row where ``--on-bad-row error`` was given.

    Raises:
        InputError: naming the row.
    """
    if on_bad_row == "error":
        row_id = conversations.id(sample)[:_DETAIL]
        name = f", id {row_id!r}," if row_id else ""
        raise InputError(
            f"--data {conversations.path}: {conversations.where(sample)}{name} cannot be captured "
            f"({reason}); mend or remove it and capture into a new --out or with --overwrite, as "
            "these are other data then, or give --on-bad-row skip"
        )


def kind_of(reason: str) -> str:
    """The part of a stored reason that the summary counts by."""
    return reason.split(":", 1)[0]
