"""Bringing what a device computed into host memory while the device goes on."""

from collections.abc import Mapping

import torch
from torch import Tensor

_ALIGNMENT = 64


class HostCopy:
    """Tensors on their way to host memory."""

    def __init__(self, tensors: dict[str, Tensor], arrived: list[torch.cuda.Event]) -> None:
        self._tensors = tensors
        self._arrived = arrived

    def wait(self) -> dict[str, Tensor]:
        """The tensors on the CPU, once they are there; from any thread."""
        for event in self._arrived:
            event.synchronize()
        return self._tensors


class HostCopies:
    """Copies from CUDA devices on streams of their own, into pinned buffers that are used in turn.
    What is on the CPU already is handed on as it is.

    Args:
        buffers: how many copies there are at once; the memory of each is used again by the copy
            that comes so many after it.
    """

    def __init__(self, buffers: int) -> None:
        self._buffers = [torch.empty(0, dtype=torch.uint8)] * buffers
        self._turn = 0
        self._streams: dict[torch.device, torch.cuda.Stream] = {}

    def start(self, tensors: Mapping[str, Tensor]) -> HostCopy:
        """Copy tensors once the current streams have computed them; the caller keeps nothing."""
        if not any(tensor.is_cuda for tensor in tensors.values()):
            return HostCopy(dict(tensors), [])
        places, size = {}, 0
        for name, tensor in tensors.items():
            places[name] = size
            size += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        buffer = self._next_buffer(size)
        copied: dict[str, Tensor] = {}
        used: set[torch.cuda.Stream] = set()
        for name, tensor in tensors.items():
            here = buffer[places[name] : places[name] + tensor.nbytes]
            copied[name] = here.view(tensor.dtype).view(tensor.shape)
            if not tensor.is_cuda:
                copied[name].copy_(tensor)
                continue
            stream = self._stream(tensor.device)
            with torch.cuda.stream(stream):
                copied[name].copy_(tensor, non_blocking=True)
            tensor.record_stream(stream)  # its memory is not given to others before that
            used.add(stream)
        return HostCopy(copied, [stream.record_event() for stream in used])

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        """The copying stream of a device, behind what the device was given to compute so far."""
        if device not in self._streams:
            self._streams[device] = torch.cuda.Stream(device)
        self._streams[device].wait_stream(torch.cuda.current_stream(device))
        return self._streams[device]

    def _next_buffer(self, size: int) -> Tensor:
        self._turn = (self._turn + 1) % len(self._buffers)
        if len(self._buffers[self._turn]) < size:
            self._buffers[self._turn] = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        return self._buffers[self._turn]
