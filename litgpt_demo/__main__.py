"""`python -m litgpt_demo <command> …`: the commands of the nodes, each imported when it is called."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module

from litgpt_demo.errors import FailureClass, TrainLitgptError, UserError, fault_of_exception
from litgpt_demo.imports import importing
from litgpt_demo.node.logs import drop_lines_without_room
from litgpt_demo.proxies import settle_proxies

COMMANDS = {
    "node": "litgpt_demo.node.main",
    "train": "litgpt_demo.training.loop",
    "replay": "litgpt_demo.training.replaying",
    "compare": "litgpt_demo.training.starting",
    "prepare": "litgpt_demo.data.preparation",
    "windows": "litgpt_demo.data.batches",
    "collect": "litgpt_demo.export.models",
    "collectives": "litgpt_demo.node.collectives",
}


def main(argv: Sequence[str]) -> int:
    """Run one command. A known failure ends with its message and the exit code of its class."""
    if argv and argv[0] in {"-h", "--help"}:
        print(f"{__doc__}\n\ncommands: {', '.join(COMMANDS)}; each has --help")
        return 0
    if not argv or argv[0] not in COMMANDS:
        print(f"usage: python -m litgpt_demo {{{','.join(COMMANDS)}}} …", file=sys.stderr)
        return 2
    try:
        if argv[0] in {"train", "replay", "collect"}:
            from litgpt_demo.node.checks import check_packages

            for finding in check_packages(os.environ):
                raise UserError(finding.what, fix=finding.fix)
        # Extras of torchmetrics, which lightning imports: half of the time of all imports.
        with importing(hidden={"transformers", "matplotlib"}):
            command: Callable[[Sequence[str]], int] = import_module(COMMANDS[argv[0]]).main
        settle_proxies(os.environ)
        return command(argv[1:])
    except (TrainLitgptError, OSError) as error:
        fault = fault_of_exception(error)
        if not isinstance(error, TrainLitgptError) and fault is not FailureClass.DISK_FULL:
            raise
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return fault.exit_code


def _leave(ended: Sequence[int]) -> None:
    """End the process of a command that has returned, after all other exit handlers and before Python finalizes.

    A thread of gloo that still holds a tensor needs Python to release it. During finalization this aborts the rank,
    though its training is complete (https://github.com/pytorch/pytorch/pull/179291, torch 2.13).
    """
    if ended:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):  # its reader has ended
                stream.flush()
        os._exit(ended[0])


if __name__ == "__main__":
    codes: list[int] = []
    atexit.register(_leave, codes)  # the first that is registered is called last
    drop_lines_without_room()
    codes.append(main(sys.argv[1:]) or 0)  # torch returns None for the exit after --help
    sys.exit(codes[0])
