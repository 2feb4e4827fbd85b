"""Kill captures at random moments, continue them on other numbers of workers, compare the bytes.

    python benchmarks/kill_captures.py --kills 100

A capture of a tiny random target is killed with SIGKILL several times and continued each time,
with one worker or, under torchrun, with two; then it is left to finish with one to three. Every
file of the finished cache must have the bytes of an uninterrupted capture, and so must every shard
that was committed at the moment of a kill. Moments are drawn in each phase of a run; whether the
draw has met its phase is looked up afterwards. With two workers the kill takes all processes at
once, one worker (torchrun must then end the job by itself), or torchrun alone (its workers must
then end).

Exit code 1 if a byte differs or anything else is not as it should be.
"""

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from conversation_data import mixed_rows, write_rows  # type: ignore[import-not-found]
from tiny_targets import save_tiny_target  # type: ignore[import-not-found]

from dspark.benchmarks import command

PHASES = ("start", "prepare", "write", "commit", "finish")
VICTIMS = {1: ("all",), 2: ("all", "all", "worker", "torchrun")}
PATIENCE = 180.0
"""Seconds within which a job must have ended after one of its processes was killed; what it really
takes is printed. It must cover the start of processes on a busy machine."""

PLACES = (
    "before the first shard",
    "inside a shard",
    "shard there, index not",
    "between two shards",
    "in the finish",
    "after the end",
)

LATEST = {"prepare": 0.1, "commit": 0.01, "finish": 0.3}
"""Seconds after the phase began that a kill is drawn from; measured for the others."""


@dataclass
class Found:
    """What came of all kills.

    Attributes:
        kills: by workers, victim and where the kill fell.
        caches: finished and compared.
        faults: one sentence each.
        slowest: seconds from the kill of one process to the end of the last one.
    """

    kills: Counter[tuple[int, str, str]] = field(default_factory=Counter)
    caches: int = 0
    faults: list[str] = field(default_factory=list)
    slowest: float = 0.0


class Captures:
    """Captures with one set of options, each in its own directory.

    Attributes:
        whole: sha256 of each file of an uninterrupted capture.
        seconds: from the start of that capture to its first shard, and to its end.
    """

    def __init__(self, folder: Path, rows: int, shards: int) -> None:
        self.folder = folder
        self.shards = shards
        target = save_tiny_target("qwen2_5_vl", folder / "target")
        data = write_rows(folder / "data.parquet", mixed_rows(rows))
        self._options = [
            *("capture", "--shards", str(shards), "--batch-tokens", "300"),
            *("--target", str(target), "--data", str(data)),
        ]
        out = folder / "whole"
        begin = time.monotonic()
        process = self.start(1, out)
        wait_for(lambda: written(out), process)
        first_shard = time.monotonic() - begin
        if process.wait():
            raise SystemExit("the uninterrupted capture fails")
        self.seconds = (first_shard, time.monotonic() - begin)
        self.whole = digests(out)

    def start(self, workers: int, out: Path) -> "subprocess.Popen[bytes]":
        """``dspark capture`` in so many processes."""
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={workers}"]
        how = torchrun if workers > 1 else []
        with open(self.folder / "log", "ab") as log:
            return subprocess.Popen(
                [sys.executable, *how, "-m", "dspark", *self._options, "--out", str(out)],
                stdout=log,
                stderr=log,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def wrong(self, out: Path) -> list[str]:
        """Files of a finished cache that are not those of the uninterrupted one."""
        found = digests(out)
        return sorted(name for name, _ in found.items() ^ self.whole.items())

    def wrong_commits(self, out: Path) -> list[str]:
        """Committed shards of an unfinished cache that have other bytes."""
        names = [f"index/{p.name}" for p in (out / "index").glob("*.parquet")]
        names += [n.replace("index", "shards").replace("parquet", "safetensors") for n in names]
        return [n for n in names if digest(out / n) != self.whole[n]]


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "missing"


def digests(root: Path) -> dict[str, str]:
    return {str(p.relative_to(root)): digest(p) for p in root.rglob("*") if p.is_file()}


def written(out: Path) -> int:
    """Shards that have been begun at least."""
    return len(list((out / "shards").glob("*")))


def published(out: Path) -> int:
    return len(list((out / "shards").glob("*.safetensors")))


def committed(out: Path) -> int:
    return len(list((out / "index").glob("*.parquet")))


def is_complete(out: Path) -> bool:
    try:
        return bool(json.loads((out / "manifest.json").read_bytes())["complete"])
    except FileNotFoundError:
        return False


def wait_for(what: Callable[[], object], process: "subprocess.Popen[bytes]") -> None:
    """Until ``what`` is true or the process has ended."""
    while not what() and process.poll() is None:
        time.sleep(0.0005)


def processes_of(process: "subprocess.Popen[bytes]") -> list[psutil.Process]:
    """It and its children, the workers."""
    try:
        parent = psutil.Process(process.pid)
        return [parent, *(p for p in parent.children() if p.status() != psutil.STATUS_ZOMBIE)]
    except psutil.NoSuchProcess:
        return []


def wait_for_moment(
    phase: str,
    out: Path,
    process: "subprocess.Popen[bytes]",
    captures: Captures,
    rng: random.Random,
) -> None:
    """Sleep until a random moment of ``phase``, or the end of the process."""
    first_shard, end = captures.seconds
    before, there, missing = written(out), published(out), captures.shards - committed(out)
    if phase == "prepare":
        wait_for(lambda: list((out / "target").glob("*")), process)
    elif phase == "write":
        wait_for(lambda: written(out) > before, process)
    elif phase == "commit":
        wait_for(lambda: published(out) > there, process)
    elif phase == "finish":
        wait_for(lambda: committed(out) == captures.shards, process)
    writing = (end - first_shard) * missing / captures.shards
    latest = {"start": first_shard, "write": writing, **LATEST}[phase]
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=rng.uniform(0, latest))


def shard_files(out: Path) -> set[tuple[Path, int, int]]:
    """Shards under both names, as they are: inode and time of the last write."""
    found = set()
    for path in (out / "shards").glob("*"):
        with suppress(FileNotFoundError):
            stat = path.stat()
            found.add((path, stat.st_ino, stat.st_mtime_ns))
    return found


def place(out: Path, before: set[tuple[Path, int, int]], shards: int) -> str:
    """Where a kill fell, by what it left; ``before`` is what earlier ones had left."""
    new = [path for path, *_ in shard_files(out) - before]
    if is_complete(out):
        return "after the end"
    if any(path.suffix == ".tmp" for path in new):
        return "inside a shard"
    if any(not (out / "index" / f"{path.stem}.parquet").exists() for path in new):
        return "shard there, index not"
    if not new:
        return "before the first shard"
    return "in the finish" if committed(out) == shards else "between two shards"


def kill_once(
    workers: int, phase: str, out: Path, captures: Captures, rng: random.Random, found: Found
) -> bool:
    """Start or continue a capture and kill it; False if it had ended before."""
    victim = rng.choice(VICTIMS[workers])
    before = shard_files(out)
    process = captures.start(workers, out)
    wait_for_moment(phase, out, process, captures, rng)
    everyone = processes_of(process)
    parent, children = everyone[:1], everyone[1:]
    one = [rng.choice(children)] if children else []
    killed = [p for p in {"all": everyone, "worker": one, "torchrun": parent}[victim] if kill(p)]
    begin = time.monotonic()
    try:
        code = process.wait(timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        code = None
    _, alive = psutil.wait_procs(children, timeout=PATIENCE)
    what = f"{out.name}, {workers} workers, {victim} killed at {phase}"
    if code is None or alive:
        found.faults.append(f"{what}: a process still runs after {PATIENCE:g} s")
        for process_left in [*alive, *processes_of(process)]:
            kill(process_left)
    if code == 0:
        return False
    if not killed:
        found.faults.append(f"{what}: it failed by itself with exit code {code}")
        return True
    if victim != "all":
        found.slowest = max(found.slowest, time.monotonic() - begin)
    where = place(out, before, captures.shards)
    found.kills[workers, victim, where] += 1
    found.faults += [
        f"{what}: {name} is committed and wrong" for name in captures.wrong_commits(out)
    ]
    return True


def kill(process: psutil.Process) -> bool:
    """Whether there was something to kill."""
    try:
        process.send_signal(signal.SIGKILL)
    except psutil.NoSuchProcess:
        return False
    return True


def finish(out: Path, most: int, captures: Captures, rng: random.Random, found: Found) -> None:
    """Leave the capture to end, with up to ``most`` workers, and compare."""
    if not is_complete(out):
        workers = rng.randint(1, most)
        if code := captures.start(workers, out).wait():
            found.faults.append(f"{out.name}: {workers} workers end with exit code {code}")
    found.caches += 1
    found.faults += [f"{out.name}: {name} differs" for name in captures.wrong(out)]


def run(kills: int, most: int, captures: Captures, rng: random.Random) -> Found:
    """Kill captures of one or, unless ``most`` is 1, two workers until all kills are spent."""
    found = Found()
    while (spent := found.kills.total()) < kills and not found.faults:
        out = captures.folder / f"cache-{found.caches:03}"
        for attempt in range(min(rng.randint(4, 9), kills - spent)):
            weights = (2, 0 if attempt else 4, 6, 3, 2)
            phase = rng.choices(PHASES, weights)[0]
            workers = min(most, rng.choice((1, 1, 2)))
            if not kill_once(workers, phase, out, captures, rng, found):
                break
        finish(out, most, captures, rng, found)
        if not found.faults:
            shutil.rmtree(out)
        print(f"{found.kills.total()} kills, {found.caches} caches", file=sys.stderr, flush=True)
    return found


def table(found: Found) -> str:
    """The kills by where they fell, and by what was killed."""
    columns = [(1, "all"), (2, "all"), (2, "worker"), (2, "torchrun")]
    heads = ["1 worker", "2 workers, all", "2 workers, one of them", "2 workers, torchrun"]
    lines = ["  ".join(["the kill fell".ljust(24), *heads, "sum"])]
    for where in (*PLACES, "sum"):
        rows = [
            sum(n for (w, v, p), n in found.kills.items() if (w, v) == c and where in (p, "sum"))
            for c in columns
        ]
        cells = [str(n).rjust(len(h)) for n, h in zip(rows, heads, strict=True)]
        lines.append("  ".join([where.ljust(24), *cells, str(sum(rows)).rjust(3)]))
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=command.count, default=100)
    parser.add_argument(
        "--most-workers", type=command.count, default=3, help="that finish a capture"
    )
    parser.add_argument("--rows", type=command.count, default=120)
    parser.add_argument("--shards", type=command.count, default=8)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="kill-captures-"))
    captures = Captures(folder, options.rows, options.shards)
    found = run(options.kills, options.most_workers, captures, random.Random(options.seed))
    print(table(found))
    print(
        f"{found.kills.total()} kills, {found.caches} finished caches compared, "
        f"{len(found.faults)} faults; a job of which one process was killed had ended after "
        f"{found.slowest:.1f} s at most"
    )
    if found.faults:
        print("\n".join(found.faults))
        raise SystemExit(f"caches and log are in {folder}")
    shutil.rmtree(folder)


if __name__ == "__main__":
    command.run(main)
