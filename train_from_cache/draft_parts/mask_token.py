"""The id that stands for a token not known yet."""

from dspark.schemas.errors import InputError
from dspark.schemas.manifest import TargetFacts


def choose_mask_token(target: TargetFacts) -> int:
    """An id of the target's vocabulary that no text of its tokenizer contains.

    The first id past the tokenizer's own if the embedding table has spare rows, else the padding
    id unless it also ends turns.

    Raises:
        InputError: there is none.
    """
    rows = min(target.embedding_rows, target.vocab_size)
    used = target.text.get("tokenizer_size")
    if used is not None:
        taken = {target.image_token_id, target.video_token_id}
        spare = next((i for i in range(used, rows) if i not in taken), None)
        if spare is not None:
            return spare
    pad = target.pad_token_id
    if pad is not None and pad < rows and pad not in target.eos_token_ids:
        return pad
    raise InputError(
        "the draft needs an id that answers never contain, but the target's embedding table has no "
        "spare row and its padding token ends turns; choose one with -c mask_token_id=ID"
    )
