"""Options of a command, each said once: as a field of a dataclass with its type, default and help.

The command line is built from the fields (``cli``), and the function that does the work takes the
dataclass's own arguments (``takes``).
"""

import operator
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import wraps
from inspect import signature
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from dspark.schemas.errors import InputError

_KINDS = {bool: "True or False", str: "text", int: "a whole number", float: "a number"}

P = ParamSpec("P")
Options = TypeVar("Options")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Help:
    """What the command line says of a field; a field without is no option there.

    Attributes:
        text: the help.
        default: words for a default that depends on other things; True shows the value itself,
            False nothing.
    """

    text: str
    default: str | bool = True


def takes(
    options: Callable[P, Options],
) -> Callable[[Callable[[Options], Result]], Callable[P, Result]]:
    """Turn a function of an options object into one of the object's own arguments."""

    def decorate(function: Callable[[Options], Result]) -> Callable[P, Result]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> Result:
            return function(options(*args, **kwargs))

        shown: Any = call
        shown.__signature__ = signature(options)
        return call

    return decorate


def option_name(field: str) -> str:
    """``max_length`` -> ``--max-length``."""
    return "--" + field.replace("_", "-")


def choices_of(hint: Any) -> tuple[str, ...]:
    """What an option of this type may be, where it lists that: ``Literal[…]``, or with None."""
    for part in (hint, *get_args(hint)):
        if get_origin(part) is Literal:
            return get_args(part)
    return ()


def check_given(**values: object) -> None:
    """Check that no option is an empty text, as a variable of a shell gives that is not set.

    Raises:
        InputError: one is.
    """
    for name, value in values.items():
        if isinstance(value, str | os.PathLike) and not os.fspath(value):
            raise InputError(
                f"{option_name(name)} is empty; is it a shell variable that is not set?"
            )


def checked(options: Options) -> Options:
    """Options of the types that their fields have: paths as text, numpy's integers as Python's.

    Raises:
        InputError: one is of another type, empty, or none of the choices that its type lists.
    """
    hints = get_type_hints(type(options))
    values = {f.name: getattr(options, f.name) for f in fields(options)}  # type: ignore[arg-type]
    check_given(**values)
    return replace(options, **{n: _checked(n, v, hints[n]) for n, v in values.items()})  # type: ignore[type-var]


def _checked(name: str, value: Any, hint: Any) -> Any:
    kinds = get_args(hint) or (hint,)
    if value is None and type(None) in kinds:
        return None
    if choices := choices_of(hint):
        if value not in choices:
            raise InputError(f"{option_name(name)} {value}: choose {' or '.join(choices)}")
        return value
    if bool in kinds or isinstance(value, bool):
        if bool in kinds and isinstance(value, bool):
            return value
    elif str in kinds and isinstance(value, str | os.PathLike):
        return os.fspath(value)
    elif int in kinds and hasattr(value, "__index__"):
        return operator.index(value)
    elif float in kinds and hasattr(value, "__float__"):
        return float(value)
    words = next(words for kind, words in _KINDS.items() if kind in kinds)
    raise InputError(f"{option_name(name)} {value!r}: must be {words}")
