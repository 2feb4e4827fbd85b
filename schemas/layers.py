"""Layer numbers. Layer K is the residual stream after decoder layer K (0-based) and anything the
model adds before layer K+1; -1 is what layer 0 receives. Hugging Face's index is K+1.

The last decoder layer is not offered: drafts use ``last_hidden_state``, after the final norm.
"""

from collections.abc import Iterable

from dspark.schemas.errors import InputError

# How many target layers each built-in draft reads when its config does not say.
DEFAULT_LAYER_COUNTS = {"dspark": 5, "msd": 0}


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


def default_layers(arch: str, num_layers: int) -> list[int]:
    """The layers that the built-in draft ``arch`` reads by default from a ``num_layers`` target."""
    return spread_layers(num_layers, DEFAULT_LAYER_COUNTS[arch])


def auto_layers(num_layers: int) -> list[int]:
    """``--layers auto``: what all built-in drafts together read by default."""
    return sorted({k for arch in DEFAULT_LAYER_COUNTS for k in default_layers(arch, num_layers)})


def check_layers(layers: Iterable[int], num_layers: int) -> list[int]:
    """Sorted distinct layers, all offered by a target of ``num_layers`` decoder layers.

    Raises:
        InputError: a layer is out of range, or is the last one.
    """
    chosen = sorted(set(layers))
    for k in chosen:
        if k == num_layers - 1:
            raise InputError(
                f"--layers {k}: this is the target's last layer, whose output drafts read as "
                f"last_hidden_state (always stored); choose from -1 to {num_layers - 2}"
            )
        if not -1 <= k <= num_layers - 2:
            raise InputError(
                f"--layers {k}: the target has {num_layers} decoder layers; "
                f"choose from -1 (what layer 0 receives) to {num_layers - 2}"
            )
    return chosen


def hidden_state_key(layer: int) -> str:
    """The name of the field that stores layer ``layer``."""
    return f"hidden_states.{layer}"
