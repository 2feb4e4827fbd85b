"""How fast shards are written, beside a plain file of as many bytes on the same disk.

    python -m benchmarks.writer --json build/benchmarks/writer.json

A shard: batches of random features are handed to the writer of a capture as the target would hand
them over, and the shard is committed: digests, rows at their place between holes, fsync, renaming,
index. Plain: as many bytes, written one after another in large pieces to a new file, then fsync.
Alternately in each repetition; both begin with a file that is not there and an idle disk.
"""

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from dspark.benchmarks import command
from dspark.benchmarks.feature_cache import draw_lengths
from dspark.benchmarks.result import Measurement, Result, Target
from dspark.capture.background import BackgroundWriter
from dspark.capture.batch import FINITE
from dspark.capture.progress import Step
from dspark.capture.rendering.batch_inputs import BatchInputs
from dspark.capture.rendering.encoded_rows import EncodedRow
from dspark.capture.shard_writer import ShardWriter
from dspark.schemas.durable import make_dir
from dspark.schemas.fields import build_fields
from dspark.schemas.index import OK, IndexRow
from dspark.schemas.paths import CachePaths, index_dir, shards_dir
from dspark.schemas.shard_layout import ShardLayout

AT_LEAST = 0.9
PIECE = 8 << 20
LAYERS = (1, 9, 17, 25, 33)


class RandomShard:
    """What a writer needs of a ``NewShard``, without a target behind it."""

    def __init__(self, number: int, lengths: list[int]) -> None:
        self.number = number
        self.samples = range(len(lengths))
        manifest = SimpleNamespace(
            identity_hash="0" * 16,
            target=SimpleNamespace(image_token_id=None),
            field=lambda name: SimpleNamespace(row_shape=(1,)),
        )
        self.plan = SimpleNamespace(manifest=manifest)

    def index_row(self, row: EncodedRow, *, finite: bool) -> IndexRow:
        return IndexRow(row.sample, row.sample, "", OK, "", len(row), 0, row.loss_tokens)


def main() -> None:
    parser = command.parser(__doc__)
    parser.add_argument("--gigabytes", type=command.positive, default=1.5, help="of one shard")
    parser.add_argument("--hidden-size", type=command.count, default=2048)
    parser.add_argument("--max-length", type=command.count, default=2048)
    parser.add_argument("--mean-length", type=command.positive, default=671)
    parser.add_argument("--batch-tokens", type=command.count, default=8192)
    command.add_repetitions(parser, 5)
    given = parser.parse_args()
    if given.small:
        given.gigabytes, given.hidden_size, given.repetitions = 0.02, 128, 2
    with tempfile.TemporaryDirectory(dir=given.folder, prefix="dspark-writer-") as folder:
        _measure(given, Path(folder)).report(Path(folder), given.json)


def _measure(given: argparse.Namespace, folder: Path) -> Result:
    token = 2 * given.hidden_size * (2 + len(LAYERS))
    rows = max(4, round(given.gigabytes * 1e9 / token / given.mean_length))
    lengths = [int(n) for n in draw_lengths(rows, given.max_length, given.mean_length)]
    fields = build_fields(
        max_length=given.max_length, hidden_size=given.hidden_size, vocab_size=1024, layers=LAYERS,
        dtype="bf16", logits="head", position_rows=1,
    )  # fmt: skip
    layout = ShardLayout(fields, rows)
    features = _features(given.batch_tokens + given.max_length, given.hidden_size)
    ours: list[float] = []
    plain: list[float] = []
    cpu: list[float] = []
    for i in range(given.repetitions + 1):  # the first one is not counted
        for side in ("ours", "plain") if i % 2 else ("plain", "ours"):
            os.sync()
            start, used = time.perf_counter(), time.process_time()
            if side == "ours":
                written = _shard(folder / "cache", lengths, layout, features, given.batch_tokens)
                ours.append(written / (time.perf_counter() - start) / 1e9)
                cpu.append((time.process_time() - used) / (written / 1e9))
                shutil.rmtree(folder / "cache")
            else:
                size = sum(lengths) * sum(f.token_bytes for f in fields)
                _plain(folder / "plain", size, features["last_hidden_state"])
                plain.append(size / (time.perf_counter() - start) / 1e9)
                (folder / "plain").unlink()
    return Result(
        "writer",
        {
            "rows": rows, "mean length": round(sum(lengths) / rows), "hidden size":
            given.hidden_size, "GB": round(sum(lengths) * token / 1e9, 2),
        },
        [
            Measurement("plain sequential write and fsync", "GB/s", plain[1:], "written"),
            Measurement("shard, with digests, index and commit", "GB/s", ours[1:], "written"),
            Measurement("shard", "s of CPU for a GB", cpu[1:], "processor"),
        ],
        [
            Target(
                "shard / plain sequential write",
                [a / b for a, b in zip(ours[1:], plain[1:], strict=True)],
                AT_LEAST,
                at_least=True,
            )
        ],
    )  # fmt: skip


def _features(tokens: int, hidden_size: int) -> dict[str, Tensor]:
    """Random features, of which every batch takes the beginning."""
    names = ("inputs_embeds", *(f"hidden_states.{k}" for k in LAYERS), "last_hidden_state")
    return {name: torch.randn(tokens, hidden_size).bfloat16() for name in names}


def _shard(
    root: Path, lengths: list[int], layout: ShardLayout, features: dict[str, Tensor], tokens: int
) -> int:
    """Write and commit a shard in batches of about so many tokens; the bytes of its rows."""
    for folder in (shards_dir(root), index_dir(root)):
        make_dir(folder)
    paths = CachePaths(root, 1)
    done = Step()

    def progress(step: Step) -> None:
        done.bytes += step.bytes

    shard: Any = RandomShard(0, lengths)
    with BackgroundWriter(paths, progress) as background:
        opened = background.open(shard, ShardWriter(paths.shard(0), layout))
        rows: list[EncodedRow] = []
        for sample, length in enumerate(lengths):
            ones = torch.ones(length, dtype=torch.bool)
            rows.append(EncodedRow.of(sample, "", ones.long(), ones, ~ones))
            if sum(map(len, rows)) >= tokens or sample == len(lengths) - 1:
                background.write(opened, _inputs(rows), _packed(rows, features))
                rows = []
        background.commit(opened)
        background.finish()
    return done.bytes


def _inputs(rows: list[EncodedRow]) -> BatchInputs:
    ids = torch.ones(len(rows), max(map(len, rows)), dtype=torch.long)
    return BatchInputs(rows, {"input_ids": ids})


def _packed(rows: list[EncodedRow], features: dict[str, Tensor]) -> dict[str, Tensor]:
    count = sum(map(len, rows))
    return {
        **{name: tensor[:count] for name, tensor in features.items()},
        "position_ids": torch.arange(count, dtype=torch.int32)[None],
        FINITE: torch.ones(count, dtype=torch.bool),
    }


def _plain(path: Path, size: int, data: Tensor) -> None:
    view = memoryview(data.view(torch.uint8).numpy().reshape(-1).data)[:PIECE]
    with open(path, "wb", buffering=0) as file:
        while size > 0:
            size -= file.write(view[: min(len(view), size)])
        os.fsync(file.fileno())


if __name__ == "__main__":
    command.run(main)
