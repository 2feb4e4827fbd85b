"""Options of the command line, made from the fields of a dataclass, and read from YAML files."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from inspect import Parameter, Signature, signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from dspark.schemas.errors import InputError
from dspark.schemas.options import Help, choices_of, option_name

_ENTRIES = "dspark.config.entries"


def options_of(kind: Callable[..., Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the fields of ``kind`` as options, ``--config`` and ``--print-config``.

    The function's first argument receives the object; its other arguments stay options of their
    own.
    """

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        parameters = _parameters(kind)

        def command(context: typer.Context, **given: Any) -> None:
            del given["config"]
            for name, entries in context.meta.get(_ENTRIES, {}).items():
                given[name] = [*entries, *(given[name] or ())]
            if given.pop("print_config"):
                typer.echo(_document(given), nl=False)
                return
            options = kind(**{p.name: given.pop(p.name) for p in parameters})
            function(options, **given)

        own = [
            p.replace(kind=Parameter.KEYWORD_ONLY)
            for p in list(signature(function, eval_str=True).parameters.values())[1:]
        ]
        made: Any = command
        first = Parameter("context", Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
        made.__signature__ = Signature([first, *parameters, *own, *_CONFIG])
        made.__annotations__ = {}
        made.__doc__ = function.__doc__
        return command

    return decorate


def _parameters(kind: Any) -> list[Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    parameters = []
    for field in fields(kind):
        type_, *more = get_args(hints[field.name]) or (None,)
        if not (more and isinstance(more[0], Help)):
            continue
        kinds, choices = get_args(type_), choices_of(type_)
        if choices or any(get_origin(k) is os.PathLike for k in kinds):
            # What is none of the choices is told by ``schemas.options.checked``, in a sentence.
            type_ = str | None if type(None) in kinds else str
        option = typer.Option(
            option_name(field.name),
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
                annotation=Annotated[type_, option],
            )
        )
    return parameters


def _read_config(context: typer.Context, path: str | None) -> str | None:
    """Make a file's options the command's defaults.

    Raises:
        InputError: the file cannot be read, or names an option that the command does not have.
    """
    if path is None or context.resilient_parsing:
        return path
    import yaml

    try:
        document = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise InputError(f"--config {path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(f"--config {path}: cannot be read as YAML ({error})") from None
    if not isinstance(document, dict):
        raise InputError(f"--config {path}: give one 'option: value' in a line")
    several = {p.name: getattr(p, "multiple", False) for p in context.command.params}
    entries = {str(name).replace("-", "_"): value for name, value in document.items()}
    if unknown := sorted({*entries} - {*several} | {*entries} & {"config", "print_config"}):
        raise InputError(
            f"--config {path}: {context.info_name} has no option {option_name(unknown[0])}; see "
            f"dspark {context.info_name} --help"
        )
    # KEY=VALUE entries of the file hold beside those of the command line, all else in their place.
    context.meta[_ENTRIES] = {
        name: _key_values(entries.pop(name))
        for name in [*entries]
        if several[name] and isinstance(entries[name], Mapping)
    }
    context.default_map = {
        **(context.default_map or {}),
        **{k: _several(v) if several[k] else v for k, v in entries.items() if v is not None},
    }
    return path


def _key_values(entries: Mapping[str, Any]) -> list[str]:
    return [f"{k}={v if isinstance(v, str) else json.dumps(v)}" for k, v in entries.items()]


def _several(value: Any) -> list[Any]:
    """The values of an option that may be repeated."""
    return list(value) if isinstance(value, list | tuple) else [value]


def _document(given: Mapping[str, Any]) -> str:
    """Options as a file for ``--config``."""
    import yaml

    entries = {k: v for k, v in given.items() if v is not None and v is not False and v != []}
    text: str = yaml.safe_dump(
        {k: list(v) if isinstance(v, tuple) else v for k, v in entries.items()}, sort_keys=False
    )
    return text


_CONFIG = [
    Parameter(
        "config",
        Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[
            str | None,
            typer.Option(
                "--config",
                metavar="FILE",
                help="YAML file with options; those on the command line win.",
                show_default=False,
                is_eager=True,
                callback=_read_config,
            ),
        ],
    ),
    Parameter(
        "print_config",
        Parameter.KEYWORD_ONLY,
        default=False,
        annotation=Annotated[
            bool, typer.Option("--print-config", help="Print all options as YAML; do nothing else.")
        ],
    ),
]
