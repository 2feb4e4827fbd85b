"""Converting one shard: its first file and those of its extensions, each with its index."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from dspark.schemas.claims import Claim, ClaimedError
from dspark.schemas.commands import repair_command
from dspark.schemas.copy_shard import DamagedRowError, write_safetensors, write_zarr
from dspark.schemas.disk_errors import is_unreadable
from dspark.schemas.durable import write_file
from dspark.schemas.errors import DamagedError, IncompatibleCacheError, UnreadableError
from dspark.schemas.index import IndexRow, read_index, write_index
from dspark.schemas.manifest import Manifest
from dspark.schemas.parts import parts
from dspark.schemas.paths import CachePaths
from dspark.schemas.shard_layout import ShardLayout
from dspark.schemas.stored_rows import stored_rows
from dspark.schemas.stored_shard import (
    is_committed,
    open_shard,
    shard_place,
    zarr_layout,
)


@dataclass(frozen=True)
class Conversion:
    """Attributes:
    source: the cache that is read.
    source_manifest: of that cache.
    root: the new cache.
    manifest: of the finished new cache.
    """

    source: Path
    source_manifest: Manifest
    root: Path
    manifest: Manifest

    def parts(self) -> Iterator[tuple[CachePaths, Manifest, CachePaths, Manifest]]:
        """Paths and manifest of each part of the new cache, after those that it is read from."""
        sources = {
            part.fields[0].name: (paths, part)
            for paths, part in parts(self.source, self.source_manifest)
        }
        by_field = {f.name: found for found in sources.values() for f in found[1].fields}
        for paths, part in parts(self.root, self.manifest):
            yield *by_field[part.fields[0].name], paths, part


def convert_shard(conversion: Conversion, shard: int) -> bool:
    """Convert what the new cache lacks of a shard.

    Returns:
        Whether the shard is there now; False if another process is writing it.

    Raises:
        IncompatibleCacheError: the shard that is read is damaged.
        UnreadableError: it cannot be read.
        OSError: the new one cannot be written.
    """
    for source_paths, source, paths, part in conversion.parts():
        if is_committed(part, paths, shard):
            continue
        try:
            with Claim(paths.shard(shard)) as claim:
                if not is_committed(part, paths, shard):
                    _convert(claim, source_paths, source, paths, part, shard)
        except ClaimedError:
            return False
    return True


def _convert(
    claim: Claim,
    source_paths: CachePaths,
    source: Manifest,
    paths: CachePaths,
    part: Manifest,
    shard: int,
) -> None:
    paths.index(shard).unlink(missing_ok=True)  # of what is not committed, whatever it is
    place = shard_place(source_paths, source, shard)
    way_out = f"run '{repair_command(source_paths.root)}', which says what mends it"
    rows = stored_rows(source_paths, source, shard)
    try:
        with open_shard(source_paths, source, shard) as stored:
            if part.shard_format.is_zarr:
                write_zarr(paths.group(shard), zarr_layout(part), stored, source, rows)
            else:
                layout = ShardLayout(part.fields, part.rows_per_shard)
                write_safetensors(claim.file, layout, stored, source, rows)
                claim.publish()
    except DamagedRowError as error:
        raise IncompatibleCacheError(f"{error.path or place}: {error}; {way_out}") from None
    except DamagedError as error:
        raise IncompatibleCacheError(f"{error}; {way_out}") from None
    except OSError as error:
        path = Path(error.filename or place)
        if source_paths.root not in path.parents:
            raise
        if is_unreadable(error):
            raise UnreadableError(path, error) from None
        raise IncompatibleCacheError(f"{path}: {error.strerror}; {way_out}") from None
    _write_index(source_paths, source, paths, part, shard)


def _write_index(
    source_paths: CachePaths, source: Manifest, paths: CachePaths, part: Manifest, shard: int
) -> None:
    """Commit a converted shard: with the same index, or one that has fewer digests."""
    table, facts = read_index(source_paths, source, shard)
    if part.fields == source.fields and part.identity == source.identity:
        write_file(paths.index(shard), source_paths.index(shard).read_bytes())
        return
    names = [field.name for field in source.fields]
    places = [names.index(field.name) for field in part.fields]
    rows = []
    for entry in table.to_pylist():
        digests = [entry["digests"][place] for place in places] if entry["digests"] else []
        rows.append(IndexRow(**{**entry, "digests": tuple(digests)}))
    write_index(paths.index(shard), rows, {**facts, "identity": part.identity_hash})
