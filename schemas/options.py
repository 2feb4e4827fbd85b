"""Options of a command, each said once: as a field of a dataclass with its type, default and help.

The command line is built from the fields (``cli``), and the function that does the work takes the
dataclass's own arguments (``takes``).
"""

from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import wraps
from inspect import signature
from typing import Any, Literal, ParamSpec, TypeVar, get_args, get_origin, get_type_hints

from dspark.schemas.errors import InputError

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


def check_choices(options: Any) -> None:
    """Check the fields whose type lists what they may be.

    Raises:
        InputError: one is something else.
    """
    hints = get_type_hints(type(options))
    for field in fields(options):
        if get_origin(hints[field.name]) is Literal:
            value, choices = getattr(options, field.name), get_args(hints[field.name])
            if value not in choices:
                raise InputError(
                    f"{option_name(field.name)} {value}: choose {' or '.join(choices)}"
                )
