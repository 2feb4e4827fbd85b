"""Trains in a process that torchrun may have started.

Takes a JSON list of trainings, one after the other: the arguments of ``train_drafts``, and perhaps
a step at which something happens: in ``die_at`` every process kills itself, in ``fail_at`` the
training fails everywhere, in ``stop_at`` the second process alone is asked to stop. The rows that
this process was given, step by step, go to ``rows.RANK.json`` in the folder of each training.
"""

import json
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from dspark.schemas.errors import StoppedError
from dspark.train_from_cache import loop
from dspark.train_from_cache.batch import Batch
from dspark.train_from_cache.draft_parts.row_random import RowRandom
from dspark.train_from_cache.train import train_drafts


def train(job: dict[str, Any]) -> None:
    die_at, fail_at, stop_at = (job.pop(x, None) for x in ("die_at", "fail_at", "stop_at"))
    rank = os.environ.get("RANK", "0")
    rows: dict[int, list[int]] = {}

    def step_random(seed: int, step: int, batch: Batch) -> RowRandom:
        if step == die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if step == fail_at:
            raise ArithmeticError
        if step == stop_at and rank == "1" and step not in rows:
            os.kill(os.getpid(), signal.SIGTERM)
        rows[step] = batch["sample"].tolist() if batch["loss_mask"].any() else []
        return RowRandom(seed, step, batch["sample"])

    loop.step_random = step_random
    with suppress(ArithmeticError, StoppedError):
        train_drafts(**job)
    (Path(job["out"]) / f"rows.{rank}.json").write_text(json.dumps(rows))


if __name__ == "__main__":
    torch.set_num_threads(1)
    for each in json.loads(sys.argv[1]):
        train(each)
