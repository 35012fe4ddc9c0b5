"""The pages of HTML, each from its template: a page needs nothing but itself, and shows all text as text."""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from typing import TYPE_CHECKING

from launcher.formatting import BIDI
from launcher.reports.charts import svg

if TYPE_CHECKING:
    from jinja2 import Environment


def page(template: str, **values: object) -> str:
    """The page that a template of launcher/reports/templates makes of `values`; markup in them is escaped."""
    return _environment().get_template(template).render(values)


@cache
def _environment() -> Environment:
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("launcher", "reports/templates"),
        autoescape=True,
        finalize=lambda value: value if isinstance(value, Markup) else printable(str(value)),
        keep_trailing_newline=True,
        lstrip_blocks=True,
        trim_blocks=True,
        undefined=StrictUndefined,
    )
    environment.globals["svg"] = svg
    return environment


def printable(text: str) -> str:
    """Return `text` without what no page and no database takes: control characters, half characters, reversed text.

    Postgres refuses NUL.
    """
    kept = text.replace("\r\n", "\n").replace("\r", "\n")
    return "".join(
        "\ufffd" if unicodedata.category(sign) in ("Cc", "Cs") and sign not in "\n\t" else sign
        for sign in re.sub(f"[{BIDI}]", "\ufffd", kept)
    )
