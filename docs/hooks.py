"""What `make docs` changes of the pages: README.md is the home page, and links to the code lead to the repository."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

CHECKOUT = Path(__file__).parents[1]
CODE = "https://github.com/train-litgpt/train-litgpt/blob/main/"


def on_files(files: Files, config: Any) -> Files:
    """Add the README as a page of docs/, where its links are one folder shorter."""
    readme = (CHECKOUT / "README.md").read_text(encoding="utf-8")
    links = re.sub(r"\]\((?!https?:|docs/|#)", "](../", readme).replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=links))
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turn each link out of docs/ into one to the repository."""
    return markdown.replace("](../README.md", "](index.md").replace("](../", f"]({CODE}")
