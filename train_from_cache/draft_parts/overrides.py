"""Config entries that the user sets, checked against what a draft offers."""

import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from dspark.schemas.errors import InputError

_KINDS: dict[type, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a finite number",
    str: "a word",
    list: "a list of whole numbers such as [1,9,17]",
}


def apply_overrides(
    arch: str, defaults: Mapping[str, Any], overrides: Mapping[str, Any]
) -> dict[str, Any]:
    """``defaults`` with the user's entries put in.

    Args:
        arch: name of the draft, for messages.
        defaults: every entry that may be set, with its default value, which also gives the type
            (a bool, int, float, str or list of int).
        overrides: what the user set. A string is read as JSON where it is JSON and the entry is
            not itself a string.

    Raises:
        InputError: an entry that ``defaults`` does not name, or a value of another type.
    """
    unknown = sorted(set(overrides) - set(defaults))
    if unknown:
        raise InputError(
            f"-c {unknown[0]}: draft {arch!r} has no such config entry; "
            f"it has {', '.join(sorted(defaults))}"
        )
    return {
        **defaults,
        **{key: _typed(key, value, type(defaults[key])) for key, value in overrides.items()},
    }


def at_least(entries: Mapping[str, Any], minimum: Mapping[str, float]) -> None:
    """Check that entries are not below their smallest useful value.

    Raises:
        InputError: one is.
    """
    for key, low in minimum.items():
        if not entries[key] >= low:
            raise InputError(f"-c {key}={entries[key]}: must be at least {low}")


def one_of(entries: Mapping[str, Any], key: str, choices: tuple[str, ...]) -> None:
    """Check that an entry is one of a few words.

    Raises:
        InputError: it is not.
    """
    if entries[key] not in choices:
        raise InputError(f"-c {key}={entries[key]}: choose from {', '.join(choices)}")


def _typed(key: str, given: Any, kind: type) -> Any:
    value = given
    if isinstance(given, str) and kind is not str:
        try:
            value = json.loads(given)
        except ValueError:
            value = given
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, tuple):
        value = list(value)
    if kind is float and type(value) is int:
        value = float(value)
    # `type(...) is`: a bool is an int to isinstance.
    fits = type(value) is kind
    if isinstance(value, float):
        fits = fits and math.isfinite(value)
    if isinstance(value, list):
        fits = fits and all(type(element) is int for element in value)
    if not fits:
        raise InputError(f"-c {key}={given}: must be {_KINDS[kind]}")
    return value
