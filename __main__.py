"""The command ``dspark``, also as ``python -m dspark``."""

import os
import signal
import sys


def main() -> None:
    """Run the command. A signal before it is ready for signals gets the same answer."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _stop)
    from dspark.cli import main as command

    command()


def _stop(number: int, _: object) -> None:
    print(f"dspark: stopped by {signal.Signals(number).name}", file=sys.stderr)
    os._exit(128 + number)


if __name__ == "__main__":
    main()
