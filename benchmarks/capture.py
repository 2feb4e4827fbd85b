"""What a capture takes, beside the bare forward passes of the same batches.

    python -m benchmarks.capture --json build/benchmarks/capture.json

Both sides run in this process with the same number of threads, one after the other in each
repetition. Bare is the target's backbone on inputs that were rendered before: no head, no hooks,
nothing kept. The capture is all from the first shard's claim to the last one's commit: reading and
decoding pictures, rendering, tokenising, loss masks, forward passes with their hooks, casting,
digests, writing and fsync; not the loading of the target. Peak memory is that of captures of the
bundled target in processes of their own.

On a CPU the target is a random Qwen2.5-VL of 54 M parameters, on CUDA one of 7 B in bfloat16;
``--target`` takes any other. The bundled target is shown beside it: a row of its 1.3 M parameters
takes as long to render as to run, so that the target waits. On CUDA a profiler adds how long the
device computed and copied.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from dspark.benchmarks import command
from dspark.benchmarks.result import Measurement, Result, Target
from dspark.benchmarks.vision_target import save_vision_target, write_conversations
from dspark.bundled import TRAIN_DATA
from dspark.capture import shard as shard_module
from dspark.capture.background import BackgroundWriter
from dspark.capture.batching import plan_batches
from dspark.capture.conversations import Conversations, open_conversations
from dspark.capture.new_shard import NewShard
from dspark.capture.options import CaptureOptions
from dspark.capture.plan import CapturePlan, plan_capture
from dspark.capture.prepare import prepare
from dspark.capture.progress import Step
from dspark.capture.rendering.batch_inputs import BatchInputs, batch_inputs
from dspark.capture.rendering.encoded_rows import EncodedRow, encode_row
from dspark.capture.rendering.pool import RenderingPool, default_workers
from dspark.capture.settings import CaptureSettings
from dspark.capture.shard import ShardCapture
from dspark.capture.shard_writer import ShardWriter
from dspark.capture.targets.loading import load_processor, load_target
from dspark.capture.targets.target import Target as Model
from dspark.capture.workers.lockstep import LockStep
from dspark.schemas.paths import CachePaths

BUNDLED = "bundled target"
MOST_LONGER = 1.05
ROOM = 32.0
"""MB that peak memory may differ by."""

MEMORY = """
import sys
from pathlib import Path
import dspark
shards, limit, out, data = sys.argv[1:]
dspark.capture(int(shards), limit=int(limit), out=out, data=data, batch_tokens=1024)
status = Path("/proc/self/status").read_text()
print(int(status.split("VmHWM:")[1].split()[0]) / 1000)
"""


@dataclass
class Setting:
    """One target with its conversations, ready to be captured again and again."""

    settings: CaptureSettings
    conversations: Conversations
    target: Model
    plan: CapturePlan
    pool: RenderingPool


@dataclass
class Split:
    """Seconds of the capturing thread, and of the CPU.

    Attributes:
        forward: in forward passes with their hooks.
        rendering: waiting for rows and batches.
        writing: waiting for writers and commits, and handing over to them.
        total: all.
        workers_cpu: user and system time of the rendering processes.
        own_cpu: of this process.
    """

    forward: float = 0.0
    rendering: float = 0.0
    writing: float = 0.0
    total: float = 0.0
    workers_cpu: float = 0.0
    own_cpu: float = 0.0


def main() -> None:
    parser = command.parser(__doc__)
    cuda = torch.cuda.is_available()
    parser.add_argument("--target", help="folder of another target", default=None)
    parser.add_argument("--hidden-size", type=command.count, default=3584 if cuda else 512)
    parser.add_argument("--layers", type=command.count, default=34 if cuda else 12)
    parser.add_argument("--rows", type=command.count, default=1024 if cuda else 48)
    parser.add_argument("--mean-length", type=command.count, default=671)
    parser.add_argument("--max-length", type=command.count, default=2048)
    parser.add_argument("--batch-tokens", type=command.count, default=16384 if cuda else 2048)
    parser.add_argument("--bundled-rows", type=command.count, default=300)
    parser.add_argument("--shards", type=command.count, default=2)
    parser.add_argument("--num-workers", type=command.count, default=None)
    command.add_repetitions(parser, 3)
    parser.add_argument("--memory-rows", type=command.count, default=800)
    given = parser.parse_args()
    if given.small:
        given.hidden_size, given.layers, given.rows, given.mean_length = 128, 2, 8, 96
        given.bundled_rows, given.repetitions, given.memory_rows = 16, 2, 40
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="dspark-capture-") as folder:
        _measure(given, Path(folder)).report(Path(folder), given.json)


def _measure(given: argparse.Namespace, folder: Path) -> Result:
    workers = default_workers() if given.num_workers is None else given.num_workers
    result = Result(
        "capture",
        {
            "rows": given.rows, "mean length": given.mean_length, "shards": given.shards,
            "batch tokens": given.batch_tokens, "bundled rows": given.bundled_rows,
            "threads": torch.get_num_threads(), "rendering processes": workers,
        },
    )  # fmt: skip
    target = given.target
    if target is None:
        target = str(folder / "target")
        dtype = torch.bfloat16 if torch.cuda.is_available() else torch.float32
        parameters = save_vision_target(
            Path(target), hidden_size=given.hidden_size, layers=given.layers,
            max_length=given.max_length, dtype=dtype,
        )  # fmt: skip
        result.parameters["target"] = f"random Qwen2.5-VL of {parameters / 1e6:,.1f} M parameters"
    data = folder / "conversations.parquet"
    write_conversations(data, given.rows, given.mean_length, given.max_length)
    for name, options in (
        (
            "random target" if given.target is None else given.target,
            {"target": target, "data": str(data), "max_length": given.max_length},
        ),
        (BUNDLED, {"data": str(TRAIN_DATA), "limit": given.bundled_rows}),
    ):
        options["batch_tokens"] = given.batch_tokens
        with ExitStack() as stack:
            setting = _setting(stack, options, given.shards, folder / "cache", workers)
            _compare(setting, name, given.repetitions, folder, result)
    _memory(given.memory_rows, folder, result, small=given.small)
    return result


def _setting(
    stack: ExitStack, options: dict[str, Any], shards: int, out: Path, workers: int
) -> Setting:
    settings = CaptureSettings.check(CaptureOptions(shards=shards, out=str(out), **options))
    conversations = open_conversations(settings.data, settings.rows)
    processor = load_processor(settings.target)
    pool = stack.enter_context(RenderingPool(workers, conversations, processor))
    target = load_target(settings.target, settings.device, loaded=processor)
    plan = plan_capture(settings, target, conversations)
    return Setting(settings, conversations, target, plan, pool)


def _compare(setting: Setting, name: str, repetitions: int, folder: Path, result: Result) -> None:
    batches = _batches(setting)
    _forward(setting.target, batches[:1])
    _capture(setting, folder / "cache")
    bare: list[float] = []
    bare_cpu: list[float] = []
    splits: list[Split] = []
    for i in range(repetitions):
        for side in ("bare", "capture") if i % 2 == 0 else ("capture", "bare"):
            if side == "bare":
                used = time.process_time()
                bare.append(_forward(setting.target, batches))
                bare_cpu.append(time.process_time() - used)
            else:
                splits.append(_capture(setting, folder / "cache"))
    group = f"{name}: seconds of a pass"
    result.measurements += [
        Measurement("bare forward passes", "s", bare, group),
        Measurement("capture", "s", [s.total for s in splits], group),
        Measurement("- in forward passes", "s", [s.forward for s in splits], group),
        Measurement("- waiting for rendered rows", "s", [s.rendering for s in splits], group),
        Measurement("- waiting for writers", "s", [s.writing for s in splits], group),
    ]
    group = f"{name}: user and system time of a pass"
    result.measurements += [
        Measurement("bare forward passes", "s", bare_cpu, group),
        Measurement("capturing process", "s", [s.own_cpu for s in splits], group),
        Measurement("rendering processes", "s", [s.workers_cpu for s in splits], group),
    ]
    if name != BUNDLED:  # so small that a row takes as long to render as to run
        ratios = [s.total / b for s, b in zip(splits, bare, strict=True)]
        result.targets.append(
            Target("capture / bare forward passes", ratios, MOST_LONGER, at_least=False)
        )
    real = sum(len(row) for batch in batches for row in batch.rows)
    computed = sum(batch.tensors["input_ids"].numel() for batch in batches)
    least = sum(len(batch.rows) * max(map(len, batch.rows)) for batch in batches)
    assert computed == least, "a batch is padded beyond its longest row"
    result.notes.append(
        f"{name}: {len(batches)} batches compute {computed:,} tokens, {real:,} of them real; none "
        "is padded beyond its longest row."
    )
    if torch.cuda.is_available():
        result.notes.append(f"{name}: {_profile(setting, folder / 'cache')}")


def _batches(setting: Setting) -> list[BatchInputs]:
    """All batches of the capture, rendered."""
    manifest = setting.plan.manifest
    made: list[BatchInputs] = []
    for shard in range(manifest.num_shards):
        rows = []
        for sample in manifest.rows_of(shard):
            row = encode_row(
                sample, setting.conversations, setting.target, manifest.max_length,
                setting.plan.options,
            )  # fmt: skip
            assert isinstance(row, EncodedRow), row
            rows.append(row)
        for batch in plan_batches([len(r) for r in rows], manifest.identity["batch_tokens"]):
            some = [rows[i] for i in batch]
            made += batch_inputs(some, setting.conversations, setting.target, fake_image=False)
    return made


@torch.inference_mode()
def _forward(target: Model, batches: list[BatchInputs]) -> float:
    """Seconds of the backbone on all batches."""
    backbone = target.model.base_model
    _synchronize(target)
    start = time.perf_counter()
    for batch in batches:
        backbone(**_on_device(batch, target), use_cache=False)
    _synchronize(target)
    return time.perf_counter() - start


def _on_device(batch: BatchInputs, target: Model) -> dict[str, Any]:
    kind = target.model.dtype
    return {
        k: v.to(target.device, kind if v.is_floating_point() else None)
        for k, v in batch.tensors.items()
    }


def _synchronize(target: Model) -> None:
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)


def _capture(setting: Setting, out: Path) -> Split:
    """Capture into a new folder, which is deleted again."""
    settings = setting.settings
    prepare(settings, setting.plan, setting.target, setting.conversations)
    paths = CachePaths(out, settings.shards)
    shards = iter(range(settings.shards))

    def draw() -> tuple[NewShard, ShardWriter] | None:
        if (number := next(shards, None)) is None:
            return None
        shard = NewShard(number, setting.plan, setting.target, setting.conversations)
        return shard, ShardWriter(paths.shard(number), setting.plan.layout)

    split = Split()
    before = _children_cpu(), time.process_time()
    start = time.perf_counter()
    with _timed(split), BackgroundWriter(paths, _silent) as background:
        ShardCapture(setting.target, setting.pool, background, LockStep(), _silent).run(draw)
    split.total = time.perf_counter() - start
    split.workers_cpu = _children_cpu() - before[0]
    split.own_cpu = time.process_time() - before[1]
    shutil.rmtree(out)
    return split


def _silent(_: Step) -> None:
    pass


def _timed(split: Split) -> ExitStack:
    """Adds up where the capturing thread is while the block runs."""
    stack = ExitStack()

    def clocked(owner: Any, name: str, part: str) -> None:
        function: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*arguments, **named)
            finally:
                setattr(split, part, getattr(split, part) + time.perf_counter() - start)

        setattr(owner, name, timed)
        stack.callback(setattr, owner, name, function)

    def handed(name: str) -> None:
        function: Callable[..., Any] = getattr(RenderingPool, name)

        def hand_out(*arguments: Any, **named: Any) -> Any:
            task = function(*arguments, **named)

            def result() -> Any:
                start = time.perf_counter()
                try:
                    return task()
                finally:
                    split.rendering += time.perf_counter() - start

            return result

        setattr(RenderingPool, name, hand_out)
        stack.callback(setattr, RenderingPool, name, function)

    clocked(shard_module, "run_batch", "forward")
    for name in ("write", "commit", "finish"):
        clocked(BackgroundWriter, name, "writing")
    for name in ("encode", "batch"):
        handed(name)
    return stack


def _children_cpu() -> float:
    return sum(sum(child.cpu_times()[:2]) for child in psutil.Process().children())


def _profile(setting: Setting, out: Path) -> str:
    """How long a CUDA device computed and copied in a capture."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        split = _capture(setting, out)
    events = profiler.key_averages()
    copied = sum(e.self_device_time_total for e in events if "Memcpy DtoH" in e.key) / 1e6
    busy = sum(e.self_device_time_total for e in events) / 1e6
    return (
        f"of {split.total:.2f} s the device computed {busy - copied:.2f} s and copied to the host "
        f"{copied:.2f} s beside that; the capturing thread waited {split.rendering:.2f} s for "
        f"rendered rows and {split.writing:.2f} s for writers."
    )


def _memory(rows: int, folder: Path, result: Result, *, small: bool) -> None:
    """Peak memory for a small and a large M, S and N."""
    few = rows // 10
    many = max(2, rows // 20)
    group = f"{BUNDLED}: peak memory"
    found: dict[str, float] = {}
    cases = (
        (f"M {few:,}, N 1, S {few:,}", few, 1),
        (f"M {rows:,}, N 1, S {rows:,}", rows, 1),
        (f"M {rows:,}, N {many:,}, S {-(-rows // many)}", rows, many),
    )
    for name, count, of in cases[:: 2 if small else 1]:
        done = subprocess.run(
            [
                *(sys.executable, "-c", MEMORY, str(of), str(count)),
                *(str(folder / f"memory-{count}-{of}"), str(TRAIN_DATA)),
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
        )
        found[name] = float(done.stdout)
        result.measurements.append(Measurement(name, "MB", [found[name]], group))
    first, *others = found.values()
    result.targets.append(
        Target(
            f"peak memory with {rows:,} rows less that with {few:,}",
            [max(others) - first],
            ROOM,
            at_least=False,
            unit="MB",
        )
    )


if __name__ == "__main__":
    command.run(main)
