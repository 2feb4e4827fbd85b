"""What a capture stores of each token, by its settings and what its target is like."""

from dataclasses import dataclass

from dspark.capture.settings import CaptureSettings
from dspark.capture.targets.logits_mode import resolve_logits
from dspark.schemas.draft_layers import draft_layers
from dspark.schemas.fields import Field, build_fields
from dspark.schemas.layers import check_layers


@dataclass(frozen=True)
class TargetSizes:
    """Attributes:
    num_layers: decoder layers.
    hidden_size: H.
    vocab_size: V, the width of the logits.
    position_rows: 1, or the rows of multi-axis rotary positions (3 for mRoPE).
    """

    num_layers: int
    hidden_size: int
    vocab_size: int
    position_rows: int


@dataclass(frozen=True)
class Stored:
    """Attributes:
    dtype: ``bf16``, ``fp16``, ``fp32`` or ``fp8``.
    layers: decoder layers, by their output.
    logits: ``full``, ``topk:k`` or ``head``.
    fields: all tensors, in file order.
    """

    dtype: str
    layers: tuple[int, ...]
    logits: str
    fields: tuple[Field, ...]


def stored_layers(settings: CaptureSettings, num_layers: int) -> list[int]:
    """The layers that ``--layers`` and ``--drafts`` mean for a target of ``num_layers``.

    Raises:
        InputError: the target has no such layer.
    """
    if settings.layers is None:
        return draft_layers(settings.drafts, num_layers)
    return check_layers(settings.layers, num_layers)


def stored(settings: CaptureSettings, sizes: TargetSizes, max_length: int) -> Stored:
    """What is stored, as far as the target's sizes tell; it may still refuse ``--logits head``.

    Raises:
        InputError: the target has no such layer, or not so many logits.
    """
    layers = stored_layers(settings, sizes.num_layers)
    # Of fields of width H in the type of logits; two in 8 bits are as wide as one.
    features = (1 + len(layers)) / (2 if settings.dtype == "fp8" else 1)
    logits = resolve_logits(
        settings.logits,
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        hidden_fields=features + 1,
    )
    fields = build_fields(
        max_length=max_length,
        hidden_size=sizes.hidden_size,
        vocab_size=sizes.vocab_size,
        layers=layers,
        dtype=settings.dtype,
        logits=logits,
        position_rows=sizes.position_rows,
        embeds=settings.embeds,
    )
    return Stored(settings.dtype, tuple(layers), logits, tuple(fields))
