"""Locations of caches that are no path."""

import os
import re
from pathlib import Path
from urllib.parse import urlsplit

from dspark.schemas.errors import InputError

SCHEMES = ("s3", "gs", "https", "http", "file")

_ONE_SLASH = re.compile(rf"({'|'.join(SCHEMES)}):/+(?=[^/]|$)", re.IGNORECASE)
"""What a URL begins with, be it one that lost a slash, as any ``Path`` of a URL has."""


def is_url(location: str | os.PathLike[str]) -> bool:
    """Whether a location is a URL; anything else is a path."""
    location = os.fspath(location)
    return "://" in location or _ONE_SLASH.match(location) is not None


def checked_url(location: str) -> str:
    """The URL of a folder, its scheme in small letters, without a slash at its end.

    Raises:
        InputError: it is of another kind, or holds what does not belong into a location.
    """
    scheme, _, rest = location.rstrip("/").partition(":")
    if "://" not in location:
        slashes = "///" if scheme.lower() == "file" else "//"
        meant = f"{scheme.lower()}:{slashes}{rest.lstrip('/')}"
        raise InputError(f"--cache {location}: no URL; did you mean {meant}?")
    url = f"{scheme.lower()}:{rest}"
    try:
        parts = urlsplit(url)
        named = parts.netloc or (parts.scheme == "file" and parts.path)
        secret = parts.username is not None or parts.password is not None
    except ValueError as error:
        raise InputError(f"--cache {location}: no URL ({error})") from None
    if secret:
        raise InputError(
            f"--cache {parts.scheme}://…@{parts.hostname}{parts.path}: a URL is printed and kept "
            "with what is trained, so give no name or password in it; the vendor's environment "
            "variables are for that"
        )
    if parts.scheme not in SCHEMES:
        raise InputError(
            f"--cache {location}: choose a path or a URL of {', '.join(f'{s}://' for s in SCHEMES)}"
        )
    if parts.query or parts.fragment or not named:
        raise InputError(f"--cache {location}: give the URL of the folder with manifest.json")
    if "//" in parts.path and parts.scheme != "file":
        raise InputError(f"--cache {location}: two slashes follow one another; give one")
    if parts.scheme == "file" and parts.netloc:
        raise InputError(f"--cache {location}: a file:// URL has three slashes, file:///folder")
    return url


def refuse_url(option: str, location: str | os.PathLike[str] | None, *, write: bool) -> None:
    """Refuse a URL where only a path will do.

    Args:
        option: that the location was given as.
        location: what was given, if anything.
        write: whether it is to be written to, or to be read.

    Raises:
        InputError: it is a URL.
    """
    if location is None or not is_url(location):
        return
    how = (
        "give a folder here, and copy it there with the vendor's own tool when it is finished"
        if write
        else "copy it into a folder with the vendor's own tool, and give that"
    )
    raise InputError(f"{option} {os.fspath(location)}: must be a path; {how} (docs/remote.md)")


def refuse_local_cache(
    location: str | os.PathLike[str],
    folder: str | os.PathLike[str] | None,
    size: str | int | None = None,
) -> None:
    """Refuse options of a local cache where the cache itself is local.

    Raises:
        InputError: one was given, and ``location`` is a path.
    """
    for option, value in (("local-cache", folder), ("local-cache-size", size)):
        if value is not None and not is_url(location):
            raise InputError(
                f"--{option} {value}: it is for a cache at a URL, and {os.fspath(location)} is none"
            )


def folder_name(url: str) -> str:
    """The last name of a URL, in letters that any file system takes."""
    last = Path(urlsplit(url).path).name or urlsplit(url).netloc or "cache"
    return "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in last)[:64]
