"""Tables, sizes and numbers for a reader."""

from collections.abc import Iterable, Sequence


def table(rows: Iterable[Sequence[object]], header: Sequence[str]) -> str:
    """A plain table: first column left, the others right."""
    cells = [list(header), *([printable(c) for c in row] for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        first, *rest = (
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join([first, *rest]).rstrip()

    return "\n".join([line(cells[0]), line(["-" * w for w in widths]), *map(line, cells[1:])])


def size(count: float) -> str:
    """Bytes for a reader, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            break
        count /= 1000
    return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"


def plural(count: int, noun: str) -> str:
    """``1 fault``, ``2 faults``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def some_numbers(numbers: Sequence[int], most: int = 8) -> str:
    """A list of numbers, cut where it gets long."""
    return ", ".join(map(str, numbers[:most])) + (", …" if len(numbers) > most else "")


def printable(text: object) -> str:
    """Words of a stranger's file for a terminal: what it would obey is escaped, and line breaks."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(text))


def printable_lines(text: str) -> str:
    """The same of several lines, which stay lines."""
    return "\n".join(map(printable, text.split("\n")))


def number(value: float | None, digits: int = 2) -> str:
    """A measured number, or a dash where there was nothing to measure."""
    return "-" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    """A measured share, or a dash where there was nothing to measure."""
    return "-" if value is None else f"{100 * value:.1f} %"
