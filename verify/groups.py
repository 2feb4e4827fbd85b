"""What can be told of a shard in its zarr form without decoding its rows."""

from pathlib import Path

import numpy as np
import pyarrow as pa

from dspark.schemas.errors import DamagedError
from dspark.schemas.manifest import Manifest
from dspark.schemas.paths import CachePaths
from dspark.schemas.stored_shard import zarr_layout
from dspark.schemas.zarr_shard import ZarrArray
from dspark.verify.faults import Fault, reading_fault


def check_group(
    paths: CachePaths, manifest: Manifest, shard: int, index: pa.Table | None
) -> list[Fault]:
    """Check metadata, index, size and chunks of each object of a group.

    Args:
        paths: of the part.
        manifest: of the part.
        shard: its number.
        index: of the shard if it is sound: a chunk must be there exactly where a row has tokens.
    """
    folder = paths.group(shard)
    layout = zarr_layout(manifest)
    lengths = None
    if index is not None:
        lengths = np.zeros(manifest.rows_per_shard, np.int64)
        lengths[: len(index)] = index["length"].to_numpy()
    faults: dict[str, Fault] = {}  # by file: the group's metadata are looked at for each field
    for field, array in layout.arrays.items():
        try:
            found = ZarrArray(folder, layout, field)
            try:
                if lengths is not None:
                    found.check_chunks(lengths)
            finally:
                found.close()
        except DamagedError as error:
            name = str(error.path.relative_to(paths.root))
            faults[name] = Fault(name, error.problem, shard, part=paths.part)
        except OSError as error:
            path = Path(error.filename or folder / array.object)
            name = str(path.relative_to(paths.root))
            faults[name] = reading_fault(error, name, shard, paths.part)
    return list(faults.values())
