"""Pictures fetched from web addresses, kept for the second time a row is read."""

import http.client
import os
import tempfile
import time
import urllib.error
import urllib.request
from collections import OrderedDict
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

from dspark.capture.bad_row import BadRowError

KEEP_BYTES = 2 << 30
_TRIES = 3
_KIND = "picture cannot be downloaded"


class Downloads:
    """Fetches http(s) addresses into a temporary folder that holds the last ones. Processes that
    are forked from this one share the folder, which goes with this one.

    Args:
        timeout: seconds that a server may be silent, and four times of which a picture may take.
        max_bytes: largest picture.
        keep_bytes: disk that pictures fetched by one process may take.
        pause: seconds before the second try; doubled for the third.
    """

    def __init__(
        self,
        timeout: float = 15,
        max_bytes: int = 64 << 20,
        keep_bytes: int = KEEP_BYTES,
        pause: float = 1,
    ) -> None:
        self._timeout = timeout
        self._max_bytes = max_bytes
        self._keep_bytes = keep_bytes
        self._pause = pause
        self._folder = tempfile.TemporaryDirectory(prefix="dspark-pictures-")
        self._sizes: OrderedDict[Path, int] = OrderedDict()

    def fetch(self, address: str, name: str) -> bytes:
        """The bytes of a picture.

        Raises:
            BadRowError: not there, too large, or too slow.
        """
        path = Path(self._folder.name) / sha256(address.encode(errors="replace")).hexdigest()
        with suppress(FileNotFoundError):  # never there, or another process has made room
            return path.read_bytes()
        data = self._fetch(address, name)
        part = path.with_suffix(f".{os.getpid()}")
        part.write_bytes(data)
        part.replace(path)
        self._sizes[path] = len(data)
        while sum(self._sizes.values()) > self._keep_bytes and len(self._sizes) > 1:
            self._sizes.popitem(last=False)[0].unlink(missing_ok=True)
        return data

    def _fetch(self, address: str, name: str) -> bytes:
        problem = ""
        for attempt in range(_TRIES):
            if attempt:
                time.sleep(self._pause * 2 ** (attempt - 1))
            try:
                return self._get(address, name)
            except urllib.error.HTTPError as error:
                problem = f"HTTP {error.code}"
                if error.code != 429 and error.code < 500:
                    break
            except (OSError, http.client.IncompleteRead, http.client.BadStatusLine) as error:
                problem = str(getattr(error, "reason", error)) or type(error).__name__
            except (http.client.HTTPException, ValueError) as error:
                problem = str(error)
                break
        raise BadRowError(_KIND, f"{name}: {problem}")

    def _get(self, address: str, name: str) -> bytes:
        request = urllib.request.Request(address, headers={"User-Agent": "dspark"})
        deadline = time.monotonic() + 4 * self._timeout
        data = bytearray()
        with urllib.request.urlopen(request, timeout=self._timeout) as response:
            while chunk := response.read1(1 << 20):
                data += chunk
                if len(data) > self._max_bytes:
                    raise BadRowError(_KIND, f"{name}: more than {self._max_bytes:,} bytes")
                if time.monotonic() > deadline:
                    raise BadRowError(_KIND, f"{name}: it took too long")
            if (length := response.headers.get("Content-Length")) and int(length) > len(data):
                raise http.client.IncompleteRead(bytes(data[:0]), int(length) - len(data))
        return bytes(data)
