"""The pages that docs/reference.py writes are those of the code."""

import os
import re

import pytest

from docs.reference import DOCS, PAGES


def _without_passes(name: str, text: str) -> str:
    """Return a page without the last passes of real tests, which `make test-TOPIC` adds to its record at any time."""
    return re.sub(r"( \| [^|]*){3} \|$", "", text, flags=re.MULTILINE) if name == "project/status.md" else text


@pytest.mark.parametrize("name", PAGES)
def test_golden_page_is_up_to_date(name: str) -> None:
    """`make golden` and `make docs` write it again."""
    file, text = DOCS / name, PAGES[name]()
    if os.environ.get("UPDATE_GOLDEN"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, "utf-8")
    committed = file.read_text("utf-8")
    assert _without_passes(name, committed) == _without_passes(name, text), "run `make docs` and commit the page"


def test_generated_page_has_its_function() -> None:
    generated = {page for page in DOCS.rglob("*.md") if page.read_text("utf-8").startswith("<!-- Generated from ")}
    assert generated == {DOCS / name for name in PAGES if name.endswith(".md")}
