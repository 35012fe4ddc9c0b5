"""The rules of the house, read off the source: who may import whom, what may be heavy, what may be asked."""

import ast
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

from launcher.networks import NETWORKS
from launcher.platforms import PLATFORMS

CHECKOUT = Path(__file__).parents[1]

# Arrows point downward; skipping is fine, upward never.
HOUSE = ("train_litgpt", "cli", "deployments", "flows", "tasks", "launcher", "litgpt_demo")
KNOWS_PREFECT = ("cli", "deployments", "flows", "tasks")

# What takes seconds or hundreds of megabytes to import, or is a cloud's SDK.
HEAVY = {"torch", "lightning", "litgpt", "gigatoken", "pyarrow", "matplotlib", "huggingface_hub", "kubernetes"}
CLOUD = {"google.cloud", "google.auth", "google.api_core"}


@cache
def source() -> dict[str, list[ast.AST]]:
    """Path below the checkout to the nodes of the module."""
    files = [file for package in HOUSE for file in sorted((CHECKOUT / package).rglob("*.py"))]
    return {file.relative_to(CHECKOUT).as_posix(): [*ast.walk(ast.parse(file.read_bytes()))] for file in files}


@cache
def imports(path: str) -> list[tuple[int, str]]:
    """Line and dotted name of everything that is imported; of `from a.b import c` it is `a.b.c`."""
    found = []
    for node in source()[path]:
        match node:
            case ast.Import(names=names):
                found += [(node.lineno, alias.name) for alias in names]
            case ast.ImportFrom(names=names, module=module, level=level):
                found += [(node.lineno, f"{'.' * level or module}.{alias.name}") for alias in names]
    return found


def require(rule: Callable[[str], list[tuple[int, str]]], advice: str) -> None:
    """No module of ours breaks the rule, which tells lines and what is wrong there."""
    assert not [f"{path}:{line} {what}" for path in source() for line, what in rule(path)], advice


def test_imports_go_downward() -> None:
    """Only the launching side imports Prefect."""

    def upward(path: str) -> list[tuple[int, str]]:
        package = path.partition("/")[0]
        allowed = {*HOUSE[HOUSE.index(package) :], *(("prefect",) if package in KNOWS_PREFECT else ())}
        return [
            imported for imported in imports(path) if imported[1].partition(".")[0] in {*HOUSE, "prefect", ""} - allowed
        ]

    require(upward, "import from packages further down, by their full names")


def test_files_or_packages_never_import_each_other_in_a_circle() -> None:
    modules = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in source()}
    # A module at the top, such as launcher.errors, counts for itself.
    packages = {name: name.rpartition(".")[0] if name.count(".") > 1 else name for name in modules}
    files, below = ({name: set[str]() for name in ones} for ones in (modules, packages.values()))
    for name, path in modules.items():
        conditions = [node for node in source()[path] if isinstance(node, ast.If)]
        typed = {inner.lineno for name in conditions if "TYPE" in ast.unparse(name.test) for inner in name.body}
        for line, what in imports(path):
            found = what if what in modules else what.rpartition(".")[0]
            if found in modules and found != name and line not in typed:
                files[name].add(found)
                below[packages[name]] |= {packages[found]} - {packages[name]}
    for graph in (files, below):
        TopologicalSorter(graph).prepare()  # raises CycleError with the circle


# A pickle calls what it names: a stored one is read where the names are known, and weights as nothing but weights.
MAY_UNPICKLE = {
    "litgpt_demo/node/evidence.py": "the dump of torch's flight recorder, of which no name is followed",
    "litgpt_demo/training/checkpoint_reader.py": "the reader that knows what a checkpoint holds",
    "litgpt_demo/training/saving.py": "the size of an index that it writes",
}
_UNPICKLERS = {"pickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "FileSystemReader", "lazy_load"}
_INTERPRETERS = {"eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}


def executes_what_it_reads(node: ast.AST) -> bool:
    """Whether it lets torch or numpy unpickle, or runs text or a model's own code."""
    if not isinstance(node, ast.Call):
        return False
    called, arguments = ast.unparse(node.func), {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
    careless = called == "torch.load" and arguments.get("weights_only") != "True"
    allowed = {arguments.get("allow_pickle", "False"), arguments.get("trust_remote_code", "False")} != {"False"}
    return careless or allowed or called in _INTERPRETERS


def test_no_stored_pickle_is_executed() -> None:
    found = {path for path in source() if any(map(executes_what_it_reads, source()[path]))}
    found |= {path for path in source() for _, name in imports(path) if not _UNPICKLERS.isdisjoint(name.split("."))}
    assert found == MAY_UNPICKLE.keys(), "use litgpt_demo.training.checkpoint_reader"


def test_python_starts_without_the_current_folder_on_its_path() -> None:
    def started(path: str) -> list[tuple[int, str]]:
        nodes = [node for node in source()[path] if isinstance(node, ast.Attribute) and node.attr == "executable"]
        named = [(node.lineno, text) for node in nodes if (text := ast.unparse(node)) == "sys.executable"]
        return named if path != "litgpt_demo/__init__.py" else []

    require(started, "use litgpt_demo.PYTHON")


# --- platforms and networks: a place each, and nobody asks which one it is ------------------------------------------

KINDS = {*PLATFORMS, *(name.split(".")[2] for name in PLATFORMS.values())}
REGISTRY, _NAMED = "launcher/platforms/__init__.py", {"__init__", *NETWORKS}
MAY_NAME_A_NETWORK = {
    "litgpt_demo/node/network.py": "what a node has that is told of no network",
    "launcher/images/stacks.py": "a stack is named after the network that it was made for",
    "launcher/platforms/local/platform.py": "a word of psutil's: the kind of connections",
}


def platform_of(path: str) -> str | None:
    """The platform whose folder a module is in, or a dotted name is below."""
    parts = path.replace("/", ".").split(".")
    return parts[2] if parts[:2] == ["launcher", "platforms"] and len(parts) > 3 and parts[2] in KINDS else None


def test_a_platform_is_imported_in_its_own_folder_only() -> None:
    def foreign(path: str) -> list[tuple[int, str]]:
        return [
            imported for imported in imports(path) if platform_of(f"{imported[1]}.") not in {None, platform_of(path)}
        ]

    require(foreign, "ask launcher.platforms.settings or launcher.platforms.base")


def test_platforms_do_not_import_runs() -> None:
    def upward(path: str) -> list[tuple[int, str]]:
        if not path.startswith("launcher/platforms/"):
            return []
        return [(line, name) for line, name in imports(path) if name.startswith("launcher.runs")]

    require(upward, "runs are built on platforms: move what both need to launcher or litgpt_demo")


def test_nobody_asks_which_platform_or_network_it_is() -> None:
    """A comparison needs the name, which stands in its own file or folder alone; a look for a setting `getattr`."""

    def asked(path: str) -> Iterator[tuple[int, str]]:
        network = path in MAY_NAME_A_NETWORK or path in {f"launcher/networks/{name}.py" for name in _NAMED}
        known = {*(NETWORKS if network else ()), *(KINDS if platform_of(path) or path == REGISTRY else ())}
        for node in source()[path]:
            match node:
                case ast.Constant(value=str(value)) if value in {*NETWORKS, *KINDS} - known:
                    yield node.lineno, value
                case ast.Call(func=ast.Name(id="getattr" | "hasattr"), args=[target, *_]) if path != REGISTRY:
                    yield from [(node.lineno, ast.unparse(node))] if ast.unparse(target).endswith("platform") else []

    require(lambda path: [*asked(path)], "put the question on PlatformSettings, Platform or launcher.networks")


# --- what is brought and installed ------------------------------------------------------------------------------------

BRING = """
import importlib, sys
for package in sys.argv[1:]:
    for name in package.split(): importlib.import_module(name)
    print(*sys.modules)
"""


def test_launcher_imports_no_torch_no_cloud_no_prefect() -> None:
    """The command line imports it; a worker imports flows for every run, and a server for every deployment."""

    def names(*packages: str) -> str:
        modules = [path.removesuffix(".py") for path in source() if path.startswith(packages)]
        return " ".join(name.replace("/", ".") for name in modules if not name.endswith(("__init__", "__main__")))

    command = [sys.executable, "-c", BRING, names("launcher/"), names("flows/", "tasks/", "deployments/")]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, check=True)
    launcher, flows = (set(line.split()) for line in done.stdout.splitlines())
    assert flows.isdisjoint(HEAVY | CLOUD)
    assert "prefect" in flows - launcher


RANK = """
import gc, sys
from importlib.metadata import version
from importlib.util import find_spec
from litgpt_demo.__main__ import main
main(["train", "--help"])
print(*sys.modules)
assert find_spec("matplotlib") and version("transformers") and gc.isenabled()
assert gc.get_freeze_count() > 100_000
"""


def test_rank_imports_no_extras_of_lightning_or_torchmetrics() -> None:
    """Imports are most of the start of a rank. What it imported is no garbage; later imports find all packages."""
    done = subprocess.run([sys.executable, "-c", RANK], cwd=CHECKOUT, capture_output=True, text=True, check=True)
    imported = {name.partition(".")[0] for name in done.stdout.splitlines()[-1].split()}
    assert {"torch", "lightning", "litgpt"} <= imported
    unused = {"transformers", "matplotlib", "huggingface_hub", "gigatoken", "pyarrow", "awkward", "pandas", "scipy"}
    assert imported.isdisjoint({*unused, "google", "wandb", "tensorboard", "torchao", "prefect"})


def test_every_file_that_a_package_reads_is_installed_with_it() -> None:
    data = tomllib.loads((CHECKOUT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    folders = {CHECKOUT / package.replace(".", "/"): patterns for package, patterns in data.items()}
    installed = {file for folder, patterns in folders.items() for pattern in patterns for file in folder.glob(pattern)}
    files = {file for package in HOUSE for file in (CHECKOUT / package).rglob("*") if file.is_file()}
    assert {file for file in files if file.suffix not in {".py", ".pyc"}} <= installed
