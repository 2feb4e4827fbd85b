"""Hostile manifests, indexes, columns and shard headers against the reader.

    python benchmarks/fuzz_cache.py --inputs 20000

Each input changes one file of a small sound cache: bytes flipped, cut, inserted or repeated; or
entries and rows changed under a digest that is right again, so that what stands behind the digest
is reached. Every input must be refused with one sentence or open. Of those with changed bytes, what
opens must mean what it meant before. Exits with 1 on a traceback or another meaning.
"""

import argparse
import resource
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from hostile_cache import HostileCache, Outcome  # type: ignore[import-not-found]

from dspark.benchmarks import command
from dspark.schemas.paths import columns_path, manifest_path


def run(
    name: str, change: Callable[[st.DataObject], Outcome], inputs: int, meaning: str
) -> Counter[str]:
    """Try so many inputs of a kind and print what became of them."""
    counts: Counter[str] = Counter()

    @settings(
        max_examples=inputs,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def attempt(data: st.DataObject) -> None:
        try:
            outcome = change(data)
        except Exception:
            counts["traceback"] += 1
            if counts["traceback"] <= 3:
                traceback.print_exc()
            return
        if outcome.refusal is not None:
            counts["refused" if "\n" not in outcome.refusal else "traceback"] += 1
        else:
            counts["same" if outcome.meaning == meaning else "other"] += 1

    attempt()
    print(
        f"{name:32}{counts.total():8,}{counts['refused']:10,}{counts['same']:10,}"
        f"{counts['other']:10,}{counts['traceback']:12,}",
        flush=True,
    )
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--inputs", type=command.count, default=20000, help="of all kinds together")
    inputs = -(-parser.parse_args().inputs // 8)
    with tempfile.TemporaryDirectory(prefix="dspark-fuzz-") as folder:
        cache = HostileCache(Path(folder) / "cache")
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"{'':32}{'inputs':>8}{'refused':>10}{'same':>10}{'other':>10}{'tracebacks':>12}")
        manifest, index = manifest_path(cache.root), cache.paths.index(0)
        columns = columns_path(cache.root)
        damage = [
            run(
                "manifest, bytes", lambda d: cache.change_bytes(manifest, d), inputs, cache.meaning
            ),
            run("index, bytes", lambda d: cache.change_bytes(index, d), inputs, cache.meaning),
            run("columns, bytes", lambda d: cache.change_bytes(columns, d), inputs, cache.meaning),
            run("shard header, bytes", cache.change_header, inputs, cache.meaning),
            run("manifest, odd JSON", cache.change_text, inputs, cache.meaning),
        ]
        forged = [
            run("manifest, entries, digest right", cache.change_document, inputs, cache.meaning),
            run("index, rows, digest right", cache.change_rows, inputs, cache.meaning),
            run("columns, digests right", cache.change_columns, inputs, cache.meaning),
        ]
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(f"peak memory grew by {(peak - before) / 1024:.0f} MiB")
    if any(c["traceback"] for c in damage + forged) or any(c["other"] for c in damage):
        sys.exit(1)


if __name__ == "__main__":
    command.run(main)
