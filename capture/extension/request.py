"""What ``--extend`` has to add: the fields asked for that the cache does not hold yet."""

from dataclasses import dataclass, replace
from pathlib import Path

from dspark.capture.finish import missing_shards
from dspark.capture.options import CaptureOptions
from dspark.capture.recorded import recorded_options
from dspark.capture.settings import CaptureSettings
from dspark.capture.stored import stored_layers
from dspark.capture.targets.logits_mode import resolve_logits
from dspark.schemas.columns import read_columns
from dspark.schemas.commands import capture_command, finish_extension_command, to_repeat
from dspark.schemas.errors import IncompatibleCacheError, InputError
from dspark.schemas.extension import AROUND, Extension, added_fields
from dspark.schemas.manifest import Manifest, read_manifest
from dspark.schemas.options import checked
from dspark.schemas.parts import parts
from dspark.schemas.paths import CachePaths
from dspark.schemas.shard_layout import ShardLayout
from dspark.schemas.url import refuse_url


@dataclass(frozen=True)
class ExtensionRequest:
    """Attributes:
    settings: of the capture of these fields; all but the fields and the device are the cache's.
    manifest: of the cache, as it is now.
    number: of the extension, from 1.
    layers: to add, by their output.
    logits: to add: ``full`` or ``topk:k``, or None.
    """

    settings: CaptureSettings
    manifest: Manifest
    number: int
    layers: tuple[int, ...]
    logits: str | None

    @property
    def adds_nothing(self) -> bool:
        """Whether the cache holds all that was asked for."""
        return not (self.layers or self.logits)

    def extension(self, identity: dict[str, object]) -> Extension:
        """The extension, unfinished.

        Args:
            identity: of a capture now.
        """
        m = self.manifest
        fields = added_fields(
            max_length=m.max_length,
            hidden_size=m.target.hidden_size,
            vocab_size=m.target.vocab_size,
            layers=self.layers,
            dtype=m.dtype,
            logits=self.logits,
        )
        return Extension(
            layers=self.layers,
            logits=self.logits,
            fields=tuple(fields),
            shard_bytes=ShardLayout(fields, m.rows_per_shard).file_size,
            around={name: identity[name] for name in AROUND},
        )


def extension_request(options: CaptureOptions) -> ExtensionRequest:
    """Look at the cache, and find what has to be added to it.

    Raises:
        IncompatibleCacheError: there is no finished cache, its columns are damaged, or it has an
            unfinished extension with other fields.
        InputError: an option is not usable.
    """
    options = checked(options)
    refuse_url("--out", options.out, write=True)
    root = Path(options.out)
    manifest = read_manifest(root)
    first = CachePaths(root, manifest.num_shards)
    if not manifest.complete or missing_shards(manifest.parts[0], first):
        raise IncompatibleCacheError(
            f"--extend: the capture of {root} is not finished; this finishes it"
            f"{to_repeat(manifest)}: {capture_command(root, manifest)}"
        )
    read_columns(root, manifest)  # which the end of an extension needs
    if options.format not in (None, form := manifest.shard_format.name):
        raise InputError(
            f"--format {options.format}: the cache in {root} is in {form} form, and what is added "
            "to it is as well; leave --format out"
        )
    settings = CaptureSettings.check(recorded_options(root, manifest, _with_request(options)))
    held = _held(root, manifest)
    layers = stored_layers(settings, manifest.target.num_layers)
    added = tuple(k for k in layers if k not in held.all_layers)
    logits = _added_logits(settings.logits, held)
    number = _number(root, manifest, held, added, logits, overwrite=settings.overwrite)
    return ExtensionRequest(settings, manifest, number, added, logits)


def _with_request(options: CaptureOptions) -> CaptureOptions:
    """Logits alone ask for no layers."""
    if options.logits != "auto" and options.layers == "auto" and options.drafts is None:
        return replace(options, layers="none")
    return options


def _held(root: Path, manifest: Manifest) -> Manifest:
    """The manifest with those extensions as unfinished of which a shard is missing."""
    for number, (paths, part) in enumerate(parts(root, manifest)):
        if number and part.complete and missing_shards(part, paths):
            lost = replace(manifest.extensions[number - 1], complete=False)
            manifest = manifest.with_extension(number, lost)
    return manifest


def _added_logits(asked: str, held: Manifest) -> str | None:
    """The logits to add; ``auto`` and ``head`` add none.

    Raises:
        InputError: those of another form of the same name are there.
    """
    if asked in ("auto", "head"):
        return None
    target = held.target
    logits = resolve_logits(
        asked, hidden_size=target.hidden_size, vocab_size=target.vocab_size, hidden_fields=0
    )
    there = {held.logits, *(e.logits for e in held.extensions if e.complete)}
    if logits in there:
        return None
    if logits != "full" and (other := [x for x in there if x and x.startswith("topk:")]):
        raise InputError(
            f"--logits {logits}: the cache holds {other[0]}, and a cache holds the largest logits "
            "once; use those, add --logits full, or capture anew into another --out"
        )
    return logits


def _number(
    root: Path,
    manifest: Manifest,
    held: Manifest,
    layers: tuple[int, ...],
    logits: str | None,
    *,
    overwrite: bool,
) -> int:
    """The unfinished extension that this one continues or overwrites, or the next number.

    Raises:
        IncompatibleCacheError: an unfinished one has other fields.
    """
    unfinished = [n for n, e in enumerate(held.extensions, 1) if not e.complete]
    for number in unfinished:
        extension = manifest.extensions[number - 1]
        if (extension.layers, extension.logits) == (layers, logits):
            return number
    if not unfinished or not (layers or logits):
        return len(manifest.extensions) + 1
    number = unfinished[0]
    extension = manifest.extensions[number - 1]
    if overwrite and not extension.complete:
        return number
    there, now = extension.logits or "not given", logits or "not given"
    raise IncompatibleCacheError(
        f"--out {root}: it has an unfinished extension with other fields "
        f"(layers: {list(extension.layers)} there, {list(layers)} now; logits: {there} there, "
        f"{now} now); finish it with '{finish_extension_command(root, manifest, number)}', or give "
        "--overwrite to delete what there is of it"
    )
