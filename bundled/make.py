"""Makes what the bundled folder ships, from fixed seeds.

    python -m dspark.bundled.make [--only tokenizer|weights|data ...] [--out DIR]

The steps build on each other: the weights belong to the tokenizer beside them, and the answers in
the data are the trained target's own.
"""

import argparse
import time
from pathlib import Path

import torch
from transformers import AutoModelForImageTextToText, AutoProcessor

from .recipe.data import write_conversations
from .recipe.processor import make_processor
from .recipe.train import Schedule, train

STEPS = ("tokenizer", "weights", "data")
SEED = 0
ROWS = {"train": 1500, "heldout": 300}


def make_tokenizer(out: Path) -> None:
    """Writes the tokenizer and the processor to `out/target`."""
    make_processor(SEED).save_pretrained(out / "target")


def make_weights(out: Path) -> None:
    """Trains the target with the processor in `out/target` and writes it there."""
    processor = AutoProcessor.from_pretrained(out / "target")
    model = train(processor, Schedule(), SEED, report=lambda line: print(line, flush=True))
    model.save_pretrained(out / "target")
    # safetensors writes files that only their owner can read.
    (out / "target" / "model.safetensors").chmod(0o644)


def make_data(out: Path) -> None:
    """Writes `out/data` with the answers of the target in `out/target`."""
    processor = AutoProcessor.from_pretrained(out / "target")
    model = AutoModelForImageTextToText.from_pretrained(out / "target").eval()
    (out / "data").mkdir(parents=True, exist_ok=True)
    for k, (split, n_rows) in enumerate(ROWS.items()):
        path = out / "data" / f"{split}.parquet"
        write_conversations(model, processor, split, n_rows, SEED + 100 + k, path)


def main() -> None:
    """Runs the chosen steps in order."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=STEPS, default=STEPS)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    arguments = parser.parse_args()
    # The number of threads decides the order of sums, and so the weights to the last bit.
    torch.set_num_threads(2)
    makers = {"tokenizer": make_tokenizer, "weights": make_weights, "data": make_data}
    for step in STEPS:
        if step in arguments.only:
            started = time.monotonic()
            makers[step](arguments.out)
            print(f"{step}: {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    main()
