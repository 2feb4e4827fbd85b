"""Options of the command line, made from the fields of a dataclass."""

from collections.abc import Callable
from dataclasses import MISSING, fields
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import typer

from dspark.schemas.options import Help, option_name


def options_of(kind: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of ``kind`` as options.

    The function's first argument receives the object; its other arguments stay options of their
    own.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        parameters = _parameters(kind)

        def command(**given: Any) -> None:
            options = kind(**{p.name: given.pop(p.name) for p in parameters})
            function(options, **given)

        own = [
            p.replace(kind=Parameter.KEYWORD_ONLY)
            for p in list(signature(function, eval_str=True).parameters.values())[1:]
        ]
        made: Any = command
        made.__signature__ = Signature([*parameters, *own])
        made.__annotations__ = {}
        made.__doc__ = function.__doc__
        return command

    return decorate


def _parameters(kind: Any) -> list[Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    parameters = []
    for field in fields(kind):
        type_, *more = get_args(hints[field.name]) or (None,)
        choices = get_args(type_) if get_origin(type_) is Literal else ()
        if not (more and isinstance(more[0], Help)):
            continue
        name = option_name(field.name)
        option = typer.Option(
            name,
            help=more[0].text,
            show_default=more[0].default,
            metavar="|".join(choices) or None,
        )
        default = Parameter.empty if field.default is MISSING else field.default
        parameters.append(
            Parameter(
                field.name,
                Parameter.KEYWORD_ONLY,
                default=default,
                # What is none of the choices is told by ``schemas.options.checked``, in a sentence.
                annotation=Annotated[str if choices else type_, option],
            )
        )
    return parameters
