"""The part of the target that a cache carries, so that a trainer never needs the target itself."""

import json
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import xxhash
from safetensors.torch import save
from torch import Tensor

from dspark.capture.targets.target import Target
from dspark.schemas.digest import FileDigest
from dspark.schemas.disk_errors import os_errors
from dspark.schemas.durable import is_tmp, make_dir, replacing, write_all
from dspark.schemas.errors import InputError
from dspark.schemas.paths import head_path, target_dir


def write_target_files(root: Path, target: Target) -> dict[str, FileDigest]:
    """Write ``target/`` of a cache: config, tokenizer, processor, chat template and head weights.

    ``head.safetensors`` holds ``embed_tokens.weight`` ``[rows, H]`` as the embedding module returns
    it (scaling included), ``lm_head.weight`` ``[V, H]``, ``lm_head.bias`` where there is one, and
    ``norm.weight`` (and ``norm.bias``) ``[H]`` where the backbone has a final norm of that kind; in
    the target's own number type. It is written last: where it is, the others are whole.

    Returns:
        What each file is, by its path under ``target/``, sorted.

    Raises:
        InputError: a file of another target is there.
    """
    folder = target_dir(root)
    make_dir(folder)
    digests: dict[str, FileDigest] = {}
    with TemporaryDirectory(prefix="dspark-") as scratch, os_errors(Path(scratch)):
        target.model.config.save_pretrained(scratch)
        target.processor.save_pretrained(scratch)
        saved = _files(Path(scratch))
        if others := sorted(_files(folder).keys() - saved.keys() - {head_path(root).name}):
            raise InputError(
                f"{folder / others[0]}: not a file of this target, and it would be loaded together "
                "with those; delete it and give the same command again"
            )
        for name, path in saved.items():
            make_dir((folder / name).parent)
            digests[name] = _write(folder / name, [path.read_bytes()])
    head = head_path(root)
    digests[head.name] = _write(head, _safetensors(target.head_tensors()))
    return dict(sorted(digests.items()))


def _files(folder: Path) -> dict[str, Path]:
    paths = (p for p in folder.rglob("*") if p.is_file() and not is_tmp(p))
    return {p.relative_to(folder).as_posix(): p for p in paths}


def _write(path: Path, chunks: Iterable[bytes | memoryview]) -> FileDigest:
    state = xxhash.xxh3_64()
    size = 0
    with replacing(path) as file:
        for chunk in chunks:
            write_all(file, chunk)
            state.update(chunk)
            size += len(chunk)
    return FileDigest(size, state.hexdigest())


def _safetensors(tensors: dict[str, Tensor]) -> Iterator[bytes | memoryview]:
    """The bytes of a safetensors file, tensor by tensor.

    ``safetensors.save`` copies all of them, and ``save_file`` writes to a temporary file of its own
    name and mode, which nothing locks.
    """
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    empty = save({name: tensors[name].flatten()[:0] for name in names})
    header = json.loads(empty[8:])  # has the library's names of the types
    end = 0
    for name in names:
        begin, end = end, end + tensors[name].nbytes
        header[name] |= {"shape": list(tensors[name].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)  # aligns the data
    yield struct.pack("<Q", len(text)) + text
    for name in names:
        yield tensors[name].flatten().view(torch.uint8).numpy().data
