"""Commands of README.md, SKILL.md and docs/ are understood, links lead somewhere, and tests that are named exist."""

import re
import shlex
import subprocess
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from cli.main import app
from deployments.bootstrap import settings
from docs.diagrams import DIAGRAMS, blocks, drawing
from launcher.platforms import PLATFORMS
from litgpt_demo.schedules import SCHEDULES

PAGES = [Path("README.md"), Path("SECURITY.md"), Path("SKILL.md"), *sorted(Path("docs").rglob("*.md"))]
BLOCK = re.compile(r"^```sh\n(.*?)^```", re.MULTILINE | re.DOTALL)
TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")
FILE = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```', re.MULTILINE | re.DOTALL)
HEADINGS = [
    "At a glance", "Administrator, once", "User, once", "Config", "Check", "Run, follow, cancel", "Storage", "Network",
    "When something fails", "Security", "Cost and clean-up", "Settings", "Troubleshooting",
]  # fmt: skip
LINK = re.compile(r"!?\[[^\]]*\]\(([^)#]*)(?:#([^)]*))?\)")


def commands(program: str = "", pages: Iterable[Path] = PAGES) -> Iterator[list[str]]:
    """Words of each command line; comments are left out."""
    for page in pages:
        for block in BLOCK.findall(page.read_text(encoding="utf-8")):
            for line in block.splitlines():
                if (arguments := shlex.split(line, comments=True)) and arguments[0].startswith(program):
                    yield arguments


def test_no_command_is_of_a_kind_that_is_not_tested() -> None:
    assert {arguments[0] for arguments in commands()} <= {"make", "train-litgpt", "prefect", "."}


def test_mark_of_a_block_that_is_not_run_has_a_reason() -> None:
    """It stands directly before the block, so that none outlives its block."""
    for page in PAGES:
        text = page.read_text("utf-8")
        reasons = re.findall(r"^<!-- not run: (\S.*) -->\n```sh$", text, re.MULTILINE)
        assert len(reasons) == text.count("<!-- not run"), page


def test_each_make_command_has_its_target() -> None:
    targets = set(re.findall(r"^([\w-]+):", Path("Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    targets |= {f"test-{topic.name}" for topic in Path("tests/real").iterdir() if topic.is_dir()}
    named = {argument for arguments in commands("make") for argument in arguments[1:] if "=" not in argument}
    assert named <= targets


def test_make_alone_lists_what_there_is_and_each_with_its_words() -> None:
    makefile = Path("Makefile").read_text(encoding="utf-8")
    listed = subprocess.run(["make"], capture_output=True, text=True, check=True).stdout
    for target in re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE):
        assert re.search(rf"^make {target} +\S", listed, re.MULTILINE), target


def test_a_port_is_told_to_make() -> None:
    for target in ("serve", "ui"):
        would = subprocess.run(["make", "-n", target, "PORT=4300"], capture_output=True, text=True, check=True).stdout
        assert "train-litgpt serve --port 4300" in would


def test_documented_command_is_valid_with_an_existing_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from typer.main import get_command

    from cli.main import app, console, read_config

    monkeypatch.setattr("cli.main.console", console)  # --json takes another one

    def write_files(page: Path) -> None:
        for name, text in FILE.findall(page.read_text(encoding="utf-8")):
            if name.endswith(".yaml") and "/" not in name:
                (tmp_path / name).write_text(text)

    def written(name: str | Path) -> Path:
        return tmp_path / name if (tmp_path / name).exists() else Path(name)

    verbs = get_command(app).commands  # type: ignore[attr-defined]
    for page in PAGES:
        write_files(page)
    for page in PAGES:
        write_files(page)  # two pages may have a file of one name
        for command in commands("train-litgpt", [page]):
            verb, *arguments = command[1:]
            options = verbs[verb].make_context(verb, list(arguments)).params
            platform_file = options.get("platform_file")
            configs = [word for word in arguments if word.endswith(".yaml") and word != str(platform_file)]
            overrides = [word for word in arguments if re.match(r"[a-z]\w*(\.\w+)*=", word)]
            for config in configs:
                read_config(written(config), overrides, platform_file and written(platform_file))


def test_pages_show_the_shipped_configs_as_they_are() -> None:
    shown = [
        file for page in PAGES for file in FILE.findall(page.read_text("utf-8")) if file[0].startswith("deployments/")
    ]
    assert len(shown) > 10
    assert [name for name, text in shown if Path(name).read_text("utf-8") != text] == [], "copy the file into the page"


def test_page_of_each_platform_has_the_same_headings() -> None:
    """Whoever knows one of them finds the same on the others."""
    headings = re.compile(r"^## (.+)", re.MULTILINE)
    pages = [Path(f"docs/platforms/{kind}.md").read_text("utf-8") for kind in PLATFORMS]
    assert [headings.findall(page)[: len(HEADINGS)] for page in pages] == [HEADINGS] * len(PLATFORMS)


@cache
def anchors(page: Path) -> set[str]:
    """The ids that a link to a page can name, by the rule of GitHub and of the site."""
    text = re.sub(r"^```.*?^```", "", page.read_text("utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)", text, re.MULTILINE)
    slugs = {
        re.sub(r"[^\w -]", "", re.sub(r"\]\([^)]*\)", "", heading.lower())).replace(" ", "-") for heading in headings
    }
    return slugs | set(re.findall(r'<a id="([^"]+)"', text))


def test_each_link_leads_to_a_file_and_to_a_section_of_it() -> None:
    links = [(page, *target) for page in PAGES for target in LINK.findall(page.read_text(encoding="utf-8"))]
    local = [(page, page.parent / file if file else page, anchor) for page, file, anchor in links if "://" not in file]
    assert sum(bool(anchor) for *_, anchor in local) > 50
    assert [(page, file) for page, file, _ in local if not file.exists()] == []
    lost = [link for link in local if link[2] and link[1].suffix == ".md" and link[2] not in anchors(link[1])]
    assert lost == []


@pytest.mark.parametrize("promises", ["docs/concepts/security.md", "docs/concepts/guarantees.md"])
def test_each_promise_names_a_test(promises: str) -> None:
    page = Path(promises).read_text(encoding="utf-8")
    rows = page.partition("| promise | shown by |\n")[2].partition("\n\n")[0].splitlines()[1:]
    assert rows
    assert [row for row in rows if not TEST.search(row)] == [], "nothing shows them"


def test_each_test_that_a_page_names_exists() -> None:
    named = [(Path(file), name) for page in PAGES for file, name in TEST.findall(page.read_text(encoding="utf-8"))]
    assert [
        entry for entry in named if not entry[0].is_file() or f"\ndef {entry[1]}(" not in entry[0].read_text()
    ] == []


def test_the_skill_is_what_an_assistant_loads() -> None:
    """Its front matter is as https://agentskills.io/specification has it; the body is read whole each time."""
    _, front, body = Path("SKILL.md").read_text(encoding="utf-8").split("---\n", 2)
    skill = yaml.safe_load(front)
    assert skill.keys() == {"name", "description"}
    assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", skill["name"])
    assert len(skill["description"]) <= 1024
    assert len(body.splitlines()) <= 80


def test_pages_install_from_the_checkout() -> None:
    """Nothing is published yet, and somebody else could register the name. The extras that a page names exist."""
    extras = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]["optional-dependencies"]
    for page in PAGES:
        installed = " ".join(re.findall(r"pip install ([^`\n]+)", page.read_text("utf-8")))
        assert not re.search(r"(^|[\s'\"])train-litgpt\b", installed), page
        for names in re.findall(r"\.\[([\w,]+)\]", installed):
            assert set(names.split(",")) <= extras.keys(), page


def test_each_diagram_is_drawn_for_the_site() -> None:
    drawn = {path.name for path in DIAGRAMS.glob("*.svg")}
    assert drawn == {drawing(block) for block in blocks()}, "make diagrams MERMAID=mermaid.min.js"


def test_page_of_training_has_each_schedule() -> None:
    page = Path("docs/howto/schedule.md").read_text("utf-8")
    assert not [name for name in SCHEDULES if f"| `{name}`" not in page], "add a row to the table of schedules"


def test_page_of_commands_has_each_command_with_json() -> None:
    page = Path("docs/reference/json.md").read_text("utf-8")
    commands = get_command(app).commands.items()  # type: ignore[attr-defined]
    with_json = [name for name, command in commands if any(param.name == "as_json" for param in command.params)]
    assert not [name for name in with_json if f"| `{name}` |" not in page], "add a row to the table of documents"


def test_page_of_prefect_has_each_deployment() -> None:
    """With the price of its machines, if it is known."""
    page = Path("docs/reference/prefect.md").read_text("utf-8")
    for deployment in yaml.safe_load(Path("deployments/prefect.yaml").read_text("utf-8"))["deployments"]:
        [row] = re.findall(rf"^\| `[\w-]+/{deployment['name']}` .*", page, re.MULTILINE)
        for step in deployment.get("build", []):
            inputs = dict(step["deployments.bootstrap.settings"])
            del inputs["id"]
            price = re.search(r"cost \$([\d,.]+\d)", settings(**inputs)["try_it"])
            assert price is None or f"| {price[1]} |" in row
            assert price is not None or "| not known |" in row or "| this machine |" in row


def test_documented_environment_variables_exist_in_the_source() -> None:
    """Each variable is read or set somewhere. RUNAI_CLIENT_ID and its kin are made of a setting and an ending."""
    page = Path("docs/reference/environment.md").read_text("utf-8")
    packages = ("cli", "deployments", "flows", "tasks", "launcher", "litgpt_demo", "train_litgpt")
    files = [path for package in packages for path in Path(package).rglob("*.py")]
    source = "".join(path.read_text("utf-8") for path in files)
    rows = re.findall(r"^\| (`[^|]+) \|", page, re.MULTILINE)
    named = {name for row in rows for name in re.findall(r"`([A-Z][A-Z_]+)`", row)} - {"TMPDIR"}
    assert named
    made = {name for name in named if name.startswith("RUNAI_")} - {"RUNAI_NUM_OF_GPUS"}
    assert [name for name in sorted(named - made) if not re.search(rf"\b{name}\b", source)] == []
    assert all(name.removeprefix("RUNAI").removesuffix("_FILE") in source for name in made)


def test_page_of_environment_has_each_variable_of_the_product() -> None:
    page = Path("docs/reference/environment.md").read_text("utf-8")
    files = [path for package in ("cli", "flows", "launcher", "litgpt_demo") for path in Path(package).rglob("*.py")]
    found = {name for path in files for name in re.findall(r'"((?:TRAIN_)?LITGPT_[A-Z_]+)"', path.read_text("utf-8"))}
    assert found
    internal = {"TRAIN_LITGPT_MASTER"}  # between a supervisor and its nodes
    assert [name for name in sorted(found - internal) if f"`{name}`" not in page] == []
