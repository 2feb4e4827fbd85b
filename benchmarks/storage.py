"""What storing less costs a draft: τ after equal training on features stored in several forms.

    python -m benchmarks.storage [--json storage.json]

The bundled target is captured once, in float32 with all logits. For each form, the training rows of
that cache are rounded as the form rounds them; the held-out rows stay exact, as a server gives them
to a draft. Then the same drafts are trained with the same seeds. So forms can be compared that
``dspark capture`` does not offer. ``--embeds pictures`` and fewer layers change no number that a
draft reads; of these, the bytes are shown, for each draft at the width of a 7B target.
"""

import argparse
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import dspark
from dspark.benchmarks import command
from dspark.benchmarks.result import Measurement, Result, Target
from dspark.capture.estimate.sizes import row_disk_bytes
from dspark.schemas.draft_layers import draft_layers
from dspark.schemas.dtypes import FLOAT8_CODE
from dspark.schemas.fields import Field, build_fields, scale_key
from dspark.schemas.float8 import from_float8, to_float8
from dspark.schemas.paths import CachePaths
from dspark.schemas.shard_layout import ShardLayout
from dspark.train_from_cache.cache import Cache, ok_rows
from dspark.train_from_cache.split import split_rows
from dspark.train_from_cache.target_head import TargetHead
from dspark.train_from_cache.train import train_drafts

DRAFTS = ("dspark", "msd")
CONFIG = {
    "dspark.block_size": 5,
    "dspark.num_hidden_layers": 2,
    "dspark.markov_rank": 64,
    "dspark.num_anchors": 16,
}
HELD_OUT = 0.1
TEACHER_ROWS = 200
WORST_TAU = -0.05
"""What fp8 may cost in τ."""


@dataclass(frozen=True)
class Form:
    """How a cache stores its floats.

    Attributes:
        name: the options of a capture, or what it is.
        dtype: of ``--dtype``.
        logits: of ``--logits``.
        embeds: of ``--embeds``.
        all_float8: ``last_hidden_state`` is in 8 bits, too, which is no option.
    """

    name: str
    dtype: str = "bf16"
    logits: str = "head"
    embeds: str = "all"
    all_float8: bool = False

    @property
    def plain(self) -> torch.dtype:
        """The type of floats that are not in 8 bits."""
        return {"fp32": torch.float32, "fp16": torch.float16}.get(self.dtype, torch.bfloat16)

    def rounded(self, name: str, x: Tensor) -> Tensor:
        """A field as a trainer gets it from such a cache, in float32."""
        if self.all_float8 or (self.dtype == "fp8" and name != "last_hidden_state"):
            return from_float8(*to_float8(x), torch.float32)
        return x.to(self.plain).float()

    def fields(self, **sizes: Any) -> list[Field]:
        fields = build_fields(**sizes, dtype=self.dtype, logits=self.logits, embeds=self.embeds)
        if self.all_float8:
            place = [f.name for f in fields].index("last_hidden_state")
            last = fields[place]
            scale = Field(scale_key(last.name), "F32", last.row_shape[:1])
            fields[place : place + 1] = [replace(last, dtype=FLOAT8_CODE), scale]
        return fields


ROUNDED = (
    Form("fp32", "fp32"),
    Form("bf16"),
    Form("fp16", "fp16"),
    Form("fp8", "fp8"),
    Form("fp8, last_hidden_state, too", "fp8", all_float8=True),
    Form("bf16, full", logits="full"),
    Form("bf16, topk:32", logits="topk:32"),
    Form("bf16, topk:8", logits="topk:8"),
)
TRAINED = tuple(ROUNDED[i] for i in (0, 1, 3, 4, 7))
"""Those on which drafts are trained; the others lie between two of them."""
STORED = (
    Form("bf16"),
    *(form for form in ROUNDED if form.name != "bf16"),
    Form("bf16, --embeds pictures", embeds="pictures"),
    Form("fp8, --embeds pictures", "fp8", embeds="pictures"),
)

WIDE = {"max_length": 2048, "hidden_size": 3584, "vocab_size": 152064, "position_rows": 3}
WIDE_LAYERS = 28
WIDE_LENGTH, WIDE_PICTURES = 671, 0.5
"""Tokens of a row, and the share of them that pictures are."""


def main() -> None:
    parser = command.parser(__doc__)
    parser.add_argument("--steps", type=command.count, default=200)
    parser.add_argument("--batch-size", type=command.count, default=16)
    parser.add_argument("--lr", type=command.positive, default=3e-3)
    parser.add_argument("--seeds", type=command.count, default=1)
    parser.add_argument("--limit", type=command.count, help="rows to capture; all by default")
    given = parser.parse_args()
    if given.small:
        given.steps, given.seeds, given.limit, given.batch_size = 2, 1, 24, 4
    folder = Path(tempfile.mkdtemp(prefix="dspark-storage-"))
    try:
        run(given, folder).report(folder, given.json)
    finally:
        shutil.rmtree(folder)


def run(given: argparse.Namespace, folder: Path) -> Result:
    forms = ROUNDED[1:4:2] if given.small else TRAINED
    exact = folder / "exact"
    dspark.capture(4, out=str(exact), dtype="fp32", logits="full", limit=given.limit)
    result = Result("storage", {k: v for k, v in vars(given).items() if k != "json"})
    with dspark.open_cache(exact) as cache:
        result.measurements += teachers(cache)
    found = {form.name: trained(exact, folder, form, given) for form in forms}
    for arch in DRAFTS:
        for key, unit in (("tau", "tokens"), ("agreement_grounded", "share")):
            group = f"{key} of {arch}"
            values = {name: [r[arch][key] for r in runs] for name, runs in found.items()}
            first = values[forms[0].name]
            less = {n: [a - b for a, b in zip(v, first, strict=True)] for n, v in values.items()}
            result.measurements += [Measurement(n, unit, v, group) for n, v in values.items()]
            result.measurements += [
                Measurement(n, unit, v, f"{group}, less that of {forms[0].name}")
                for n, v in less.items()
            ]
            if key == "tau":
                cost = [a - b for a, b in zip(values["fp8"], values["bf16"], strict=True)]
                name = f"tau of {arch}: fp8 less bf16"
                result.targets.append(Target(name, cost, WORST_TAU, at_least=True, unit=unit))
    result.measurements += sizes()
    result.notes = [
        f"teachers: of the supervised tokens of the first {TEACHER_ROWS} rows; overlap is "
        "sum(min(p, q)) of the target's distribution and the one that a trainer gets.",
        f"kB a token: of a {WIDE_LAYERS}-layer target of width {WIDE['hidden_size']:,} and "
        f"{WIDE['vocab_size']:,} ids, rows of {WIDE_LENGTH} tokens, "
        f"{WIDE_PICTURES:.0%} of them of pictures; on disk in blocks of 4 KiB.",
    ]
    return result


def teachers(cache: Cache) -> Iterator[Measurement]:
    """How far the logits that a trainer gets are from the target's own."""
    head = TargetHead.load(cache.root)
    rows = [row for row in range(min(TEACHER_ROWS, len(cache))) if cache.lengths[row]]
    for form in ROUNDED:
        shared = lost = count = 0.0
        for row in rows:
            stored = cache[row]
            supervised = stored["loss_mask"].bool()
            own = stored["logits"][supervised]
            given = rounded_row(stored, form, head)["logits"][supervised]
            shared += float(torch.minimum(own.softmax(-1), given.softmax(-1)).sum())
            lost += float((own.argmax(-1) != given.argmax(-1)).sum())
            count += len(own)
        yield Measurement(form.name, "share", [shared / count], "teachers: overlap")
        yield Measurement(form.name, "share", [lost / count], "teachers: another argmax")


def trained(
    exact: Path, folder: Path, form: Form, given: argparse.Namespace
) -> list[dict[str, dict[str, float]]]:
    """The metrics of each draft, for each seed."""
    cache = folder / "form"
    subprocess.run(["cp", "-a", exact, cache], check=True)  # which keeps holes
    round_rows(exact, cache, form)
    found = []
    for seed in range(given.seeds):
        results = train_drafts(
            cache, DRAFTS, folder / "drafts", steps=given.steps, batch_size=given.batch_size,
            lr=given.lr, seed=seed, device="cpu", draft_config=CONFIG, eval_fraction=HELD_OUT,
            trim=True, progress=False,
        )  # fmt: skip
        found.append({r.arch: {k: v or 0.0 for k, v in r.after.items()} for r in results})
        shutil.rmtree(folder / "drafts")
    shutil.rmtree(cache)
    return found


def round_rows(exact: Path, out: Path, form: Form) -> None:
    """Round the features of the training rows of a copy."""
    head = TargetHead.load(exact)
    with dspark.open_cache(exact) as cache:
        m = cache.manifest
        paths, layout = CachePaths(out, m.num_shards), ShardLayout(m.fields, m.rows_per_shard)
        rows, _ = split_rows(ok_rows(cache), HELD_OUT)
        for sample in rows:
            shard, row = divmod(sample, m.rows_per_shard)
            rounded = rounded_row(cache[sample], form, head)
            with open(paths.shard(shard), "r+b") as file:
                for field in m.fields:
                    if field.name in rounded:
                        ((offset, size),) = layout.row_extents(field, row, len(rounded[field.name]))
                        data = rounded[field.name].contiguous().numpy().data.cast("B")
                        assert os.pwrite(file.fileno(), data, offset) == size


def rounded_row(row: dict[str, Tensor], form: Form, head: TargetHead) -> dict[str, Tensor]:
    """The floats of a row as a trainer gets them from a cache of that form, in float32."""
    rounded = {
        name: form.rounded(name, x)
        for name, x in row.items()
        if x.is_floating_point() and name != "logits"
    }
    logits = row["logits"]
    if form.logits == "head":
        logits = head(rounded["last_hidden_state"])
    elif form.logits == "full":
        logits = logits.to(form.plain).float()
    else:  # what is not among the largest has no chance
        values, ids = logits.topk(int(form.logits.removeprefix("topk:")))
        logits = torch.full_like(logits, -torch.inf)
        logits = logits.scatter(-1, ids, values.to(form.plain).float())
    return {**rounded, "logits": logits}


def sizes() -> Iterator[Measurement]:
    """Bytes of a token, for the layers of one draft each."""
    for draft in ("dspark", "eagle3", "msd"):
        for form in STORED:
            fields = form.fields(**WIDE, layers=draft_layers([draft], WIDE_LAYERS))
            image_tokens = round(WIDE_LENGTH * WIDE_PICTURES)
            real = sum(f.real_bytes(WIDE_LENGTH, image_tokens) for f in fields)
            disk = row_disk_bytes(fields, WIDE_LENGTH, WIDE_PICTURES)
            for kind, size in (("", real), (" on disk", disk)):
                group = f"kB a token{kind}, --drafts {draft}"
                yield Measurement(form.name, "kB", [size / WIDE_LENGTH / 1000], group)


if __name__ == "__main__":
    command.run(main)
