"""The rows of one shard, and what is made sure of while they are captured."""

from collections.abc import Iterator, Sequence

from dspark.capture.bad_row import stop_if_asked
from dspark.capture.conversations import Conversations
from dspark.capture.plan import CapturePlan
from dspark.capture.rendering.encoded_rows import EncodedRow, SkippedRow, encode_row
from dspark.capture.targets.features import Features
from dspark.capture.targets.logits import prove_head
from dspark.capture.targets.target import Target
from dspark.schemas.index import OK, SKIPPED, IndexRow

NON_FINITE = "non-finite features"
"""Why a row is skipped that the target ran on, in its batch."""


class NewShard:
    """A shard of a new cache: each of its rows is encoded, and the head is proved on a batch.

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

    def encode(self) -> Iterator[EncodedRow | IndexRow]:
        """Each row, in order, or the index entry of one that is skipped before it runs."""
        for sample in self.samples:
            row = self.encode_row(sample)
            yield self._skipped(sample, row.id, row.reason) if isinstance(row, SkippedRow) else row

    def encode_row(self, sample: int) -> EncodedRow | SkippedRow:
        max_length = self.plan.manifest.max_length
        return encode_row(sample, self.conversations, self.target, max_length, self.plan.options)

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
            image_tokens=int(row.image_mask.sum()),
            loss_tokens=int(row.loss_mask.sum()),
        )

    def _skipped(self, sample: int, row_id: str, reason: str) -> IndexRow:
        return IndexRow(sample, sample - self.samples.start, row_id, SKIPPED, reason=reason)
