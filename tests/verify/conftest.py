"""The command, run in this process."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dspark.cli import main


@pytest.fixture
def run_dspark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """``run_dspark(command, …)``: exit code, stdout and stderr."""

    def run(*args: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dspark", *map(str, args)])
        with pytest.raises(SystemExit) as stop:
            main()
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return run
