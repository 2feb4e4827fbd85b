"""Chunks of the zarr form, as zarr's own codecs make them: bytes, compressed, with a crc32c."""

import struct

import google_crc32c
import numcodecs
import numcodecs.blosc
import numpy as np

from dspark.schemas.dtypes import ITEMSIZE
from dspark.schemas.zarr_layout import CHECKSUM_BYTES, ArrayLayout

numcodecs.blosc.use_threads = False  # its threads are for one caller; ours call it at once

_BLOSC_SIZES = struct.Struct("<4xI4xI")  # of the decoded bytes, and of all


def checksum(data: bytes) -> bytes:
    """crc32c as zarr's codec of that name appends it."""
    return int(google_crc32c.value(data)).to_bytes(CHECKSUM_BYTES, "little")


class ChunkCodec:
    """Encodes and decodes the chunks of an array; may be used by several threads at once.

    Attributes:
        most_bytes: that an encoded chunk can have.
    """

    def __init__(self, array: ArrayLayout) -> None:
        form = array.format
        self._codec = form.codec
        self._chunk_bytes = array.chunk_bytes
        self._itemsize = ITEMSIZE[array.field.dtype]
        self._compressor = None
        if form.codec == "zstd":
            self._compressor = numcodecs.Zstd(level=form.level)
        elif form.codec == "lz4":
            self._compressor = numcodecs.Blosc("lz4", form.level, numcodecs.Blosc.BITSHUFFLE)
        self.most_bytes = array.chunk_bytes + array.chunk_bytes // 128 + 1024

    def encode(self, chunk: np.ndarray) -> bytes:
        """Encode the uint8 bytes of a whole chunk."""
        if self._compressor is None:
            data = chunk.tobytes()
        else:
            data = bytes(self._compressor.encode(chunk.view(f"u{self._itemsize}")))
        return data + checksum(data)

    def decode(self, data: bytes, out: np.ndarray) -> None:
        """Decode a chunk into its uint8 bytes.

        Raises:
            ValueError: it is damaged.
        """
        packed = data[:-CHECKSUM_BYTES]
        if data[-CHECKSUM_BYTES:] != checksum(packed):
            raise ValueError("its checksum is another one")
        if self._compressor is None:
            if len(packed) != out.size:
                raise ValueError("it has another size")
            out[:] = np.frombuffer(packed, np.uint8)
            return
        try:
            if _decoded_size(packed, self._codec) != out.size:
                raise ValueError("it has another size")
            self._compressor.decode(packed, out)
        except (RuntimeError, struct.error, IndexError) as error:
            raise ValueError(f"it cannot be decoded ({error})") from None


def _decoded_size(packed: bytes, codec: str | None) -> int:
    """What the header of a compressed chunk declares, which the decoders only take for a limit."""
    if codec == "lz4":
        decoded, whole = _BLOSC_SIZES.unpack_from(packed)
        return int(decoded) if whole == len(packed) else -1
    descriptor = packed[4]  # RFC 8878, 3.1.1.1
    one_segment = descriptor >> 5 & 1
    start = 5 + 1 - one_segment + (0, 1, 2, 4)[descriptor & 3]
    size = (one_segment, 2, 4, 8)[descriptor >> 6]
    value = int.from_bytes(packed[start : start + size], "little")
    return value + 256 if size == 2 else value
