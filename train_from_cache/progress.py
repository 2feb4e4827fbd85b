"""What a waiting person sees of a training, on stderr."""

import sys
import time
from collections.abc import Mapping

from tqdm import tqdm

_LINES = 20


class Progress:
    """A bar on a terminal, about twenty plain lines elsewhere, nothing if disabled.

    Attributes:
        tau: the last τ measured of each draft, shown until there is a newer one.
    """

    def __init__(self, label: str, total: int, initial: int, enabled: bool) -> None:
        self._label = label
        self._total = total
        self._enabled = enabled
        self._every = max(1, total // _LINES)
        self.tau: dict[str, float | None] = {}
        self._bar = None
        if enabled and sys.stderr.isatty():
            self._bar = tqdm(total=total, initial=initial, desc=label, unit="step")
        self._since = (initial, time.monotonic())

    def say(self, text: str) -> None:
        """A line of its own."""
        if not self._enabled:
            return
        if self._bar is not None:
            self._bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)

    def step(self, step: int, losses: Mapping[str, float], batch_size: int) -> None:
        """Report that ``step`` updates are done, with the losses of the last one by draft."""
        shown = "; ".join(
            (f"{arch}: " if len(losses) > 1 else "") + f"loss {loss:.4f}, tau {self._tau(arch)}"
            for arch, loss in losses.items()
        )
        if self._bar is not None:
            self._bar.update(1)
            rate = self._bar.format_dict["rate"] or 0.0
            self._bar.set_postfix_str(f"{shown}, {rate * batch_size:.1f} samples/s", refresh=False)
        elif step % self._every == 0 or step == self._total:
            before, then = self._since
            now = time.monotonic()
            rate = (step - before) * batch_size / max(now - then, 1e-9)
            self._since = (step, now)
            self.say(f"{self._label}: step {step}/{self._total}, {shown}, {rate:.1f} samples/s")

    def _tau(self, arch: str) -> str:
        tau = self.tau.get(arch)
        return "?" if tau is None else f"{tau:.2f}"

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()
