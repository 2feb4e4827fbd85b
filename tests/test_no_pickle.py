"""Nothing here reads or writes pickle: files from strangers must not run code."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PARTS = ("bundled", "capture", "schemas", "train_from_cache", "verify", "benchmarks")
MODULES = {"pickle", "cPickle", "_pickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
# Functions that pickle, by name: of torch.hub, torch.distributed, accelerate and pandas.
PICKLING = {
    *("all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"),
    *("send_object_list", "recv_object_list", "load_state_dict_from_url"),
    *("read_pickle", "to_pickle"),
}
METHODS = PICKLING | {"save_state", "load_state"}  # the latter two are accelerate's
OF_TORCH = {"load", "save"}
ARGUMENTS = {("allow_pickle", True), ("weights_only", False), ("safe_serialization", False)}


def sources() -> list[Path]:
    files = [*ROOT.glob("*.py"), *(p for part in PARTS for p in (ROOT / part).rglob("*.py"))]
    assert len(files) > 100
    return files


def pickling(path: Path) -> list[str]:
    """The places of a file that would read or write pickle."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        bad: list[str] = []
        if isinstance(node, ast.Import):
            bad = [a.name for a in node.names if a.name.split(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = {a.name for a in node.names}
            bad = [module] if module.split(".")[0] in MODULES else []
            bad += sorted(names & PICKLING)
            bad += sorted(names & OF_TORCH) if module in ("torch", "torch.serialization") else []
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else ""
            if node.attr in METHODS:
                bad = [node.attr]
            elif node.attr in OF_TORCH and owner == "torch":
                bad = [f"torch.{node.attr}"]
        elif isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            bad = [str(node.arg)] if (node.arg, node.value.value) in ARGUMENTS else []
        found += [f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}: {b}" for b in bad]
    return found


def test_no_source_pickles() -> None:
    assert [place for path in sources() for place in pickling(path)] == []


@pytest.mark.parametrize(
    "line",
    [
        "import pickle",
        "from pickle import loads",
        "import torch\ntorch.load('x')",
        "from torch import save",
        "import torch.distributed as dist\ndist.broadcast_object_list([1])",
        "from torch.distributed import all_gather_object",
        "import numpy as np\nnp.load('x', allow_pickle=True)",
        "f(weights_only=False)",
        "accelerator.save_state('x')",
    ],
)
def test_the_scan_sees_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str) -> None:
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    (tmp_path / "a.py").write_text(line)
    assert pickling(tmp_path / "a.py")
