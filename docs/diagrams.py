"""Draw the Mermaid diagrams of the pages as SVG files, which the site shows without a script.

GitHub draws the blocks itself. `make diagrams MERMAID=FILE` draws new blocks, and removes the files of deleted ones.
FILE is mermaid.min.js, from `npm pack mermaid@11`. The extra `dev` and Chromium are needed.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PAGES = Path(__file__).parent
DIAGRAMS = PAGES / "images" / "diagrams"
BLOCK = re.compile(r"^```mermaid\n(.*?)^```$", re.MULTILINE | re.DOTALL)
TITLE = re.compile(r"^\s*accTitle: (.+)$", re.MULTILINE)
SIZE = re.compile(r'viewBox="\S+ \S+ (\S+) (\S+)"')
# Plain SVG text: an <img> shows no HTML labels. The site inverts the colors of its dark theme (extra.css).
SETTINGS = {"startOnLoad": False, "theme": "neutral", "htmlLabels": False, "fontFamily": "sans-serif"}


def drawing(block: str) -> str:
    """Return the file name of a diagram, which follows from its text."""
    return f"{hashlib.sha256(block.encode()).hexdigest()[:12]}.svg"


def blocks() -> Iterator[str]:
    """Yield the Mermaid blocks of all pages and of the README, without their fences."""
    for page in (PAGES.parent / "README.md", *sorted(PAGES.rglob("*.md"))):
        yield from BLOCK.findall(page.read_text(encoding="utf-8"))


def sized(svg: str) -> str:
    """Return a drawing with its own size. Mermaid's `width="100%"` would stretch it to the width of the page."""
    width, height = SIZE.search(svg).groups()  # type: ignore[union-attr]
    return svg.replace('width="100%"', f'width="{width}" height="{height}"', 1)


def main(mermaid: str) -> None:
    """Draw each block that has no file yet."""
    from playwright.sync_api import sync_playwright

    drawings = {drawing(block): block for block in blocks()}
    DIAGRAMS.mkdir(parents=True, exist_ok=True)
    for path in DIAGRAMS.glob("*.svg"):
        if path.name not in drawings:
            path.unlink()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
        page = browser.new_page()
        page.add_script_tag(path=mermaid)
        page.evaluate("settings => mermaid.initialize(settings)", SETTINGS)
        for name, block in drawings.items():
            if not (DIAGRAMS / name).exists():
                draw = "async text => (await mermaid.render('diagram', text)).svg"
                (DIAGRAMS / name).write_text(sized(page.evaluate(draw, block)) + "\n", encoding="utf-8")
                print(DIAGRAMS / name)
        browser.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
