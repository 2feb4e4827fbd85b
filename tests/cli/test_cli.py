"""The command line: quick help, one sentence for wrong input, no traceback."""

import json
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from conversation_data import mixed_rows, write_rows

from dspark.cli import main


def dspark(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "dspark", *args], capture_output=True, text=True, timeout=120
    )


def in_process(
    args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    """Exit code and stderr of ``main()`` without the start of an interpreter."""
    monkeypatch.setattr(sys, "argv", ["dspark", *args])
    with pytest.raises(SystemExit) as stop:
        main()
    return int(stop.value.code or 0), capsys.readouterr().err


def test_help_needs_no_heavy_import() -> None:
    code = (
        "import sys; sys.argv = ['dspark', '--help']\n"
        "from dspark.cli import main\n"
        "try:\n    main()\nexcept SystemExit: pass\n"
        "assert not {'torch', 'transformers', 'pyarrow', 'accelerate'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)


@pytest.fixture
def wrong_columns(tmp_path: Path) -> str:
    path = tmp_path / "table.parquet"
    pq.write_table(pa.table({"question": ["a"], "answer": ["b"]}), path)
    return str(path)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--shards", "0"], "--shards 0"),
        (["--shards", "2", "--layers", "a"], "--layers a"),
        (["--shards", "2", "--layers", ""], "--layers is empty"),
        (["--shards", "2", "--target", ""], "--target is empty"),
        (["--shards", "2", "--data", ""], "--data is empty"),
        (["--shards", "2", "--only", "1" * 5000], "give shard numbers"),
        (["--shards", "999999999", "--only", "0-999999998"], "a cache has at most 1,000,000"),
        (["--shards", "2", "--layers", "99"], "4 decoder layers"),
        (["--shards", "2", "--layers", "3"], "last_hidden_state"),
        (["--shards", "2", "--drafts", "eagle9"], "--drafts eagle9: no draft 'eagle9'; choose"),
        (["--shards", "2", "--logits", "some"], "--logits some"),
        (["--shards", "2", "--logits", "topk:0"], "--logits topk:0"),
        (["--shards", "2", "--logits", "topk:9999"], "512 logits"),
        (["--shards", "9999"], "--shards 9999: more than the 1500 rows"),
        (["--shards", "2", "--max-length", "99999"], "--max-length 99999"),
        (["--shards", "2", "--device", "cuda"], "--device cuda"),
        (["--shards", "2", "--data", "nowhere.parquet"], "nowhere.parquet: no such file"),
        (["--shards", "2", "--data", __file__], "neither Parquet, Arrow IPC, JSON Lines nor"),
        (["--shards", "2", "--data", "no*.json"], "no*.json: no file matches"),
        (["--shards", "2", "--data", "tests/cli"], "tests/cli: the folder holds no conversation"),
        (["--shards", "2", "--image-root", "nowhere"], "--image-root nowhere: no such folder"),
        (["--shards", "2", "--max-skipped", "10"], "--max-skipped 10"),
        (["--shards", "2", "--on-bad-row", "stop"], "--on-bad-row stop: choose skip or error"),
        (["--shards", "2", "--target", "./nowhere"], "./nowhere: no such folder"),
    ],
)
def test_wrong_options(
    args: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import torch

    if "cuda" in args and torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    out = tmp_path / "cache"
    code, stderr = in_process(["capture", *args, "--out", str(out)], monkeypatch, capsys)
    assert code == 2, stderr
    assert words in stderr
    assert len(stderr.strip().splitlines()) == 1
    assert not out.exists()


GOOD = '{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}\n'


@pytest.mark.parametrize(
    ("content", "options", "code", "words"),
    [
        (b"", [], 2, ["it has no rows"]),
        (b'{\n"messages": []\n}', [], 2, ["rows can be read (row 0: broken JSON line: Expecting"]),
        (b"PAR1 and no more", [], 2, ["not a readable Parquet file"]),
        (b"ARROW1 and no more", [], 2, ["not a readable Arrow ipc file"]),
        (b"[{}", [], 2, ["not a readable JSON array"]),
        (b'{"dialogue": 1}\n', [], 2, ["unknown layout; its columns are dialogue; known layouts"]),
        (b'{"messages": []}\n{"messages"\n', [], 2, ["every row was skipped (1 x broken JSON"]),
        (GOOD.encode() + b"oops", ["--on-bad-row", "error"], 2, ["row 1 cannot be captured"]),
        (
            GOOD.encode() + b"oops",
            [],
            1,
            ["1 of 2 rows were skipped, more than", "  1  broken JSON line  row 1  (Expecting"],
        ),
        (GOOD.encode() + b"oops", ["--max-skipped", "0.5"], 0, []),
    ],
)
def test_wrong_conversations(
    content: bytes,
    options: list[str],
    code: int,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = tmp_path / "d.json"
    data.write_bytes(content)
    args = ["capture", "--shards", "1", "--data", str(data), "--out", str(tmp_path / "c"), *options]
    found, stderr = in_process(args, monkeypatch, capsys)
    assert found == code, stderr
    lines = [line for line in stderr.splitlines() if line and not line.startswith("capture:")]
    assert len(lines) == len(words), stderr
    assert all(word in line for word, line in zip(words, lines, strict=True)), stderr


def test_wrong_columns(wrong_columns: str, tmp_path: Path) -> None:
    result = dspark(
        "capture", "--shards", "1", "--data", wrong_columns, "--out", str(tmp_path / "c")
    )
    assert result.returncode == 2
    assert "question, answer" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize(
    ("args", "name"),
    [
        (["capture", "--shards", "2", "--out", ""], "--out"),
        (["plan", "--shards", "2", "--out", ""], "--out"),
        (["verify", "--cache", ""], "--cache"),
        (["inspect", "--cache", ""], "--cache"),
        (["verify", "--cache", "x", "--against", ""], "--against"),
        (["train-draft", "--arch", "msd", "--cache", ""], "--cache"),
        (["train-draft", "--arch", "msd", "--cache", "x", "--out", ""], "--out"),
        (["train-draft", "--arch", "", "--cache", "x"], "--arch"),
    ],
)
def test_empty_options(
    args: list[str],
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    code, stderr = in_process(args, monkeypatch, capsys)
    assert code == 2
    assert stderr == f"dspark: {name} is empty; is it a shell variable that is not set?\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("option", ["--ttt-steps", "--draft-vocab-size"])
def test_counts_that_are_none_are_told_by_their_option(
    option: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["train-draft", "--arch", "eagle3", "--cache", "x", option, "0"]
    code, stderr = in_process(args, monkeypatch, capsys)
    assert code == 2
    assert f"Invalid value for '{option}'" in stderr


def test_version() -> None:
    assert dspark("--version").stdout == f"dspark {version('dspark')}\n"


def test_out_holds_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("precious")
    result = dspark("capture", "--shards", "1", "--out", str(tmp_path), "--limit", "2")
    assert result.returncode == 2
    assert "thesis.tex" in result.stderr
    assert (tmp_path / "thesis.tex").read_text() == "precious"


def test_inspect_of_nothing(tmp_path: Path) -> None:
    result = dspark("inspect", "--cache", str(tmp_path / "none"))
    assert result.returncode == 2
    assert "dspark capture --shards N" in result.stderr


def test_dry_run_writes_nothing(tmp_path: Path) -> None:
    out = tmp_path / "c"
    result = dspark("capture", "--shards", "4", "--limit", "20", "--out", str(out), "--dry-run")
    assert result.returncode == 0, result.stderr
    assert "train.parquet: messages of {role, content}\n" in result.stdout
    assert "20 rows to capture, none of the 20 read is skipped" in result.stdout
    assert "bytes/token" in result.stdout
    assert not out.exists()


def test_plan_as_json(
    tiny_target: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = write_rows(tmp_path / "d.parquet", mixed_rows(5))
    target = str(tiny_target("qwen2_5_vl"))
    args = ["plan", "--shards", "2", "--target", target, "--data", str(data)]
    out = tmp_path / "c"
    args += ["--out", str(out), "--drafts", "msd", "--measure", "--json"]
    monkeypatch.setattr(sys, "argv", ["dspark", *args])
    with pytest.raises(SystemExit) as stop:
        main()
    assert not stop.value.code
    plan = json.loads(capsys.readouterr().out)
    assert plan["rows"] == plan["rows_read"] == plan["counts"]["ok"] == 5
    assert plan["layers"] == []
    assert plan["real_bytes"] == plan["token_bytes"] * plan["counts"]["tokens"]
    assert plan["token_bytes"] == sum(plan["token_bytes_by_field"].values())
    assert plan["room"]["fit"] == "fits"
    assert plan["speed"]["tokens_per_second"] > 0
    assert not out.exists()


def test_capture_then_inspect(tiny_target: Callable[[str], Path], tmp_path: Path) -> None:
    data = write_rows(tmp_path / "d.parquet", mixed_rows(5))
    out = tmp_path / "c"
    target = str(tiny_target("qwen2_5_vl"))
    done = dspark(
        *("capture", "--shards", "2", "--target", target, "--data", str(data), "--out", str(out))
    )
    assert done.returncode == 0, done.stderr
    assert "5 samples" in done.stdout
    assert "none skipped" in done.stdout
    assert "tokens/s" in done.stderr

    summary = json.loads(dspark("inspect", "--cache", str(out), "--json", "--sample", "2").stdout)
    assert summary["complete"]
    assert summary["counts"]["ok"] == 5
    real = sum(f["token_bytes"] for f in summary["fields"]) * summary["counts"]["tokens"]
    assert summary["real_bytes"] == real
    for path in (out / "shards").iterdir():
        assert path.stat().st_size == summary["logical_bytes"] // 2
    marks = [t["mark"] for t in summary["sample"]["tokens"]]
    assert marks.count("image") == summary["sample"]["image_tokens"] > 0
    answer = "".join(t["text"] for t in summary["sample"]["tokens"] if t["mark"] == "loss")
    assert answer.startswith("It is ")
    assert "<|im_end|>" in answer

    shown = dspark("inspect", "--cache", str(out), "--sample", "2").stdout
    assert "hidden_states.1" in shown
    assert "<|image_pad|>" in shown
    missing = dspark("inspect", "--cache", str(out), "--sample", "5")
    assert missing.returncode == 2
    assert "rows 0 to 4" in missing.stderr
