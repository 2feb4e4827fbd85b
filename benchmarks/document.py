"""Makes ``docs/performance.md`` from the JSON files in ``docs/performance``.

    python -m benchmarks.document

Beside ``NAME.json``, which ``python -m benchmarks.NAME --json`` wrote, a file ``NAME.md`` may say
what a reader should know of it.
"""

import argparse
import ast
import json
from pathlib import Path
from typing import Any

from dspark.benchmarks.result import Measurement, Result, Target

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "docs" / "performance"
DOCUMENT = ROOT / "docs" / "performance.md"

_INTRODUCTION = """\
# Performance

Made by `python -m benchmarks.document` from the results in [performance/](performance/), each of
which one run of one command wrote; nothing here is typed by hand but the remarks. What is compared
was measured in the same run, alternately. Every table says minimum, median and maximum over the
repetitions; `ratio` is that of the medians to the first line of the table, and a target is met if
its median is. These results are of a virtual machine with nothing else to do (but for `storage`, in
which nothing is timed); its memory and its disk are not its own, which wide spreads show.

"""


def document(results: Path = RESULTS) -> str:
    """The text of ``docs/performance.md``."""
    sections = []
    targets: list[Target] = []
    for path in sorted(results.glob("*.json")):
        found = json.loads(path.read_text())
        result = read_result(found)
        targets += result.targets
        remarks = path.with_suffix(".md")
        sections.append(
            "\n\n".join(
                [
                    f"## {result.benchmark}",
                    _purpose(result.benchmark),
                    f"`{found['command']}`",
                    _facts(found["machine"]) + "  \n" + _facts(found["parameters"]),
                    *(f"```\n{table}\n```" for table in result.tables()),
                    *result.notes,
                    *([remarks.read_text().strip()] if remarks.exists() else []),
                ]
            )
        )
    promised = Result("", {}, targets=targets).tables()
    summary = [f"## The targets\n\n```\n{table}\n```" for table in promised]
    return _INTRODUCTION + "\n\n".join([*summary, *sections]) + "\n"


def read_result(found: dict[str, Any]) -> Result:
    """The result that a JSON file holds."""
    return Result(
        found["benchmark"],
        found["parameters"],
        [Measurement(**entry) for entry in found["measurements"]],
        [Target(**{k: v for k, v in t.items() if k != "met"}) for t in found["targets"]],
        found["notes"],
    )


def _purpose(benchmark: str) -> str:
    """The first paragraphs of the benchmark's own words, up to the command."""
    module = ast.parse((ROOT / "benchmarks" / f"{benchmark}.py").read_text())
    return (ast.get_docstring(module) or "").split("\n\n    ")[0]


def _facts(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    DOCUMENT.write_text(document())


if __name__ == "__main__":
    main()
