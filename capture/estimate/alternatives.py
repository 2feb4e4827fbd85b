"""What other choices of what to store would come to."""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from dspark.capture.estimate.rows import RowEstimate
from dspark.capture.estimate.sizes import ShardSizes, shard_sizes
from dspark.capture.settings import CaptureSettings
from dspark.capture.stored import Stored, TargetSizes, stored
from dspark.capture.targets.logits import prove_head
from dspark.capture.targets.picture_entry import check_embeds
from dspark.capture.targets.probe import probe_target
from dspark.capture.targets.target import Target
from dspark.schemas.draft_layers import DRAFTS, TRAINABLE, draft_layers
from dspark.schemas.dtypes import FLOAT_CODES, torch_dtype
from dspark.schemas.errors import InputError
from dspark.schemas.manifest import Manifest

_TOPK = 64


@dataclass(frozen=True)
class Alternative:
    """Attributes:
    options: to give instead of, or in addition to, those that were given.
    stored: what would be stored.
    sizes: of the shards.
    refusal: why this target cannot be captured so, or an empty string.
    """

    options: str
    stored: Stored
    sizes: ShardSizes
    refusal: str


def alternatives(
    settings: CaptureSettings, manifest: Manifest, rows: RowEstimate, target: Target
) -> tuple[Alternative, ...]:
    """Each other choice of number type, logits, layers and drafts, with all else as it is.

    Choices that store the same as ``settings`` do are left out.
    """
    positions = manifest.field("position_ids")
    assert positions is not None
    sizes = TargetSizes(
        num_layers=manifest.target.num_layers,
        hidden_size=manifest.target.hidden_size,
        vocab_size=manifest.target.vocab_size,
        position_rows=positions.row_shape[0] if len(positions.row_shape) > 1 else 1,
    )
    found = []
    for options, other in _choices(settings, sizes):
        kept = stored(other, sizes, manifest.max_length)
        if kept.fields == manifest.fields:
            continue
        found.append(
            Alternative(
                options=options,
                stored=kept,
                sizes=shard_sizes(
                    kept.fields,
                    rows,
                    num_shards=manifest.num_shards,
                    rows_per_shard=manifest.rows_per_shard,
                ),
                refusal=_refusal(target, kept, other.embeds),
            )
        )
    return tuple(found)


def served_drafts(manifest: Manifest) -> tuple[str, ...]:
    """The architectures whose layers, by default, are all stored."""
    layers = {*manifest.layers}
    return tuple(d for d in DRAFTS if layers.issuperset(_reads(d, manifest.target.num_layers)))


def _choices(
    settings: CaptureSettings, sizes: TargetSizes
) -> Iterator[tuple[str, CaptureSettings]]:
    for dtype in FLOAT_CODES:
        if {dtype, settings.dtype} != {"bf16", "fp16"}:  # which take the same room
            yield f"--dtype {dtype}", replace(settings, dtype=dtype)
    for embeds in ("all", "pictures"):
        yield f"--embeds {embeds}", replace(settings, embeds=embeds)
    for logits in ("head", f"topk:{min(_TOPK, sizes.vocab_size)}", "full"):
        yield f"--logits {logits}", replace(settings, logits=logits)
    yield "--layers none", replace(settings, layers=())
    yield "--layers auto", replace(settings, layers=None, drafts=TRAINABLE)
    for drafts in _alike(sizes.num_layers):
        yield f"--drafts {','.join(drafts)}", replace(settings, layers=None, drafts=drafts)


def _alike(num_layers: int) -> list[tuple[str, ...]]:
    """Drafts that read the same layers together, fewest layers first, then all that read any."""
    groups: dict[tuple[int, ...], list[str]] = {}
    for draft in DRAFTS:
        groups.setdefault(_reads(draft, num_layers), []).append(draft)
    alike = [tuple(groups[layers]) for layers in sorted(groups, key=len)]
    reading = tuple(d for layers, drafts in groups.items() if layers for d in drafts)
    return alike if reading in alike else [*alike, reading]


def _reads(draft: str, num_layers: int) -> tuple[int, ...]:
    return tuple(draft_layers([draft], num_layers))


def _refusal(target: Target, kept: Stored, embeds: str) -> str:
    """What a capture would say that probes this choice."""
    try:
        probe = probe_target(target, list(kept.layers), torch_dtype(FLOAT_CODES[kept.dtype]))
        check_embeds(embeds, probe.observed)
        if kept.logits == "head":
            prove_head(target, probe.features)
    except InputError as error:
        return str(error)
    return ""
