"""The use of a collected model: Python that its card and its report show."""

from __future__ import annotations

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
