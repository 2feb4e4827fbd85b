"""Thrift's compact protocol, as far as Parquet uses it, from bytes that may be hostile."""

from typing import Any

_TRUE, _FALSE, _BYTE, _I16, _I32, _I64, _DOUBLE, _BINARY, _LIST, _STRUCT = (*range(1, 10), 12)
_DEEPEST = 10


class CompactReader:
    """Reads structures one after another. Whatever cannot be read is a ``ValueError``.

    Attributes:
        at: offset of the next byte.
    """

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self.at = at

    def struct(self, depth: int = 0) -> dict[int, Any]:
        """The fields of the next structure by their number; text stays bytes."""
        if depth > _DEEPEST:
            raise ValueError("its Thrift structures are nested too deep")
        fields: dict[int, Any] = {}
        number = 0
        while (head := self._byte()) != 0:
            number = number + (head >> 4) if head >> 4 else self._zigzag()
            kind = head & 15
            fields[number] = kind == _TRUE if kind <= _FALSE else self._value(kind, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if kind in (_TRUE, _FALSE, _BYTE):
            return self._byte()
        if kind in (_I16, _I32, _I64):
            return self._zigzag()
        if kind == _DOUBLE:
            return self._take(8)
        if kind == _BINARY:
            return self._take(self._varint())
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind == _LIST:
            head = self._byte()
            count = head >> 4 if head >> 4 < 15 else self._varint()
            if count > len(self._data) - self.at:
                raise ValueError("a Thrift list is cut")
            return [self._value(head & 15, depth + 1) for _ in range(count)]
        raise ValueError("a Thrift value is of no known kind")

    def _byte(self) -> int:
        return self._take(1)[0]

    def _take(self, size: int) -> bytes:
        if size > len(self._data) - self.at:
            raise ValueError("a Thrift structure is cut")
        self.at += size
        return self._data[self.at - size : self.at]

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError("a Thrift number is too long")

    def _zigzag(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)
