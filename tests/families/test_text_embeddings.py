"""``--embeds pictures``, where text comes from the embedding table and where it does not."""

from pathlib import Path

import pytest
import torch
from conversation_data import mixed_rows, write_rows
from family_checkpoints import save_checkpoint

import dspark
from dspark.capture.settings import TargetOptions
from dspark.capture.targets.features import capture_features
from dspark.capture.targets.loading import load_target
from dspark.capture.targets.probe import PICTURES, probe_inputs
from dspark.schemas.errors import InputError
from dspark.train_from_cache.decode import decode
from dspark.train_from_cache.target_head import TargetHead


def test_a_target_that_embeds_some_text_otherwise(tmp_path: Path) -> None:
    folder = save_checkpoint("ovis2", tmp_path / "ovis2")
    data = write_rows(tmp_path / "d.parquet", mixed_rows(2))
    out = tmp_path / "cache"
    refused = "--embeds pictures: .* for the text tokens 265, 266, 267 .*use --embeds all"
    with pytest.raises(InputError, match=refused):
        dspark.capture(1, target=str(folder), data=str(data), out=str(out), embeds="pictures")
    assert not out.exists()
    # A token that the first look did not show is found in its batch.
    target = load_target(str(folder), torch.device("cpu"), TargetOptions())
    inputs = probe_inputs(target, PICTURES[0])
    length = inputs["input_ids"].shape[1]
    with pytest.raises(InputError, match=r"vector for text token 26[567] than .*--embeds all"):
        capture_features(
            target,
            inputs,
            [length],
            layers=[],
            dtype=torch.bfloat16,
            with_logits=False,
            pictures_alone=True,
        )


@pytest.mark.parametrize("family", ["gemma3", "granite4_vision"])
def test_text_comes_back_exactly(family: str, tmp_path: Path) -> None:
    """Of an embedding that scales, and of a target whose pictures enter beside the embeddings."""
    folder = save_checkpoint(family, tmp_path / family)
    data = write_rows(tmp_path / "d.parquet", mixed_rows(3))
    options = {"target": str(folder), "data": str(data), "layers": "none", "logits": "full"}
    dspark.capture(1, **options, out=str(tmp_path / "all"))
    dspark.capture(1, **options, out=str(tmp_path / "pictures"), embeds="pictures")
    full, some = dspark.open_cache(tmp_path / "all"), dspark.open_cache(tmp_path / "pictures")
    embeddings = TargetHead.load(some.root).embeddings
    assert full.manifest.counts.image_tokens
    for sample in range(3):
        decoded = decode(some[sample], some.manifest.all_fields, embeddings)
        assert all(torch.equal(decoded[name], x) for name, x in full[sample].items())
        assert not torch.equal(some[sample]["inputs_embeds"], full[sample]["inputs_embeds"])
