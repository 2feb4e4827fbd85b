"""The files in docs/recipes say what the trainer takes."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml
from synthetic_cache import write_cache

from dspark.train_from_cache.cache import open_cache
from dspark.train_from_cache.drafts import ARCHITECTURES, draft_class
from dspark.train_from_cache.options import TrainTask
from dspark.train_from_cache.plan import check_numbers
from dspark.train_from_cache.train import train_draft

FOLDER = Path(__file__).parents[2] / "docs" / "recipes"
FILES = sorted(FOLDER.glob("*.yaml"))
every_recipe = pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)


def read(file: Path) -> tuple[str, dict[str, Any]]:
    """The draft and the options of a recipe."""
    recipe = yaml.safe_load(file.read_text())
    (arch,) = recipe.pop("arch")
    return arch, recipe


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cache(tmp_path_factory.mktemp("recipes") / "cache")


def test_every_draft_has_a_recipe_and_every_recipe_is_in_the_table() -> None:
    assert {read(file)[0] for file in FILES} == set(ARCHITECTURES)
    rows = re.findall(r"^\| \[(.*?)\]\((.*?)\) \|", (FOLDER / "README.md").read_text(), re.M)
    assert sorted(rows) == [(file.name, file.name) for file in FILES]


@every_recipe
def test_the_source_is_named(file: Path) -> None:
    comment = file.read_text().split("\n\n")[0]
    assert all(line.startswith("#") for line in comment.splitlines())
    assert re.search(r"^# Source: arXiv \d{4}\.\d{5}", comment, re.M)


@every_recipe
def test_the_options_are_options(file: Path) -> None:
    arch, options = read(file)
    assert options.keys() <= {field.name for field in fields(TrainTask)} - {"cache", "out"}
    check_numbers(TrainTask("cache", arch, **options))


@every_recipe
def test_the_draft_takes_its_config(file: Path, cache: Path) -> None:
    arch, options = read(file)
    entries = options["draft_config"]
    config = draft_class(arch).config_from_cache(open_cache(cache).manifest, entries)
    assert {name: getattr(config, name) for name in entries} == entries


def test_both_stages_of_vispec_train(cache: Path, tmp_path: Path) -> None:
    quick = {"steps": 2, "epochs": None, "device": "cpu", "progress": False}
    (arch, words), (_, pictures) = (read(FOLDER / f"vispec-stage{i}.yaml") for i in (1, 2))
    assert pictures["init_from"] == "drafts/vispec-stage1"
    first = train_draft(cache, arch, tmp_path / "words", **{**words, **quick})
    pictures["init_from"] = first.out
    second = train_draft(cache, arch, tmp_path / "pictures", **{**pictures, **quick})
    assert (first.steps, second.steps) == (2, 2)
    assert second.trainable_parameters > first.trainable_parameters
