"""A cache opened for reading: by sample here, in batches by ``stream``."""

import os
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from dspark.remote.ahead import FetchAhead
from dspark.remote.mirror import Mirror
from dspark.schemas.columns import read_columns
from dspark.schemas.commands import (
    capture_command,
    convert_command,
    extend_command,
    finish_extension_command,
    making,
    repair_command,
    to_repeat,
    unfinished,
)
from dspark.schemas.digest import file_digest
from dspark.schemas.draft_layers import DRAFTS, draft_layers
from dspark.schemas.dtypes import torch_dtype
from dspark.schemas.errors import IncompatibleCacheError
from dspark.schemas.fields import FIELDS, Field
from dspark.schemas.layers import layer_of
from dspark.schemas.manifest import Manifest, read_manifest
from dspark.schemas.options import check_given
from dspark.schemas.parts import readable_parts
from dspark.schemas.paths import target_dir
from dspark.schemas.url import is_url, refuse_local_cache
from dspark.train_from_cache.part import Part, unusable
from dspark.train_from_cache.remote_part import RemotePart
from dspark.train_from_cache.rows import Rows
from dspark.train_from_cache.zarr_part import ZarrPart

_OPEN_SHARDS = 256


class Cache:
    """A finished cache. ``cache[i]`` gives the stored tensors of dataset row ``i``.

    Args:
        root: the cache directory.
        check_digests: compare all that is read with its digest: the files of ``target/`` now, the
            index of a shard when a row of it is read, each field of a row whenever it is read.
        mirror: of a cache at a URL, whose root is ``root``.

    Raises:
        IncompatibleCacheError: ``root`` is no cache, or an unfinished or damaged one.

    Attributes:
        root: the cache directory; of one at a URL, the folder that has its small files here.
        location: what the cache is called: its directory, or its URL.
        manifest: what is stored and how.
        lengths: int32 ``[M]``, stored tokens of each dataset row, 0 where it was skipped; this and
            the next two are mapped from their file, and cannot be written to.
        image_tokens: int32 ``[M]``, positions of each row that a picture fills.
        loss_tokens: int32 ``[M]``, supervised positions of each row.
        check_digests: whether what is read is compared with its digest.
    """

    def __init__(
        self, root: Path, check_digests: bool = False, mirror: Mirror | None = None
    ) -> None:
        self.root = root
        self._mirror = mirror
        self.location = str(root) if mirror is None else mirror.url
        self.manifest: Manifest = read_manifest(root)
        if not self.manifest.complete:
            raise IncompatibleCacheError(f"{root}: {unfinished(root, self.manifest)}")
        self.check_digests = check_digests
        columns = read_columns(root, self.manifest) if mirror is None else mirror.columns
        self.lengths, self.image_tokens = columns.length, columns.image_tokens
        self.loss_tokens = columns.loss_tokens
        found = list(readable_parts(root, self.manifest))
        kind: Callable[..., Part] = ZarrPart if self.manifest.shard_format.is_zarr else Part
        if mirror is not None:
            kind = partial(RemotePart, mirror=mirror)
        self._parts: list[Part] = [
            kind(
                paths,
                part,
                columns,
                way_out=self._way_out(paths.part),
                check_digests=check_digests,
                open_files=max(1, _OPEN_SHARDS // len(found)),
            )
            for paths, part in found
        ]
        self._part_of = {field.name: part for part in self._parts for field in part.fields}
        if check_digests:
            self._check_target_files()

    def __reduce__(self) -> tuple[Any, ...]:
        # Workers of a data loader open the files on their own.
        if self._mirror is not None:
            return _open_remote, (*self._mirror.arguments, self.check_digests)
        return type(self), (self.root.absolute(), self.check_digests)

    def __enter__(self) -> "Cache":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the shard files. The next read opens them again."""
        for part in self._parts:
            part.close()

    def ahead(
        self, batches: Iterable[Sequence[int]], fields: Sequence[Field]
    ) -> AbstractContextManager[Iterable[Sequence[int]]]:
        """Fetch the shards of coming batches while the first are read, if they are at a URL.

        Args:
            batches: dataset rows of each batch, in order.
            fields: what will be read of each row.

        Returns:
            A context manager that gives the batches to read, and stops fetching on leaving.
        """
        if self._mirror is None:
            return nullcontext(batches)
        names = [field.name for field in fields]
        ahead = FetchAhead(self._mirror, names, batches, evicted=self.close)
        for part in self._parts:
            assert isinstance(part, RemotePart)
            part.ahead = ahead
        return ahead

    def abandon(self) -> None:
        """End all waiting for a lost connection: whoever reads is told that it is lost."""
        if self._mirror is not None:
            self._mirror.store.abandon()

    def __repr__(self) -> str:
        target, fields = self.manifest.target.id, len(self.manifest.all_fields)
        return f"<Cache {self.location!r} of {target!r}: {len(self):,} rows, {fields} fields>"

    def __len__(self) -> int:
        """M: rows of the dataset, skipped ones included."""
        return self.manifest.num_samples

    def __getitem__(self, sample: int) -> dict[str, Tensor]:
        """The stored tensors of a dataset row, real tokens only.

        Returns:
            ``[L, …]`` per field (``[3, L]`` for mRoPE positions), L being the row's length;
            empty for a skipped row.

        Raises:
            IndexError: there is no such row; a negative one counts from the end, here and below.
        """
        sample = self._row(sample)
        length = int(self.lengths[sample])
        out = {}
        for field in self.manifest.all_fields:
            shape = list(field.row_shape)
            shape[field.token_axis] = length
            out[field.name] = torch.empty(shape, dtype=torch_dtype(field.dtype))
            self.read_row(sample, field, out[field.name])
        return out

    def field(self, name: str) -> Field:
        """The stored field of that name.

        Raises:
            IncompatibleCacheError: the cache does not hold it.
        """
        field = self.manifest.field(name)
        if field is None:
            raise IncompatibleCacheError(
                f"{self.location}: the cache has no field {name!r}; it has "
                + ", ".join(f.name for f in self.manifest.all_fields)
            )
        return field

    def read_row(self, sample: int, field: Field, out: Tensor) -> int:
        """Read the real tokens of one field of one row into ``out``.

        Args:
            sample: dataset row.
            field: a field of the manifest.
            out: contiguous CPU tensor of the field's type and of ``row_shape`` with any number of
                tokens, at least the row's length; positions beyond the length are left alone.

        Returns:
            Bytes read.

        Raises:
            IncompatibleCacheError: the shard file is missing or shorter than it must be, or digests
                are checked and the bytes do not have theirs.
            IndexError: there is no such row.
            ValueError: ``out`` is not such a tensor.
        """
        sample = self._row(sample)
        self._check_out(sample, field, out)
        # Of an empty tensor, torch gives no view of another type.
        data = out.view(torch.uint8).numpy().reshape(-1).data if out.numel() else memoryview(b"")
        return self.part_of(field).read_row(sample, field, data)

    def entry(self, sample: int) -> dict[str, Any]:
        """What the index says of a dataset row: the columns of ``schemas.index.IndexRow``.

        Raises:
            IndexError: there is no such row.
        """
        return self._parts[0].entry(self._row(sample))

    def part_of(self, field: Field) -> Part:
        """The files that hold one of the manifest's fields."""
        return self._part_of[field.name]

    def _row(self, sample: int) -> int:
        """The number from 0 of a dataset row, which may be counted from the end."""
        sample = index(sample)  # numpy's integers are narrow
        if not -len(self) <= sample < len(self):
            raise IndexError(f"sample {sample} of a cache of {len(self)}")
        return sample % len(self)

    def _check_out(self, sample: int, field: Field, out: Tensor) -> None:
        dtype, shape = torch_dtype(field.dtype), list(field.row_shape)
        shape[field.token_axis] = int(self.lengths[sample])
        found = list(out.shape)
        if len(found) == len(shape):
            found[field.token_axis] = min(found[field.token_axis], shape[field.token_axis])
        if out.dtype != dtype or found != shape or not out.is_contiguous() or not out.is_cpu:
            raise ValueError(
                f"out is {out.dtype} {list(out.shape)}; {field.name} of row {sample} needs a "
                f"contiguous CPU tensor of {dtype}, {shape} or with more tokens"
            )

    def _check_target_files(self) -> None:
        for name, file in self.manifest.target_files.items():
            path = target_dir(self.root) / name
            try:
                found = file_digest(path)
            except OSError as error:
                raise unusable(path, error, self._way_out(0)) from None
            if found != file:
                raise IncompatibleCacheError(
                    f"{path}: damaged: its bytes do not have the digest of the manifest; "
                    + self._way_out(0)
                )

    def _way_out(self, part: int) -> str:
        """What to do about damage in a part; in the manifest's own files, about that in part 0."""
        if self._mirror is not None:
            return f"delete {self.root}, which holds a copy of some of {self.location}"
        again = (
            finish_extension_command(self.root, self.manifest, part)
            if part
            else capture_command(self.root, self.manifest)
        )
        return (
            f"run '{repair_command(self.root)}' and then the {making(self.manifest)} again, "
            f"which redoes what is damaged and nothing else: {again}"
        )


def open_cache(
    path: str | os.PathLike[str],
    *,
    check_digests: bool = False,
    local_cache: str | os.PathLike[str] | None = None,
    local_cache_size: str | int | None = None,
) -> Cache:
    """Open a finished cache for reading.

    Args:
        path: the cache directory, or the URL of one (``s3://``, ``gs://``, ``https://``,
            ``http://``, ``file://``).
        check_digests: compare all that is read with its digest, and raise where it differs.
        local_cache: of a cache at a URL, the folder where fetched shards are kept; by default
            ``~/.cache/dspark``.
        local_cache_size: what all shards there may take, such as ``200GB``; by default what is
            free on that disk.

    Raises:
        IncompatibleCacheError: ``path`` is no cache, or an unfinished or damaged one, or it cannot
            be reached.
        InputError: an argument is wrong.
    """
    check_given(cache=path, local_cache=local_cache)
    if is_url(path):
        return _open_remote(os.fspath(path), local_cache, local_cache_size, check_digests)
    refuse_local_cache(path, local_cache, local_cache_size)
    return Cache(Path(path), check_digests)


def _open_remote(
    url: str,
    local_cache: str | os.PathLike[str] | None,
    size: str | int | None,
    check_digests: bool,
) -> Cache:
    mirror = Mirror(url, local_cache, size)
    return Cache(mirror.root, check_digests, mirror)


def ok_rows(cache: Cache) -> Rows:
    """Dataset rows that hold a sample."""
    manifest = cache.manifest
    return Rows(manifest.num_samples, manifest.rows_per_shard, lambda rows: cache.lengths[rows] > 0)


def require_fields(cache: Cache, names: Sequence[str], arch: str) -> list[Field]:
    """The fields a draft reads, checked before anything else.

    Raises:
        IncompatibleCacheError: one is missing; the message says how to capture it.
    """
    missing = [name for name in names if cache.manifest.field(name) is None]
    if missing:
        where, root, it = "this", cache.root, "adds them"
        if cache.location != str(root):
            where, root = "where CACHE was made, this", Path("CACHE")
        if FIELDS in cache.manifest.identity:
            root, it = Path("NEW"), "makes another with them"
            where = "where ORIGINAL is, this" if cache.location != str(cache.root) else "this"
        raise IncompatibleCacheError(
            f"{cache.location}: draft {arch!r} needs {', '.join(missing)}, which this cache does "
            f"not hold; {where} {it}{to_repeat(cache.manifest)}: "
            + _adding_command(root, cache.manifest, missing, arch)
        )
    return [cache.field(name) for name in names]


def _adding_command(root: Path, manifest: Manifest, missing: Sequence[str], arch: str) -> str:
    if (kept := manifest.identity.get(FIELDS)) is not None:
        return convert_command(root, manifest, [*kept, *missing])
    num_layers = manifest.target.num_layers
    layers = sorted(k for name in missing if (k := layer_of(name)) is not None)
    logits = "full" if "logits" in missing else None
    if logits is None and arch in DRAFTS and {*layers} <= {*draft_layers([arch], num_layers)}:
        return extend_command(root, drafts=arch)
    return extend_command(root, layers=layers, logits=logits)
