"""How large is the house? Lines, files, and what makes it slow to read, beside what was asked: `make size`."""

from __future__ import annotations

import ast
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from corpora import as_parquet, prepared
from test_architecture import source
from test_size import ALLOWED, CHECKOUT, SOURCE, lines

from cli.main import read_config
from launcher.checks.plan import previews
from litgpt_demo.data.batches import open_split

ASKED = {
    "source": 26_000, "launcher": 13_200, "launcher/platforms/kubernetes": 2_950, "litgpt_demo": 10_200, "bench": 800,
    "tests": 25_000, "test data": 15_000,
}  # fmt: skip


def imports(tree: ast.AST, known: set[str]) -> Iterator[str]:
    """The modules of ours that this one imports, also in functions; those that types alone need are left out."""
    conditions = [node for node in ast.walk(tree) if isinstance(node, ast.If)]
    typed = [inner for one in conditions if ast.unparse(one.test) == "TYPE_CHECKING" for inner in ast.walk(one)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module in known and node not in typed:
            named = {f"{node.module}.{alias.name}" for alias in node.names}
            yield from named & known or {str(node.module)}


def circles(arrows: set[tuple[str, str]]) -> int:
    """The number of groups in which each leads to every other one."""
    ways = {one: {two for start, two in arrows if start == one} for one, _ in arrows}
    for via in ways:
        for found in ways.values():
            found |= ways[via] if via in found else set()
    return len({frozenset(two for two in ways[one] if one in ways.get(two, ())) for one in ways if one in ways[one]})


def files_of(work: Callable[[], object]) -> int:
    """The number of source files of which code runs, in any thread. A first time imports all that is needed."""
    work()
    seen: set[str] = set()
    for module in (threading, sys):
        module.setprofile(lambda frame, event, arg: seen.add(frame.f_code.co_filename))
    work()
    for module in (threading, sys):
        module.setprofile(None)
    return sum(path.startswith(tuple(f"{CHECKOUT / part}/" for part in SOURCE)) for path in seen)


def a_pod() -> None:
    """A config becomes what is sent."""
    assert list(previews(read_config(CHECKOUT / "deployments/configs/gke-tcpx.yaml", [])))


def a_document() -> None:
    """A row of parquet becomes part of a batch."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "texts")
        source.mkdir()
        (source / "a.parquet").write_bytes(as_parquet([f"{number} bottles on the wall" for number in range(1000)]))
        manifest, dataset = prepared(source, Path(folder, "root"))
        open_split(dataset, manifest, manifest.train, length=32).read(np.arange(4))


def main() -> None:
    """Print a row for each figure."""
    trees = {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): tree
        for path, (tree, *_) in source().items()
    }
    arrows = {(one, two) for one, tree in trees.items() for two in imports(tree, set(trees)) if one != two}
    parents = {name.rpartition(".")[0] for name in trees}
    # A module at the top, such as launcher.errors, counts for itself.
    inner = {name: name if name in parents or name.count(".") < 2 else name.rpartition(".")[0] for name in trees}
    packages = {(inner[one], inner[two]) for one, two in arrows if inner[one] != inner[two]}
    nodes = [node for tree in trees.values() for node in ast.walk(tree)]
    uses = Counter(node.id for node in nodes if isinstance(node, ast.Name))
    uses.update(node.attr for node in nodes if isinstance(node, ast.Attribute))
    functions = [node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    once = [name for name in functions if name.startswith("_") and not name.endswith("__") and uses[name] == 1]
    rest = sum(lines(name) for name in ("cli", "deployments", "flows", "tasks"))
    naming = sum("learning_rate" in ast.unparse(tree) for tree in trees.values())
    rows = [(f"lines of {name}", lines(name), ASKED[name]) for name in ALLOWED]
    rows += [
        ("lines of cli, deployments, flows, tasks", rest, 2_750),
        ("source files", len(trees), 200),
        ("private functions that are called once", len(once), 150),
        ("circles among files", circles(arrows), 0),
        ("circles among packages", circles(packages), 0),
        ("source files that name train.learning_rate", naming, 7),
        ("source files of which code runs while a pod with tcpx is rendered", files_of(a_pod), 8),
        ("source files of which code runs from parquet to a batch", files_of(a_document), 12),
    ]
    print("| what | now | asked |\n|---|---|---|")
    for what, now, asked in rows:
        print(f"| {what} | {now:,} | {asked:,} |")


if __name__ == "__main__":
    main()
