"""A row of the dataset that cannot be captured."""


class BadRowError(Exception):
    """Why a row is skipped. The index stores ``kind: detail``; the summary counts by kind."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)


def kind_of(reason: str) -> str:
    """The part of a stored reason that the summary counts by."""
    return reason.split(":", 1)[0]
