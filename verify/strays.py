"""Files in a cache's directory that are no part of it."""

import os
from pathlib import Path

from dspark.schemas.durable import TMP_SUFFIX
from dspark.schemas.locks import is_locked
from dspark.schemas.manifest import Manifest
from dspark.schemas.parts import parts
from dspark.schemas.paths import columns_path, manifest_path, target_dir
from dspark.schemas.stored_shard import shard_files


def strays(root: Path, manifest: Manifest) -> list[str]:
    """One line for each file that does not belong there; none of them does any harm.

    Folders that cannot be listed are passed over.
    """
    known = {
        manifest_path(root),
        columns_path(root),
        *(target_dir(root) / name for name in manifest.target_files),
    }
    for paths, part in parts(root, manifest):
        for shard in range(manifest.num_shards):
            known |= {*shard_files(paths, part, shard), paths.index(shard)}
    files = {Path(folder, name) for folder, _, names in os.walk(root) for name in names}
    return [f"{path.relative_to(root)}: {_what(path)}" for path in sorted(files - known)]


def _what(path: Path) -> str:
    if path.suffix != TMP_SUFFIX:
        return "no part of the cache"
    try:
        locked = is_locked(path)
    except OSError:  # no right to write there, so nobody to ask
        return "a temporary file"
    return (
        "being written by a running capture"
        if locked
        else "left by a capture that was stopped; the next one removes it"
    )
