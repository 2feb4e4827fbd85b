"""What the commands print on stdout."""

from pathlib import Path
from typing import Any

from dspark.reports import training as report
from dspark.reports.text import size
from dspark.train_from_cache.train import TrainResult

METRICS = {
    "tau": 2.5,
    "tau_greedy": 2.25,
    "agreement": 0.5,
    "agreement_grounded": None,
    "acceptance": [0.75, 0.25],
}


def training(before: dict[str, Any] | None, eval_rows: int) -> list[str]:
    result = TrainResult(
        out=Path("drafts/msd"),
        arch="msd",
        steps=10,
        train_rows=90,
        eval_rows=eval_rows,
        trainable_parameters=1234,
        before=before,
        after=METRICS,
        already_finished=False,
    )
    return report.training(result).splitlines()


def test_training_before_and_after() -> None:
    lines = training({**METRICS, "tau": 1.0, "acceptance": [0.0, 0.0]}, 10)
    assert lines[0].endswith("measured on 10 held-out rows")
    assert lines[3].startswith("tau: tokens per round, with bonus token")
    assert lines[3].split()[-2:] == ["1.00", "2.50"]
    assert lines[5].split()[-4:] == ["0.0", "%", "75.0", "%"]
    assert lines[-2].split()[-2:] == ["-", "-"]


def test_training_without_a_measurement_before() -> None:
    lines = training(None, 10)
    assert lines[5].split()[-3:] == ["-", "75.0", "%"]


def test_training_with_nothing_held_out() -> None:
    lines = training(None, 0)
    assert lines == [
        "msd: 10 steps on 90 rows, 1,234 trained parameters; nothing held out, so nothing measured",
        "draft in drafts/msd",
    ]


def test_sizes_are_in_powers_of_1000() -> None:
    assert [size(n) for n in (0, 999, 1000, 1_500_000, 2e12)] == [
        *("0 B", "999 B", "1.0 kB", "1.5 MB", "2.0 TB")
    ]
