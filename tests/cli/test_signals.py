"""A signal ends a command wherever Python is when it comes."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

FINALIZED = """
import os, signal, sys, time
from dspark import cli

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(100):
            pass

@cli.app.command("finalize")
def finalize():
    Finalized()
    time.sleep(10)
    print("went on")

sys.argv = ["dspark", "finalize"]
cli.main()
"""


def test_in_a_finalizer_which_cannot_raise() -> None:
    done = subprocess.run([sys.executable, "-c", FINALIZED], capture_output=True, text=True)
    assert done.returncode == 143
    assert "went on" not in done.stdout
    assert "Traceback" not in done.stderr and "stopped by SIGTERM" in done.stderr


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_while_the_command_is_still_being_imported(tmp_path: Path, how: signal.Signals) -> None:
    (tmp_path / "typer.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)")
    process = subprocess.Popen(
        [sys.executable, "-m", "dspark", "verify", "--cache", "x"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert process.stdout is not None and process.stdout.readline() == "here\n"
    process.send_signal(how)
    _, said = process.communicate(timeout=30)
    assert process.returncode == 128 + how
    assert said == f"dspark: stopped by {how.name}\n"
