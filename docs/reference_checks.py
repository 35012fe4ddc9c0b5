"""The page of check codes, written from their registry."""

from __future__ import annotations

from collections.abc import Mapping

from docs.markdown import page, table
from litgpt_demo.codes import CODES

_PLANS = "`train-litgpt plan` and `run` check it before anything starts."
_NODES = "Each node checks it before its ranks start."
_BOTH = "`train-litgpt plan` and `run` check the settings, and each node checks its machine."
AREAS: Mapping[str, tuple[str, str]] = {
    "data": (f"The corpus and the dataset. {_PLANS}", "Use your own files: ../howto/data-files.md"),
    "dataset_workers": (
        f"The workers that prepare a dataset. {_PLANS}",
        "Prepare a large corpus: ../howto/data-dask.md",
    ),
    "model": (f"The model and its initial weights. {_PLANS}", "Start from existing weights: ../howto/init-weights.md"),
    "train": (f"The settings of the training. {_PLANS}", "Fit a larger model: ../howto/fit-model.md"),
    "evaluation": (f"The evaluation. {_PLANS}", "Score a model: ../howto/evaluate.md"),
    "sweep": (f"The trials of a sweep. {_PLANS}", "Run a grid or a search: ../howto/sweep.md"),
    "run": (f"The run and its jobs. {_PLANS}", "Runs, attempts and jobs: ../concepts/runs.md"),
    "attempt": (f"The next attempt of the run. {_PLANS}", "Runs, attempts and jobs: ../concepts/runs.md"),
    "root": (f"The place of the run's files. {_PLANS}", ""),
    "script": (f"Your own script. {_PLANS}", ""),
    "platform": (f"Settings that all platforms have. {_PLANS}", ""),
    "image": (_BOTH, "Images and reproducibility: ../concepts/images.md"),
    "network": (_BOTH, "GPU networks and NCCL: ../concepts/networks.md"),
    "nccl": (_BOTH, "GPU networks and NCCL: ../concepts/networks.md"),
    "gpu": (f"The GPUs of a node. {_NODES}", ""),
    "node": (f"The arguments and the machine of a node. {_NODES}", ""),
    "torch": (f"The torch of the ranks. {_NODES}", ""),
    "python": ("`train-litgpt doctor` lists it, and each node checks it.", ""),
    "package": ("`train-litgpt doctor` lists it.", ""),
    "tool": ("`train-litgpt doctor` lists it.", ""),
    "machine": ("`train-litgpt doctor` lists it.", ""),
    "prefect": ("`train-litgpt doctor` lists it.", "Run a server for a team: ../howto/team-server.md"),
    "local": (f"Jobs on this machine. {_PLANS}", "This machine: ../platforms/local.md"),
    "kubernetes": (
        f"The cluster of a job on GKE or another Kubernetes. {_PLANS}",
        "Kubernetes: ../platforms/kubernetes.md",
    ),
    "kubernetes.pending": (
        "`run` and `train-litgpt status` show it while a job waits.",
        "Kubernetes: ../platforms/kubernetes.md",
    ),
    "runai": (f"Jobs on Run:ai. {_PLANS}", "Run:ai: ../platforms/runai.md"),
    "batch": (f"Jobs on GCP Batch. {_PLANS}", "GCP Batch: ../platforms/batch.md"),
    "slurm": (f"Jobs on Slurm. {_PLANS}", "Slurm: ../platforms/slurm.md"),
    "slurm.pending": ("`run` and `train-litgpt status` show it while a job waits.", "Slurm: ../platforms/slurm.md"),
}
"""The first words of codes: where they come from, and the title and the link of the guide, if there is one."""


def checks() -> str:
    """Return the page of check codes."""
    sections = []
    for area, (origin, guide) in AREAS.items():
        rows = [
            (f'<a id="{code}"></a>`{code}`', check.severities, check.summary, check.cause, check.fix)
            for code, check in sorted(CODES.items())
            if area_of(code) == area
        ]
        title, _, link = guide.partition(": .")
        more = f" Guide: [{title}](.{link})." if guide else ""
        sections += [f"## `{area}`", f"{origin}{more}", table("code", "severity", "meaning", "cause", "fix", rows=rows)]
    return page(
        "Check codes",
        "litgpt_demo/codes.py",
        "Use this page to look up the code of a finding, which is printed in brackets or at the end of its line: "
        "`[gpu.count]`.",
        "An `error` stops the run. `unknown` could not be checked from this machine: `plan` continues without it, but "
        "`run` refuses it. A `warning` and an `info` stop nothing. The address of a code on this page is "
        "`docs/reference/checks.md#CODE`.",
        *sections,
    )


def area_of(code: str) -> str:
    """Return the area of a code."""
    area, _, rest = code.partition(".")
    return f"{area}.pending" if rest.startswith("pending.") else area
