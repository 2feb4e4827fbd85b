"""What a conversion can be asked for: every option, said once."""

from dataclasses import KW_ONLY, dataclass
from typing import Annotated, Literal

from dspark.schemas.options import Help


@dataclass(frozen=True)
class ConvertOptions:
    """The options of ``dspark convert``, unchecked."""

    cache: Annotated[str, Help("Cache to read.")]
    to: Annotated[str, Help("Directory of the new cache.")]
    _: KW_ONLY
    format: Annotated[
        Literal["safetensors", "zarr"],
        Help("Form of its shards: safetensors is the fast one, zarr the compressed one."),
    ]
    fields: Annotated[
        str | None,
        Help(
            "Keep only these, e.g. inputs_embeds,last_hidden_state; ids, positions and masks are "
            "always kept, and stored logits unless some of them are named.",
            default="all",
        ),
    ] = None
    only: Annotated[
        str | None,
        Help(
            "Convert only these shards, e.g. 0-9, and leave the others to other jobs.",
            default=False,
        ),
    ] = None
    codec: Annotated[
        Literal["zstd", "lz4", "none"] | None,
        Help("Of zarr: zstd is the smallest, lz4 the fastest.", default="zstd"),
    ] = None
    level: Annotated[
        int | None, Help("Of zstd (1 to 22) or lz4 (1 to 9).", default="zstd 1, lz4 5")
    ] = None
    num_workers: Annotated[
        int | None,
        Help("Processes, each with a shard of its own.", default="one for each core"),
    ] = None
    progress: bool = False
