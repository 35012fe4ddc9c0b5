"""Errors and findings name an existing page and section of the documentation."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from launcher import pages
from launcher.pages import page_of_error, page_of_finding
from litgpt_demo.codes import CODES
from litgpt_demo.errors import FailureClass, Finding

CHECKOUT = Path(__file__).parents[2]


def has_section(page: str) -> bool:
    """Return True if the page exists and has an anchor of that name."""
    path, _, anchor = page.partition("#")
    return f'<a id="{anchor}"></a>' in (CHECKOUT / path).read_text("utf-8")


@pytest.mark.parametrize("fault", FailureClass)
def test_page_of_an_error_is_the_section_of_its_exit_code(fault: FailureClass) -> None:
    assert has_section(page_of_error("it broke", fault))


def test_page_of_an_error_with_a_code_is_that_of_the_check() -> None:
    message = "[node 0] [no.code] 2 problems:\n  [gpu.ecc] GPU 1 is broken\n  [gpu.count] too few"
    assert page_of_error(message, FailureClass.NODE) == "docs/reference/checks.md#gpu.ecc"


def test_page_of_a_finding_has_its_code() -> None:
    assert all(has_section(page_of_finding(Finding("error", code, "wrong"))) for code in CODES)


def test_help_names_pages_that_exist() -> None:
    printed = " ".join(CliRunner().invoke(app, ["--help"]).output.split())
    named = re.findall(r"[\w/]+\.md", printed[printed.index("Documentation: ") :])
    assert named == [pages.START, pages.SYMPTOMS]
    assert all((CHECKOUT / name).is_file() for name in named)
