"""What decoder layers hand on for each token, as one vector a token.

Most models hand on ``[B, L, H]``. Some keep n parallel residual streams, told apart by shape:
``[n, B, L, H]`` (AltUp), ``[B, L, n, H]`` or ``[B, L, n·H]`` (hyper-connections). A draft reads one
vector a token, so these are stored as the mean over the streams, and the manifest says so.
"""

from torch import Tensor

from dspark.schemas.errors import InputError


def gather_rows(hidden: Tensor, real: Tensor, width: int) -> tuple[Tensor, int]:
    """The real rows of a layer's input, averaged over its streams.

    Args:
        hidden: what a decoder layer receives.
        real: bool ``[B, L]``, which positions to gather.
        width: H.

    Returns:
        A new tensor ``[R, H]`` of the same type, and the number of streams: 1 in most models.

    Raises:
        InputError: the shape is none of those known.
    """
    real = real.to(hidden.device)
    shape, tokens = tuple(hidden.shape), tuple(real.shape)
    if shape == (*tokens, width):
        return hidden[real], 1
    if len(shape) == 4 and shape[-1] == width:
        if shape[:2] == tokens:
            return hidden[real].mean(1), shape[2]
        if shape[1:3] == tokens:
            return hidden[:, real].mean(0), shape[0]
    if len(shape) == 3 and shape[:2] == tokens and shape[2] % width == 0:
        return hidden[real].unflatten(-1, (-1, width)).mean(1), shape[2] // width
    raise InputError(
        f"a decoder layer receives {list(shape)} for {list(tokens)} tokens of width {width}, which "
        "is not a residual stream; use --layers none to capture the target without its layers"
    )
