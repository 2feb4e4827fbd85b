"""What ``dspark train-draft`` prints."""

from typing import TYPE_CHECKING

from dspark.reports.text import number, percent, table

if TYPE_CHECKING:
    from dspark.train_from_cache.train import TrainResult

_TRAINING = ("", "before", "after")


def training(result: "TrainResult") -> str:
    """Held-out acceptance before and after a training."""
    before, after = result.before or {}, result.after
    rows = [
        (label, shown(before.get(key)), shown(after.get(key)))
        for label, key, shown in (
            ("tau: tokens per round, with bonus token", "tau", number),
            ("tau, greedy", "tau_greedy", number),
            ("top-1 agreement, all supervised tokens", "agreement", percent),
            ("top-1 agreement, picture-grounded tokens", "agreement_grounded", percent),
        )
    ]
    earlier = before.get("acceptance") or [None] * len(after["acceptance"])
    rows[2:2] = [
        (f"acceptance rate of draft token {k + 1}", percent(b), percent(a))
        for k, (b, a) in enumerate(zip(earlier, after["acceptance"], strict=True))
    ]
    measured = [f"measured on {result.eval_rows:,} held-out rows", table(rows, _TRAINING)]
    if not result.eval_rows:
        measured = ["nothing held out, so nothing measured"]
    done = "finished already" if result.already_finished else f"{result.steps:,} steps"
    return "\n".join(
        [
            f"{result.arch}: {done} on {result.train_rows:,} rows, "
            f"{result.trainable_parameters:,} trained parameters; {measured[0]}",
            *measured[1:],
            f"draft in {result.out}",
        ]
    )
