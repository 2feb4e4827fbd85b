"""The teacher gives the same distribution from each form that a cache stores."""

from pathlib import Path

import pytest
import torch
from synthetic_cache import write_cache
from torch import Tensor

from dspark.train_from_cache import teacher
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
        rows = ok_rows(cache)[:4]
        with BatchStream(cache, fields, [rows], batch_size=4, trim=True) as stream:
            batch: Batch = next(iter(stream))
            batch["loss_mask"] = torch.ones(4, int(batch["length"].max()), dtype=torch.uint8)
            target = Teacher(batch, TargetHead.load(cache.root))
            row = torch.arange(4)[:, None].expand(4, 6)
            position = torch.arange(6).expand(4, 6)
            logits[mode] = target.logits(row, position)
    full, head, top = logits["full"], logits["head"], logits["topk:5"]
    torch.testing.assert_close(head, full, rtol=1e-5, atol=1e-5)
    kept = full.topk(5).indices
    assert torch.equal(torch.isfinite(top).sum(-1), torch.full((4, 6), 5))
    among = full.softmax(-1).gather(-1, kept)
    torch.testing.assert_close(
        top.softmax(-1).gather(-1, kept), among / among.sum(-1, keepdim=True)
    )
    assert full.dtype == head.dtype == top.dtype == torch.float32


def test_all_who_ask_share_what_the_head_is_run_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(3, 9, 4, generator=generator)
    head = TargetHead(torch.zeros(7, 4), torch.randn(7, 4, generator=generator))
    mask = torch.zeros(3, 9, dtype=torch.uint8)
    mask[0, [0, 1, 4]] = 1
    mask[1, 8] = 1
    batch = {"last_hidden_state": hidden, "loss_mask": mask}
    near = [(0, p) for p in (0, 1, 2, 3, 4, 5)] + [(1, 7), (1, 8)]
    row, position = (torch.tensor(x) for x in zip(*near, near[3], near[0], strict=True))
    ran: list[int] = []
    forward = TargetHead.forward

    def counting(self: TargetHead, hidden: Tensor) -> Tensor:
        ran.append(len(hidden))
        return forward(self, hidden)

    monkeypatch.setattr(TargetHead, "forward", counting)
    want = hidden[row, position] @ head.weight.T
    shared = Teacher(batch, head)
    for part in (slice(0, 5), slice(3, None), slice(2, 2)):
        torch.testing.assert_close(shared.logits(row[part], position[part]), want[part])
    assert ran == [len(near)]
    monkeypatch.setattr(teacher, "MAX_KEPT", 7 * len(near) - 1)
    torch.testing.assert_close(Teacher(batch, head).logits(row, position), want)
    assert ran[1:] == [len(row)]
