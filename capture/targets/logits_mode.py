"""The forms of ``--logits``."""

from dspark.schemas.errors import InputError


def check_logits_option(logits: str) -> None:
    """Check the form of ``--logits``.

    Raises:
        InputError: it is none of the known forms.
    """
    if logits in ("auto", "full", "head"):
        return
    count = logits.removeprefix("topk:")
    if not logits.startswith("topk:") or not count.isdigit() or int(count) < 1:
        raise InputError(f"--logits {logits}: choose auto, full, head, or topk:K with K at least 1")


def resolve_logits(logits: str, *, hidden_size: int, vocab_size: int, hidden_fields: float) -> str:
    """Turn ``auto`` into ``full`` where logits cost no more than all other floats, else ``head``.

    Raises:
        InputError: ``topk:K`` with K beyond the vocabulary.
    """
    if logits == "auto":
        return "full" if vocab_size <= hidden_size * hidden_fields else "head"
    if logits.startswith("topk:") and int(logits.removeprefix("topk:")) > vocab_size:
        raise InputError(f"--logits {logits}: the target has {vocab_size} logits")
    return logits
