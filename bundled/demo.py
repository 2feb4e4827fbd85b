"""The main job on the bundled target, from conversations to two trained drafts: ``make demo``.

Runs the ``dspark`` commands that a user would type, prints each, and ends with one table.
"""

import argparse
import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from dspark.reports.text import number, percent, size, table

MSD = "--arch msd --steps 500 --batch-size 16 --lr 5e-3"
DSPARK = (
    "--arch dspark --steps 500 --batch-size 16 --lr 3e-3 -c block_size=5 -c num_hidden_layers=2 "
    "-c markov_rank=64 -c num_anchors=16"
)
RUNS = {
    "msd": MSD,
    "msd, zeroed hidden states": f"{MSD} --zero-hidden-states",
    "dspark": DSPARK,
    "dspark, zeroed hidden states": f"{DSPARK} --zero-hidden-states",
}


def run(command: str) -> None:
    """Run a ``dspark`` command in this Python, showing what is run.

    Raises:
        SystemExit: it failed; it has printed why.
    """
    print(f"\n$ dspark {command}", flush=True)
    result = subprocess.run([sys.executable, "-m", "dspark", *shlex.split(command)])
    if result.returncode:
        raise SystemExit(result.returncode)


def evaluations(draft: Path) -> dict[str, dict[str, Any]]:
    """The held-out metrics of a training, by ``before`` and ``after``."""
    records = map(json.loads, (draft / "metrics.jsonl").read_text().splitlines())
    return {r["when"]: r for r in records if r["event"] == "eval"}


def inspect(cache: Path) -> dict[str, Any]:
    """What ``dspark inspect --json`` says."""
    command = [sys.executable, "-m", "dspark", "inspect", "--cache", str(cache), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


def main() -> None:
    """Capture, train two drafts and their controls on the same cache, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for all results")
    out: Path = parser.parse_args().out
    start = time.monotonic()
    shutil.rmtree(out, ignore_errors=True)
    cache = out / "cache"
    run(f"capture --shards 4 --out {shlex.quote(str(cache))}")
    rows = []
    for name, options in RUNS.items():
        draft = out / "drafts" / name.replace(", ", "-").replace(" ", "-")
        run(
            f"train-draft --cache {shlex.quote(str(cache))} {options} --trim --log-every 100 "
            f"--out {shlex.quote(str(draft))}"
        )
        result = evaluations(draft)
        rows.append((name, *_cells(result["before"], result["after"])))
    summary = inspect(cache)
    tokens = summary["counts"]["tokens"]
    print(
        f"\ncache: {size(summary['cache_bytes'])} on disk for {tokens:,} tokens, "
        f"{summary['cache_bytes'] / tokens:,.0f} bytes per token "
        f"({summary['real_bytes'] / tokens:,.0f} of them stored features)\n"
    )
    print(
        table(
            rows,
            (
                "held-out rows, before -> after",
                "tau",
                "first token accepted",
                "agreement",
                "on picture-grounded tokens",
            ),
        )
    )
    print(
        "\ntau: tokens per round of the target, bonus token included, sampling at temperature 1.\n"
        "agreement: teacher-forced top-1 agreement with the target over supervised tokens; "
        "picture-grounded\ntokens are the digits in answers about pictures, which a draft can only "
        "know from the target's features.\n"
        f"Done in {time.monotonic() - start:.0f} s; everything is in {out}."
    )


def _cells(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, ...]:
    return (
        f"{number(before['tau'])} -> {number(after['tau'])}",
        f"{percent(before['acceptance'][0])} -> {percent(after['acceptance'][0])}",
        f"{percent(before['agreement'])} -> {percent(after['agreement'])}",
        f"{percent(before['agreement_grounded'])} -> {percent(after['agreement_grounded'])}",
    )


if __name__ == "__main__":
    main()
