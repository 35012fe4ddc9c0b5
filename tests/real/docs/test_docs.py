"""The site builds as by `make docs`, and the notebook runs as in a reader's Jupyter."""

import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
from nbclient import NotebookClient

from docs.hooks import CODE, on_page_markdown

CHECKOUT = Path(__file__).parents[3]
NOTEBOOK = CHECKOUT / "examples" / "notebook.ipynb"
# What a browser fetches by itself; a link is followed by a person.
FETCHED = re.compile(r"<(?:link|script|img|iframe)\b[^>]*\b(?:href|src)=[\"']?(https?:[^\"'> ]+)")


def test_site_builds_without_warnings_or_foreign_requests(tmp_path: Path) -> None:
    venv = Path(sys.prefix)
    command = ["make", f"--old-file={venv}/.installed-docs", "docs", f"VENV={venv}", f"SITE={tmp_path}"]
    subprocess.run(command, cwd=CHECKOUT, check=True, capture_output=True, text=True)
    pages = list(tmp_path.rglob("*.html"))
    sources = {page.relative_to(CHECKOUT / "docs").with_suffix(".html") for page in (CHECKOUT / "docs").rglob("*.md")}
    assert sources <= {page.relative_to(tmp_path) for page in pages}
    assert list(tmp_path.rglob("*.py")) == []
    assert [found for page in pages for found in FETCHED.findall(page.read_text(encoding="utf-8"))] == []
    home = (tmp_path / "index.html").read_text(encoding="utf-8")
    assert 'href="platforms/local.html"' in home
    assert "blob/main/examples/notebook.ipynb" in home


@pytest.mark.parametrize(
    ("source", "link", "target"),
    [
        ("local.md", "../Makefile", f"{CODE}Makefile"),
        ("local.md", "../README.md#limits", "index.md#limits"),
        ("start/gke.md", "../../deployments/rbac.yaml", f"{CODE}deployments/rbac.yaml"),
        ("start/gke.md", "../../README.md", "../index.md"),
        ("reference/settings/train.md", "../../../README.md", "../../index.md"),
        ("reference/settings/train.md", "../../images/plan.png", "../../images/plan.png"),
        ("start/gke.md", "../platforms/gke.md#network", "../platforms/gke.md#network"),
    ],
)
def test_link_out_of_the_pages_leads_to_the_repository(source: str, link: str, target: str) -> None:
    page = SimpleNamespace(file=SimpleNamespace(src_uri=source))
    assert on_page_markdown(f"see [it]({link}).", page=page) == f"see [it]({target})."  # type: ignore[arg-type]


def test_the_notebook_runs_as_it_is_and_was_run(
    tmp_path: Path, prefect_home: Callable[[], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_HOME", str(prefect_home()))
    (tmp_path / "examples").mkdir()
    (tmp_path / "deployments").symlink_to(CHECKOUT / "deployments")
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with which a kernel does not show what its processes print
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    shown = [len(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in notebook.cells if cell.cell_type == "code")
    resources = {"metadata": {"path": str(tmp_path / "examples")}}
    ctrl_c = signal.getsignal(signal.SIGINT)  # asyncio leaves Python's own behind
    made = NotebookClient(notebook, kernel_name="python3", timeout=None, resources=resources).execute()
    signal.signal(signal.SIGINT, ctrl_c)
    assert [bool(cell.outputs) for cell in made.cells if cell.cell_type == "code"] == [count > 0 for count in shown]
    assert list(tmp_path.glob("output/runs/*/final/huggingface"))
