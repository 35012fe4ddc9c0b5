"""The use of a collected model: what its card, its report and the command line show."""

from __future__ import annotations

import json
import shlex

from litgpt_demo.runs import FINAL, HUGGINGFACE, LITGPT
from litgpt_demo.storage import bucket_path


def usage(run: str, *, huggingface: bool) -> str:
    """Return Python that lets the models of the run at this address write, from whatever folder it is run in.

    No library opens a model in a bucket: there it begins with how to bring it here.
    """
    remote = bucket_path(run) is not None
    # Into a folder that is there, so that the copy has the same name whatever was copied before.
    lines = [f"# first, in a shell: gcloud storage cp --recursive {run}/{FINAL} ."] if remote else []
    folder = "" if remote else f"{run}/"
    lines += ["from litgpt import LLM", f'print(LLM.load({f"{folder}{LITGPT}"!r}).generate("Once upon a time"))']
    if huggingface:
        where = repr(f"{folder}{HUGGINGFACE}")
        lines += [
            "",
            "from transformers import AutoModelForCausalLM, AutoTokenizer",
            f"tokenizer = AutoTokenizer.from_pretrained({where})",
            f"model = AutoModelForCausalLM.from_pretrained({where})",
            'ids = tokenizer("Once upon a time", return_tensors="pt").input_ids',
            "print(tokenizer.decode(model.generate(ids, max_new_tokens=50)[0]))",
        ]
    return "\n".join(lines)


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
