"""Objects under a URL, read with patience: what is lost on the way is asked for again."""

import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import unquote

from dspark.schemas.errors import IncompatibleCacheError, InputError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, ObjectStore

PATIENCE = 300.0
"""Seconds for which a connection that was lost is tried again."""

FIRST_PATIENCE = 10.0
"""The same before anything has come from there: the URL may be wrong."""

_PAUSE, _LONGEST_PAUSE = 0.5, 30.0
_TIMEOUT = 120
"""Seconds for a request with its answer, of at most some 16 MiB."""

_PIECE = 16 << 20
_COALESCE = 256 << 10
"""Bytes between two ranges that are rather read than asked for apart."""

_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_REGION, or AWS_SKIP_SIGNATURE=true for "
    "a public bucket",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
}

_NO_RANGES = "non-partial response", "Range request not supported"
"""What obstore says of a server that sends whole objects where ranges are asked for."""

_CAUSE = re.compile(
    r"Connection \w+|failed to lookup address information[^\"]*|TimedOut|"
    r"InvalidCertificate|Invalid\w*Message|CorruptMessage"
)
"""What ends a connection, as obstore's dump of an error names it."""

T = TypeVar("T")


class UnreachableError(IncompatibleCacheError):
    """What is at a URL could not be read for longer than dspark is patient."""


class MissingObjectError(IncompatibleCacheError):
    """There is no such object at a URL."""


class DamagedObjectError(IncompatibleCacheError):
    """An object is not what the manifest and the index describe."""


class Store:
    """The objects under a URL. May be used by several threads at once.

    Args:
        url: as ``checked_url`` gives it.

    Attributes:
        url: of the folder.

    Raises:
        InputError: the library for it is not installed, or takes the URL or the environment for
            wrong.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self._store = _open(url, FIRST_PATIENCE)
        self._reached = False
        self._warned = -math.inf
        self._abandoned = threading.Event()

    def abandon(self) -> None:
        """End all waiting for a lost connection; its readers are told that it is lost."""
        self._abandoned.set()

    def where(self, name: str) -> str:
        """The URL of an object."""
        return f"{self.url}/{name}"

    def size(self, name: str) -> int:
        """Bytes of an object.

        Raises:
            MissingObjectError: there is none.
            UnreachableError: it cannot be told.
        """
        import obstore

        return self._patiently(name, lambda: int(obstore.head(self._store, name)["size"]))

    def read(self, name: str, most: int) -> bytes:
        """A small object.

        Raises:
            DamagedObjectError: it is larger than ``most`` bytes.
            MissingObjectError: there is none.
            UnreachableError: it cannot be read.
        """
        size = self.size(name)
        if size > most:
            raise DamagedObjectError(f"{self.where(name)}: {size:,} bytes are too many for it")
        return b"".join(self.pieces(name, size))

    def holds(self, name: str, data: bytes) -> bool:
        """Whether a small object is just these bytes.

        Raises:
            MissingObjectError: there is none.
            UnreachableError: it cannot be read.
        """
        import obstore

        def read() -> bool:
            found = obstore.get(self._store, name)
            return found.meta["size"] == len(data) and bytes(found.bytes()) == data

        return self._patiently(name, read)

    def pieces(self, name: str, size: int | None = None) -> Iterator[bytes | memoryview]:
        """A whole object, piece by piece; errors as in ``ranges``.

        Args:
            name: of the object.
            size: its bytes, if they are known.
        """
        import obstore

        size = self.size(name) if size is None else size
        if size <= _PIECE:  # some servers answer a range of all with no range
            yield self._patiently(name, lambda: bytes(obstore.get(self._store, name).bytes()))
            return
        for start in range(0, size, _PIECE):
            yield self.ranges(name, [start], [min(start + _PIECE, size)])[0]

    def ranges(self, name: str, starts: Sequence[int], ends: Sequence[int]) -> list[memoryview]:
        """Some ranges of an object, read together.

        Raises:
            DamagedObjectError: it ends before one of them.
            MissingObjectError: there is none.
            UnreachableError: it cannot be read.
        """
        import obstore

        def read() -> list[memoryview]:
            try:
                found = obstore.get_ranges(
                    self._store, name, starts=starts, ends=ends, coalesce=_COALESCE
                )
            except Exception:
                self._check_size(name, max(ends))
                raise
            except BaseException as error:
                if type(error).__name__ != "PanicException":
                    raise
                self._check_size(name, max(ends))
                raise OSError("the server gave another range than asked for") from None
            data = [memoryview(part) for part in found]
            if [len(d) for d in data] != [b - a for a, b in zip(starts, ends, strict=True)]:
                self._check_size(name, max(ends))
                raise OSError("less came than was asked for")
            return data

        return self._patiently(name, read)

    def _check_size(self, name: str, end: int) -> None:
        """Tell a short object from a lost connection.

        Raises:
            DamagedObjectError: the object is shorter than ``end``.
        """
        import obstore

        size = int(obstore.head(self._store, name)["size"])
        if size < end:
            raise DamagedObjectError(
                f"{self.where(name)}: {size:,} bytes long, so it ends before byte {end:,}; "
                + mend(self.url)
            )

    def _patiently(self, name: str, ask: Callable[[], T]) -> T:
        from obstore import exceptions as e

        started = time.monotonic()
        pause = _PAUSE
        while True:
            if self._abandoned.is_set():
                raise UnreachableError(f"{self.where(name)}: given up")
            try:
                found = ask()
            except (FileNotFoundError, e.NotFoundError):
                raise MissingObjectError(
                    f"{self.where(name)}: there is nothing; is the URL right, and was all of the "
                    "cache copied there?"
                ) from None
            except (e.BaseError, OSError, ValueError) as error:
                said = _first_sentence(error)
                if any(text in said for text in _NO_RANGES):
                    raise UnreachableError(
                        f"{self.where(name)}: the server sends whole files alone and no parts; "
                        "serve it with one that answers range requests (nginx, caddy, …), or copy "
                        "the cache into a folder"
                    ) from None
                if _is_refused(error):
                    raise UnreachableError(
                        f"{self.where(name)}: refused ({said}); {self._credentials()}"
                    ) from None
                now = time.monotonic()
                patience = PATIENCE if self._reached else FIRST_PATIENCE
                if now + pause > started + patience:
                    raise self._lost(name, said, now - started) from None
                if now - self._warned > patience:
                    self._warned = now
                    logging.getLogger(__name__).warning(
                        "dspark: %s: %s; this and what else is lost is tried again for up to "
                        "%.0f s", self.where(name), said, patience,
                    )  # fmt: skip
                self._abandoned.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                if not self._reached:
                    self._store = _open(self.url, _TIMEOUT)
                    self._reached = True
                return found

    def _lost(self, name: str, said: str, seconds: float) -> UnreachableError:
        way_out = (
            "what came stays: give the same command again (train-draft: with --resume) when it can "
            "be reached"
            if self._reached
            else "is the address right?"
        )
        return UnreachableError(
            f"{self.where(name)}: cannot be read ({said}), tried for {seconds:.0f} s; {way_out}"
        )

    def _credentials(self) -> str:
        scheme = self.url.partition(":")[0]
        known = _CREDENTIALS.get(scheme)
        return f"set {known}" if known else "make it readable without a name or password"


def mend(url: str) -> str:
    """The way out where something at a URL is damaged."""
    return (
        f"'dspark verify --cache {url} --deep' names all that is damaged; copy that there once "
        "more from where the cache was made"
    )


def _open(url: str, timeout: float) -> "ObjectStore":
    """The client for a URL whose requests may take so many seconds each."""
    try:
        from obstore.store import LocalStore, from_url
    except ImportError:
        raise InputError(
            f"--cache {url}: a URL needs the package obstore; install dspark with the extra "
            "'remote', or run 'pip install obstore'"
        ) from None
    scheme, _, rest = url.partition("://")
    if scheme == "file":
        folder = Path(rest or "/")
        if not folder.is_dir():
            folder = Path(unquote(rest))
        if not folder.is_dir():
            raise InputError(f"--cache {url}: there is no folder {folder}")
        return LocalStore(folder)
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
    plain = url if scheme == "http" else endpoint if scheme == "s3" else ""
    options: ClientConfig = {
        "allow_http": plain.startswith("http://"),
        "connect_timeout": timedelta(seconds=10),
        "timeout": timedelta(seconds=timeout),
    }
    try:
        return from_url(url, client_options=options, retry_config={"max_retries": 0})
    except Exception as error:  # each store has its own kind
        raise InputError(f"--cache {url}: {_first_sentence(error)}") from None


def _is_refused(error: Exception) -> bool:
    """Whether to ask again would give the same answer."""
    from obstore import exceptions as e

    if isinstance(
        error,
        e.PermissionDeniedError | e.UnauthenticatedError | e.InvalidPathError | e.NotSupportedError,
    ):
        return True
    status = re.search(r"\bstatus:? (4\d\d)\b", str(error))
    return status is not None and status[1] not in ("408", "425", "429")


def _first_sentence(error: Exception) -> str:
    """What a library says, and of its dump of the error nothing but the cause."""
    text, _, dump = str(error).partition("\n\nDebug source")
    said = " ".join(text.split())[:300]
    cause = _CAUSE.search(dump)
    return f"{said}: {cause[0]}" if cause and cause[0] not in said else said
