"""Nothing is put into a cache that a capture would then refuse to continue."""

from pathlib import Path

import pytest
from runs import OPTIONS
from synthetic_cache import write_cache

import dspark
from dspark.capture.prepare import check_out
from dspark.schemas.errors import InputError
from dspark.schemas.nested import refuse_inside_cache


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return write_cache(tmp_path / "cache", samples=8, shards=1)


def names(root: Path) -> list[str]:
    return sorted(str(p) for p in root.rglob("*"))


@pytest.mark.parametrize("where", [".", "drafts", "shards/drafts", "../link", "../link/drafts"])
def test_a_draft_is_not_trained_into_a_cache(cache: Path, where: str) -> None:
    (cache.parent / "link").symlink_to(cache)
    out, before = cache / where, names(cache)
    for train in (
        lambda: dspark.train_draft(cache, "msd", out, **OPTIONS),
        lambda: dspark.train_drafts(cache, ["msd", "eagle3"], out, **OPTIONS),
        lambda: dspark.train_draft(cache, "msd", out, **OPTIONS, resume=True),
    ):
        with pytest.raises(InputError, match="--out .*: it (is a|lies inside the) cache"):
            train()
        assert names(cache) == before


def test_the_folder_that_a_draft_comes_to_by_default(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(cache)
    with pytest.raises(InputError, match=f"--out drafts/msd: it lies inside the cache {cache}"):
        dspark.train_draft(cache, "msd", **OPTIONS)


def test_beside_a_cache_there_is_room(cache: Path) -> None:
    for out in (cache.parent, cache.parent / "new", cache / ".." / "new"):
        refuse_inside_cache("--out", out, or_cache=True)
    refuse_inside_cache("--out", cache)


def test_what_lies_in_a_cache_is_to_be_moved_away(cache: Path, tmp_path: Path) -> None:
    check_out(cache)
    (cache / "drafts").mkdir()
    with pytest.raises(InputError, match=r"something else \(drafts\); move it away: it is no part"):
        check_out(cache)
    (cache / "drafts").rename(tmp_path / "drafts")
    check_out(cache)
    (tmp_path / "other" / "drafts").mkdir(parents=True)
    with pytest.raises(InputError, match=r"something else \(drafts\); choose an empty or new one"):
        check_out(tmp_path / "other")
