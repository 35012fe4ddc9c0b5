"""The rules of the house, read off the source: who may import whom, what may be heavy, what may be asked."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

from launcher.networks import NETWORKS
from launcher.platforms import PLATFORMS

CHECKOUT = Path(__file__).parents[1]

# Arrows point downward; skipping is fine, upward never.
HOUSE = ("cli", "deployments", "flows", "tasks", "launcher", "litgpt_demo")
MAY_IMPORT = {package: set(HOUSE[place:]) for place, package in enumerate(HOUSE)}
KNOWS_PREFECT = {"cli", "deployments", "flows", "tasks"}

# What takes seconds or hundreds of megabytes to import, or is a cloud's SDK.
HEAVY = ("torch", "lightning", "litgpt", "gigatoken", "pyarrow", "matplotlib", "huggingface_hub", "kubernetes")
CLOUD = ("google.cloud", "google.auth", "google.api_core")

MODULES = [path for package in HOUSE for path in sorted((CHECKOUT / package).rglob("*.py"))]


def place(path: Path) -> str:
    return path.relative_to(CHECKOUT).as_posix()


def package(path: Path) -> str:
    return path.relative_to(CHECKOUT).parts[0]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def imports(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything that is imported; of `from a.b import c` it is `a.b.c`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, f"{'.' * node.level or node.module}.{alias.name}") for alias in node.names)


def imported(path: Path) -> list[tuple[int, str]]:
    """Line and top package."""
    return [(line, name.partition(".")[0]) for line, name in imports(parsed(path))]


def every_module(rule: Callable[[Path], None]) -> Callable[[], None]:
    """Make one test of a rule for all modules: two thousand tests that read a file would cost more than they do."""

    def test() -> None:
        broken = []
        for path in MODULES:
            try:
                rule(path)
            except AssertionError as error:
                broken.append(f"{place(path)}: {error}")
        assert not broken, "\n".join(broken)

    test.__doc__ = rule.__doc__
    return test


@every_module
def test_imports_go_downward_and_only_the_left_of_the_house_knows_prefect(module: Path) -> None:
    allowed = MAY_IMPORT[package(module)] | ({"prefect"} if package(module) in KNOWS_PREFECT else set())
    upward = [(line, name) for line, name in imported(module) if name in {*HOUSE, "prefect", ""} - allowed]
    assert upward == [], f"{package(module)} may import {sorted(allowed)}, by their full names"


# A pickle calls what it names: a stored one is read where the names are known, and weights as nothing but weights.
MAY_UNPICKLE = {
    "litgpt_demo/node/evidence.py": "the dump of torch's flight recorder, of which no name is followed",
    "litgpt_demo/training/reading.py": "the reader that knows what a checkpoint holds",
    "litgpt_demo/training/shards.py": "the size of an index that it writes",
}
_UNPICKLERS = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "FileSystemReader", "lazy_load"}
_INTERPRETERS = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}


def may_execute_what_it_reads(node: ast.AST) -> bool:
    """Whether it imports an unpickler, lets torch or numpy unpickle, or runs text or a model's own code."""
    match node:
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            dotted = [getattr(node, "module", None) or "", *(alias.name for alias in names)]
            return not _UNPICKLERS.isdisjoint(part for name in dotted for part in name.split("."))
        case ast.Call(func=func, keywords=keywords):
            given = {one.arg: ast.unparse(one.value) for one in keywords}
            careless = ast.unparse(func) == "torch.load" and given.get("weights_only") != "True"
            allowed = {given.get("allow_pickle", "False"), given.get("trust_remote_code", "False")} != {"False"}
            return careless or allowed or ast.unparse(func) in _INTERPRETERS
    return False


@every_module
def test_no_stored_pickle_is_executed(module: Path) -> None:
    lines = [getattr(node, "lineno", 0) for node in ast.walk(parsed(module)) if may_execute_what_it_reads(node)]
    assert bool(lines) == (place(module) in MAY_UNPICKLE), f"lines {lines}: use litgpt_demo.training.reading"


@every_module
def test_every_python_is_started_without_the_current_folder_on_its_path(module: Path) -> None:
    started = [
        node.lineno
        for node in ast.walk(parsed(module))
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "sys.executable"
    ]
    assert started == [] or place(module) == "litgpt_demo/__init__.py", f"lines {started}: use litgpt_demo.PYTHON"


# A network is one file: what another module would ask of its name is asked of its `Profile` or `Network` instead.
MAY_NAME_A_NETWORK = {
    "litgpt_demo/node/network.py": "what a node has that is told of no network",
    "launcher/images/stacks.py": "a stack is named after the network that it was made for",
    "launcher/images/docker.py": "a word of Docker's: how it shows its progress",
}


@every_module
def test_a_networks_name_stands_in_its_own_file(module: Path) -> None:
    own = {f"launcher/networks/{name}.py" for name in NETWORKS}
    strings = (node for node in ast.walk(parsed(module)) if isinstance(node, ast.Constant) and node.value in NETWORKS)
    named = [] if place(module) in own else [(node.lineno, node.value) for node in strings]
    assert bool(named) == (place(module) in MAY_NAME_A_NETWORK), f"{named}: ask its profile (launcher.networks)"


# --- platforms: a folder each, and nobody asks which one it is --------------------------------------------------------

REGISTRY = "launcher/platforms/__init__.py"
KINDS = {*PLATFORMS, *(name.split(".")[2] for name in PLATFORMS.values())}


def platform_of(path: str) -> str | None:
    """The platform whose folder a module is in, or a dotted name is below."""
    parts = path.replace("/", ".").split(".")
    return parts[2] if parts[:2] == ["launcher", "platforms"] and len(parts) > 3 and parts[2] in KINDS else None


@every_module
def test_a_platform_is_imported_in_its_own_folder_only(module: Path) -> None:
    mine = platform_of(place(module))
    foreign = [(line, name) for line, name in imports(parsed(module)) if platform_of(f"{name}.") not in {None, mine}]
    assert foreign == [], "ask launcher.platforms.settings or launcher.platforms.base"


@every_module
def test_nobody_asks_which_platform_it_is(module: Path) -> None:
    """A comparison needs a platform's name, which only its own folder has; a look for a setting needs `getattr`."""
    if place(module) == REGISTRY:
        return
    own = platform_of(place(module)) is not None
    asked = [
        (node.lineno, ast.unparse(node))
        for node in ast.walk(parsed(module))
        if (isinstance(node, ast.Constant) and node.value in KINDS and not own)
        or (
            isinstance(node, ast.Call)
            and ast.unparse(node.func) in {"getattr", "hasattr"}
            and ast.unparse(node.args[0]).endswith("platform")
        )
    ]
    assert asked == [], "put the question on launcher.platforms.settings.PlatformSettings or on the Platform"


def brought_by(folder: str) -> set[str]:
    """Every module that a fresh Python has after importing all of a folder."""
    paths = [path.relative_to(CHECKOUT).with_suffix("") for path in MODULES if package(path) in folder.split()]
    names = [".".join(path.parts) for path in paths if path.name not in {"__init__", "__main__"}]
    program = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(*sys.modules)"
    command = [sys.executable, "-c", program, *names]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_launcher_brings_neither_torch_nor_a_cloud_nor_prefect_which_flows_bring() -> None:
    """The command line imports it; a worker imports flows for every run, and a server for every deployment."""
    launcher, flows = brought_by("launcher"), brought_by("flows tasks deployments")
    assert (launcher | flows).isdisjoint({*HEAVY, *CLOUD})
    assert "prefect" in flows - launcher


def test_every_file_that_a_package_reads_is_installed_with_it() -> None:
    data = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folders = {CHECKOUT / package.replace(".", "/"): patterns for package, patterns in data.items()}
    installed = {file for folder, patterns in folders.items() for pattern in patterns for file in folder.glob(pattern)}
    files = {file for package in HOUSE for file in (CHECKOUT / package).rglob("*") if file.is_file()}
    assert {file for file in files if file.suffix not in {".py", ".pyc"}} <= installed
