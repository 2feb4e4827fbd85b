"""Code that lies in the ``target/`` of a stranger's cache is never run."""

import builtins
import json
from pathlib import Path

import pytest
from synthetic_cache import write_cache

from dspark.schemas.errors import IncompatibleCacheError
from dspark.schemas.paths import target_dir
from dspark.train_from_cache.grounding import number_ids
from dspark.train_from_cache.inspection import inspect_sample


def test_a_tokenizer_with_code_of_its_own_is_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = write_cache(tmp_path / "cache", samples=4, shards=1)
    ran = tmp_path / "ran"
    folder = target_dir(root)
    (folder / "strange.py").write_text(
        f"open({str(ran)!r}, 'w').close()\n"
        "from transformers import PreTrainedTokenizer\n"
        "class StrangeTokenizer(PreTrainedTokenizer): pass\n"
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "StrangeTokenizer",
                "auto_map": {"AutoTokenizer": ["strange.StrangeTokenizer", None]},
            }
        )
    )
    # Whoever is asked whether to trust the code says yes.
    monkeypatch.setattr(builtins, "input", lambda *_: "y")
    assert number_ids(root, 48) is None
    with pytest.raises(IncompatibleCacheError, match="tokenizer"):
        inspect_sample(str(root), 0)
    assert not ran.exists()
