"""What the trainer asks of a draft. A draft is one file; its parts come in this order:
config, needed fields, module, loss, prediction.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from dspark.schemas.manifest import Manifest
from dspark.train_from_cache.batch import Anchors, Batch, LossTerm
from dspark.train_from_cache.cache import Cache
from dspark.train_from_cache.draft_parts.row_random import RowRandom
from dspark.train_from_cache.target_head import TargetHead
from dspark.train_from_cache.teacher import Teacher


class Draft(PreTrainedModel):
    """A draft model. Tensor and config names are those that serving engines load.

    Attributes:
        arch: the name under ``--arch``.
        frozen: modules whose weights are the target's: saved, never trained.
        aliases: beginnings of tensor names in checkpoints of others, with what they are here.
        added: modules that a config entry may add to a draft that was trained without them.
    """

    arch: ClassVar[str]
    frozen: ClassVar[tuple[str, ...]] = ()
    aliases: ClassVar[dict[str, str]] = {}
    added: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> Any:
        """As in transformers, whose loading makes every parameter trainable."""
        loaded = super().from_pretrained(*args, **kwargs)
        (loaded[0] if isinstance(loaded, tuple) else loaded).freeze()
        return loaded

    def freeze(self) -> None:
        """Make what the draft shares with the target untrainable."""
        for name in self.frozen:
            self.get_submodule(name).requires_grad_(False)

    @classmethod
    @abstractmethod
    def config_from_cache(cls, manifest: Manifest, overrides: dict[str, Any]) -> PreTrainedConfig:
        """The config of a fresh draft for the target of a cache.

        Args:
            manifest: of the cache.
            overrides: config entries that the user set.

        Raises:
            InputError: an override that this draft does not have or cannot take.
        """

    @classmethod
    @abstractmethod
    def needed_fields(cls, config: PreTrainedConfig) -> list[str]:
        """Stored fields that the draft itself reads (those of the teacher come on top)."""

    @abstractmethod
    def attach_head(self, head: TargetHead) -> None:
        """Copy what the draft shares with the target into frozen parameters of its own."""

    def start(self, cache: Cache, rows: Sequence[int], head: TargetHead) -> dict[str, float]:
        """Give a fresh draft what it takes from the cache before its first update. Not called on a
        draft that is loaded; a resumed training calls it again before it loads its state.

        Args:
            cache: the target's features.
            rows: dataset rows to train on.
            head: of the target, already attached.

        Returns:
            Facts that are recorded with every evaluation, by name.
        """
        return {}

    @property
    @abstractmethod
    def depth(self) -> int:
        """K: draft tokens proposed in a round."""

    @abstractmethod
    def forward(self, batch: Batch, teacher: Teacher, random: RowRandom) -> dict[str, LossTerm]:
        """The loss of a batch, term by term.

        Args:
            batch: the draft's inputs.
            teacher: the target's predictions for it.
            random: the only source of randomness.
        """

    @abstractmethod
    def predict(self, batch: Batch, anchors: Anchors) -> Tensor:
        """What the draft would propose at each anchor, its earlier proposals being the true tokens.

        Returns:
            float32 logits ``[n, K, V]``; entry k is the distribution of ``x[a+1+k]`` after
            ``x[a+1] … x[a+k]``. It uses features of positions before ``a`` alone. Entries whose
            token lies beyond the row are arbitrary.
        """

    def confidence_logits(self, batch: Batch, anchors: Anchors) -> Tensor | None:
        """How far the draft trusts each proposal of ``predict``, if it says so.

        Returns:
            float32 ``[n, K]``; the sigmoid of entry k is to be the rate at which it is accepted
            where those before it were. None for a draft without a confidence head.
        """
        return None
