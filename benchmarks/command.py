"""What the commands of the benchmarks share: arguments are checked before anything is measured."""

import argparse
import math
import os
import sys
from collections.abc import Callable
from pathlib import Path

from dspark.schemas.errors import InputError, StoppedError
from dspark.schemas.signals import stop_on_signals


def parser(description: str | None) -> argparse.ArgumentParser:
    """Of a command that writes a result; its own arguments are to be added."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", type=json_file, help="write the result there")
    made.add_argument("--small", action="store_true", help="some seconds, to see that it works")
    return made


def add_repetitions(made: argparse.ArgumentParser, default: int) -> None:
    """The arguments of a command that measures on a disk, several times."""
    made.add_argument("--repetitions", type=count, default=default)
    made.add_argument("--folder", type=folder, help="on the disk to measure", default=None)


def json_file(text: str) -> Path:
    """A file that the result can be written to; its folder is made."""
    path = Path(text)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{path.parent}: {error.strerror}") from None
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(f"{path}: no file can be written there")
    return path


def folder(text: str) -> Path:
    """A folder that files can be written to."""
    path = Path(text)
    if not (path.is_dir() and os.access(path, os.W_OK)):
        raise argparse.ArgumentTypeError(f"{path}: no folder that can be written to")
    return path


def count(text: str) -> int:
    """A whole number, at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a whole number, at least 1")
    return int(text)


def positive(text: str) -> float:
    """A finite number above 0."""
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
    return number


def run(main: Callable[[], None]) -> None:
    """Run a benchmark; what a user can mend becomes one sentence on stderr, and so does a signal,
    after what lies in temporary folders is removed."""
    name = Path(sys.argv[0]).stem
    stop_on_signals()
    try:
        main()
    except InputError as error:
        print(f"{name}: {error}", file=sys.stderr)
        sys.exit(2)
    except StoppedError as stopped:
        print(f"{name}: {stopped}", file=sys.stderr)
        sys.exit(stopped.exit_code)
