"""Which layers of the target each draft architecture reads, by output (see ``schemas.layers``)."""

from collections.abc import Iterable

from dspark.schemas.errors import InputError


def spread_layers(num_layers: int, count: int) -> list[int]:
    """``count`` layers spread evenly over a target of ``num_layers``, as DFlash and DSpark do.

    From 1 to N-3: ``round(1 + i (N-4) / (count-1))``, and ``N // 2`` for one layer. A target too
    shallow for ``count`` distinct layers there gives up to ``count`` of its layers 0..N-2 instead.
    """
    if count <= 0:
        return []
    if num_layers >= count + 3:
        if count == 1:
            return [num_layers // 2]
        return [round(1 + i * (num_layers - 4) / (count - 1)) for i in range(count)]
    last = num_layers - 2
    count = min(count, last + 1)
    if count <= 1:
        return [last]
    return [round(i * last / (count - 1)) for i in range(count)]


def low_middle_high(num_layers: int) -> list[int]:
    """The three layers of EAGLE-3: 1, N//2-1 and N-4, which engines number 2, N//2 and N-3.

    A target of fewer than 7 layers, where these are not three, gives ``spread_layers`` of three.
    """
    if num_layers < 7:
        return spread_layers(num_layers, 3)
    return [1, num_layers // 2 - 1, num_layers - 4]


_LAYERS = {
    "dflash": lambda n: spread_layers(n, 5),
    "dspark": lambda n: spread_layers(n, 5),
    "eagle": lambda n: [],
    "eagle3": low_middle_high,
    "medusa": lambda n: [],
    "msd": lambda n: [],
    "vispec": lambda n: [],
}

DRAFTS = tuple(_LAYERS)
"""The architectures whose needs are known."""

TRAINABLE = ("dflash", "dspark", "eagle", "eagle3", "medusa", "msd", "vispec")
"""Those that ``dspark train-draft`` trains; ``--layers auto`` stores what they read."""


def parse_drafts(names: str) -> tuple[str, ...]:
    """``msd,eagle3`` -> ("msd", "eagle3").

    Raises:
        InputError: one is not known; the message lists those that are.
    """
    drafts = tuple(name.strip() for name in names.split(","))
    for draft in drafts:
        if draft not in _LAYERS:
            raise InputError(
                f"--drafts {names}: no draft {draft!r}; choose from {', '.join(DRAFTS)}"
            )
    return drafts


def draft_layers(drafts: Iterable[str], num_layers: int) -> list[int]:
    """The layers that these drafts together read by default from a ``num_layers`` target."""
    return sorted({layer for draft in drafts for layer in _LAYERS[draft](num_layers)})
