"""A few hundred changed caches; benchmarks/fuzz_cache.py tries tens of thousands."""

from collections.abc import Callable

import pytest
from hostile_cache import HostileCache, Outcome
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark.schemas.paths import columns_path, manifest_path

FEW = settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> HostileCache:
    return HostileCache(tmp_path_factory.mktemp("hostile") / "cache")


Damage = Callable[[HostileCache, st.DataObject], Outcome]


@pytest.mark.parametrize(
    "damage",
    [
        lambda cache, data: cache.change_bytes(manifest_path(cache.root), data),
        lambda cache, data: cache.change_bytes(cache.paths.index(0), data),
        lambda cache, data: cache.change_bytes(columns_path(cache.root), data),
        lambda cache, data: cache.change_header(data),
        lambda cache, data: cache.change_text(data),
    ],
    ids=["manifest", "index", "columns", "shard header", "odd JSON"],
)
def test_damage_is_refused_or_means_nothing(cache: HostileCache, damage: Damage) -> None:
    @FEW
    @given(st.data())
    def attempt(data: st.DataObject) -> None:
        outcome = damage(cache, data)
        if outcome.refusal is None:
            assert outcome.meaning == cache.meaning
        else:
            assert "\n" not in outcome.refusal

    attempt()


@pytest.mark.parametrize(
    "forge",
    [HostileCache.change_document, HostileCache.change_rows, HostileCache.change_columns],
    ids=["manifest", "index", "columns"],
)
def test_what_is_forged_with_a_right_digest_is_refused_or_opens(
    cache: HostileCache, forge: Damage
) -> None:
    @FEW
    @given(st.data())
    def attempt(data: st.DataObject) -> None:
        refusal = forge(cache, data).refusal
        assert refusal is None or "\n" not in refusal

    attempt()
