"""The bundled target through both stages: no trainer sees the target, and the picture matters."""

import io
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image

import dspark
from dspark.bundled import TARGET, TRAIN_DATA
from dspark.train_from_cache.batch import Anchors
from dspark.train_from_cache.cache import ok_rows
from dspark.train_from_cache.drafts import draft_class
from dspark.train_from_cache.grounding import number_ids
from dspark.train_from_cache.target_head import TargetHead

ROWS = 160


def blank(row: dict[str, Any]) -> dict[str, Any]:
    """The same row with black pictures of the same sizes."""
    images = []
    for image in row["images"]:
        buffer = io.BytesIO()
        Image.new("RGB", Image.open(io.BytesIO(image["bytes"])).size).save(buffer, "PNG")
        images.append({"bytes": buffer.getvalue(), "path": None})
    return {**row, "images": images}


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> tuple[dspark.Cache, dspark.Cache]:
    """Rows with pictures as they are, and with the pictures blanked; the target is gone after."""
    folder = tmp_path_factory.mktemp("end-to-end")
    table = pq.read_table(TRAIN_DATA)
    rows = [r for r in table.to_pylist() if r["images"]][:ROWS]
    target = folder / "target"
    shutil.copytree(TARGET, target)
    out = []
    for name, some in (("seen", rows), ("blank", [blank(r) for r in rows])):
        data = folder / f"{name}.parquet"
        pq.write_table(pa.Table.from_pylist(some, schema=table.schema), data)
        dspark.capture(2, target=str(target), data=str(data), out=str(folder / name))
        out.append(dspark.open_cache(folder / name))
    shutil.rmtree(target)
    return out[0], out[1]


def grounded_agreement(draft: Any, seen: dspark.Cache, features: dspark.Cache) -> float:
    """Share of number tokens of which the draft's first proposal, made from ``features``, is what
    the target that sees the picture would say."""
    numbers = number_ids(seen.root, seen.manifest.target.vocab_size)
    assert numbers is not None
    agree = total = 0
    for sample in ok_rows(seen):
        truth, row = seen[int(sample)], features[int(sample)]
        assert torch.equal(truth["input_ids"], row["input_ids"])
        mask = truth["loss_mask"].bool()
        positions = [
            a
            for a in range(len(mask) - 1)
            if mask[a] and mask[a + 1] and numbers[truth["input_ids"][a + 1]]
        ]
        if not positions:
            continue
        batch = {k: v[None] for k, v in row.items()}
        batch["length"] = torch.tensor([len(mask)])
        anchors = Anchors(torch.zeros(len(positions), dtype=torch.long), torch.tensor(positions))
        proposed = draft.predict(batch, anchors)[:, 0].argmax(-1)
        agree += int((proposed == truth["logits"][positions].argmax(-1)).sum())
        total += len(positions)
    assert total > 100
    return agree / total


def test_the_picture_matters(caches: tuple[dspark.Cache, dspark.Cache], tmp_path: Path) -> None:
    seen, blanked = caches
    changed = 0
    for sample in ok_rows(seen):
        a, b = seen[int(sample)], blanked[int(sample)]
        picture = a["image_mask"].bool()
        assert torch.equal(picture, b["image_mask"].bool())
        changed += not torch.equal(a["last_hidden_state"], b["last_hidden_state"])
        start = int(picture.nonzero()[0])
        assert torch.equal(a["inputs_embeds"][:start], b["inputs_embeds"][:start])
    assert changed == ROWS

    out = tmp_path / "msd"
    dspark.train_draft(
        seen.root,
        "msd",
        out,
        steps=350,
        batch_size=16,
        lr=3e-3,
        eval_fraction=0,
        trim=True,
        progress=False,
    )
    draft = draft_class("msd").from_pretrained(out).eval()
    draft.attach_head(TargetHead.load(seen.root))
    with_picture = grounded_agreement(draft, seen, seen)
    without = grounded_agreement(draft, seen, blanked)
    assert with_picture > without + 0.2, (with_picture, without)


@pytest.mark.parametrize("arch", ["msd", "dspark"])
def test_one_cache_serves_both_drafts(
    caches: tuple[dspark.Cache, dspark.Cache], tmp_path: Path, arch: str
) -> None:
    """A short training from a cache whose target no longer exists moves the held-out metrics."""
    config = {"block_size": 4, "num_hidden_layers": 1, "num_anchors": 8, "markov_rank": 16}
    result = dspark.train_draft(
        caches[0].root,
        arch,
        tmp_path / arch,
        steps=60,
        lr=3e-3,
        draft_config=config if arch == "dspark" else {},
        progress=False,
    )
    assert result.before is not None
    assert result.before["tau"] < 1.1
    assert result.after["tau"] > result.before["tau"] + 0.2
    assert result.after["agreement"] > 0.25
