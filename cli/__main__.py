"""The console script `train-litgpt`: signals are answered before the imports of the command line begin."""

from __future__ import annotations

import atexit
import gc

from cli import interrupts


def main() -> None:
    """Run the command line, and end on Ctrl-C from the first moment to the last."""
    interrupts.answer()
    atexit.register(gc.freeze)  # as in litgpt_demo.__main__, for the objects of Prefect
    from cli.main import main as command_line

    try:
        command_line()
    finally:
        interrupts.answer_at_once()


if __name__ == "__main__":
    main()
