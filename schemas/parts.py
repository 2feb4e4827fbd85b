"""The parts of a cache: the first file of each shard, and one more file for each extension."""

from collections.abc import Iterator
from pathlib import Path

from dspark.schemas.manifest import Manifest
from dspark.schemas.paths import CachePaths


def parts(root: Path, manifest: Manifest) -> Iterator[tuple[CachePaths, Manifest]]:
    """File names and manifest of each part (see ``Manifest.parts``), finished or not."""
    for number, part in enumerate(manifest.parts):
        yield CachePaths(root, manifest.num_shards, number), part


def readable_parts(root: Path, manifest: Manifest) -> Iterator[tuple[CachePaths, Manifest]]:
    """The first files, and those of finished extensions: the parts with ``all_fields``."""
    return (
        (paths, part) for paths, part in parts(root, manifest) if part.complete or not paths.part
    )
