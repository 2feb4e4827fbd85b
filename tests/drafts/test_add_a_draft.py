"""The draft that docs/add-a-draft.md adds by one file works as the page says."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from draft_cases import HIDDEN, VOCAB, head
from draft_cases import batch as make_batch
from synthetic_cache import write_cache

from dspark.schemas.errors import InputError
from dspark.train_from_cache import drafts
from dspark.train_from_cache.batch import Anchors
from dspark.train_from_cache.drafts import draft_class
from dspark.train_from_cache.train import train_draft

PAGE = Path(__file__).parents[2] / "docs" / "add-a-draft.md"
FIT = {"lr": 1e-2, "batch_size": 4, "eval_fraction": 0.2, "device": "cpu", "progress": False}


@pytest.fixture(autouse=True)
def added(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The page's file in the drafts' folder, or one that counts as such."""
    (text,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    folder = tmp_path / "drafts"
    folder.mkdir()
    (folder / "glance.py").write_text(text)
    monkeypatch.setattr(drafts, "__path__", [*drafts.__path__, str(folder)])
    yield text
    sys.modules.pop(f"{drafts.__name__}.glance", None)


def test_the_example_is_short(added: str) -> None:
    code = added.split('"""', 2)[2].splitlines()
    body = [line for line in code if line.strip() and not line.startswith(("import", "from"))]
    assert len(body) <= 60


def test_it_trains_resumes_and_is_started_from(tmp_path: Path) -> None:
    cache = write_cache(tmp_path / "cache")
    config = {"num_draft_tokens": "3"}
    first = train_draft(cache, "glance", tmp_path / "a", steps=40, draft_config=config, **FIT)
    records = map(json.loads, (tmp_path / "a" / "metrics.jsonl").read_text().splitlines())
    losses = [r["loss"] for r in records if r["event"] == "step"]
    assert losses[-1] < losses[0] and len(first.after["acceptance"]) == 3
    again = train_draft(
        cache, "glance", tmp_path / "a", steps=40, draft_config=config, resume=True, **FIT
    )
    assert again.already_finished and again.after == first.after

    warm = train_draft(cache, "glance", tmp_path / "b", steps=1, init_from=tmp_path / "a", **FIT)
    assert warm.before is not None and warm.before["tau"] == first.after["tau"]


def test_its_loss_and_predictions_are_its_formulas() -> None:
    cls = draft_class("glance")
    config = cls.config_class(hidden_size=HIDDEN, vocab_size=VOCAB, num_draft_tokens=3)
    draft, batch, target = cls(config).double(), make_batch(), head()
    draft.attach_head(target)
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    total, count = 0.0, 0
    for row, mask in enumerate(batch["loss_mask"].tolist()):
        for a in (a for a in range(11) if mask[a] and mask[a + 1]):
            logits = draft.predict(batch, Anchors(torch.tensor([row]), torch.tensor([a])))[0]
            before = batch["last_hidden_state"][row, a - 1].double() if a else torch.zeros(HIDDEN)
            for k in range(3):
                seen = torch.cat([batch["inputs_embeds"][row, a].double(), before.double()])
                want = target.weight.double() @ (before + draft.maps[k].weight @ seen)
                torch.testing.assert_close(logits[k], want, atol=1e-6, rtol=0)
                if not all(a + 1 + j < 12 and mask[a + 1 + j] for j in range(k + 1)):
                    break
                label = int(batch["input_ids"][row, a + 1 + k])
                total -= float(torch.log_softmax(want, -1)[label].detach())
                count += 1
    term = draft(batch, None, None)["ce"]
    assert float(term.denominator) == count > 0
    assert float(term.numerator.detach()) == pytest.approx(total, abs=1e-5)


def test_its_name_and_its_entries_are_known() -> None:
    with pytest.raises(InputError, match="choose from .*dspark.*glance.*msd"):
        draft_class("glanze")
    cls = draft_class("glance")
    assert cls.arch == "glance" and cls.__module__ == f"{drafts.__name__}.glance"
