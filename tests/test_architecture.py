"""The layout tells the architecture, and imports keep to it."""

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {
    "schemas": {"schemas"},
    "capture": {"capture", "schemas", "bundled"},
    "remote": {"remote", "schemas"},
    "train_from_cache": {"train_from_cache", "remote", "schemas"},
    "convert": {"convert", "schemas"},
    "verify": {"verify", "remote", "schemas"},
    "reports": {"reports", "capture", "convert", "train_from_cache", "verify", "schemas"},
}


def imported_parts(path: Path) -> set[str]:
    """The parts of dspark that a file imports, also inside functions."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.append(node.module or "")
    return {n.split(".")[1] for n in names if n.startswith("dspark.")}


def test_stages_know_the_contract_and_not_each_other() -> None:
    for part, allowed in ALLOWED.items():
        files = list((ROOT / part).rglob("*.py"))
        assert files
        for path in files:
            assert imported_parts(path) <= allowed, path


def test_nothing_else_is_installed_at_top_level() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["setuptools"]["packages"]
    assert all(p == "dspark" or p.startswith("dspark.") for p in packages)
    on_disk = {
        "dspark." + ".".join(p.parent.relative_to(ROOT).parts)
        for part in (*ALLOWED, "bundled")
        for p in (ROOT / part).rglob("__init__.py")
    }
    assert on_disk == set(packages) - {"dspark"}
