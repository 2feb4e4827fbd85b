"""A signal ends a command wherever Python is when it comes."""

import subprocess
import sys

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
