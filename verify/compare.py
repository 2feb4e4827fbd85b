"""Stored rows against the same rows captured once more."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import torch
from torch import Tensor

from dspark.schemas.errors import InputError
from dspark.schemas.fields import is_scale
from dspark.schemas.float8 import without_float8
from dspark.schemas.index import OK, read_index
from dspark.schemas.manifest import Manifest
from dspark.schemas.parts import readable_parts
from dspark.schemas.paths import CachePaths
from dspark.schemas.row_bytes import read_field
from dspark.schemas.stored_shard import open_shard, shard_place
from dspark.schemas.tolerance import token_error, tolerance
from dspark.verify.faults import Fault, by_place
from dspark.verify.result import Verification


@dataclass
class FieldDifference:
    """How far a field of the stored rows is from its recapture.

    Attributes:
        name: of the field.
        rows: that were compared.
        equal: whether all rows are equal bit for bit.
        largest: largest difference of two numbers.
        magnitude: largest stored number, without its sign.
        token_error: largest error of a token's vector, relative to its length.
        sample: dataset row of that largest error.
    """

    name: str
    rows: int = 0
    equal: bool = True
    largest: float = 0.0
    magnitude: float = 0.0
    token_error: float = 0.0
    sample: int | None = None

    @property
    def relative(self) -> float:
        """The largest difference as a share of the largest number."""
        return self.largest / self.magnitude if self.magnitude else self.largest


@dataclass
class Comparison:
    """What a comparison found.

    Attributes:
        target_differences: what the target is not that was captured, one phrase each.
        other_differences: what else is not as it was and changes how floats are rounded.
        fields: in the manifest's order.
        tolerance: of ``FieldDifference.token_error``.
        samples: the dataset rows that were compared.
        faults: fields that differ by more, or that had to be equal.
    """

    target_differences: list[str]
    other_differences: list[str]
    fields: list[FieldDifference]
    tolerance: float
    samples: list[int] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)

    @property
    def equal(self) -> bool:
        """Whether all that was compared is equal bit for bit."""
        return all(f.equal for f in self.fields)

    @property
    def differs(self) -> bool:
        """Whether the cache is not what this target gives."""
        return bool(self.target_differences or self.faults)


def random_rows(verification: Verification, count: int, seed: int) -> dict[int, int]:
    """Dataset rows drawn from the shards without a fault, each with its stored tokens.

    Raises:
        InputError: there is none.
    """
    manifest = verification.manifest
    drawn: dict[int, int] = {}
    if manifest is not None:
        paths = CachePaths(verification.root, manifest.num_shards)
        damaged = {fault.shard for fault in (*verification.faults, *verification.unreadable)}
        samples, lengths = [], []
        for shard in range(manifest.num_shards):
            if shard not in damaged and paths.index(shard).exists():
                table, _ = read_index(paths, manifest, shard)
                ok = table.filter(pc.equal(table["status"], OK))
                samples.append(ok["sample"].to_numpy())
                lengths.append(ok["length"].to_numpy())
        if samples:
            places = np.random.default_rng(seed).permutation(sum(map(len, samples)))[:count]
            places.sort()
            found = np.concatenate(samples)[places].tolist()
            drawn = dict(zip(found, np.concatenate(lengths)[places].tolist(), strict=True))
    if not drawn:
        raise InputError(f"{verification.root}: it has no sound row to compare")
    return drawn


def compare_rows(
    root: Path,
    manifest: Manifest,
    lengths: Mapping[int, int],
    recaptured: Iterable[tuple[int, Mapping[str, Tensor]]],
    target_differences: Sequence[str] = (),
    other_differences: Sequence[str] = (),
) -> Comparison:
    """Compare stored rows with their recapture.

    Ids, positions and masks must be equal. Floats may differ by ``Comparison.tolerance``.

    Args:
        root: the cache.
        manifest: of the cache.
        lengths: stored tokens of the rows.
        recaptured: dataset row, and ``[L, …]`` per field in the stored types.
        target_differences: for the result.
        other_differences: for the result.
    """
    names = [f.name for f in manifest.all_fields if not is_scale(f.name)]
    fields = {name: FieldDifference(name) for name in names}
    comparison = Comparison(
        target_differences=list(target_differences),
        other_differences=list(other_differences),
        fields=list(fields.values()),
        tolerance=tolerance(manifest),
    )
    places = _Places(root, manifest)
    for sample, recaptured_row in recaptured:
        comparison.samples.append(sample)
        # In 8 bits, equal numbers may have another scale.
        now = without_float8(recaptured_row)
        stored = without_float8(places.stored(sample, lengths[sample]))
        tokens = len(now["input_ids"])
        if tokens != lengths[sample]:
            problem = f"{tokens} tokens captured now, {lengths[sample]} stored"
            comparison.faults.append(places.fault(sample, "input_ids", problem))
            continue
        for name, difference in fields.items():
            if wrong := _compare(name, stored, now, difference, sample):
                comparison.faults.append(places.fault(sample, name, wrong))
    for difference in fields.values():
        if difference.sample is not None and difference.token_error > comparison.tolerance:
            off = (
                f"a token's vector is off by {difference.token_error:.2g} of its length, "
                f"{comparison.tolerance:g} is allowed"
            )
            comparison.faults.append(places.fault(difference.sample, difference.name, off))
    comparison.samples.sort()
    comparison.faults.sort(key=by_place)
    return comparison


class _Places:
    """Where the fields of rows lie."""

    def __init__(self, root: Path, manifest: Manifest) -> None:
        self._rows_per_shard = manifest.rows_per_shard
        self._parts = list(readable_parts(root, manifest))

    def stored(self, sample: int, length: int) -> dict[str, Tensor]:
        """The real tokens of a row."""
        shard, row = divmod(sample, self._rows_per_shard)
        found: dict[str, Tensor] = {}
        for paths, part in self._parts:
            with open_shard(paths, part, shard) as stored:
                found |= {f.name: read_field(stored, f, row, length) for f in part.fields}
        return found

    def fault(self, sample: int, field: str, problem: str) -> Fault:
        shard = sample // self._rows_per_shard
        paths, part = next(
            (paths, part) for paths, part in self._parts if field in {f.name for f in part.fields}
        )
        file = str(shard_place(paths, part, shard).relative_to(paths.root))
        return Fault(file, problem, shard, sample, field, paths.part)


def _compare(
    name: str,
    stored: Mapping[str, Tensor],
    now: Mapping[str, Tensor],
    difference: FieldDifference,
    sample: int,
) -> str | None:
    """Compare a field of a row; what is wrong with it if it had to be equal and is not."""
    before, after = stored[name], now[name].contiguous()
    if before.shape != after.shape:
        difference.equal = False
        return f"{list(after.shape)} captured now, {list(before.shape)} stored"
    equal = torch.equal(before.view(torch.uint8), after.view(torch.uint8))
    difference.rows += 1
    difference.equal &= equal
    if not before.is_floating_point():
        # Of logits that are nearly the same, others may come first where floats may differ.
        follows = name == "logits_topk.indices" and not torch.equal(
            stored["logits_topk.values"], now["logits_topk.values"]
        )
        count = int((before != after).sum())
        return None if equal or follows else f"{count:,} of {before.numel():,} numbers differ"
    old, new = before.float(), after.float()
    difference.magnitude = max(difference.magnitude, float(old.abs().max()))
    if not equal:
        off = (new - old).abs().nan_to_num(nan=torch.inf)
        difference.largest = max(difference.largest, float(off.max()))
        error = token_error(old, new)
        if error >= difference.token_error:
            difference.token_error, difference.sample = error, sample
    return None
