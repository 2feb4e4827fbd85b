"""Options from a YAML file, and all of them printed as one."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from synthetic_cache import write_cache

from dspark.cli import main

RECIPES = Path(__file__).resolve().parents[2] / "docs" / "recipes"


@pytest.fixture
def dspark(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """Run a command in this process: exit code, stdout, stderr."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["dspark", *map(str, arguments)])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0), *capsys.readouterr()

    return run


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.yaml")), ids=lambda p: p.stem)
def test_a_recipe_is_a_config(dspark: Callable, recipe: Path) -> None:
    code, out, err = dspark(
        "train-draft", "--config", recipe, "--cache", "c", "--lr", "0.5", "--print-config"
    )
    assert code == 0, err
    given, asked = yaml.safe_load(out), yaml.safe_load(recipe.read_text())
    assert given["lr"] == 0.5 and given["cache"] == "c"  # the command line wins
    config = dict(entry.split("=", 1) for entry in given.get("draft_config", []))
    wanted = asked.get("draft_config", {})
    assert {k: v if isinstance(wanted[k], str) else json.loads(v) for k, v in config.items()} == (
        wanted
    )
    for name in asked.keys() - {"lr", "draft_config"}:
        assert given[name] == asked[name]


def test_what_is_printed_is_a_config(dspark: Callable, tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    code, out, err = dspark("capture", "--shards", "3", "--only", "1", "--print-config")
    assert code == 0, err
    file.write_text(out.replace("max_skipped", "max-skipped"))
    printed = dspark("plan", "--config", file, "--limit", "9", "--print-config")[1]
    assert yaml.safe_load(printed) == {**yaml.safe_load(out), "limit": 9}


def test_an_entry_on_the_command_line_leaves_the_others_of_the_file(dspark: Callable) -> None:
    recipe = RECIPES / "dflash.yaml"
    code, out, err = dspark(
        *("train-draft", "--config", recipe, "--cache", "c", "-c", "block_size=8"),
        "--print-config",
    )
    assert code == 0, err
    config = dict(entry.split("=", 1) for entry in yaml.safe_load(out)["draft_config"])
    wanted = {**yaml.safe_load(recipe.read_text())["draft_config"], "block_size": 8}
    assert {k: json.loads(v) for k, v in config.items()} == wanted


def test_a_training_follows_its_config(dspark: Callable, tmp_path: Path) -> None:
    cache = write_cache(tmp_path / "cache")
    file = tmp_path / "c.yaml"
    file.write_text(
        f"cache: {cache}\narch: [msd, medusa]\nout: {tmp_path}\nsteps: 2\n"
        "draft-config: {medusa.num_heads: 2}\n"
    )
    code, out, err = dspark("train-draft", "--config", file, "--device", "cpu")
    assert code == 0, err
    assert "msd: 2 steps" in out and "medusa: 2 steps" in out
    assert json.loads((tmp_path / "medusa" / "config.json").read_text())["num_heads"] == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps: [", "cannot be read as YAML"),
        ("steps", "give one 'option: value' in a line"),
        ("stps: 3", "train-draft has no option --stps"),
        ("config: x", "train-draft has no option --config"),
    ],
)
def test_a_wrong_config_is_one_sentence(
    dspark: Callable, tmp_path: Path, text: str, words: str
) -> None:
    file = tmp_path / "c.yaml"
    file.write_text(text)
    code, out, err = dspark("train-draft", "--config", file)
    assert code == 2 and not out
    assert err.startswith(f"dspark: --config {file}: ") and words in err and err.count("\n") == 1
    code, _, err = dspark("train-draft", "--config", tmp_path / "none.yaml")
    assert code == 2 and "No such file" in err
