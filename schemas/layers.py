"""Layer numbers. Layer K is the residual stream after decoder layer K (0-based) and anything the
model adds before layer K+1; -1 is what layer 0 receives. Hugging Face's index is K+1.

The last decoder layer is not offered: drafts use ``last_hidden_state``, after the final norm.
"""

import re
from collections.abc import Iterable

from dspark.schemas.errors import InputError


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


def layer_of(name: str) -> int | None:
    """The layer that a field stores, or None if it stores none."""
    found = re.fullmatch(r"hidden_states\.(-1|\d{1,10})", name)
    return None if found is None else int(found[1])
