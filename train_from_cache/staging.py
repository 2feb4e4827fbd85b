"""Batches on an accelerator, copied there while the step before computes."""

from collections.abc import Sequence
from itertools import cycle

import torch

from dspark.schemas.fields import Field
from dspark.train_from_cache.buffers import Buffers

# One for the step, one that is copied to meanwhile.
_SLOTS = 2


class Staged(Buffers):
    """A batch on the device.

    Attributes:
        copied: when it has arrived.
        used: when the last step that read it was done with it.
    """

    def __init__(
        self, fields: Sequence[Field], rows: int, tokens: int, device: torch.device
    ) -> None:
        super().__init__(fields, rows, tokens, device, pinned=False)
        events = torch.get_device_module(device)
        self.copied, self.used = events.Event(), events.Event()


class Staging:
    """Copies on a stream of their own.

    Whoever takes a batch calls ``wait`` before its first use and ``release`` after the last.
    """

    def __init__(
        self, fields: Sequence[Field], rows: int, tokens: int, device: torch.device
    ) -> None:
        """Make room on ``device``; the arguments are those of ``Buffers``."""
        self._device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._slots = [Staged(fields, rows, tokens, device) for _ in range(_SLOTS)]
        self._next = cycle(self._slots)
        self._stream.wait_stream(self._module.current_stream(device))  # until they are zero

    def copy(self, source: Buffers, rows: int) -> Staged:
        """Start to copy the first rows of ``source``, which must stay as they are until ``release``
        returns. No more batches may be under way than there are slots."""
        staged = next(self._next)
        self._stream.wait_event(staged.used)
        with self._module.stream(self._stream):
            for row, tokens in enumerate(source.filled[:rows]):
                # Beyond its tokens the source is zero: that clears what was here.
                size = max(tokens, staged.filled[row])
                staged.filled[row] = tokens
                for name, target in staged.runs.items():
                    for to, from_ in zip(target[row], source.runs[name][row], strict=True):
                        to[:size].copy_(from_[:size], non_blocking=True)
            staged.copied.record(self._stream)
        return staged

    def wait(self, staged: Staged) -> None:
        """Let what is computed from now on wait for the batch."""
        staged.copied.wait(self._module.current_stream(self._device))

    def release(self, staged: Staged) -> None:
        """Let the batch be overwritten once all that was started so far is done; return when its
        source may be."""
        staged.used.record(self._module.current_stream(self._device))
        staged.copied.synchronize()

    def close(self) -> None:
        """Wait for all copies."""
        for staged in self._slots:
            staged.copied.synchronize()
