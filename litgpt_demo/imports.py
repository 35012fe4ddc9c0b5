"""The import of large libraries, without the collection of garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Collect no garbage while this block imports libraries, and never look for garbage among their objects.

    A library's objects live as long as the process. Python would visit all of them at each of hundreds of collections:
    a fifth of the time that torch and LitGPT take to be imported, and a third of Prefect's server's.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
