"""Single-byte flips at random places of real small caches, and which of them `verify --deep` finds.

    python benchmarks/flip_bytes.py --flips 1000

Three caches of a small random Qwen2.5-VL are captured (logits head, full, topk; mRoPE; skipped
rows). A flip that is not found must be without meaning: the file is decoded before and after, with
the libraries of its format. Exits with 1 if one is not, or if a fault names another place.
"""

import argparse
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))
from flipped_bytes import capture_small, flips  # type: ignore[import-not-found]
from tiny_targets import save_tiny_target  # type: ignore[import-not-found]

from dspark.benchmarks import command


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=command.count, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        target = save_tiny_target("qwen2_5_vl", folder / "target-model")
        caches = [capture_small(folder, target, m) for m in ("head", "full", "topk:4")]
        start = time.monotonic()
        counts: dict[str, Counter[str]] = {}
        for flip in flips(caches, options.flips, options.seed):
            count = counts.setdefault(flip.place, Counter())
            count["flips"] += 1
            count["found"] += flip.found
            count["named"] += flip.found and flip.named
            count["harmless"] += not flip.found and flip.harmless
            count["missed"] += not flip.found and not flip.harmless
        seconds = time.monotonic() - start
    columns = ("flips", "found", "named", "harmless", "missed")
    print(f"{'place':24}" + "".join(f"{c:>10}" for c in columns))
    for place, count in sorted(counts.items()):
        print(f"{place:24}" + "".join(f"{count[c]:10,}" for c in columns))
    total: Counter[str] = sum(counts.values(), Counter())
    print(f"{'all':24}" + "".join(f"{total[c]:10,}" for c in columns))
    print(
        f"{seconds:.0f} s; named: the first fault names the file and, of real tokens, row and "
        "field; harmless: not found, and the file decodes to the same; missed: neither"
    )
    sys.exit(1 if total["missed"] or total["named"] != total["found"] else 0)


if __name__ == "__main__":
    command.run(main)
