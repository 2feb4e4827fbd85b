"""How many cores a process may use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dspark.schemas import cores
from dspark.schemas.errors import InputError


@pytest.fixture
def cgroups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A tree of control groups, this process being in ``job/step``."""
    root = tmp_path / "cgroup"
    (root / "job" / "step").mkdir(parents=True)
    (tmp_path / "own").write_text("1:name=systemd:/old\n0::/job/step\n")
    monkeypatch.setattr(cores, "_CGROUPS", root)
    monkeypatch.setattr(cores, "_OWN_CGROUP", tmp_path / "own")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(16)))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    return root


def test_without_a_quota_all_that_it_may_run_on(cgroups: Path) -> None:
    assert cores.usable_cores() == 16
    (cgroups / "job" / "cpu.max").write_text("max 100000\n")
    assert cores.usable_cores() == 16


def test_the_least_quota_of_its_groups(cgroups: Path) -> None:
    (cgroups / "job" / "step" / "cpu.max").write_text("800000 100000\n")
    assert cores.usable_cores() == 8
    (cgroups / "job" / "cpu.max").write_text("350000 100000\n")
    assert cores.usable_cores() == 3
    (cgroups / "cpu.max").write_text("50000 100000\n")
    assert cores.usable_cores() == 1


def test_processes_of_a_machine_share(cgroups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert cores.usable_cores() == 4
    (cgroups / "cpu.max").write_text("600000 100000")
    assert cores.usable_cores() == 1
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "many")
    with pytest.raises(InputError, match="LOCAL_WORLD_SIZE is 'many'"):
        cores.usable_cores()


def test_no_such_files(cgroups: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cores, "_OWN_CGROUP", cgroups / "none")
    assert cores.usable_cores() == 16


def test_a_process_that_is_bound_to_one_core() -> None:
    one = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, {{{one}}}); "
        "from dspark.schemas.cores import usable_cores; print(usable_cores())"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert done.stdout == "1\n"
