"""The page of the documentation that helps with a finding or an error, as a path in the checkout."""

from __future__ import annotations

import re

from litgpt_demo.codes import CODES
from litgpt_demo.errors import FailureClass, Finding

START = "README.md"
SYMPTOMS = "docs/troubleshooting.md"
_CHECKS = "docs/reference/checks.md"
_EXIT_CODES = "docs/reference/exit-codes.md"


def page_of_finding(finding: Finding) -> str:
    """Return the page and section of a finding's code."""
    return f"{_CHECKS}#{finding.code}"


def page_of_error(message: str, fault: FailureClass) -> str:
    """Return the page and section of the first check code in an error's message, or else of its exit code."""
    for code in re.findall(r"\[([\w.-]+)\]", message):
        if code in CODES:
            return f"{_CHECKS}#{code}"
    return f"{_EXIT_CODES}#{fault.exit_code}"
