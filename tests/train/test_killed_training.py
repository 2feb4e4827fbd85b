"""A training that was killed goes on to the same bits."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from synthetic_cache import write_cache

from dspark.train_from_cache.train import train_draft

OPTIONS: dict[str, Any] = {
    "steps": 18, "batch_size": 4, "save_every": 5, "log_every": 1, "device": "cpu",
    "progress": False, "eval_fraction": 0.2, "curriculum": True,
    "draft_config": {"num_hidden_layers": 1, "block_size": 4, "markov_rank": 8, "num_anchors": 3},
}  # fmt: skip

# Trains once for each moment, in a child that kills itself at a certain call of a function.
DRIVER = """
import json, os, signal, sys
import torch
from dspark.train_from_cache import train

def deadly(function, fatal):
    calls = 0
    def call(*args, **kwargs):
        nonlocal calls
        calls += 1
        if calls == fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call

cache, outs, moments, options = map(json.loads, sys.argv[1:])
torch.set_num_threads(1)
for out, (module, name, fatal) in zip(outs, moments):
    if os.fork() == 0:
        module = sys.modules["dspark.train_from_cache." + module]
        setattr(module, name, deadly(getattr(module, name), fatal))
        train.train_draft(cache, "dspark", out, **options)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.wait()[1]))
"""

# The call that kills, and the step whose state must be there afterwards.
MOMENTS: dict[str, tuple[tuple[str, str, int], int | None]] = {
    "before the first state": (("loop", "step_random", 3), None),
    "in an update": (("loop", "step_random", 13), 10),
    "while a state is published": (("checkpoint", "publish", 2), 5),
    "while the model is published": (("outputs", "make_durable", 2), 18),
    "in the last evaluation": (("train", "evaluate_together", 2), 18),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cache(tmp_path_factory.mktemp("resume") / "cache")


@pytest.fixture(scope="module")
def whole(cache: Path) -> Path:
    out = cache.parent / "whole"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    train_draft(cache, "dspark", out, **OPTIONS)
    torch.set_num_threads(threads)
    return out


@pytest.fixture(scope="module")
def killed(cache: Path) -> Path:
    """A folder with an interrupted training for each moment."""
    outs = [str(cache.parent / moment) for moment in MOMENTS]
    arguments = [
        json.dumps(x) for x in (str(cache), outs, [kill for kill, _ in MOMENTS.values()], OPTIONS)
    ]
    process = subprocess.run(
        [sys.executable, "-c", DRIVER, *arguments], capture_output=True, text=True, check=False
    )
    assert process.stdout.split() == [str(-signal.SIGKILL)] * len(MOMENTS), process.stderr
    return cache.parent


def records(out: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in r.items() if k != "samples_per_s"} for r in lines]


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_and_resumed_equals_uninterrupted(
    cache: Path, whole: Path, killed: Path, moment: str
) -> None:
    out = killed / moment
    state = out / "training_state" / "state.safetensors"
    step = MOMENTS[moment][1]
    assert state.exists() == (step is not None)
    if step is not None:
        with safe_open(state, framework="pt") as file:
            assert file.metadata() == {"step": str(step)}
    with open(out / "metrics.jsonl", "a") as log:
        log.write('{"event": "st')  # a line that the crash cut off

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    result = train_draft(cache, "dspark", out, **OPTIONS, resume=True)
    torch.set_num_threads(threads)

    assert not result.already_finished
    for name in ("model.safetensors", "training_state/state.safetensors"):
        one, two = load_file(whole / name), load_file(out / name)
        assert one.keys() == two.keys()
        assert all(torch.equal(one[key], two[key]) for key in one)
    assert (out / "config.json").read_bytes() == (whole / "config.json").read_bytes()
    assert records(out) == records(whole)
