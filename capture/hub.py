"""Without network, what is in the local Hugging Face cache is used at once."""

from collections.abc import Iterator
from contextlib import contextmanager

_TIMEOUT = 10.0
"""Seconds for the Hub's first answer."""


@contextmanager
def offline_if_unreachable() -> Iterator[None]:
    """Ask the Hub once; inside, its clients stay offline if it cannot be reached.

    Otherwise each file that they look for costs six tries and 23 seconds or more.
    """
    from huggingface_hub import constants, get_session

    before = constants.HF_HUB_OFFLINE
    try:
        if not before:
            get_session().head(constants.ENDPOINT, timeout=_TIMEOUT)
    except Exception:  # what the HTTP library raises differs between its versions
        constants.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        constants.HF_HUB_OFFLINE = before
