"""Commands that let a trained model write, wherever it lies."""

from __future__ import annotations

import json
import shlex

from litgpt_demo.storage import bucket_path


def use_of(folder: str, name: str) -> tuple[str, ...]:
    """Return shell commands that let the LitGPT model in `folder` write, which first copy it here from a bucket.

    Args:
        name: the run's, which the copy is called after.
    """
    copy: tuple[str, ...] = ()
    if bucket_path(folder) is not None:
        copy, folder = (shlex.join(["gcloud", "storage", "cp", "-r", folder, name]),), name
    # JSON's strings are Python's, and their quotes need no escape within the shell's.
    program = f'from litgpt import LLM; print(LLM.load({json.dumps(folder)}).generate("Once upon a time"))'
    return (*copy, shlex.join(["python", "-c", program]))
