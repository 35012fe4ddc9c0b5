"""`python -m litgpt_demo <command> …`: what runs on the nodes, each command imported when it is asked for."""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import MappingProxyType

from litgpt_demo.errors import Fault, TrainLitgptError, fault_of_exception
from litgpt_demo.node.printing import drop_what_does_not_fit
from litgpt_demo.proxies import settle_proxies

COMMANDS = MappingProxyType(
    {
        "node": "litgpt_demo.node.main:main",
        "train": "litgpt_demo.training.loop:main",
        "prepare": "litgpt_demo.data.preparation:main",
        "verify": "litgpt_demo.data.dataset:main",
        "windows": "litgpt_demo.data.batches:main",
        "collect": "litgpt_demo.export:main",
        "collectives": "litgpt_demo.node.collectives:main",
    }
)


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
    command: Callable[[Sequence[str]], int] = getattr(import_module(module), name)
    try:
        settle_proxies(os.environ)
        return command(argv[1:])
    except (TrainLitgptError, OSError) as error:
        fault = fault_of_exception(error)
        if not isinstance(error, TrainLitgptError) and fault is not Fault.DISK_FULL:
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return fault.exit_code


if __name__ == "__main__":
    # A process ends with several collections of garbage; each looks at all objects of torch.
    atexit.register(gc.freeze)
    drop_what_does_not_fit()
    sys.exit(main(sys.argv[1:]))
