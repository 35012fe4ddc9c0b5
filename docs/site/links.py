"""Lead the links of pages that leave docs/ to the repository, where their files are; mkdocs.yml names this module.

The pages are read on the repository's own site too, where `../deployments/prefect.yaml` is right as it stands.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, config: Any, page: Any, **_: object) -> str:
    """Return a page's text with such links made whole.

    Raises:
        FileNotFoundError: a link leads to no file of the checkout.
    """
    checkout, repository = Path(config.config_file_path).parent, config.extra["repository"]

    def whole(link: re.Match[str]) -> str:
        path, anchor = link[1], link[2] or ""
        if not (checkout / path).exists():
            raise FileNotFoundError(f"{page.file.src_uri} points to {path}, which is not there; correct the link")
        kind = "tree" if (checkout / path).is_dir() else "blob"
        return f"]({repository}/{kind}/main/{path}{anchor})"

    return _LINK.sub(whole, markdown)
