"""The commands that messages about a cache name as the way out."""

import shlex
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.schemas.fields import FIELDS

if TYPE_CHECKING:
    from dspark.schemas.manifest import Manifest

NOT_RECORDED = "--chat-template, --device-map, --fsdp, --max-skipped and --trust-remote-code"
"""Options that a manifest does not hold: whoever gave them must give them again."""


def capture_command(root: Path, manifest: "Manifest") -> str:
    """The command that continues the capture of a cache, with all options but ``NOT_RECORDED``.

    Of a cache that a conversion left some fields out of, the command that continues this.
    """
    identity = manifest.identity
    if FIELDS in identity:
        return convert_command(root, manifest, identity[FIELDS])
    options: dict[str, object] = {
        "shards": manifest.num_shards,
        "target": manifest.target.id,
        "revision": manifest.target.revision or None,
        "data": manifest.data,
        "out": root,
        "limit": manifest.num_samples,
        "max-length": manifest.max_length,
        "layers": ",".join(map(str, manifest.layers)) or "none",
        "logits": manifest.logits,
        "dtype": manifest.dtype,
        "embeds": identity.get("embeds"),
        "batch-tokens": identity.get("batch_tokens"),
        "attn-implementation": identity.get("target.attention"),
        "device": identity.get("device"),
        "image-root": identity.get("image_root"),
        "allow-download": identity.get("allow_download"),
        "mask-reasoning": identity.get("mask_reasoning"),
        "fake-image": "always" if identity.get("fake_image") else None,
        "overlong": identity.get("overlong"),
        "format": manifest.shard_format.name if manifest.shard_format.is_zarr else None,
    }
    return _command(_capture(identity.get("tensor_parallel") or 1), options)


def making(manifest: "Manifest") -> str:
    """What the command of ``capture_command`` is: a capture or, of some fields, a conversion."""
    return "conversion" if FIELDS in manifest.identity else "capture"


def to_repeat(manifest: "Manifest") -> str:
    """What to add to the command of ``capture_command``, in brackets after a space."""
    if FIELDS in manifest.identity:
        return ""
    return f" ({NOT_RECORDED} must be given again if they were)"


def unfinished(root: Path, manifest: "Manifest") -> str:
    """What to say of a cache that has shards to come."""
    return (
        f"the {making(manifest)} is not finished; this continues it with the missing shards"
        f"{to_repeat(manifest)}: {capture_command(root, manifest)}"
    )


def convert_command(root: Path, manifest: "Manifest", fields: Iterable[str]) -> str:
    """The command that makes, or goes on to make, a cache with some fields of its original."""
    form = manifest.shard_format
    options = {
        "cache": "ORIGINAL",
        "to": root,
        "format": form.name,
        "codec": form.codec,
        "level": form.level,
        "fields": ",".join(fields),
    }
    return _command(["dspark", "convert"], options)


def extend_command(
    root: Path, *, drafts: str | None = None, layers: Iterable[int] = (), logits: str | None = None
) -> str:
    """The command that adds fields to a cache: those of drafts, or of layers and logits."""
    options = {
        "drafts": drafts,
        "layers": ",".join(map(str, layers)) or None,
        "logits": logits,
        "out": root,
    }
    return _command([*_capture(), "--extend"], options)


def finish_extension_command(root: Path, manifest: "Manifest", number: int) -> str:
    """The command that continues extension ``number`` (from 1), without ``NOT_RECORDED``.

    Of a cache that a conversion left some fields out of, the command that continues this.
    """
    if FIELDS in manifest.identity:
        return convert_command(root, manifest, manifest.identity[FIELDS])
    extension = manifest.extensions[number - 1]
    device = extension.around["device"]
    options = {
        "layers": ",".join(map(str, extension.layers)) or None,
        "logits": extension.logits,
        "out": root,
        "device": None if device == manifest.identity.get("device") else device,
    }
    return _command([*_capture(extension.around["tensor_parallel"]), "--extend"], options)


def _capture(ranks: int = 1) -> list[str]:
    command = ["dspark", "capture"]
    if ranks == 1:
        return command
    return ["torchrun", f"--nproc-per-node={ranks}", "-m", *command, f"--tp={ranks}"]


def _command(command: list[str], options: Mapping[str, object]) -> str:
    """``command`` with options; of those that are None or False, none, and of True, the name."""
    for name, value in options.items():
        if value is True:
            command.append(f"--{name}")
        elif value is not None and value is not False:
            text = str(value)
            command += [f"--{name}={text}"] if text.startswith("-") else [f"--{name}", text]
    return shlex.join(command)


def verify_command(root: str | Path) -> str:
    """The command that names all that is wrong with a cache at first sight."""
    return shlex.join(["dspark", "verify", "--cache", str(root)])


def repair_command(root: Path) -> str:
    """The command after which a capture redoes what is damaged, and nothing else."""
    return shlex.join(["dspark", "verify", "--cache", str(root), "--deep", "--repair"])
