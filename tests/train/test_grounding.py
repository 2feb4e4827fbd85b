"""Picture-grounded tokens are numbers in answers about a picture."""

import logging
from pathlib import Path

import pytest
from synthetic_cache import VOCAB, write_cache
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from dspark.schemas.paths import target_dir
from dspark.train_from_cache.batch import supervised_anchors
from dspark.train_from_cache.cache import ok_rows, open_cache
from dspark.train_from_cache.drafts import draft_class
from dspark.train_from_cache.evaluate import evaluate
from dspark.train_from_cache.grounding import number_ids
from dspark.train_from_cache.target_head import TargetHead

WORDS = ["7", "12", "Ġ3", "Ġ4a", "²", "-5", "", "Ġ", "4.5"]


def save_tokenizer(root: Path) -> None:
    words = [*WORDS, *(f"word{i}" for i in range(VOCAB - 4 - len(WORDS)))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, "word0"))
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(target_dir(root))


def test_ids_whose_text_is_a_number(tmp_path: Path) -> None:
    root = write_cache(tmp_path / "cache")
    save_tokenizer(root)
    numbers = number_ids(root, VOCAB)
    assert numbers is not None and numbers.shape == (VOCAB,)
    assert [WORDS[i] for i in numbers.nonzero().flatten().tolist()] == ["7", "12", "Ġ3"]


def test_only_rows_with_a_picture_count(tmp_path: Path) -> None:
    root = write_cache(tmp_path / "cache")
    save_tokenizer(root)
    cache = open_cache(root)
    draft = draft_class("msd")
    model = draft(draft.config_from_cache(cache.manifest, {}))
    head = TargetHead.load(root)
    model.attach_head(head)
    rows = list(ok_rows(cache))
    expected = 0
    for row in rows:
        sample = cache[row]
        anchors = supervised_anchors(sample["loss_mask"][None])
        following = sample["input_ids"][anchors.position + 1]
        expected += int((following < 3).sum()) * bool(sample["image_mask"].any())
    assert expected > 0
    result = evaluate(model, cache, head, rows)
    assert result["grounded_anchors"] == expected
    assert 0 <= result["agreement_grounded"] <= 1


def test_without_a_tokenizer_it_is_none_with_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = write_cache(tmp_path / "cache")
    with caplog.at_level(logging.WARNING):
        assert number_ids(root, VOCAB) is None
        assert number_ids(root, VOCAB) is None
    messages = [m for m in caplog.messages if "agreement_grounded" in m]
    assert len(messages) == 1
