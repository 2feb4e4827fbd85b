"""The rows of one shard, and what is made sure of while they are captured."""

from collections.abc import Sequence

from dspark.capture.bad_row import stop_if_asked
from dspark.capture.conversations import Conversations
from dspark.capture.plan import CapturePlan
from dspark.capture.rendering.encoded_rows import EncodedRow, SkippedRow
from dspark.capture.targets.features import Features
from dspark.capture.targets.logits import prove_head
from dspark.capture.targets.target import Target
from dspark.schemas.index import OK, SKIPPED, IndexRow

NON_FINITE = "non-finite features"
"""Why a row is skipped that the target ran on, in its batch."""


class NewShard:
    """A shard of a new cache: all of its rows are encoded, and the head is proved on a batch.

    Args:
        shard: its number.
        plan: of the capture.
        target: the frozen target.
        conversations: the dataset.

    Attributes:
        number: of the shard.
        samples: its dataset rows.
    """

    def __init__(
        self, shard: int, plan: CapturePlan, target: Target, conversations: Conversations
    ) -> None:
        self.number = shard
        self.samples = plan.manifest.rows_of(shard)
        self.plan = plan
        self.target = target
        self.conversations = conversations

    def begin(self) -> tuple[list[IndexRow], Sequence[int]]:
        """Called once, first: rows that are skipped unseen, and the samples to encode, in order."""
        return [], self.samples

    def accept(self, row: EncodedRow | SkippedRow) -> EncodedRow | IndexRow:
        """A row that was encoded, or the index entry of one that is skipped before it runs."""
        if isinstance(row, SkippedRow):
            return self._skipped(row.sample, row.id, row.reason)
        return row

    @property
    def needs_logits(self) -> bool:
        """Whether ``check_first_batch`` looks at logits."""
        return self.plan.manifest.logits == "head"

    def check_first_batch(self, rows: Sequence[EncodedRow], features: Features) -> float | None:
        """Check the shard's first batch before any row of it is written.

        Returns:
            ``head_error`` of the index.

        Raises:
            InputError: the target is not what it must be.
        """
        return prove_head(self.target, features) if self.needs_logits else None

    def index_row(self, row: EncodedRow, *, finite: bool) -> IndexRow:
        """The index entry of a row that has run, without digests; not ``OK`` if it is not stored.

        Args:
            row: that has run.
            finite: whether all of its numbers are.

        Raises:
            InputError: the row is bad, and bad rows are errors.
        """
        if not finite:
            options = self.plan.options
            stop_if_asked(options.on_bad_row, self.conversations, row.sample, NON_FINITE)
            return self._skipped(row.sample, row.id, NON_FINITE)
        return IndexRow(
            sample=row.sample,
            row=row.sample - self.samples.start,
            id=row.id,
            status=OK,
            length=len(row),
            image_tokens=row.image_tokens,
            loss_tokens=row.loss_tokens,
        )

    def _skipped(self, sample: int, row_id: str, reason: str) -> IndexRow:
        return IndexRow(sample, sample - self.samples.start, row_id, SKIPPED, reason=reason)
