"""What a benchmark found: a table for the reader, and a JSON file for ``docs/performance.md``."""

import json
import shlex
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dspark.benchmarks.machine import machine
from dspark.reports.text import table


@dataclass(frozen=True)
class Measurement:
    """One thing measured several times.

    Attributes:
        name: what was measured.
        unit: of the values.
        values: one for each repetition, in the order they were made.
        group: measurements of one group are shown as one table; the first of a group is what the
            others are compared with.
    """

    name: str
    unit: str
    values: list[float]
    group: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)


@dataclass(frozen=True)
class Target:
    """A promise of the project, and what came of it here.

    Attributes:
        name: what is compared with what.
        values: a ratio for each repetition, both sides measured in the same repetition.
        bound: that the median is to reach.
        at_least: whether the bound is the least or the most.
        unit: of values and bound; empty for a ratio.
    """

    name: str
    values: list[float]
    bound: float
    at_least: bool
    unit: str = ""

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def met(self) -> bool:
        return self.median >= self.bound if self.at_least else self.median <= self.bound


@dataclass
class Result:
    """All that one run of a benchmark found.

    Attributes:
        benchmark: its name.
        parameters: what it was run with.
        measurements: in the order they are shown.
        targets: in the order they are shown.
        notes: further facts, one sentence each.
    """

    benchmark: str
    parameters: dict[str, Any]
    measurements: list[Measurement] = field(default_factory=list)
    targets: list[Target] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def report(self, folder: Path, json_path: Path | None) -> None:
        """Print the tables; write the JSON file if one is asked for.

        Args:
            folder: where the benchmark kept its files.
            json_path: of the file to write.
        """
        document = {
            "benchmark": self.benchmark,
            "command": shlex.join(["python", "-m", f"benchmarks.{self.benchmark}", *sys.argv[1:]]),
            "machine": machine(folder),
            "parameters": self.parameters,
            "measurements": [asdict(m) for m in self.measurements],
            "targets": [{**asdict(t), "met": t.met} for t in self.targets],
            "notes": self.notes,
        }
        print(", ".join(f"{k} {v}" for k, v in machine(folder).items()))
        print(", ".join(f"{k} {v}" for k, v in self.parameters.items()) + "\n")
        print("\n\n".join(self.tables()))
        for note in self.notes:
            print(note)
        if json_path is not None:
            json_path.parent.mkdir(parents=True, exist_ok=True)
            json_path.write_text(json.dumps(document, indent=1) + "\n")

    def tables(self) -> list[str]:
        """The measurements by group, then the targets, as plain tables."""
        shown = []
        for group in dict.fromkeys(m.group for m in self.measurements):
            some = [m for m in self.measurements if m.group == group]
            rows = [_row(m, some[0]) for m in some]
            header = (group or "measured", "minimum", "median", "maximum", "unit", "ratio")
            shown.append(table(rows, header))
        if self.targets:
            header = ("target", "minimum", "median", "maximum", "bound", "met")
            shown.append(table(map(_target_row, self.targets), header))
        return shown


def spread(values: Sequence[float]) -> tuple[str, str, str]:
    """Minimum, median and maximum, four digits each."""
    return tuple(f"{f(values):,.4g}" for f in (min, statistics.median, max))  # type: ignore


def _row(found: Measurement, first: Measurement) -> tuple[str, ...]:
    same = found.unit == first.unit and first.median
    ratio = f"{found.median / first.median:.2f}" if same else "-"
    return (found.name, *spread(found.values), found.unit, ratio)


def _target_row(target: Target) -> tuple[str, ...]:
    bound = f"{'at least' if target.at_least else 'at most'} {target.bound:g} {target.unit}".strip()
    return (target.name, *spread(target.values), bound, "yes" if target.met else "NO")
