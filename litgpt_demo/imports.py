"""The import of large libraries, without the collection of garbage and without optional parts of theirs."""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.metadata import DistributionFinder, PackageNotFoundError


class _Hiding:
    """A finder for `sys.meta_path` to which packages are not installed
    (https://docs.python.org/3/library/importlib.metadata.html#extending-the-search-algorithm)."""

    def __init__(self, packages: Collection[str]) -> None:
        self._packages = packages

    def find_spec(self, name: str | None, path: object = None, target: object = None) -> None:
        if name in self._packages:
            raise PackageNotFoundError(name)

    def find_distributions(self, context: DistributionFinder.Context) -> tuple[()]:
        self.find_spec(context.name)
        return ()


@contextmanager
def importing(*, hidden: Collection[str] = ()) -> Iterator[None]:
    """Collect no garbage while this block imports libraries, and never look for garbage among their objects.

    A library's objects live as long as the process. Python would visit all of them at each of hundreds of collections:
    a fifth of the time that torch and LitGPT take to be imported, and a third of Prefect's server's. The `hidden`
    packages look to libraries as if they were not installed; other threads must not import meanwhile.
    """
    finder = _Hiding(hidden)
    sys.meta_path.insert(0, finder)
    gc.disable()
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        gc.freeze()
        gc.enable()
