"""The teacher gives the same distribution from each form that a cache stores."""

from pathlib import Path

import torch
from synthetic_cache import write_cache

from dspark.train_from_cache.batch import Batch
from dspark.train_from_cache.cache import ok_rows, open_cache
from dspark.train_from_cache.stream import BatchStream
from dspark.train_from_cache.target_head import TargetHead
from dspark.train_from_cache.teacher import Teacher, teacher_fields


def test_stored_logits_the_head_and_the_top_k_agree(tmp_path: Path) -> None:
    logits = {}
    for mode in ("full", "head", "topk:5"):
        cache = open_cache(write_cache(tmp_path / mode, logits=mode))
        fields = [cache.field(name) for name in teacher_fields(mode)]
        rows = ok_rows(cache)[:4].tolist()
        with BatchStream(cache, fields, [rows], batch_size=4) as stream:
            batch: Batch = next(iter(stream))
            teacher = Teacher(batch, TargetHead.load(cache.root))
            row = torch.arange(4)[:, None].expand(4, 6)
            position = torch.arange(6).expand(4, 6)
            logits[mode] = teacher.logits(row, position)
    full, head, top = logits["full"], logits["head"], logits["topk:5"]
    torch.testing.assert_close(head, full, rtol=1e-5, atol=1e-5)
    kept = full.topk(5).indices
    assert torch.equal(torch.isfinite(top).sum(-1), torch.full((4, 6), 5))
    among = full.softmax(-1).gather(-1, kept)
    torch.testing.assert_close(
        top.softmax(-1).gather(-1, kept), among / among.sum(-1, keepdim=True)
    )
    assert full.dtype == head.dtype == top.dtype == torch.float32
