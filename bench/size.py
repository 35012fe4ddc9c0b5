"""How large is the house? Lines, files, and what makes it slow to read, beside what was asked: `make size`."""

from __future__ import annotations

import ast
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
from corpora import as_parquet, prepared
from test_architecture import source
from test_size import ALLOWED, CHECKOUT, lines

from cli.main import read_config
from launcher.checks.plan import previews
from litgpt_demo.data.dataset import open_split

ASKED = (26_000, 13_200, 2_950, 10_200, 800, 25_000, 15_000)  # of the parts of tests/test_size.py, in their order


def files_of(work: Callable[[], object]) -> int:
    """The number of source files of which code runs, in any thread. A first time imports all that is needed."""
    work()
    seen: set[str] = set()
    for module in (threading, sys):
        module.setprofile(lambda frame, event, arg: seen.add(frame.f_code.co_filename))
    work()
    for module in (threading, sys):
        module.setprofile(None)
    return len(seen & {str(CHECKOUT / path) for path in source()})


def a_document() -> None:
    """A row of parquet becomes part of a batch."""
    with tempfile.TemporaryDirectory() as folder:
        (corpus := Path(folder, "texts")).mkdir()
        (corpus / "a.parquet").write_bytes(as_parquet([f"{number} bottles on the wall" for number in range(1000)]))
        manifest, dataset = prepared(corpus, Path(folder, "root"))
        open_split(dataset, manifest, manifest.train, length=32).read(np.arange(4))


def main() -> None:
    """Print a row for each figure."""
    nodes = [node for tree in source().values() for node in tree]
    uses = Counter(node.id if isinstance(node, ast.Name) else getattr(node, "attr", "") for node in nodes)
    functions = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    once = [name for name in functions if name.startswith("_") and not name.endswith("__") and uses[name] == 1]
    rendering = files_of(lambda: previews(read_config(CHECKOUT / "deployments/configs/gke-tcpx.yaml", [])))
    naming = ["learning_rate" in ast.unparse(tree[0]) for tree in source().values()]
    rows = [(f"lines of {name}", lines(name), target) for name, target in zip(ALLOWED, ASKED, strict=True)]
    rows += [
        ("lines of cli, deployments, flows, tasks", sum(map(lines, ("cli", "deployments", "flows", "tasks"))), 2_750),
        ("source files", len(source()), 200),
        ("private functions that are called once", len(once), 150),
        ("source files that name train.learning_rate", sum(naming), 7),
        ("source files of which code runs while a pod with tcpx is rendered", rendering, 8),
        ("source files of which code runs from parquet to a batch", files_of(a_document), 12),
    ]
    print("| what | now | asked |\n|---|---|---|")
    for what, now, target in rows:
        print(f"| {what} | {now:,} | {target:,} |")


if __name__ == "__main__":
    main()
