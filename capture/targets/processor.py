"""The part of a target that turns conversations into its inputs: no weights, any process."""

from dataclasses import dataclass
from typing import Any, Protocol


class EncodesRows(Protocol):
    """What encoding a row needs of a target: a ``TargetProcessor``, or a whole ``Target``."""

    @property
    def processor(self) -> Any: ...

    @property
    def tokenizer(self) -> Any: ...

    @property
    def image_token_id(self) -> int | None: ...


@dataclass(frozen=True)
class TargetProcessor:
    """Attributes:
    processor: of the model; the tokenizer itself for a text-only target.
    config: of the model.
    image_token_id: placeholder of a picture position; None in a text-only target.
    """

    processor: Any
    config: Any
    image_token_id: int | None

    @property
    def tokenizer(self) -> Any:
        return getattr(self.processor, "tokenizer", self.processor)
