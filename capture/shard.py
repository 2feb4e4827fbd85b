"""Capturing shards: while the target runs a batch, the next ones are rendered and those before are
written; a shard is committed, and the rows of another are encoded, behind the batches of a third.
"""

from collections import deque
from collections.abc import Callable, Iterator

from dspark.capture.background import BackgroundWriter, OpenShard
from dspark.capture.batch import packed_batch, run_batch
from dspark.capture.batching import plan_batches
from dspark.capture.new_shard import NewShard
from dspark.capture.progress import Step
from dspark.capture.rendering.batch_inputs import BatchInputs
from dspark.capture.rendering.encoded_rows import EncodedRow, SkippedRow
from dspark.capture.rendering.pool import RenderingPool
from dspark.capture.shard_writer import ShardWriter
from dspark.capture.targets.target import Target
from dspark.capture.workers.lockstep import LockStep

_ROWS_AT_ONCE = 8
"""That a rendering process encodes before it sends them back."""

_DRAW_AHEAD = 4
"""The next shard is drawn when one batch in so many is left to hand out: late, so that no other
worker is short of a shard that waits here."""

Draw = Callable[[], tuple[NewShard, ShardWriter | None] | None]


class ShardCapture:
    """Captures shard after shard.

    Batches never cross a shard and depend on its rows alone, so its bytes do not depend on who
    captures it, when, and with how many rendering processes.

    Args:
        target: the frozen target.
        pool: that renders.
        background: that writes.
        step: of the workers that share the target.
        progress: told of rows that are skipped.
    """

    def __init__(
        self,
        target: Target,
        pool: RenderingPool,
        background: BackgroundWriter,
        step: LockStep,
        progress: Callable[[Step], None],
    ) -> None:
        self._target = target
        self._pool = pool
        self._background = background
        self._step = step
        self._progress = progress

    def run(self, draw: Draw) -> None:
        """Capture and commit all shards that ``draw`` gives.

        Args:
            draw: the next shard and the writer of the claimed file, which is None in a worker that
                only helps to run the target; None after the last one.
        """
        current = self._drawn(draw)
        while current is not None:
            current = self._capture(current, draw)
        self._background.finish()

    def _drawn(self, draw: Draw) -> "_Rows | None":
        if (drawn := draw()) is None:
            return None
        shard, writer = drawn
        return _Rows(
            shard, None if writer is None else self._background.open(shard, writer), self._pool
        )

    def _capture(self, current: "_Rows", draw: Draw) -> "_Rows | None":
        """Capture one shard; the next one, which is being encoded already."""
        plan = current.shard.plan
        rows = self._encoded(current)
        lengths = [len(row) for row in rows]
        batches = deque(plan_batches(lengths, plan.manifest.identity["batch_tokens"]))
        late = len(batches) // _DRAW_AHEAD
        draws_ahead = self._step.draws_ahead and self._pool.ahead > 1
        following: _Rows | None = None
        handed: deque[Callable[[], list[BatchInputs]]] = deque()
        first, has_drawn = True, False
        while batches or handed:
            while batches and len(handed) < self._pool.ahead:
                batch = [rows[i] for i in batches.popleft()]
                handed.append(self._pool.batch(batch, fake_image=plan.fake_image))
                if draws_ahead and not has_drawn and len(batches) <= late:
                    following, has_drawn = self._drawn(draw), True
                if following is not None:
                    following.hand_out(len(batches))
            for inputs in handed.popleft()():
                self._run(current, inputs, first=first)
                first = False
        if current.opened is not None:
            self._background.commit(current.opened)
        return following if has_drawn else self._drawn(draw)

    def _encoded(self, current: "_Rows") -> list[EncodedRow]:
        """The rows of a shard that will run."""
        shard, opened = current.shard, current.opened
        skipped = current.skipped
        rows: list[EncodedRow] = []
        for row in current.encoded():
            accepted = shard.accept(row)
            if isinstance(accepted, EncodedRow):
                rows.append(accepted)
            else:
                skipped.append(accepted)
        if opened is not None:
            opened.index |= {entry.sample: entry for entry in skipped}
            self._progress(Step(samples=len(skipped)))
        return rows

    def _run(self, current: "_Rows", inputs: BatchInputs, *, first: bool) -> None:
        """Run the target on a batch, and have it written."""
        shard, opened = current.shard, current.opened
        manifest = shard.plan.manifest
        self._step.before_forward(inputs.tensors, [row.sample for row in inputs.rows])
        with_head = first and shard.needs_logits
        features = run_batch(inputs, manifest, self._target, with_head=with_head)
        head_error = shard.check_first_batch(inputs.rows, features) if first else None
        if opened is not None:
            if first:
                opened.head_error = head_error
            self._background.write(opened, inputs, packed_batch(features, manifest))


class _Rows:
    """The rows of a drawn shard on their way to be encoded.

    Attributes:
        shard: that they are of.
        opened: to write them to; None in a worker that only helps to run the target.
        skipped: entries of those that do not run.
    """

    def __init__(self, shard: NewShard, opened: OpenShard | None, pool: RenderingPool) -> None:
        self.shard = shard
        self.opened = opened
        self._pool = pool
        self.skipped, self._samples = shard.begin()
        self._handed: list[Callable[[], list[EncodedRow | SkippedRow]]] = []
        self._next = 0

    def hand_out(self, batches: int) -> None:
        """Hand out as many rows as it takes to have done so for all when ``batches`` more batches
        of the shard before are handed out."""
        plan = self.shard.plan
        left = len(self._samples) - self._next
        pieces = -(-left // (_ROWS_AT_ONCE * (batches + 1)))
        for _ in range(pieces):
            some = self._samples[self._next : self._next + _ROWS_AT_ONCE]
            self._next += len(some)
            task = self._pool.encode(some, plan.manifest.max_length, plan.options)
            self._handed.append(task)

    def encoded(self) -> Iterator[EncodedRow | SkippedRow]:
        """Each row, in order, as soon as it is there."""
        self.hand_out(0)
        for task in self._handed:
            yield from task()
