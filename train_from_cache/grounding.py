"""Which tokens of an answer only the picture can tell: numbers."""

import logging
from functools import lru_cache
from pathlib import Path

import torch
from torch import Tensor

from dspark.schemas.paths import target_dir


@lru_cache(maxsize=1)
def number_ids(root: Path, vocab_size: int) -> Tensor | None:
    """The ids whose text is a number, from the tokenizer files of a cache.

    Args:
        root: the cache directory.
        vocab_size: V.

    Returns:
        bool ``[V]``, or None, with one warning, where no tokenizer can be loaded.
    """
    from transformers import AutoTokenizer

    path = target_dir(root)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
        known = min(vocab_size, len(tokenizer))
        texts = tokenizer.batch_decode([[i] for i in range(known)])
    except Exception as error:  # transformers raises almost anything on files it cannot read
        logging.getLogger(__name__).warning(
            "%s: no tokenizer can be loaded (%s); agreement_grounded is not measured",
            path,
            type(error).__name__,
        )
        return None
    numbers = torch.zeros(vocab_size, dtype=torch.bool)
    numbers[:known] = torch.tensor([text.strip().isdecimal() for text in texts])
    return numbers
