"""Shared fixtures: each tiny target is built once per run."""

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import settings

# How long an example takes says how busy the machine is.
settings.register_profile("dspark", deadline=None)
settings.load_profile("dspark")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
sys.path.insert(0, str(Path(__file__).parent))  # the helper modules beside this file


@pytest.fixture(scope="session")
def tiny_target(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``tiny_target("llava")`` is the folder of a small random model of that family."""
    from tiny_targets import save_tiny_target

    built: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in built:
            folder = tmp_path_factory.mktemp("targets") / family
            built[family] = save_tiny_target(family, folder)
        return built[family]

    return get
