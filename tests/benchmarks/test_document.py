"""``docs/performance.md`` says what the results beside it say."""

import json
from pathlib import Path

from dspark.benchmarks.document import DOCUMENT, RESULTS, document, read_result


def test_it_is_made_from_the_results_that_are_there() -> None:
    assert list(RESULTS.glob("*.json"))
    assert DOCUMENT.read_text() == document()


def test_each_target_says_whether_its_own_values_reach_it() -> None:
    for path in RESULTS.glob("*.json"):
        found = json.loads(path.read_text())
        assert [t["met"] for t in found["targets"]] == [t.met for t in read_result(found).targets]


def test_a_number_is_shown_as_measured(tmp_path: Path) -> None:
    found = {
        "benchmark": "document",
        "command": "python -m benchmarks.document",
        "machine": {"cores": 2},
        "parameters": {"rows": 3},
        "measurements": [
            {"name": "ours", "unit": "GB/s", "values": [4.0, 1.0, 2.0], "group": "warm"},
            {"name": "theirs", "unit": "GB/s", "values": [1.0, 1.0, 1.0], "group": "warm"},
        ],
        "targets": [
            {"name": "a ratio", "values": [1.0, 4.0, 2.0], "bound": 2.5, "at_least": True,
             "unit": "", "met": False},
        ],
        "notes": ["Said."],
    }  # fmt: skip
    (tmp_path / "document.json").write_text(json.dumps(found))
    lines = [" ".join(line.split()) for line in document(tmp_path).splitlines()]
    assert "ours 1 2 4 GB/s 1.00" in lines
    assert "theirs 1 1 1 GB/s 0.50" in lines
    assert lines.count("a ratio 1 2 4 at least 2.5 NO") == 2
    assert "Said." in lines
