"""A small trained vision-language model and conversations with its own answers."""

from pathlib import Path

TARGET: Path = Path(__file__).parent / "target"
"""A Hugging Face checkpoint with its processor."""

TRAIN_DATA: Path = Path(__file__).parent / "data" / "train.parquet"
"""1500 conversations to train drafts on."""

HELDOUT_DATA: Path = Path(__file__).parent / "data" / "heldout.parquet"
"""300 conversations about digits that neither the target nor a draft was trained on."""
