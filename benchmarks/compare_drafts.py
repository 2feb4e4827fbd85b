"""All drafts on one cache with the same budget, each beside its control: a table of τ.

    dspark capture --shards 4 --out cache
    .venv/bin/python benchmarks/compare_drafts.py --cache cache --out drafts --steps 300

Two passes over the cache: all drafts, and all with zeros for the target's hidden states. Every
draft proposes five tokens a round.
"""

import argparse
from pathlib import Path
from typing import Any

from dspark.benchmarks import command
from dspark.reports.text import number, percent, table
from dspark.train_from_cache.drafts import ARCHITECTURES
from dspark.train_from_cache.train import TrainResult, train_drafts

CONFIG = {
    "dspark.block_size": 5,
    "dspark.num_hidden_layers": 2,
    "dspark.markov_rank": 64,
    "dspark.num_anchors": 16,
    "dflash.block_size": 6,
    "dflash.num_hidden_layers": 2,
    "dflash.num_anchors": 16,
    "eagle3.ttt_steps": 5,
    "medusa.num_heads": 5,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=command.count, default=300)
    parser.add_argument("--batch-size", type=command.count, default=16)
    parser.add_argument("--lr", type=command.positive, default=3e-3)
    given = parser.parse_args()
    options: dict[str, Any] = {
        "steps": given.steps, "batch_size": given.batch_size, "lr": given.lr, "device": "cpu",
        "draft_config": CONFIG, "log_every": 100, "trim": True,
    }  # fmt: skip
    trained, control = (
        train_drafts(
            given.cache, ARCHITECTURES, out, **options, resume=out.exists(), zero_hidden_states=zero
        )
        for out, zero in ((given.out / "drafts", False), (given.out / "controls", True))
    )
    pairs = sorted(zip(trained, control, strict=True), key=lambda pair: -pair[0].after["tau"])
    header = ("draft", "parameters", "tau", "control", "grounded agreement", "control")
    print(table([_row(*pair) for pair in pairs], header))


def _row(draft: TrainResult, control: TrainResult) -> tuple[str, ...]:
    before = draft.before or {}
    return (
        draft.arch,
        f"{draft.trainable_parameters:,}",
        f"{number(before.get('tau'))} -> {number(draft.after['tau'])}",
        number(control.after["tau"]),
        f"{percent(before.get('agreement_grounded'))} -> "
        f"{percent(draft.after['agreement_grounded'])}",
        percent(control.after["agreement_grounded"]),
    )


if __name__ == "__main__":
    command.run(main)
