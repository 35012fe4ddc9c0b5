"""`python -m litgpt_demo <command> …`: what runs on the nodes, each command imported when it is asked for."""

from __future__ import annotations

import atexit
import contextlib
import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from importlib import import_module
from types import MappingProxyType

from litgpt_demo.errors import EXIT_CODES, Fault, TrainLitgptError, fault_of_exception
from litgpt_demo.node.printing import drop_what_does_not_fit
from litgpt_demo.proxies import settle_proxies

COMMANDS = MappingProxyType(
    {
        "node": "litgpt_demo.node.main:main",
        "train": "litgpt_demo.training.loop:main",
        "prepare": "litgpt_demo.data.preparation:main",
        "weights": "litgpt_demo.pretrained.staging:main",
        "verify": "litgpt_demo.data.verification:main",
        "windows": "litgpt_demo.data.windows:main",
        "collect": "litgpt_demo.export:main",
        "evaluate": "litgpt_demo.evaluation:main",
        "collectives": "litgpt_demo.node.collectives:main",
    }
)

LIGHTNING = frozenset({"train", "collect"})  # the commands that import Lightning
# torchmetrics imports them where they are installed, for metrics of texts and sounds and for plots; none is used here.
UNUSED_BY_METRICS = ("transformers", "matplotlib", "scipy")


@contextlib.contextmanager
def without_unused_metrics() -> Iterator[None]:
    """Hide from torchmetrics, which Lightning imports, what it would import and no rank uses.

    It spares each rank 5 of the 10 CPU seconds of its imports (torch 2.13, Lightning 2.6.6, torchmetrics 1.9), at
    every start and restart.
    """
    from lightning_utilities.core import imports

    class Requirement(imports.RequirementCache):
        def __bool__(self) -> bool:
            return not str(self.requirement).startswith(UNUSED_BY_METRICS) and super().__bool__()

    @cache
    def available(package_name: str) -> bool:
        return package_name not in UNUSED_BY_METRICS and is_available(package_name)

    usual, is_available = imports.RequirementCache, imports.package_available
    imports.RequirementCache = Requirement  # type: ignore[misc]
    imports.package_available = available
    try:
        yield
    finally:
        imports.RequirementCache = usual  # type: ignore[misc]
        imports.package_available = is_available


def main(argv: Sequence[str]) -> int:
    """Run one command; a failure that we know ends with its message and the exit code of its class."""
    if argv and argv[0] in {"-h", "--help"}:
        print(f"{__doc__}\n\ncommands: {', '.join(COMMANDS)}; each has --help")
        return 0
    if not argv or argv[0] not in COMMANDS:
        asked = f"{argv[0]!r} is not a command. " if argv else ""
        print(f"{asked}usage: python -m litgpt_demo {{{','.join(COMMANDS)}}} …", file=sys.stderr)
        return 2
    module, _, name = COMMANDS[argv[0]].partition(":")
    try:
        with without_unused_metrics() if argv[0] in LIGHTNING else contextlib.nullcontext():
            command: Callable[[Sequence[str]], int] = getattr(import_module(module), name)
            settle_proxies(os.environ)
            return command(argv[1:])
    except (TrainLitgptError, OSError) as error:
        fault = fault_of_exception(error)
        if not isinstance(error, TrainLitgptError) and fault is not Fault.DISK_FULL:
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_CODES[fault]


if __name__ == "__main__":
    # A process ends with several collections of garbage; each looks at all objects of torch.
    atexit.register(gc.freeze)
    drop_what_does_not_fit()
    sys.exit(main(sys.argv[1:]))
