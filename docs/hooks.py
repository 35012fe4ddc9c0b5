"""Changes of the pages for the site: README.md is the home page, links to the code lead to the repository, and diagrams
are the drawings of docs/diagrams.py."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from docs.diagrams import BLOCK, TITLE, drawing

CHECKOUT = Path(__file__).parents[1]
CODE = "https://github.com/train-litgpt/train-litgpt/blob/main/"


def on_files(files: Files, config: Any) -> Files:
    """Add the README as a page of docs/, where its links are one folder shorter."""
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    links = re.sub(r"\]\((?!https?:|docs/|#)", "](../", readme).replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=links))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Turn links out of docs/ into links to the repository, and links to README.md into links to the home page."""
    folder = posixpath.dirname(page.file.src_uri)

    def resolved(link: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(folder, link[1]))
        if target == "../README.md":
            return f"]({posixpath.relpath('index.md', folder or '.')}"
        return f"]({CODE}{target[3:]}" if target.startswith("../") else link[0]

    def drawn(block: re.Match[str]) -> str:
        title = TITLE.search(block[1])
        path = posixpath.relpath(f"images/diagrams/{drawing(block[1])}", folder or ".")
        return f"![{title[1] if title else 'Diagram'}]({path}){{ .diagram }}"

    return re.sub(r"\]\((\.\./[^)#\s]*)", resolved, BLOCK.sub(drawn, markdown))
