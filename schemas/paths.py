"""Where the parts of a cache lie."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CachePaths:
    """The file names inside a cache directory of ``num_shards`` shards.

    Attributes:
        root: the cache.
        num_shards: N.
        part: which file of each shard: 0 the first, K that of the K-th extension.
    """

    root: Path
    num_shards: int
    part: int = 0

    def _stem(self, shard: int) -> str:
        plus = f".plus{self.part}" if self.part else ""
        return f"shard-{shard:05d}-of-{self.num_shards:05d}{plus}"

    def shard(self, shard: int) -> Path:
        """The tensors of a shard in its safetensors form."""
        return shards_dir(self.root) / f"{self._stem(shard)}.safetensors"

    def group(self, shard: int) -> Path:
        """The tensors of a shard in its zarr form: a folder."""
        return shards_dir(self.root) / f"{self._stem(shard)}.zarr"

    def index(self, shard: int) -> Path:
        """The sample index of a shard (Parquet). Its presence commits the shard."""
        return index_dir(self.root) / f"{self._stem(shard)}.parquet"


def manifest_path(root: Path) -> Path:
    return root / "manifest.json"


def shards_dir(root: Path) -> Path:
    return root / "shards"


def index_dir(root: Path) -> Path:
    return root / "index"


def columns_path(root: Path) -> Path:
    """Columns of the sample indexes of all shards (safetensors); see ``columns``."""
    return index_dir(root) / "columns.safetensors"


def first_indexes(root: Path) -> list[Path]:
    """What has the name of a shard's first index, that of no extension, of any number of shards."""
    return sorted(p for p in index_dir(root).glob("shard-*.parquet") if ".plus" not in p.name)


def target_dir(root: Path) -> Path:
    """The target's config, tokenizer, processor and head: all that a trainer needs of it."""
    return root / "target"


def head_path(root: Path) -> Path:
    return target_dir(root) / "head.safetensors"
