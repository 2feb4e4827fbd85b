"""What a cache keeps of its target: whole files, listed with their digests."""

from collections.abc import Callable
from pathlib import Path

import torch
from conversation_data import mixed_rows, write_rows
from safetensors.torch import load_file

import dspark
from dspark.capture.targets.target_files import _safetensors
from dspark.schemas.digest import file_digest
from dspark.schemas.manifest import read_manifest
from dspark.schemas.paths import target_dir


def test_each_file_is_listed_with_its_digest(
    tiny_target: Callable[[str], Path], tmp_path: Path
) -> None:
    data = write_rows(tmp_path / "d.parquet", mixed_rows(2))
    out = tmp_path / "cache"
    dspark.capture(1, target=str(tiny_target("qwen2_5_vl")), data=str(data), out=str(out))
    folder = target_dir(out)
    files = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    assert {"config.json", "tokenizer.json", "head.safetensors"} <= files.keys()
    listed = read_manifest(out).target_files
    assert listed == {name: file_digest(path) for name, path in files.items()}
    modes = {path.stat().st_mode for path in out.rglob("*") if path.is_file()}
    assert modes == {data.stat().st_mode}, "as umask has it"


def test_safetensors_reads_a_file_written_tensor_by_tensor(tmp_path: Path) -> None:
    tensors = {
        "wide": torch.randn(3, 5).bfloat16(),
        "vector": torch.randn(7),
        "empty": torch.zeros(0, 4),
        "odd": torch.arange(5, dtype=torch.int8),
        "double": torch.randn(2, 2, dtype=torch.float64),
    }
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"".join(bytes(chunk) for chunk in _safetensors(tensors)))
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert torch.equal(read[name], tensor)
