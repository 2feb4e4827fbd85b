"""Where the parts of a cache lie."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class CachePaths:
    """The file names inside a cache directory of ``num_shards`` shards."""

    root: Path
    num_shards: int

    def _stem(self, shard: int) -> str:
        return f"shard-{shard:05d}-of-{self.num_shards:05d}"

    def shard(self, shard: int) -> Path:
        """The tensors of a shard (safetensors)."""
        return shards_dir(self.root) / f"{self._stem(shard)}.safetensors"

    def index(self, shard: int) -> Path:
        """The sample index of a shard (Parquet). Its presence commits the shard."""
        return index_dir(self.root) / f"{self._stem(shard)}.parquet"


def manifest_path(root: Path) -> Path:
    return root / "manifest.json"


def shards_dir(root: Path) -> Path:
    return root / "shards"


def index_dir(root: Path) -> Path:
    return root / "index"


def target_dir(root: Path) -> Path:
    """The target's config, tokenizer, processor and head: all that a trainer needs of it."""
    return root / "target"


def head_path(root: Path) -> Path:
    return target_dir(root) / "head.safetensors"
