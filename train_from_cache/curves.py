"""A picture of a training: ``curves.png`` beside ``metrics.jsonl``."""

import os
from pathlib import Path
from typing import Any

from dspark.train_from_cache.outputs import read_metrics

CURVES = "curves.png"


def plot_curves(out: Path) -> str:
    """Draw the loss, τ and held-out acceptance of the training in ``out``.

    Returns:
        A sentence for the user: where the picture is, or how to get one.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return (
            f"no {CURVES}: matplotlib is not installed; "
            "pip install 'dspark[plots]' brings it for the next training"
        )
    records = read_metrics(out)
    steps = [r for r in records if r["event"] == "step"]
    evaluations = [r for r in records if r["event"] == "eval"]
    figure = Figure(figsize=(13, 4), layout="constrained")
    loss, tau, acceptance = figure.subplots(1, 3)

    loss.plot(*_curve(steps, "loss"))
    loss.set(title="loss", xlabel="step")

    tau.plot(*_curve(steps, "tau"), alpha=0.5, label="on batches of the training")
    tau.plot(*_curve(evaluations, "tau"), "o-", label="on held-out rows")
    tau.set(title="tau: tokens per round, with bonus token", xlabel="step")
    tau.legend()

    for evaluation in evaluations:
        rates = [None if a is None else 100 * a for a in evaluation["acceptance"]]
        label = f"{evaluation['when']} (step {evaluation['step']:,})"
        acceptance.plot(*_known(range(1, len(rates) + 1), rates), "o-", label=label)
    acceptance.set(
        title="acceptance on held-out rows", xlabel="draft token", ylabel="%", ylim=(0, 100)
    )
    if evaluations:
        acceptance.legend()

    for axes in (loss, tau, acceptance):
        axes.xaxis.get_major_locator().set_params(integer=True)
    beside = out / f"{CURVES}.tmp"
    figure.savefig(beside, format="png", dpi=120)
    os.replace(beside, out / CURVES)
    return f"curves in {out / CURVES}"


def _curve(records: list[dict[str, Any]], key: str) -> tuple[list[Any], list[Any]]:
    return _known([r["step"] for r in records], [r.get(key) for r in records])


def _known(x: Any, y: list[float | None]) -> tuple[list[Any], list[Any]]:
    """Points without those that could not be measured."""
    points = [(a, b) for a, b in zip(x, y, strict=True) if b is not None]
    return [a for a, _ in points], [b for _, b in points]
